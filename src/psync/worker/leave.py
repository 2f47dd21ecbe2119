"""Orderly departure of a worker: no closure that it has finished runs again.

    worker → coordinator: LeaveCluster       nothing more is sent; it begins nothing more
                          GivenBack          what it has not started
                          ClosureResults     of the closure that ran, whose updates are all answered
                          EndSession         on both connections: nothing follows

The coordinator counts it as left when it gets the last.
"""

from __future__ import annotations

import asyncio
import logging

from psync.errors import DeadlineExceeded
from psync.wire.recovery_messages import EndSession, LeaveCluster
from psync.worker.session import Session

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a coordinator may take for each answer: it runs no user code, but merges of gangs."""

SILENCE_S = 1.0
"""A closure that runs on for longer than this is named in the log."""


async def leave(session: Session, reason: str, *, hint: str = "") -> None:
    """Give back what has not begun, end what runs, and tell the coordinator.

    Args:
        session: Of the coordinator.
        reason: Why, for its log.
        hint: How it can be had sooner, for our own.

    Raises:
        TransportError: The session ended before: the coordinator knows that, too.

    Cancellation: Safe; the coordinator goes on waiting for what runs.
    """
    session.retire()
    loop = asyncio.get_running_loop()
    try:
        await session.control.call(LeaveCluster(reason), deadline=loop.time() + ANSWER_S)
    except DeadlineExceeded:
        logger.info("the coordinator is busy; leaving it all the same")
    session.give_back_all()
    waiting = asyncio.ensure_future(session.wait_idle())
    try:
        await asyncio.wait((waiting,), timeout=SILENCE_S)
        running = session.running
        if not waiting.done() and running is not None:
            name = f" ({running.name})" if running.name else ""
            logger.info(
                "worker %d leaves when closure %d%s has ended%s",
                session.attach.worker_index, running.id, name, hint,
            )  # fmt: skip
        await waiting
    finally:
        waiting.cancel()
    await session.runtime.ps.outgoing.drain()
    for lane in (session.bulk, session.control):
        await lane.call(EndSession(reason, True), deadline=loop.time() + ANSWER_S)
