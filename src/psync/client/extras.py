"""Consistent reads and atomic assigns, under locks on shards; compressed pushes and pulls.

A lock is taken on one ps after the other, in the order of their indices, so two tasks that want
the same shards cannot wait for each other. It is renewed while the call goes on, and released
when that ends, however it ends. No user code runs under it. All requests about a lock and under it
go over a connection of their own: where updates that wait for locks are many, a ps reads no more
from the connections over which they come.

    of                              promised
    a consistent read               all its shards at the instant at which the last lock was granted
    an atomic assign                a consistent read, or another atomic assign, sees all or nothing
                                    of it; a plain read may see some shards before others
    a plain push or assign          no more than without locks

A holder that dies loses its locks with its connections; an assign that had reached some ps tasks
then stays there, until the closure runs again and assigns the rest. A lock that ends early is
LockLost: a read is tried three times, an assign once, since some shards may have the new value.

Compressed, float32 travels in 16 bits: a variable is laid out as one of the narrow dtype, in a plan
of its own, whose sets say so to the ps tasks (``numerics.compression``). All that knows plans goes
on as ever, and a message that is sent again has the same bytes. Small sets are compressed, too, but
for pulls.

Error feedback: what a gradient is *owed* is what the pushes before it, of the same variable through
the same optimizer, have been rounded by. Each task keeps that of its own pushes:

    the push                              what is owed then
    accepted                              what is left of this gradient and what was owed before
    stale, duplicate, failed              what was owed before: this gradient was not applied
    cancelled, asynchronous               as above: it goes on in the background, and its end counts
    cancelled, synchronous                what was owed before: nobody knows whether it was counted
    under way while another one begins    the other finds nothing, and what both are owed is added
    before a rollback to a checkpoint     nothing: what it would correct is undone
    a worker's session ends, another      nothing: one rounding error of each element is lost
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from psync.client.counters import PulledSteps
from psync.client.link import PsLink
from psync.client.plan import Array, Plan
from psync.client.ps import PsClient
from psync.errors import LockLost, PsyncError
from psync.net.platform import PerProcess
from psync.net.shielding import in_turns
from psync.numerics.compression import WIDE, Compression, compensate, narrow_dtype, widen_into
from psync.numerics.rows import IndexedSlices
from psync.wire.messages import Contributed, LockShards, Pushed, UnlockShards

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""A holder that says nothing for so long has lost its lock: others do not wait for it."""

READ_ATTEMPTS = 3
"""Connections, and with them locks, may be lost; a read changes nothing and is tried again."""

_numbers = PerProcess(lambda: itertools.count(1))

A = TypeVar("A", bound=list[Pushed] | Contributed)


async def pull_at_once(ps: PsClient, plan: Plan, **options: Any) -> list[np.ndarray]:
    """Return the values of a plan's variables as they are at one instant; else as ``pull``.

    Args:
        ps: All ps tasks.
        plan: Of the variables.
        options: As for ``PsClient.pull``.

    Raises:
        ParameterServerLost: A ps is gone.
        LockLost: The connection to a ps was lost again and again, or this task was silent for
            longer than the lease.

    Cancellation: Safe; ``out`` then holds anything.
    """
    if not _is_divided(plan):
        return await ps.pull(plan, **options)
    attempts = itertools.count(1)
    while True:
        try:
            async with _locked(ps, plan) as lock:
                return await ps.pull(plan, lock=lock, **options)
        except LockLost:
            if next(attempts) == READ_ATTEMPTS:
                raise


async def assign_at_once(
    ps: PsClient, plan: Plan, values: Sequence[np.ndarray], *, op: str, call: tuple[int, int]
) -> list[Pushed]:
    """Assign to a plan's variables so that nobody who reads at one instant sees half of it.

    Args:
        ps: The ps tasks.
        plan: Of the variables.
        values: As for ``PsClient.assign``, as is ``call``.
        op: "assign", "add" or "sub".
        call: Its identity.

    Raises:
        ParameterServerLost: A ps is gone; the others may have the new value.
        LockLost: The connection to a ps was lost, or this task was silent for longer than the
            lease, before all shards had the new value; some may have it.

    Cancellation: It ends in the background.
    """
    if not _is_divided(plan):
        return await ps.assign(plan, values, op=op, call=call)

    async def assign() -> list[Pushed]:
        async with _locked(ps, plan) as lock:
            try:
                return await ps.assign(plan, values, op=op, call=call, lock=lock)
            except LockLost as exc:
                names = ", ".join(f'"{variable.name}"' for variable in plan.variables)
                raise LockLost(
                    f"{op} to {names}: {exc.message}; shards on other ps tasks may have been "
                    "changed",
                    hint="assign the whole value again",
                ) from exc

    return await ps.outgoing.shielded(assign)


def _is_divided(plan: Plan) -> bool:
    """Return whether there are several shards, so that a lock makes a difference."""
    return sum(len(request.members) for request in plan.requests) > 1


