"""Blocking API: the same programs in plain calls, over an event loop in a thread.

Use it in scripts, notebooks and tests that are not coroutines. ``LocalCluster`` and
``ClusterCoordinator`` are context managers here. Their methods block, and so do those of the
objects that they return. Pass any other awaitable of psync to ``psync.wait``, as in a plain step
function:

    from psync import blocking

    with blocking.LocalCluster(2, 2) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with blocking.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(10, np.float32), name="w")
            value = coordinator.schedule(step, (w,))
            print(value.fetch(), psync.wait(w.read()))

Step functions are unchanged: coroutine functions or plain ones. The loop runs in a thread from the
start of the first of these context managers to the end of the last one. Ctrl-C cancels the awaited
call and is raised when that call has ended. The API also works in a notebook, whose cells already
run on an event loop. Other code on an event loop should await instead, because a call here blocks
its loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from psync.api.cluster_coordinator import ClusterCoordinator as AsyncCoordinator
from psync.api.data_shards import Visits as AsyncVisits
from psync.api.datasets import PerWorkerDataset as AsyncPerWorkerDataset
from psync.api.datasets import PerWorkerIterator as AsyncPerWorkerIterator
from psync.api.strategy import ParameterServerStrategy
from psync.chief.watch import Event, RollbackEvent
from psync.client.context import program_waits, wait
from psync.errors import UsageError, check_fits
from psync.launch import tasks
from psync.launch.cluster import LaunchedClusterResolver
from psync.launch.cluster import LocalCluster as AsyncLocalCluster
from psync.launch.process import loop_factory
from psync.net.platform import PerProcess
from psync.net.resolvers import ClusterResolver, opened
from psync.net.shielding import shielded
from psync.net.trace import Trace
from psync.net.trace_file import Summary
from psync.serialization.remote_value import RemoteValue as AsyncRemoteValue
from psync.status.dashboard import run_log

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
P = ParamSpec("P")

__all__ = ["ClusterCoordinator", "LocalCluster", "report", "run", "wait"]


class _Waits:
    """Waits of threads for what runs on one loop.

    Args:
        loop: Runs in another thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None  # the newest that is waited for
        self._interrupts = False  # the next wait is to be interrupted
        self._interrupted: asyncio.Task[Any] | None = None

    @property
    def is_here(self) -> bool:
        """Whether this is called on the loop."""
        return asyncio._get_running_loop() is self._loop

    def __call__(self, awaitable: Awaitable[T]) -> T:
        """Wait for ``awaitable``, in the context of the caller.

        Raises:
            UsageError: On the loop itself, which it would block for ever; or it is a value.
            KeyboardInterrupt: After Ctrl-C, or when ``run`` is to end; ``awaitable`` was cancelled.
        """
        if self.is_here:
            raise UsageError(
                "wait on the event loop of psync.blocking would block that loop forever",
                hint="in a coroutine use `await …` instead of `psync.wait(…)`, and `await value` "
                "instead of `value.fetch()` for a RemoteValue",
            )
        if not inspect.isawaitable(awaitable):
            raise UsageError(
                f"wait expected an awaitable, got {type(awaitable).__name__}",
                hint="psync.blocking needs no wait: its methods return values",
            )
        task: asyncio.Task[Any] | None = None

        async def waited() -> T:
            nonlocal task
            self._task = task = asyncio.current_task()
            try:
                if self._interrupts:
                    self.interrupt()
                    await asyncio.sleep(0)
                return await awaitable
            finally:
                self._task = None if self._task is task else self._task

        outcome = asyncio.run_coroutine_threadsafe(waited(), self._loop)  # in this context
        try:
            return outcome.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(self._loop.call_soon, self.interrupt)  # it has begun
            concurrent.futures.wait((outcome,))
            raise
        except concurrent.futures.CancelledError:
            interrupted = task is not None and self._interrupted is task
            raise (KeyboardInterrupt if interrupted else asyncio.CancelledError) from None

    def interrupt(self) -> None:
        """Cancel what is waited for just now, or else next; called on the loop."""
        self._interrupts = self._task is None
        if self._task is not None:
            self._interrupted = self._task
            self._task.cancel()


