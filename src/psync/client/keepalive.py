"""Pings, by which a ps is found that is stopped: its kernel still answers, its loop does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from psync.errors import ConnectionLost, PsyncError
from psync.net.peer import Peer

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 10.0
"""A ps runs no user code and answers within milliseconds; two silent periods: it is gone."""


async def keep_alive(
    task: str,
    open_peers: Callable[[], Sequence[Peer] | None],
    control: Callable[[], Awaitable[Peer]],
) -> None:
    """Ping a ps for as long as it is not lost, and end its connections when it is silent.

    Args:
        task: Name of the ps.
        open_peers: Returns its connections; None: it is lost.
        control: Returns that for small messages, which is opened if need be.

    Cancellation: Safe.
    """
    loop = asyncio.get_running_loop()
    silent_since: float | None = None
    while True:
        await asyncio.sleep(PING_INTERVAL_S)
        peers = open_peers()
        if peers is None:
            return
        if not peers:
            silent_since = None
            continue
        began = loop.time()
        try:
            # Pings do not queue behind tensors: if need be the control lane is opened.
            peer = await control()
            async with asyncio.timeout(PING_TIMEOUT_S):
                await peer.ping()
            silent_since = None
        except TimeoutError:
            # Our own loop may have been blocked by a step, with the answer unread: only
            # a second silence in a row counts.
            if silent_since is None:
                silent_since = began
                continue
            waited = loop.time() - silent_since
            for open_peer in open_peers() or ():
                open_peer.abort(ConnectionLost(f"{task} did not answer pings for {waited:.0f} s"))
            silent_since = None
        except PsyncError as exc:  # whoever needs the ps gets it, too
            logger.info("%s: no ping: %s", task, exc.message)
            silent_since = None
