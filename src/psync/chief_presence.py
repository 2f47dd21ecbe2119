"""Whether a chief is connected to a ps or worker, and since when none has been.

Layer: L2. Imports: errors, endpoint, rpc.

A task that is told to end does so at once. This is for the chief that cannot tell it any more: a
job whose chief is gone for good must not hold machines for ever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from psync.endpoint import Endpoint
from psync.errors import ConfigurationError, TrainingEnded
from psync.rpc import Peer

FIRST_CHIEF_S = 3600.0
"""How long a ps or worker waits for its first chief, which may stand in a queue, or load its data
before it connects."""

NEXT_CHIEF_S = 600.0
"""How long it waits for another chief when the last one has gone. One that ends, even by an error,
says so: this is for those that were killed, and whoever starts them again does it in minutes."""


Patience = tuple[float | None, float | None]
"""Seconds until the first chief, and until another one when the last has gone; None: for ever."""


def chief_timeouts(environ: Mapping[str, str], given: str | None = None) -> Patience:
    """Return how long a ps or worker waits for a chief.

    A task that a launcher has started ends with the launcher, and so waits for ever.

    Args:
        environ: ``PSYNC_CHIEF_TIMEOUT`` is seconds, for both, or ``none``.
        given: The same, from the command line, which wins.

    Raises:
        ConfigurationError: It is something else.
    """
    text = environ.get("PSYNC_CHIEF_TIMEOUT") if given is None else given
    if not text:
        return (None, None) if environ.get("PSYNC_LAUNCHED") else (FIRST_CHIEF_S, NEXT_CHIEF_S)
    if text.strip().lower() == "none":
        return None, None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"chief timeout: expected seconds above 0, or none, got {text!r}")
    return seconds, seconds


class ChiefPresence:
    """Counts the connections of chiefs, whichever they are.

    Args:
        endpoint: Of the ps or worker.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.has_come = False  # whether one has ever been here
        self._connections = 0
        self._changed = asyncio.Event()
        self.watch(endpoint)

    def watch(self, endpoint: Endpoint) -> None:
        """Count connections to another endpoint of this process, too."""
        endpoint.on_peer.append(self._note_peer)

    def _note_peer(self, peer: Peer) -> None:
        if peer.task.startswith("/job:chief/"):
            self.has_come = True
            self._connections += 1
            self._changed.set()
            peer.on_closed.append(self._note_closed)

    def _note_closed(self, peer: Peer) -> None:
        self._connections -= 1
        self._changed.set()

    async def missed(self, patience: Patience) -> float:
        """Wait until there has been none for too long; return how many seconds that was.

        Args:
            patience: How long that is; the first number counts from this call on.

        Cancellation: Safe.
        """
        first_s, next_s = patience
        while True:
            self._changed.clear()
            limit_s = next_s if self.has_come else first_s
            try:
                async with asyncio.timeout(None if self._connections else limit_s):
                    await self._changed.wait()
            except TimeoutError:
                assert limit_s is not None, "None has no end"
                return limit_s


async def until_told(
    task: str, stopped: asyncio.Event, chief: ChiefPresence, patience: Patience
) -> None:
    """Wait until somebody has told a task to end.

    Args:
        task: Its name.
        stopped: Set when it is told.
        chief: Who could say it.
        patience: How long it waits when there is nobody who could.

    Raises:
        TrainingEnded: There was nobody for so long.

    Cancellation: Safe.
    """
    told = asyncio.ensure_future(stopped.wait())
    missing = asyncio.ensure_future(chief.missed(patience))
    try:
        await asyncio.wait([told, missing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        missing.cancel()
    if not stopped.is_set():
        since = "the last one went" if chief.has_come else "it started"
        raise TrainingEnded(
            f"{task} ends: no chief has connected within {missing.result():g} s since {since}",
            hint="PSYNC_CHIEF_TIMEOUT sets how many seconds it waits; none: for ever",
        )