class _LoopThread:
    """The loop of this process's blocking calls, as long as somebody uses it."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._loop = contextlib.ExitStack()  # while somebody uses it

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Return a context manager inside which a loop runs for ``wait``."""
        with self._lock:
            if not self._users and not program_waits():
                self._loop.enter_context(_loop_in_thread())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._loop.close()


_loop_thread = PerProcess(_LoopThread)


def _begin_child() -> None:
    _loop_thread.value = _LoopThread()  # a forked process does not have that thread


os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def _loop_in_thread() -> Iterator[None]:
    """Run a loop in a thread; threads wait for what runs there."""
    runner = asyncio.Runner(loop_factory=loop_factory())
    loop = runner.get_loop()
    over = asyncio.Event()

    def run() -> None:  # to the end: a caller's thread may have a running loop, as in a notebook
        with runner:
            runner.run(over.wait())

    thread = threading.Thread(target=run, name="psync.blocking")
    waits = _Waits(loop)
    thread.daemon = True  # a program that does not close what it has opened ends all the same
    thread.start()
    program_waits().append(waits)
    try:
        yield
    finally:
        program_waits().remove(waits)
        loop.call_soon_threadsafe(over.set)
        thread.join()


class _Blocking:
    """A blocking context manager whose asynchronous counterpart runs on the loop."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._opened: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"

    def _repr_html_(self) -> str:
        show: Callable[[], str] = self._inner._repr_html_
        return show() if self._opened is None else _on_loop(show)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with opened:
                wait(self._inner.__aexit__(kind, error, traceback))

    def start(self) -> None:
        """Start without a ``with`` block; ``close`` ends it."""
        if self._opened is not None:
            raise UsageError(f"{self._inner!r} was already started")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_loop_thread().used())
            wait(self._inner.start())
            self._opened = stack.pop_all()

    def close(self) -> None:
        """End, as leaving the ``with`` block does. Calling it again has no effect."""
        self.__exit__(None, None, None)


def _waiting(
    method: Callable[Concatenate[A, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a coroutine method of a class of ``psync`` as one that blocks."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return wait(method(_inner_of(self), *args, **kwargs))

    return _described(method, call)


def _on_the_loop(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a plain method of a class of ``psync`` as one that other threads may call."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _on_loop(functools.partial(method, _inner_of(self), *args, **kwargs))

    return _described(method, call)


def _inner_of(blocking: Any) -> Any:
    """Return the asynchronous object: the one inside, or the same one if it is of a subclass."""
    return blocking._inner if isinstance(blocking, _Blocking) else blocking


def _described(method: Callable[..., Any], call: Callable[P, T]) -> Callable[P, T]:
    """Give a method the name and the signature of the one that it calls."""
    functools.update_wrapper(call, method)
    call.__doc__ = f"Call ``psync.{method.__qualname__}``, and return when it is done."
    return call


class LocalCluster(_Blocking):
    """A ``psync.LocalCluster`` in plain calls, with the same arguments and errors.

    Example:
        with blocking.LocalCluster(2, 2) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
    """

    __psync_capture_error__ = AsyncLocalCluster.__psync_capture_error__

    def __init__(
        self, num_ps: int, num_workers: int, processes: bool = True, **options: Any
    ) -> None:
        super().__init__(AsyncLocalCluster(num_ps, num_workers, processes, **options))

    def start(self) -> None:
        """Start all tasks; ``close`` stops them."""
        super().start()
        assert self._opened is not None
        self._opened.enter_context(opened(self.resolver))  # in this thread's context, too

    @property
    def resolver(self) -> LaunchedClusterResolver:
        """The chief's resolver; see ``psync.LocalCluster``."""
        resolver: LaunchedClusterResolver = self._inner.resolver
        return resolver

    scale = _waiting(AsyncLocalCluster.scale)
    adapt = _on_the_loop(AsyncLocalCluster.adapt)


class RemoteValue(AsyncRemoteValue[T_co]):
    """A ``psync.RemoteValue`` in plain calls."""

    __slots__ = ()

    def fetch(self) -> T_co:  # type: ignore[override]
        """Wait for the closure to end and return its value; see ``psync.RemoteValue.fetch``."""
        return self.get_nowait() if self.done() else wait(super().fetch())

    get = fetch  # type: ignore[assignment]

    cancel = _on_the_loop(AsyncRemoteValue.cancel)


