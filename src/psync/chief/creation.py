"""Creation of declared variables on the ps tasks.

Declared variables are created together, before anything needs the first of them. The
initial values are made on the chief, one shard at a time, and sent in messages of bounded
size, so that the chief holds no more than a message and a shard for each ps. A variable that
begins as a copy of another one has no value here: each ps copies its shards itself. Of a constant
one element is sent, and its blocks come into being on the ps when they are first written. Creating
is idempotent, so a lost connection repeats it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from psync.chief.declarations import Declaration, initial_shards, is_constant
from psync.chief.reattachment import Reattachment
from psync.client.calls import all_of
from psync.client.ps_client import PsClient
from psync.specs import ShardSpec
from psync.wire.messages import CreateShards
from psync.wire.tensors import to_bytes_view

MESSAGE_BYTES = 16 << 20
MESSAGE_SHARDS = 1024
"""Shards for one ps are gathered into a message until it has as much, or as many."""


class Creation:
    """Creates what is declared.

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
        return self._has_work or self.reattachment is not None

    @property
    def _has_work(self) -> bool:
        return bool(self._declared) or self._error is not None

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
        while self._has_work or (last and self.reattachment is not None):
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
        message = CreateShards(
            [
                (spec.variable, spec.variable_id, spec.index, spec.offset, list(spec.shape),
                 spec.dtype)
                for spec in batch.shards
            ],
            batch.sources,
        )  # fmt: skip
        await self._ps.links[ps].call(lambda peer: message, batch.values, bulk=True, urgent=urgent)


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
