"""The closure timeout: a worker is given up when one closure runs on it for too long.

A step may compute for minutes on its worker's loop, which then answers nothing: a silent worker is
not taken for dead. Only the program knows how long its steps may take, so it is the program
that sets this limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from psync.closures.closure import Closure
from psync.closures.queue import ClosureQueue

LOOKS = 8
"""How often it is looked within the limit; a closure is given up that much late at most."""


async def watch(
    queue: ClosureQueue, timeout_s: float, give_up: Callable[[str, Closure], None]
) -> None:
    """Call ``give_up(worker, closure)`` where the same closure is the oldest for ``timeout_s``.

    Args:
        queue: Knows what each worker holds; the oldest is the one that runs.
        timeout_s: Seconds that a closure may take.
        give_up: Ends the connection to the worker.

    Cancellation: Safe; it ends in no other way.
    """
    loop = asyncio.get_running_loop()
    since: dict[str, tuple[Closure, float]] = {}  # what each worker runs, and when it was seen
    while True:
        await asyncio.sleep(timeout_s / LOOKS)
        oldest: dict[str, Closure] = {}
        for worker, closure in queue.in_flight():
            if not closure.in_collective:  # or it would be given up for another one that is slow
                oldest.setdefault(worker, closure)
        now = loop.time()
        since = {
            worker: since[worker] if worker in since and since[worker][0] is closure
            else (closure, now)
            for worker, closure in oldest.items()
        }  # fmt: skip
        for worker, (closure, start) in list(since.items()):
            if now - start >= timeout_s:
                del since[worker]
                give_up(worker, closure)