class PerWorkerIterator(AsyncPerWorkerIterator[T]):
    """A ``psync.PerWorkerIterator`` with plain calls."""

    positions = _waiting(AsyncPerWorkerIterator.positions)  # type: ignore[arg-type]
    next_in = _waiting(AsyncPerWorkerIterator.next_in)


class PerWorkerDataset(AsyncPerWorkerDataset[T]):
    """A ``psync.PerWorkerDataset`` that returns iterators of this module."""

    _iterator_class = PerWorkerIterator


class Visits(AsyncVisits):
    """Visits of data shards in plain calls; see ``psync.ClusterCoordinator.distribute_once``."""

    schedule = _on_the_loop(AsyncVisits.schedule)
    run = _waiting(AsyncVisits.run)  # type: ignore[arg-type]
    _look = _on_the_loop(AsyncVisits._look)


class Traced:
    """A trace of a part of the run; see ``psync.ClusterCoordinator.trace``."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def summary(self) -> Summary | None:
        """Seconds, events, tasks and dropped events of the file. None until the trace ends."""
        return self._trace.summary


def _blocking(value: AsyncRemoteValue[T]) -> RemoteValue[T]:
    """Return a handle that blocks, in place of one that was made in this turn of the loop."""
    made: RemoteValue[T] = RemoteValue(value._closure, value._cancel)
    if value._error is not None:  # it ended at once
        made._set_error(value._error)
    else:
        value._closure.payload.value = weakref.ref(made)
    return made


class ClusterCoordinator(_Blocking):
    """A ``psync.ClusterCoordinator`` in plain calls, with the same arguments and errors.

    Attributes:
        coordinator: The ``psync.ClusterCoordinator``; for methods that are missing here, with
            ``psync.wait``.
        strategy: The strategy of its cluster.

    Example:
        with blocking.ClusterCoordinator(strategy) as coordinator:
            losses = [coordinator.schedule(step, (batches,)) for _ in range(100)]
            coordinator.join()
            print(np.mean(coordinator.fetch(losses)))
    """

    __psync_capture_error__ = AsyncCoordinator.__psync_capture_error__
    __psync_capture_hint__ = AsyncCoordinator.__psync_capture_hint__

    def __init__(self, strategy: ParameterServerStrategy, **options: Any) -> None:
        self.strategy = strategy
        self.coordinator = AsyncCoordinator(strategy, **options)
        super().__init__(self.coordinator)

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue[Any]:
        """Queue ``fn(*args, **kwargs)``; see ``psync.ClusterCoordinator.schedule``."""
        schedule = self.coordinator.schedule
        return _on_loop(lambda: _blocking(schedule(fn, args, kwargs)))

    @overload
    def submit(
        self, step: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteValue[T]: ...
    @overload
    def submit(
        self, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteValue[T]: ...
    def submit(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteValue[Any]:
        """Queue ``step(*args, **kwargs)``; see ``psync.ClusterCoordinator.submit``."""
        return self.schedule(step, args, kwargs)

    def schedule_all(self, fn: Callable[..., Any], calls: Sequence[Any]) -> list[RemoteValue[Any]]:
        """Queue ``fn(*args)`` for each ``args`` of ``calls``, much faster than one by one."""
        schedule = self.coordinator.schedule
        return _on_loop(lambda: [_blocking(schedule(fn, args)) for args in calls])

    join = _waiting(AsyncCoordinator.join)
    done = _on_the_loop(AsyncCoordinator.done)
    fetch = _waiting(AsyncCoordinator.fetch)
    status = _waiting(AsyncCoordinator.status)
    report = _on_the_loop(AsyncCoordinator.report)
    statistics = _on_the_loop(AsyncCoordinator.statistics)
    ps_statistics = _waiting(AsyncCoordinator.ps_statistics)

    def events(self) -> Iterator[Event]:
        """Yield events as they occur; see ``psync.ClusterCoordinator.events``.

        The iterator blocks, so run it in a separate thread.
        """
        stream = _on_loop(self.coordinator.events)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield wait(anext(stream))

    def reschedule(self, event: RollbackEvent) -> list[RemoteValue[Any]]:
        """Schedule undone closures again; see ``psync.ClusterCoordinator.reschedule``."""
        reschedule = self.coordinator.reschedule
        return _on_loop(lambda: [_blocking(value) for value in reschedule(event)])

    def create_per_worker_dataset(
        self, dataset_fn: Any, *, end: str = "all"
    ) -> PerWorkerDataset[Any]:
        """Return a dataset; see ``psync.ClusterCoordinator.create_per_worker_dataset``."""
        create = functools.partial(self.coordinator.create_per_worker_dataset, end=end)
        made = _on_loop(create, dataset_fn)
        return PerWorkerDataset(made._dataset, made._function, self.coordinator, end)

    def distribute_once(
        self,
        shards: Sequence[Any],
        num_epochs: int = 1,
        *,
        shuffle_seed: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Visits:
        """Return visits of data shards; see ``psync.ClusterCoordinator.distribute_once``."""
        coordinator = self.coordinator

        def schedule(*call: Any) -> AsyncRemoteValue[Any]:
            return _blocking(coordinator._schedule_shard(*call))

        _on_loop(coordinator._running, "distribute_once")
        return Visits(schedule, coordinator.join, shards, num_epochs, shuffle_seed, state)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Traced]:
        """Trace the block; see ``psync.ClusterCoordinator.trace``."""
        with _entered(self.coordinator.trace(path)) as traced:
            yield Traced(traced)

    @property
    def stop_reason(self) -> str | None:
        """Reason for which a step asked to stop; see ``psync.ClusterCoordinator.stop_reason``."""
        return _on_loop(lambda: self.coordinator.stop_reason)

    @property
    def dashboard_url(self) -> str:
        """URL of the dashboard; see ``psync.ClusterCoordinator.dashboard_url``."""
        return _on_loop(lambda: self.coordinator.dashboard_url)


@contextlib.contextmanager
def _entered(inner: contextlib.AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Return an asynchronous context manager as a blocking one."""
    entered = wait(inner.__aenter__())
    try:
        yield entered
    finally:
        wait(inner.__aexit__(None, None, None))


