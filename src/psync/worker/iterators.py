"""Per-worker dataset iterators: batches loaded ahead in a thread, handed out in order.

Dataset code is the user's: it may block, raise, or never end. So it runs in a thread of its
own, a few batches ahead of the steps, and neither the worker's loop nor the end of the process
ever waits for it. It must not call psync: what it would wait for may be waiting for it.

The position of an iterator counts the batches that steps have got, not those loaded ahead. A worker
that was lost starts where its iterator started.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from psync.client.context import DatasetContext, current_runtime, inside
from psync.errors import ClosedError, ClosureInputError, EndOfData, UnsupportedError, UsageError
from psync.serialization.captures import name_of
from psync.worker.data_sources import InputContext, open_dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCHES_AHEAD = 2  # one is being used up while the other is ready; more only takes memory


@dataclass(eq=False, repr=False)
class WorkerIterator:
    """One worker's iterator over its dataset.

    States: open; ended (the dataset is exhausted or has raised, and stays so until
    ``next_in`` begins it again); closed (every method raises ClosedError), with which the thread
    ends. Whoever made the iterator closes it.

    Args:
        dataset_fn: Builds the dataset; called in the loader thread.
        context: What it is told.
        worker_index: What ``get_worker_index`` returns in dataset code.
        ahead: How many batches may wait to be handed out. With 0 there is no thread: a batch is
            loaded when it is asked for, which a test under virtual time needs.
        position: How many batches were handed out, at first by an iterator that this one goes on
            from: those are loaded and thrown away.
        uid: Of its handle; the end of the data names it.
    """

    dataset_fn: Callable[..., Any]
    context: InputContext
    _: KW_ONLY
    worker_index: int = 0
    ahead: int = BATCHES_AHEAD
    position: int = 0
    uid: str = ""

    def __post_init__(self) -> None:
        self._to_skip = self.position
        self.name = name_of(self.dataset_fn)
        self._source: Iterator[Any] | None = None  # the loader's own; None before and after
        # What loader and steps share. Re-entrant: without a thread, a step is the loader.
        self._changed = threading.Condition(threading.RLock())
        self._batches: deque[Any] = deque()
        self._end: BaseException | None = None  # raised once all batches are handed out
        self._end_traceback: TracebackType | None = None
        self._closed = False
        self._waiters: list[concurrent.futures.Future[None]] = []  # of `ready`
        self._epoch: int | None = None  # in which the dataset was begun, of those who count them
        self.thread: threading.Thread | None = None  # in which dataset code runs
        if self.ahead > 0:
            self.thread = threading.Thread(
                target=self._run, name=f"psync dataset {self.name}", daemon=True
            )
            self.thread.start()

    # Steps.

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch; blocks the thread only if none is loaded yet.

        Raises:
            EndOfData: If there is none, now and ever after, unless ``next_in`` begins again.
            ClosureInputError: If the dataset could not be built; ``__cause__`` says why.
            ClosedError: If the iterator was closed.
            Exception: What dataset code raised, again each time.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError(f"the iterator over dataset {self.name} was released")
                if self._batches:
                    self.position += 1
                    self._changed.notify_all()  # there is room for another one
                    return self._batches.popleft()
                if self._end is not None:
                    if isinstance(self._end, EndOfData):
                        self._end.data, self._end.batches = (self.uid, 0), self.position
                    raise self._end.with_traceback(self._end_traceback)  # else it grows
                if self.thread is None:
                    self._load()
                else:
                    self._changed.wait()

    async def next_in(self, epoch: int) -> Any:
        """Return the next batch of a dataset that outlasts epochs; waits for it without blocking.

        Where it ends that was begun in an earlier epoch it begins again, and its position with it.

        Args:
            epoch: Grows.

        Raises:
            EndOfData: The dataset was begun in this epoch, and has ended in it.
            Exception: As ``next``.

        Cancellation: Safe; no batch is lost.
        """
        if self._epoch is None:
            self._epoch = epoch
        while True:
            await self.ready()
            try:
                return next(self)
            except EndOfData as exc:
                if self._epoch >= epoch:
                    exc.data = self.uid, epoch
                    raise
            with self._changed:
                self._epoch, self.position, self._to_skip, self._end = epoch, 0, 0, None
                self._changed.notify_all()

    async def ready(self) -> None:
        """Wait until ``next`` will not block: a batch, the end or an error is there.

        Raises:
            ClosureInputError: If the dataset could not be built; ``__cause__`` says why.
            ClosedError: If the iterator is closed, before or meanwhile.

        Cancellation: safe; no batch is lost.
        """
        waiter: concurrent.futures.Future[None] | None = None
        with self._changed:
            if not (self._batches or self._end is not None or self._closed):
                if self.thread is None:
                    self._load()
                else:
                    waiter = concurrent.futures.Future()
                    self._waiters.append(waiter)
        if waiter is not None:
            await asyncio.wrap_future(waiter)
        if self._closed:
            raise ClosedError(f"the iterator over dataset {self.name} was released")
        if isinstance(self._end, ClosureInputError):  # it could not be built
            raise self._end.with_traceback(self._end_traceback)

    # The loader.

    def _run(self) -> None:
        while not self._closed:
            self._load()
            with self._changed:  # until another batch may be loaded
                while not self._closed and (self._end or len(self._batches) >= self.ahead):
                    self._changed.wait()
        self._close_source()

    def _load(self) -> None:
        """Load one batch, or find the end. Runs user code."""
        with inside(DatasetContext(self.worker_index)):
            try:
                if self._source is None:
                    self._source = self._open()
                while self._to_skip and not self._closed:
                    next(self._source)
                    self._to_skip -= 1
                batch = next(self._source)
            except StopIteration:
                self._settle(EndOfData(f"dataset {self.name} has no further batch"))
            except BaseException as exc:  # `next` raises it where somebody asks for a batch
                self._settle(exc)
            else:
                with self._changed:
                    if not self._closed:
                        self._batches.append(batch)
                    self._wake()

    def _open(self) -> Iterator[Any]:
        try:
            return open_dataset(self.dataset_fn, self.context)
        except BaseException as exc:
            raise ClosureInputError(
                f"dataset {self.name} could not be built: {type(exc).__name__}: {exc}"
            ) from exc

    def _settle(self, end: BaseException) -> None:
        """Note the end, wake whoever waits for it, and let the dataset clean up."""
        with self._changed:
            self._end, self._end_traceback = end, end.__traceback__
            self._wake()
        self._close_source()

    def _wake(self) -> None:
        self._changed.notify_all()
        for waiter in self._waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        self._waiters.clear()

    # The end.

    def close(self) -> None:
        """End the iterator: drop what was loaded, stop the thread. Does not block; idempotent.

        A thread that is inside dataset code ends when that returns; it is a daemon, so the process
        can exit all the same.
        """
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._wake()
        if self.thread is None:
            self._close_source()

    def _close_source(self) -> None:
        """Let the dataset clean up, in the thread that has used it."""
        source, self._source = self._source, None
        close = getattr(source, "close", None)
        if callable(close):
            with inside(DatasetContext(self.worker_index)):
                try:
                    close()
                except Exception:  # of user code, where nobody asks for anything any more
                    logger.warning("dataset %s raised when it was closed", self.name, exc_info=True)


class IteratorHandle(Generic[T]):
    """A per-worker iterator as steps see it; it stands for the iterator of the step's worker.

    Args:
        uid: Unique id in the cluster.
        key: Key of the dataset function.
        num_pipelines: Number of workers that the data is meant for.
        starts: Number of batches to skip, by worker index; 0 for a missing worker.
    """

    def __init__(self, uid: str, key: bytes, num_pipelines: int, starts: Mapping[int, int]) -> None:
        self.uid = uid
        self.key = key
        self.num_pipelines = num_pipelines
        self.starts = starts

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrived, (self.uid, self.key, self.num_pipelines, dict(self.starts)))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return this worker's next element.

        Raises:
            EndOfData: There is no further element; a step that does not catch it ends with it.
            UnsupportedError: Outside a step.
        """
        element: T = next(self._found())
        return element

    async def next_in(self, epoch: int) -> T:
        """Return the next element of data that spans epochs, which are numbered.

        If this worker's data ends and was begun in an earlier epoch, it begins again.

        Raises:
            EndOfData: The data was begun in this epoch, and has ended in it.
            UnsupportedError: Outside a step.

        Cancellation: Safe.
        """
        element: T = await self._found().next_in(epoch)
        return element

    def _found(self) -> Any:
        """Return the iterator of this worker."""
        runtime = current_runtime()
        if runtime is None or runtime.find_iterator is None:
            raise UnsupportedError(
                "next() on a per-worker iterator outside a step: each worker has its own data",
                hint="pass the iterator to a step: schedule(step, args=(iterator,))",
            )
        iterator = runtime.find_iterator(self.uid)
        if iterator is None:
            raise UsageError(
                "a per-worker iterator was passed to the step in an unsupported way",
                hint="pass it as an argument of the step, or let the step capture it",
            )
        return iterator


arriving: ContextVar[list[IteratorHandle[Any]] | None] = ContextVar("psync_arriving", default=None)
"""Where iterators are noted that come in with a function or its arguments."""


def _arrived(
    uid: str, key: bytes, num_pipelines: int, starts: Mapping[int, int]
) -> IteratorHandle[Any]:
    handle: IteratorHandle[Any] = IteratorHandle(uid, key, num_pipelines, starts)
    if (noted := arriving.get()) is not None:
        noted.append(handle)
    return handle
