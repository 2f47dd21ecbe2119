"""Pending ``join`` calls: the closures that each waits for, and the error that each raises.

A join waits for the closures that were scheduled before it (ids below its cut-off). An error ends
all joins that wait, at once: it has ended everything that they wait for. The end of a worker's
data ends none early: each join that waits for the closure that met it raises it when all else
that it waits for is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from psync.client.context import LATE_HINT
from psync.closures.closure import Closure, State
from psync.closures.queue import ClosureQueue
from psync.errors import ClosedError, DeadlineExceeded, UsageError
from psync.serialization.failures import text_of

logger = logging.getLogger(__name__)

NEVER = 1 << 62
"""The cut-off of a join that ends with an error alone."""

REPORT_EVERY_S = 10.0
"""A join that has heard of nothing for so long says on whom it waits."""


class Joins:
    """All joins of one coordinator.

    Args:
        queue: Says which closures are final, and holds the errors.
        waits_for: Says on whom everybody waits.
    """

    def __init__(self, queue: ClosureQueue, waits_for: Callable[[], str]) -> None:
        self._queue = queue
        self._waits_for = waits_for
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()  # when a worker last reported
        self.waiting: dict[asyncio.Future[None], int] = {}  # and the ids below which each waits for
        self._ends_of_data: dict[asyncio.Future[None], BaseException | None] = {}  # to be raised
        self._late = Counter[tuple[str, str]]()  # refused operations, by step and operation
        self._exhausted_at: int | None = None  # lowest closure that met an end of data, not told

        self.stop_reason: str | None = None
        """Why a step asked for the end of training that the latest join met; None if none did."""

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, cutoff: int) -> asyncio.Future[None]:
        """Return a future that ends when all closures with ids below ``cutoff`` are final.

        Whoever waits for it gives it back with ``discard``.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self.waiting[future] = cutoff
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        """Nobody waits any more."""
        self.waiting.pop(future, None)
        self._ends_of_data.pop(future, None)
        if future.done():
            future.exception()  # seen, also where whoever waited was cancelled just now

    @contextlib.contextmanager
    def _joining(self, cutoff: int) -> Iterator[asyncio.Future[None]]:
        future = self.add(cutoff)
        self.settle()
        try:
            yield future
        finally:
            self.discard(future)

    async def wait(
        self,
        deadline: float | None,
        timeout_s: float | None,
        *futures: asyncio.Future[Any],
    ) -> None:
        """Wait until one of the futures is done; say on whom, if it is long.

        Args:
            futures: Are not looked at further, nor cancelled.
            deadline: Loop time (seconds) at which to give up; None: never.
            timeout_s: The seconds that join was given, for the error.

        Raises:
            DeadlineExceeded: It is not done by then.

        Cancellation: Safe.
        """
        while not any(future.done() for future in futures):
            pause = REPORT_EVERY_S
            if deadline is not None:
                pause = min(pause, deadline - self._loop.time())
                if pause <= 0:
                    raise DeadlineExceeded(
                        f"join did not end within {timeout_s:g} s: {self._waits_for()}",
                        hint="scheduled closures continue; join again, or cancel their "
                        "RemoteValues",
                    )
            done, _ = await asyncio.wait(
                futures, timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and self._loop.time() - self.heard_at >= REPORT_EVERY_S:
                logger.warning("join waits: %s", self._waits_for())

    async def below(
        self, cutoff: int, deadline: float | None = None, timeout_s: float | None = None
    ) -> asyncio.Future[None]:
        """Wait until all closures with ids below ``cutoff`` are final.

        Returns:
            Done; has the error that a join raises.

        Raises:
            DeadlineExceeded: As for ``wait``, which explains the other arguments.

        Cancellation: Safe; the next one that waits has the error.
        """
        with self._joining(cutoff) as future:
            await self.wait(deadline, timeout_s, future)
        return future

    async def run(
        self, work: Coroutine[Any, Any, Any], deadline: float | None, timeout_s: float | None
    ) -> None:
        """Do something that a join waits for, too; see ``wait``. Cancellation: of both.

        Raises:
            Exception: The error of a closure, or of all of them, that came meanwhile: a ps may be
                lost for good without which ``work`` has no end.
        """
        task = self._loop.create_task(work)
        try:
            with self._joining(NEVER) as failed:
                await self.wait(deadline, timeout_s, task, failed)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if failed.done():
            failed.result()
        task.result()

    async def collect_into(self, error: Exception, cutoff: int) -> None:
        """Collect the error that a join would raise, where ``error`` is raised instead.

        If that is another one it becomes the cause of ``error``, or a note.

        Cancellation: Safe; a join still raises it.
        """
        collected = (await self.below(cutoff)).exception()
        if collected is None or collected is error or isinstance(collected, ClosedError):
            return
        if error.__cause__ is None:
            error.__cause__ = collected
        else:
            error.add_note(f"also failed: {type(collected).__name__}: {text_of(collected)}")

    def note_final(self, closures: Sequence[Closure]) -> None:
        """Look for closures whose data had ended."""
        for closure in closures:
            if closure.state is State.EXHAUSTED and (
                self._exhausted_at is None or closure.id < self._exhausted_at
            ):
                self._exhausted_at = closure.id

    def note_late(self, worker: str, step: str, operation: str, times: int) -> None:
        """A worker has refused an operation whose step had returned; a join will raise that."""
        if (step, operation) not in self._late:
            logger.warning(
                '%s: %s in step "%s" was refused, because the step had returned; join raises it\n'
                "hint: %s", worker, operation, step, LATE_HINT,
            )  # fmt: skip
        self._late[step, operation] += times

    def take_late(self) -> UsageError | None:
        """Return the error of operations that were refused since this was asked last."""
        if not self._late:
            return None
        texts = [
            f'{operation} in step "{step}"{f" ({times} times)" if times > 1 else ""}'
            for (step, operation), times in self._late.items()
        ]
        self._late.clear()
        return UsageError(
            f"refused, because the step had returned: {'; '.join(_some(texts))}",
            hint=LATE_HINT,
        )

    def settle(self) -> None:
        """End the joins that are over."""
        ready = {f: cutoff for f, cutoff in self.waiting.items() if self._queue.is_settled(cutoff)}
        if ready:
            self.stop_reason = self._queue.requested_stop
        if ready and self._queue.has_failed:
            self.fail(self._collect())
            return
        exhausted = self._exhausted_at
        if exhausted is not None and any(cutoff > exhausted for cutoff in ready.values()):
            error = self._collect()
            concerned = [f for f, cutoff in self.waiting.items() if cutoff > exhausted]
            self._ends_of_data |= dict.fromkeys(concerned, error)
        for future in ready:
            self._end(future, self._ends_of_data.pop(future, None))
        if ready and self.stop_reason is not None:
            self._collect()  # what is scheduled now runs

    def fail(self, error: BaseException | None) -> None:
        """End all joins with an error."""
        for future in list(self.waiting):
            self._end(future, error)

    def warn_of_leftovers(self) -> None:
        """Say what closing now throws away: who forgets ``join`` would take it for done."""
        counts = self._queue.statistics()
        if left := counts.waiting + counts.queued + counts.in_flight:
            logger.warning("closing cancels %d unfinished closures; join was not awaited", left)
        if self._queue.ready_to_raise and (collected := self._queue.collect_error()):
            name, text = type(collected[0]).__name__, text_of(collected[0]).partition("\nhint:")[0]
            logger.warning("closing without join; join would have raised %s: %s", name, text)

    def _collect(self) -> BaseException | None:
        self._exhausted_at = None
        collected = self._queue.collect_error()
        if collected is None:
            return None
        first, others = collected
        # When a ps is lost, all steps that run fail with the same error.
        texts = Counter(_line(other) for other in others)
        if alike := texts.pop(_line(first), 0):
            first.add_note(f"{alike} more failed likewise")
        for text, count in texts.items():
            times = f" ({count} times)" if count > 1 else ""
            first.add_note(f"also failed{times}: {text}")
        return first

    def _end(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        del self.waiting[future]
        if future.done():  # whoever waited was cancelled
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


MAX_NAMED = 5
"""Closures or tasks in a description: it is repeated in the log, and there may be hundreds."""


def _some(names: Sequence[str]) -> list[str]:
    """Return the first few, and how many more there are."""
    more = len(names) - MAX_NAMED
    return [*names[:MAX_NAMED], f"and {more} more"] if more > 0 else list(names)


def describe_waiting(
    queue: ClosureQueue,
    missing: Sequence[tuple[str, str]],
    others: Sequence[str],
    gone: Sequence[str] = (),
) -> str:
    """Say what runs where, and what else is not done; of what is many, a few are named.

    Args:
        queue: Of the coordinator.
        missing: (name, address) of the tasks that are waited for.
        others: What else is waited for.
        gone: Workers that have left.
    """
    counts = queue.statistics()
    running: dict[str, Closure] = {}
    for worker, closure in queue.in_flight():
        running.setdefault(worker, closure)
    parts = _some([f"{closure} on {worker}" for worker, closure in running.items()])
    behind = counts.waiting + counts.queued + counts.in_flight - len(running)
    if behind:
        parts.append(f"{behind} more wait for their turn")
    if not counts.workers:
        names = ", ".join(_some([f"{task} at {address}" for task, address in missing]))
        left = f"{', '.join(_some(gone))} left" if gone else ""
        awaited = f"waiting for {names}" if names else "waiting for one to come"
        parts.append(f"no worker is connected ({'; '.join(filter(None, (left, awaited)))})")
    text = "; ".join([*parts, *others]) or "nothing"
    if queue.has_failed:
        return f"there is an error, raised as soon as these steps have stopped: {text}"
    return text
