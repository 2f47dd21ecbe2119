"""The end of a program: its tasks are told to exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from psync.cluster import task_name
from psync.errors import ConfigurationError, PsyncError
from psync.launch.identity import OwnTask
from psync.net.endpoint import Endpoint
from psync.net.environment import added_workers, newest_incarnation, platform_of
from psync.wire.messages import Shutdown

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
"""How long the chief waits, at its end, for each task to hear that it should exit."""


async def shut_down(own: OwnTask, jobs: Sequence[str], began: int) -> None:
    """Tell every task of these jobs that training is over; those that do not hear it stay.

    It is said in the name of the program's last coordinator; if there was none, of the moment in
    which the program ``began``: tasks that serve a newer chief meanwhile are not ours to end.

    Args:
        own: This process.
        jobs: As in ``("worker", "ps")``.
        began: Nanoseconds, of the time of day.

    Cancellation: Who has not heard it stays.
    """
    cluster = own.cluster
    try:
        # If there is no secret, main() has allowed that or has failed: it was said before.
        platform = platform_of(own.resolver, own.address, insecure=True, warn=logger.debug)
    except ConfigurationError as exc:
        logger.debug("nobody was told to exit: %s", exc)
        return
    incarnation = newest_incarnation() or began
    endpoint = Endpoint(platform, task_name("chief", 0), incarnation, {})

    async def tell(name: str, address: str) -> None:
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    peer = await endpoint.connect(address, name)
                    await peer.call(Shutdown("the chief has ended"))
            except PsyncError as exc:
                logger.info("%s was not told to exit: %s", name, exc)

    tasks = {
        task_name(job, index): cluster.task_address(job, index)
        for job in jobs
        for index in cluster.task_indices(job)
    } | (added_workers.get() or {})
    try:
        await asyncio.gather(*(tell(name, address) for name, address in tasks.items()))
    finally:
        await endpoint.close()
