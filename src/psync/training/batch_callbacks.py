"""Who is told of the closures of an epoch as they end: callbacks for batches, and the bar."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from psync.errors import EndOfData
from psync.serialization.remote_value import RemoteValue
from psync.status.progress import Progress

SHOW_EVERY_S = 0.1


async def follow(
    closures: Sequence[RemoteValue[Any]],
    counts: Sequence[int],
    tell: Callable[[int, Any], Awaitable[None]],
    stopped: Callable[[], bool],
) -> None:
    """Call ``tell(step, result)`` for each closure that has a result, in the order of the epoch.

    Where that raises, or ``stopped()`` becomes true, the closures that have not ended are
    cancelled. An error of a closure is left to whoever joins.

    Args:
        closures: Of an epoch.
        counts: How many steps each has.
        tell: Gets the last step of the closure, from 0, and its result.
        stopped: Asked after each.

    Raises:
        Exception: What ``tell`` raised.

    Cancellation: Safe; closures go on.
    """
    steps = 0
    for place, (closure, count) in enumerate(zip(closures, counts, strict=True)):
        steps += count
        try:
            result = await closure
        except EndOfData:  # of this worker; others may have more
            continue
        except Exception:
            return
        try:
            await tell(steps - 1, result)
            if not stopped():
                continue
        except Exception:
            _cancel(closures[place:])
            raise
        _cancel(closures[place:])
        return


def _cancel(closures: Sequence[RemoteValue[Any]]) -> None:
    for closure in closures:
        closure.cancel()


async def show_steps(
    closures: Sequence[RemoteValue[Any]], counts: Sequence[int], show: Progress
) -> None:
    """Move the bar while the closures run; they are done about in order."""
    first = done = 0
    while True:
        while first < len(closures) and closures[first].done():
            done += counts[first]
            first += 1
        show.at(done)
        await asyncio.sleep(SHOW_EVERY_S)
