"""How a chief learns under which incarnation it is the coordinator.

Whoever asks does not know yet under which incarnation it will be served, so it asks under
``ENQUIRER``, which nobody refuses, on a connection that serves for nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from psync.closures.membership import backoff
from psync.errors import ConnectFailed, ConnectionLost, PsyncError, RemoteProtocolError
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.wire.recovery_messages import CoordinatorGranted, GrantCoordinator

logger = logging.getLogger(__name__)

CHIEF = "/job:chief/task:0"
"""The name under which the chief speaks to the other tasks, whatever its task is called."""

ENQUIRER = 2**62
"""Incarnation of who asks for its own; above all that a clock of nanoseconds gives."""

ANSWER_WITHIN_S = 1.0
"""A task that is there accepts a connection sooner."""


async def enquire(
    platform: Platform, task: str, address: str, *, previous: int = 0, seen: int = 0
) -> int:
    """Ask ps 0 for a new incarnation, or another task for the highest that it has served.

    Waits for the task as long as it takes, and asks again if a connection is lost.

    Args:
        platform: Network, secret, randomness.
        task: Whom to ask.
        address: Where it listens.
        previous: What this coordinator was granted before; 0: nothing.
        seen: The highest that another task has served; 0: none is known.

    Raises:
        FencedError: Another coordinator has asked after this one.
        AuthenticationError, ProtocolError: Something else answers at that address.

    Cancellation: Safe.
    """
    endpoint = Endpoint(platform, CHIEF, ENQUIRER, {})
    losses = 0
    try:
        while True:
            peer = await endpoint.connect_retrying(address, task)
            try:
                received = await peer.call(GrantCoordinator(previous, seen))
            except ConnectionLost as exc:
                logger.info("%s is asked again for an incarnation: %s", task, exc.message)
                await asyncio.sleep(backoff(losses, platform.uniform()))
                losses += 1
                continue
            if not isinstance(received.message, CoordinatorGranted):
                raise RemoteProtocolError(
                    f"{task} answered GrantCoordinator with {type(received.message).__name__}"
                )
            return received.message.incarnation
    finally:
        await endpoint.close()


async def absent(platform: Platform, tasks: Mapping[str, str]) -> list[str]:
    """Return "task at address" of those that do not answer at once, for a message.

    Args:
        platform: Network, secret, randomness.
        tasks: Address of each task, by its name.

    Cancellation: Safe.
    """
    endpoint = Endpoint(platform, CHIEF, ENQUIRER, {})

    async def is_absent(task: str, address: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await endpoint.connect(address, task)
        except (ConnectFailed, TimeoutError):
            return True
        except PsyncError:  # somebody answers
            return False
        return False

    try:
        answers = await asyncio.gather(*(is_absent(*item) for item in tasks.items()))
    finally:
        await endpoint.close()
    missing = zip(tasks.items(), answers, strict=True)
    return [f"{task} at {address}" for (task, address), gone in missing if gone]
