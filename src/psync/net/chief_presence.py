"""Chief timeout of ps and worker tasks: they exit when no chief has been connected for too long.

A task that is told to end does so at once. This is for the chief that cannot tell it any more: a
job whose chief is gone for good must not hold machines for ever. An evaluator is connected to no
task. It ends when ps tasks and workers have, which this rule ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from psync.errors import TrainingEnded
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.net.platform import Patience
from psync.net.shielding import first_of
from psync.net.transport import Network

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
"""How often an evaluator looks whether somebody trains."""

LOOK_AT_MOST_EVERY_S = 10.0
"""However short its patience is: a ps takes each look for a probe of its port, and does not hear an
address from which ten come in a minute, which may be that of a worker or chief, too."""

ALL_GONE_S = 60.0
"""Training has ended when nobody has been there for so long: a ps that was lost has as long to be
there again."""

ANSWER_WITHIN_S = 1.0
"""A task that is there accepts a connection sooner."""

HOW_LONG = "PSYNC_CHIEF_TIMEOUT sets how many seconds it waits; none: for ever"

REPORT_EVERY_S = 10.0
"""A wait for which nobody else says why is named in the log so often."""


@contextlib.contextmanager
def naming_who_is_awaited(text: Callable[[], str], *, warn: bool = False) -> Iterator[None]:
    """Return a context that says what ``text`` returns every ten seconds, until it is left.

    Args:
        text: Names who is awaited; empty while nobody is.
        warn: Whether it is a warning, which is repeated after twice the time as the one before.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    pause_s = REPORT_EVERY_S

    def say() -> None:
        nonlocal timer, pause_s
        pause_s *= 2 if warn else 1
        timer = loop.call_later(pause_s, say)
        if line := text():
            logger.log(logging.WARNING if warn else logging.INFO, "%s", line)

    timer = loop.call_later(REPORT_EVERY_S, say)
    try:
        yield
    finally:
        timer.cancel()


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

    @property
    def is_here(self) -> bool:
        """Whether one is connected."""
        return self._connections > 0

    def watch(self, endpoint: Endpoint) -> None:
        """Count connections to another endpoint of this process, too."""
        endpoint.on_peer.append(self._note_peer)

    def _note_peer(self, peer: Connection) -> None:
        if peer.task.startswith("/job:chief/"):
            self.has_come = True
            self._connections += 1
            self._changed.set()
            peer.on_closed.append(self._note_closed)

    def _note_closed(self, peer: Connection) -> None:
        self._connections -= 1
        self._changed.set()

    async def missed(self, task: str, patience: Patience) -> NoReturn:
        """Wait until there has been none for too long.

        Args:
            task: Name of the task that ends then.
            patience: How long that is; the first number counts from this call on.

        Raises:
            TrainingEnded: There has been none for so long.

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
                since = "the last one went" if self.has_come else "it started"
                raise TrainingEnded(
                    f"{task} ends: no chief has connected within {limit_s:g} s since {since}",
                    hint=HOW_LONG,
                ) from None


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
    await first_of(stopped.wait(), chief.missed(task, patience))


class TrainingPresence:
    """Whether anybody trains, for an evaluator. That somebody accepts connections is all it asks.

    Args:
        network: Where the tasks are.
        tasks: Address of each ps and worker, by name.
        patience: How long to wait for the first of them; and, at most, when all have gone.
    """

    def __init__(self, network: Network, tasks: Mapping[str, str], patience: Patience) -> None:
        self._network = network
        self._tasks = dict(tasks)
        self._first_s, self._next_s = patience
        self._seen = False  # whether there was ever one
        self._since: float | None = None  # loop time of the last sign; None: not looked yet
        self._looked_at = -math.inf
        self._is_there_now = False

    async def look(self) -> None:
        """Look whether somebody is there, unless that was done a moment ago. Cancellation: safe."""
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        pause_s = max(LOOK_AT_MOST_EVERY_S, min(LOOK_EVERY_S, self._limit_s / 2))
        if now - self._looked_at < pause_s:
            return
        self._looked_at = now
        was_there = self._is_there_now
        self._is_there_now = any(await asyncio.gather(*map(self._answers, self._tasks.values())))
        if self._is_there_now or was_there:  # who is not there any more, is missed from now on
            self._since = now
        if self._is_there_now and not self._seen:
            self._seen = True
            logger.debug("training goes on: somebody answers")

    def note_sign(self) -> None:
        """Somebody has saved a checkpoint."""
        self._since = asyncio.get_running_loop().time()

    @property
    def _limit_s(self) -> float:
        if not self._seen:
            return math.inf if self._first_s is None else self._first_s
        return math.inf if self._next_s is None else min(self._next_s, ALL_GONE_S)

    @property
    def _away_s(self) -> float:
        since, now = self._since, asyncio.get_running_loop().time()
        return 0.0 if since is None else now - since

    def has_ended(self) -> bool:
        """Whether there was somebody, and all have gone.

        Raises:
            TrainingEnded: There was nobody for too long.
        """
        if not self._tasks or self._is_there_now or self._away_s < self._limit_s:
            return False
        if self._seen:
            return True
        raise TrainingEnded(
            f"the evaluator ends: within {self._first_s:g} s nobody has come who trains "
            f"({self._names()})",
            hint=HOW_LONG,
        )

    def describe(self) -> str:
        """Say who is there."""
        if not self._tasks:
            return "the cluster's description names nobody who trains"
        if self._is_there_now:
            return "training goes on"
        left_s = self._limit_s - self._away_s
        ends = f"; the evaluator ends in {left_s:.0f} s" if 0 < left_s < math.inf else ""
        return f"nobody trains {'any more' if self._seen else 'yet'} ({self._names()}){ends}"

    def _names(self) -> str:
        shown = [f"{task} at {address}" for task, address in list(self._tasks.items())[:3]]
        more = len(self._tasks) - len(shown)
        return ", ".join([*shown, *([f"{more} more"] if more else [])])

    async def _answers(self, address: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                transport, _ = await self._network.connect(address, _Knock)
        except OSError:  # TimeoutError is one
            return False
        transport.close()
        return True


class _Knock(asyncio.BufferedProtocol):
    """A connection over which nothing is said."""

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where what nobody reads belongs."""
        return bytearray(sizehint if sizehint > 0 else 1024)