def report(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Write an HTML report of a run; see ``psync.report``.

    Enter it within the block of a ``LocalCluster`` or ``ClusterCoordinator``, whose loop it needs.
    """
    return _entered(run_log.report(path))


def _on_loop(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, called on the loop, while there is one."""

    async def call() -> T:
        return function(*args)

    newest = program_waits()[-1] if program_waits() else None
    if newest is None or (isinstance(newest, _Waits) and newest.is_here):
        return function(*args)
    return wait(call())


def run(
    main: Callable[[], T],
    resolver: ClusterResolver | None = None,
    *,
    evaluator: Callable[[], Coroutine[Any, Any, Any]] | None = None,
) -> T:
    """Run this process as its task of the cluster: ``psync.run`` for a plain ``main``.

    ``main`` runs in a thread. Ctrl-C and SIGTERM cancel the call that it waits for and raise
    KeyboardInterrupt there. If it is computing, the next call that waits raises.

    Args:
        main: Training program, a function without arguments.
        resolver: See ``psync.run``.
        evaluator: See ``psync.run``.

    Raises:
        UsageError: ``main`` is a coroutine function.
        SystemExit, Exception: See ``psync.run``.

    Example:
        if __name__ == "__main__":
            blocking.run(main)
    """
    fits = callable(main) and not inspect.iscoroutinefunction(main)
    hint = "psync.run(main) runs a coroutine function"
    check_fits(fits, "blocking.run: expected a plain function", main, hint, error=UsageError)

    async def program() -> T:
        waits = _Waits(asyncio.get_running_loop())
        program_waits().append(waits)
        running = asyncio.ensure_future(asyncio.to_thread(main))
        try:
            return await shielded(running)
        except asyncio.CancelledError:
            waits.interrupt()
            await asyncio.wait((running,))
            if not running.cancelled() and isinstance(running.exception(), Exception):
                running.result()  # what it says about its end
            raise
        finally:
            program_waits().remove(waits)

    return tasks.run(program, resolver, evaluator=evaluator)