@asynccontextmanager
async def _locked(ps: PsClient, plan: Plan) -> AsyncIterator[int]:
    """Hold the shards of a plan; yields the number of the lock."""
    members: dict[int, list[tuple[int, int]]] = {}
    for request in plan.requests:
        members.setdefault(request.ps, []).extend(request.members)
    number = next(_numbers())
    asked: list[PsLink] = []
    held: list[PsLink] = []
    renewing = asyncio.get_running_loop().create_task(_renew(held, number))
    try:
        for index in sorted(members):
            asked.append(ps.links[index])
            with ps.work.wait:
                await ps.links[index].call(LockShards(number, members[index], LEASE_S))
            held.append(ps.links[index])
        yield number
    finally:
        renewing.cancel()
        await ps.outgoing.shielded(lambda: _unlock(asked, number))


async def _renew(held: Sequence[PsLink], number: int) -> None:
    """Keep a lock."""
    while True:
        await asyncio.sleep(LEASE_S / 4)
        for link in list(held):
            try:
                await link.call(LockShards(number, [], LEASE_S))
            except PsyncError as exc:  # whoever speaks under it is told
                logger.debug("%s: lock %d is not renewed: %s", link.task, number, exc)


async def _unlock(asked: Sequence[PsLink], number: int) -> None:
    calls = (link.call(UnlockShards(number)) for link in asked)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, Exception):  # it ends with the connection
            logger.info("lock %d was not released: %s", number, outcome)


class ErrorFeedback:
    """What the gradients of one task are owed. Single owner.

    Args:
        ps: All ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        # By the optimizer, and the variable or shard that is pushed through it.
        self._owed: dict[tuple[int, int, int, int], np.ndarray] = {}
        self._timeline = ps.timeline

    async def push(
        self,
        plan: Plan,
        gradients: Sequence[Array],
        send: Callable[[Plan, Sequence[Array]], Awaitable[A]],
        *,
        kind: Compression,
        optimizer: int,
    ) -> A:
        """Push gradients compressed.

        Args:
            plan: Of the variables, as they are.
            gradients: For each. Those of some rows, and of other dtypes, travel as they are.
            send: Pushes gradients for a plan, and returns the answer, or that of each ps.
            kind: How they travel.
            optimizer: Number of the optimizer.

        Raises:
            Exception: What ``send`` raises.

        Cancellation: As ``send``. A push that is to go on has to be shielded.
        """
        ps, sent = self._ps, list(gradients)
        owed: dict[tuple[int, int, int, int], np.ndarray] = {}
        rest: dict[tuple[int, int, int, int], np.ndarray] = {}

        def rounding() -> Iterator[int]:
            for at, (spec, gradient) in enumerate(zip(plan.variables, gradients, strict=True)):
                if isinstance(gradient, IndexedSlices) or spec.dtype != WIDE:
                    continue
                stream = (optimizer, spec.variable_id, spec.shards[0].index, len(spec.shards))
                before = self._owed.pop(stream, None)
                if before is not None:
                    owed[stream] = before
                sent[at] = out = ps.empty(spec.shape, narrow_dtype(kind))
                rest[stream] = ps.empty(spec.shape, gradient.dtype)
                yield from compensate(gradient, before, out, rest[stream])

        self._begin_timeline()
        timeline = self._timeline
        try:
            with ps.work.push:
                await in_turns(rounding())
            answer = await send(ps.plan(plan.variables, kind), sent)
            each = answer if isinstance(answer, list) else [answer]
            if all(one.outcome == "accepted" for one in each):
                owed = rest
        finally:
            self._begin_timeline()
            for stream, array in owed.items() if self._timeline == timeline else ():
                other = self._owed.setdefault(stream, array)
                if other is not array:  # of a push that was under way at the same time
                    np.add(other, array, out=other)
        return answer

    def _begin_timeline(self) -> None:
        if self._timeline != self._ps.timeline:
            self._timeline = self._ps.timeline
            self._owed.clear()


async def pull_compressed(
    ps: PsClient,
    plan: Plan,
    kind: Compression,
    *,
    writable: bool = False,
    out: Sequence[np.ndarray | None] | None = None,
    seen: PulledSteps | None = None,
) -> list[np.ndarray]:
    """Do ``PsClient.pull`` with float32 values that travel compressed: they are rounded.

    Args:
        ps: All ps tasks.
        plan: Of the variables, as they are.
        kind: How they travel.
        writable: As for ``PsClient.pull``.
        out: As for ``PsClient.pull``.
        seen: As for ``PsClient.pull``.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: Safe; ``out`` then holds anything.
    """
    given = list(out or [None] * len(plan.variables))
    is_wide = [spec.dtype == WIDE for spec in plan.variables]
    others = [None if wide else target for wide, target in zip(is_wide, given, strict=True)]
    narrow = ps.plan(plan.variables, kind)
    arrays = await ps.pull(narrow, writable=writable, out=others, seen=seen)

    def widening() -> Iterator[int]:
        for at, spec in enumerate(plan.variables):
            if is_wide[at]:
                target = given[at]
                wide = ps.empty(spec.shape, np.dtype(WIDE)) if target is None else target
                yield from widen_into(arrays[at], wide)
                if target is None:
                    wide.setflags(write=writable)
                arrays[at] = wide

    with ps.work.pull:
        await in_turns(widening())
    return arrays
