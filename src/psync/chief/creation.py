"""Creation of what is declared, or adoption of what an earlier program has left.

The values are made on the chief, one shard at a time, and sent to the ps tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psync.chief.declarations import Declaration, initial_shards, is_constant
from psync.client.link import all_of, ask
from psync.client.ps import PsClient
from psync.specs import ShardSpec, VariableSpec
from psync.store.reattach import (
    Adoption,
    Decision,
    Holding,
    NewOptimizer,
    Orders,
    partial_updates,
    read_sent,
)
from psync.store.untrusted_json import to_json
from psync.wire.messages import AdoptShards, CreateShards, DescribeShards, Done
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnOptimizers:
    """The optimizers of the present program."""

    listed: Callable[[], Sequence[NewOptimizer]]  # returns them
    note_rate: Callable[[int, Mapping[str, Any]], None]
    """Told by its number of each one that goes on, and with which learning rate."""


@dataclass(eq=False)
class Reattachment:
    """What was left, as long as it is not adopted or dropped.

    All ps tasks have been attached, and have set aside what they held, when this begins. They
    describe it; ``store.reattach`` decides; then each gets its orders.

    the chief dies                          the next one, with ``attach=True``
    before it was granted a number          as if it had not been
    some ps tasks attached                  finds the variables set aside there, in stores elsewhere
    some variables not wholly created       adopts whole variables, creates the others
    some variables adopted                  finds both kinds; slots wait for their optimizers
    ``attach=False``, some ps tasks empty   AttachError, which names those
    within an update over two ps tasks      the parts that have arrived whole are applied, also if
                                            they waited; one that arrives later is refused, and
                                            ``Reattachment.partial_updates`` counts the update
    within a synchronous step               waits until ps 0 has closed it; AttachError if a ps
                                            could not be reached
    while a cut is taken or written         nothing of it; gates open with its connections
    during a rollback                       AttachError
    in training, and a ps dies too          AttachError, unless its backup had been promoted
    before anything was created             begins with empty ps tasks
    """

    _ps: PsClient
    _adoption: Adoption  # what was left
    _optimizers: OwnOptimizers  # those of this program
    partial_updates: int  # that only some of their ps tasks have applied
    _taken: set[int] = field(default_factory=set)  # numbers of optimizers that go on

    async def adopt(self, declared: Sequence[VariableSpec], *, last: bool) -> Collection[str]:
        """Let the present program have what it declares; return the names of what was not there.

        Args:
            declared: Variables that are not created yet.
            last: Whether what is left is dropped.

        Raises:
            AttachError: Something does not fit; nothing was changed.
            ParameterServerLost: A ps is gone.

        Cancellation: Some ps tasks may have done it; the next call repeats it.
        """
        new = [each for each in self._optimizers.listed() if each.number not in self._taken]
        decision = self._adoption.compare(declared, new, last=last)
        await _order(self._ps, decision.orders, lineage=0, last=last)
        for identity, number in decision.optimizers.items():
            self._taken.add(number)
            self._optimizers.note_rate(number, self._adoption.rate_of(identity))
        self._adoption.done(decision)
        _say(decision)
        return {spec.name for spec in decision.missing}


async def reattach(ps: PsClient, lineage: int, optimizers: OwnOptimizers) -> Reattachment | None:
    """Ask all ps tasks what they hold.

    Args:
        ps: Links to all ps tasks, which are attached.
        lineage: Under which they begin if they hold nothing.
        optimizers: Those of this program.

    Returns:
        What there is; None: nothing anywhere, so this is the first start.

    Raises:
        AttachError: Some of them have lost what they held.
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """
    answers = await all_of([ask(link, DescribeShards(), Done) for link in ps.links])
    where = "a ps has described what it holds as nonsense"
    holdings = [read_sent(segments, Holding, where) for _, segments in answers]
    adoption = Adoption(holdings)
    if not adoption.is_empty:
        partial = partial_updates(holdings)
        if partial:
            logger.warning(
                "%d updates of the earlier program are only partly applied: the parts for the "
                "other ps tasks were still in flight when it ended, or when a newer program "
                "attached",
                partial,
            )
        return Reattachment(ps, adoption, optimizers, partial)
    logger.info("the ps tasks are empty: all variables start with their initial values")
    await _order(ps, [Orders() for _ in holdings], lineage=lineage, last=True)
    return None


async def _order(ps: PsClient, orders: Sequence[Orders], *, lineage: int, last: bool) -> None:
    """Let each ps do what was decided."""
    message, each = AdoptShards(lineage, last), zip(ps.links, orders, strict=True)
    await all_of([ask(link, message, Done, [to_json(what)]) for link, what in each])


def _say(decision: Decision) -> None:
    """Tell what has become of everything."""
    if decision.adopted:
        logger.info("%d variables keep their values", len(decision.adopted))
    broken = {spec.name for spec in decision.broken}
    for spec in decision.missing:
        why = "it was not created whole" if spec.name in broken else "no ps held it"
        logger.warning('variable "%s" starts with its initial value: %s', spec.name, why)
    for name in decision.extra:
        logger.warning('variable "%s" is removed: this program has not declared it', name)


MESSAGE_BYTES = 16 << 20

MESSAGE_SHARDS = 1024
"""Shards for one ps are gathered into a message until it has as much, or as many."""


class Creation:
    """Creates what is declared.

    Declared variables are created together, before anything needs the first of them. The
    initial values are made on the chief, one shard at a time, and sent in messages of bounded
    size, so that the chief holds no more than a message and a shard for each ps. A variable that
    begins as a copy of another one has no value here: each ps copies its shards itself. Of a
    constant one element is sent, and its blocks come into being on the ps when they are first
    written. Creating is idempotent, so a lost connection repeats it.

    Args:
        declared: New declarations appear at the end of this list; they are taken from it.
        ps: Links to all ps tasks.

    Attributes:
        reattachment: What earlier programs have left there, and is adopted instead of being
            created; None: nothing.
        repeatable: What was created and can be created again, as long as ps tasks have held
            nothing else and nothing has been computed; None: it cannot.
        on_adopted: Called when nothing is left to be adopted.
    """

    def __init__(self, declared: list[Declaration], ps: PsClient) -> None:
        self.reattachment: Reattachment | None = None
        self.on_adopted: Callable[[], None] = lambda: None
        self._declared = declared
        self._ps = ps
        self._lock = asyncio.Lock()
        self._error: Exception | None = None  # a variable could not be created: for ever
        self.created: set[tuple[tuple[int, int], str]] = set()  # (key, name) of each shard
        self.repeatable: list[Declaration] | None = None
        self._batch: list[Declaration] = []  # is being created

    @property
    def pending(self) -> bool:
        """Whether something has to be created, or never will be."""
        return bool(self._declared) or self._error is not None or self.reattachment is not None

    async def ensure(self, *, last: bool = False) -> None:
        """Create everything that is declared, or adopt it.

        Args:
            last: Whether what nobody has declared by now is dropped, if there was another program.

        Raises:
            AttachError: What is declared is not what another program has left; again at every call.
            PartitionError: An initial value does not fit its variable; again at every call,
                since closures cannot tell which variables they will need.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; creating goes on with the next call.
        """
        while self._declared or self._error is not None or (last and self.reattachment is not None):
            async with self._lock:
                if self._error is not None:
                    raise self._error.with_traceback(None)  # it is raised many times
                batch = list(self._declared)
                try:
                    self._batch = missing = await self._adopt(batch, last=last)
                    timeline = -1
                    while self._ps.timeline != timeline:  # a snapshot gone back to has it not
                        timeline = self._ps.timeline
                        await self._create(missing)
                except Exception as exc:
                    self._error = exc
                    raise
                finally:
                    self._batch = []
                if self.repeatable is not None:
                    self.repeatable += batch
                del self._declared[: len(batch)]
                self.created.update(
                    (shard.key, one.spec.name) for one in batch for shard in one.spec.shards
                )

    async def create_again(self, lost: Collection[int]) -> None:
        """Create on these ps tasks all that was, and what is being, created: they have lost it.

        Raises:
            ParameterServerLost: One was lost again.

        Cancellation: Safe.
        """
        assert self.repeatable is not None, "nothing is computed during a recovery"
        await self._create([*self.repeatable, *self._batch], lost)

    async def _adopt(self, batch: list[Declaration], *, last: bool) -> list[Declaration]:
        """Return what is not adopted."""
        if self.reattachment is None:
            return batch
        missing = await self.reattachment.adopt([each.spec for each in batch], last=last)
        if last:
            self.reattachment = None
            self.on_adopted()
        return [each for each in batch if each.spec.name in missing]

    async def _create(self, batch: list[Declaration], lost: Collection[int] | None = None) -> None:
        """Make and send the shards; at most one message for each ps is held at a time.

        Args:
            batch: Declarations.
            lost: Only on these ps tasks, and while others are held back; None: on all.
        """
        urgent = lost is not None
        messages: dict[int, _Batch] = {}
        for declaration in batch:
            for shard, value in initial_shards(declaration):
                if lost is not None and shard.ps not in lost:
                    continue
                message = messages.setdefault(shard.ps, _Batch())
                message.add(shard, value)
                if message.nbytes >= MESSAGE_BYTES or len(message.shards) >= MESSAGE_SHARDS:
                    await self._send(shard.ps, messages.pop(shard.ps), urgent)
        if messages:
            await all_of([self._send(ps, each, urgent) for ps, each in messages.items()])

    async def _send(self, ps: int, batch: _Batch, urgent: bool) -> None:
        message = CreateShards([as_sent(shard) for shard in batch.shards], batch.sources)
        await self._ps.links[ps].call(lambda peer: message, batch.values, bulk=True, urgent=urgent)


def as_sent(shard: ShardSpec) -> tuple[str, int, int, int, list[int], str]:
    """Return a shard as CreateShards and CheckShards describe it."""
    return (
        shard.variable, shard.variable_id, shard.index, shard.offset, list(shard.shape),
        shard.dtype,
    )  # fmt: skip


@dataclass(slots=True)
class _Batch:
    """Shards for one ps, in the order of their declaration: a copy stands after its original."""

    shards: list[ShardSpec] = field(default_factory=list)
    sources: list[tuple[int, int] | bytes | None] = field(default_factory=list)
    values: list[memoryview] = field(default_factory=list)  # of those whose source is None
    nbytes: int = 0

    def add(self, shard: ShardSpec, value: np.ndarray | ShardSpec) -> None:
        """Let the message create one more shard."""
        self.shards.append(shard)
        if isinstance(value, ShardSpec):
            self.sources.append(value.key)
        elif is_constant(value):
            self.sources.append(bytes(to_bytes_view(value[(0,) * value.ndim])))
        else:
            self.sources.append(None)
            self.values.append(to_bytes_view(value))
            self.nbytes += value.nbytes
