"""Reattachment of a new program to the variables that ps tasks still hold.

All ps tasks have been attached, and have set aside what they held, when this begins. They describe
it; ``store.reattach`` decides; then each gets its orders.

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

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.client.calls import all_of
from psync.client.ps_client import PsClient
from psync.client.ps_link import PsLink, ask
from psync.specs import VariableSpec
from psync.store.reattach import (
    Adoption,
    Decision,
    Holding,
    NewOptimizer,
    Orders,
    partial_updates,
)
from psync.wire.messages import AdoptShards, DescribeShards, Done, ShardsDescribed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnOptimizers:
    """The optimizers of the present program."""

    listed: Callable[[], Sequence[NewOptimizer]]  # returns them
    note_rate: Callable[[int, Mapping[str, Any]], None]
    """Told by its number of each one that goes on, and with which learning rate."""


@dataclass(eq=False)
class Reattachment:
    """What was left, as long as it is not adopted or dropped."""

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
    holdings = await all_of([_ask(link) for link in ps.links])
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


async def _ask(link: PsLink) -> Holding:
    _, segments = await ask(link, DescribeShards(), ShardsDescribed)
    return Holding.from_bytes(b"".join(segments))


async def _order(ps: PsClient, orders: Sequence[Orders], *, lineage: int, last: bool) -> None:
    """Let each ps do what was decided."""
    message, each = AdoptShards(lineage, last), zip(ps.links, orders, strict=True)
    await all_of([ask(link, message, Done, [what.to_bytes()]) for link, what in each])


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
