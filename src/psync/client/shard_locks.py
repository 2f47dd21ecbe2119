"""Consistent reads and atomic assigns over several ps tasks, under locks on shards.

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
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from psync.client.plans import Plan
from psync.client.ps_client import PsClient
from psync.client.ps_link import PsLink
from psync.client.pulled_steps import PulledSteps
from psync.errors import LockLost, PsyncError
from psync.net.platform import PerProcess
from psync.wire.codec import Message
from psync.wire.messages import LockShards, Pushed, RenewLock, UnlockShards

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""A holder that says nothing for so long has lost its lock: others do not wait for it."""

READ_ATTEMPTS = 3
"""Connections, and with them locks, may be lost; a read changes nothing and is tried again."""

_numbers = PerProcess(lambda: itertools.count(1))


async def pull_at_once(
    ps: PsClient,
    plan: Plan,
    *,
    writable: bool = False,
    out: Sequence[np.ndarray | None] | None = None,
    seen: PulledSteps | None = None,
) -> list[np.ndarray]:
    """Return the values of a plan's variables as they are at one instant; else as ``pull``.

    Raises:
        ParameterServerLost: A ps is gone.
        LockLost: The connection to a ps was lost again and again, or this task was silent for
            longer than the lease.

    Cancellation: Safe; ``out`` then holds anything.
    """
    if _num_shards(plan) < 2:
        return await ps.pull(plan, writable=writable, out=out, seen=seen)
    attempts = itertools.count(1)
    while True:
        try:
            async with _locked(ps, plan) as lock:
                return await ps.pull(plan, writable=writable, out=out, seen=seen, lock=lock)
        except LockLost:
            if next(attempts) == READ_ATTEMPTS:
                raise


async def assign_at_once(
    ps: PsClient, plan: Plan, values: Sequence[np.ndarray], *, op: str, closure: int, ordinal: int
) -> list[Pushed]:
    """Assign to a plan's variables so that nobody who reads at one instant sees half of it.

    Args:
        ps: The ps tasks.
        plan: Of the variables.
        values: As for ``PsClient.assign``, as are the next three.
        op: "assign", "add" or "sub".
        closure: Id of the closure, or -1.
        ordinal: Of the call within the closure.

    Raises:
        ParameterServerLost: A ps is gone; the others may have the new value.
        LockLost: The connection to a ps was lost, or this task was silent for longer than the
            lease, before all shards had the new value; some may have it.

    Cancellation: It ends in the background.
    """
    if _num_shards(plan) < 2:
        return await ps.assign(plan, values, op=op, closure=closure, ordinal=ordinal)

    async def assign() -> list[Pushed]:
        async with _locked(ps, plan) as lock:
            try:
                return await ps.assign(
                    plan, values, op=op, closure=closure, ordinal=ordinal, lock=lock
                )
            except LockLost as exc:
                names = ", ".join(f'"{variable.name}"' for variable in plan.variables)
                raise LockLost(
                    f"{op} to {names}: {exc.message}; shards on other ps tasks may have been "
                    "changed",
                    hint="assign the whole value again",
                ) from exc

    return await ps.outgoing.shielded(assign)


@asynccontextmanager
async def _locked(ps: PsClient, plan: Plan) -> AsyncIterator[int]:
    """Hold the shards of a plan; yields the number of the lock."""
    members: dict[int, list[tuple[int, int]]] = {}
    for request in plan.requests:
        members.setdefault(request.ps, []).extend(request.members)
    number = next(_numbers())
    asked: list[PsLink] = []
    renewing = asyncio.get_running_loop().create_task(_renew(asked, number))
    try:
        for index in sorted(members):
            asked.append(ps.links[index])
            with ps.work.wait:
                await _say(ps.links[index], LockShards(number, members[index], LEASE_S))
        yield number
    finally:
        renewing.cancel()
        await ps.outgoing.shielded(lambda: _unlock(asked, number))


async def _renew(held: Sequence[PsLink], number: int) -> None:
    """Keep a lock; the last one that was asked for may not be held yet."""
    while True:
        await asyncio.sleep(LEASE_S / 4)
        for link in list(held):
            try:
                await _say(link, RenewLock(number))
            except PsyncError as exc:  # whoever speaks under it is told
                logger.debug("%s: lock %d is not renewed: %s", link.task, number, exc)


async def _unlock(asked: Sequence[PsLink], number: int) -> None:
    calls = (_say(link, UnlockShards(number)) for link in asked)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, Exception):  # it ends with the connection
            logger.info("lock %d was not released: %s", number, outcome)


async def _say(link: PsLink, message: Message) -> None:
    await link.call(lambda peer: message, locked=True)


def _num_shards(plan: Plan) -> int:
    return sum(len(request.members) for request in plan.requests)
