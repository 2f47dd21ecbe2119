"""Running a process as its task: ``run`` for scripts, ``run_task`` for ps and workers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from psync.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectFailed,
    PsyncError,
    RemoteProtocolError,
    TrainingEnded,
    UsageError,
)
from psync.launch.cluster import cluster_on_engine
from psync.launch.identity import OwnTask, open_to_joiners, own_task, shut_down
from psync.launch.joining import JOINING, join
from psync.launch.plugins import load_plugins
from psync.launch.process_loop import (
    asked_first,
    end_of_run,
    following_launcher,
    run_loop,
    watch_launcher,
)
from psync.launch.task_output import configure_logging, fill_standard_streams, write_whole_lines
from psync.net.chief_presence import (
    TrainingPresence,
    chief_timeouts,
    naming_who_is_awaited,
    until_told,
)
from psync.net.environment import (
    added_workers,
    note_incarnation,
    platform_of,
    run_over,
    script_is_shared,
    tell_launcher,
    training_began,
    training_over,
    training_presence,
)
from psync.net.platform import Platform
from psync.net.resolvers import ClusterResolver, opened
from psync.net.task_reports import described_by
from psync.net.transport import SocketNetwork
from psync.net.workforce import workforce_of_launcher

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from psync.ps_task import PsTask
    from psync.worker_task import WorkerTask

T = TypeVar("T")

LEFT = 128 + signal.SIGTERM
"""Exit code of a worker that SIGTERM has ended, where 0 would say that it is not needed again."""

SETUP_ERRORS = (ConfigurationError, ConnectFailed, AuthenticationError, RemoteProtocolError)
"""What is wrong with the cluster rather than with the program, until training has begun."""


def run(
    main: Callable[[], Awaitable[T]],
    resolver: ClusterResolver | None = None,
    *,
    on_workers: bool = False,
    evaluator: Callable[[], Awaitable[Any]] | None = None,
) -> T:
    """Run this process as its task in the cluster.

    - On the chief: run ``main()`` to its end, then tell ps and worker tasks to exit (under ``psync
      run`` the launcher does that).
    - On a ps or worker: serve until told to stop, then exit with code 0; code after this call does
      not run there.
    - On an evaluator: run ``evaluator()`` to its end, then exit with code 0. It takes no part in
      training, and needs no secret.

    Exit codes other than 0, with the reason instead of a traceback on stderr for 1 and 2:

    - 2: the set-up is wrong. The cluster's description or an option is invalid, there is no secret
      or a different one, an address is taken, a plugin cannot be imported, or a task is missing or
      is another one. This applies until a coordinator or session has started; the other tasks then
      keep waiting for a chief.
    - 1: no chief comes, on a task that serves; no task trains, on an evaluator (both:
      ``PSYNC_CHIEF_TIMEOUT``); or training has ended early, for example because the chief was lost,
      where ``main`` runs on workers.
    - 130 after Ctrl-C and 143 after SIGTERM, which cancel ``main``.

    Args:
        main: Coroutine function without arguments: the training program.
        resolver: Resolver that describes the cluster and this process's task. Default: the result
            of ``psync.resolve_cluster()``, as under ``psync run``, SLURM and Kubernetes.
        on_workers: Whether workers run ``main()`` as well instead of serving a coordinator: for
            programs that train in a ``MonitoredTrainingSession``. A worker then exits
            automatically. In a cluster without a chief, worker 0 tells the ps tasks to exit.
        evaluator: Coroutine function without arguments, which runs if the task type is
            ``evaluator``: usually a ``SidecarEvaluator``. SIGTERM ends it with code 0.

    Returns:
        The result of ``main``.

    Raises:
        SystemExit: The process exits with one of the codes above.
        Exception: Other errors of ``main``, and all its errors once a coordinator or session has
            started. The other tasks are told to exit.

    Example:
        if __name__ == "__main__":
            psync.run(main)
    """
    for function in (main, *([] if evaluator is None else [evaluator])):
        if not inspect.iscoroutinefunction(function):
            raise UsageError(
                f"run: expected a coroutine function, got {type(function).__name__}",
                hint="psync.run(main) with `async def main():`",
            )
    began, job = asyncio.Event(), "worker"
    try:
        if chief := os.environ.pop("PSYNC_JOIN", ""):
            _prepare_process("joined")
            sys.exit(join_forever(chief, os.environ.pop("PSYNC_JOIN_LISTEN", ""), shared=True))
        if resolver is None and (settings := os.environ.pop("PSYNC_ON", None)):
            job = "chief"
            configure_logging(os.environ.get("PSYNC_LOG_LEVEL", "info"))
            if on_workers:
                raise ConfigurationError(
                    "psync.run(main, on_workers=True): on Ray and Dask only the chief runs main",
                    hint="psync run without --on, or psync task by hand, for programs of sessions",
                )
            return run_loop(lambda: _run_on_engine(main, settings, began))
        own = own_task(resolver)
        job = own.job
        launched = _prepare_process(f"{job}-{own.index}")
        # Who has written TF_CONFIG or a resolver knows.
        level = logging.INFO if own.is_found else logging.DEBUG
        logger.log(level, "this process is %s, as %s says", own.name, own.resolver.source)
        load_plugins(own.name)
        if job == "chief" or (on_workers and job == "worker"):
            jobs = ("ps",) if on_workers else ("worker", "ps")
            over = asyncio.Event()
            return run_loop(
                lambda: _run_main(
                    main, own, () if launched else jobs, began, over, joinable=not on_workers
                ),
                last_words=over if job == "worker" else None,
            )
        serving = (
            _evaluate(evaluator, own, began)
            if job == "evaluator"
            else partial(serve_as, own, insecure=False, shared=True)
        )
        sys.exit(run_loop(serving, terminated_code=_terminated_code(own)))
    except SETUP_ERRORS as exc:
        if began.is_set():
            raise
        _exit(exc, 2)
    except TrainingEnded as exc:
        if job == "chief" and not on_workers:
            raise
        _exit(exc, 1)  # something went wrong elsewhere, and is said there


async def _run_main(
    main: Callable[[], Awaitable[T]],
    own: OwnTask,
    stopping: Sequence[str],
    began: asyncio.Event,
    over: asyncio.Event,
    *,
    joinable: bool,
) -> T:
    """Run the program; then tell the tasks of some jobs to exit, if it is for this one to say."""
    script_is_shared.set(True)
    training_began.set(began)
    training_over.set(over)
    added: dict[str, str] = {}
    added_workers.set(added)
    note_incarnation(0)
    tasks_end, since = own.leads, time.time_ns()
    try:
        async with contextlib.AsyncExitStack() as stack:
            workforce = workforce_of_launcher()
            if joinable:
                await stack.enter_async_context(open_to_joiners(own, workforce, added))
            stack.enter_context(following_launcher(workforce))
            stack.enter_context(opened(own.resolver))
            return await main()
    except SETUP_ERRORS:
        # Whoever corrects what is wrong here, or starts who is missing, finds the others still
        # there. They may also serve a chief that has a better right to them.
        tasks_end = tasks_end and began.is_set()
        raise
    except BaseException:
        # Where it is started again it goes on with them, or waits for them.
        tasks_end = tasks_end and not own.is_supervised
        raise
    finally:
        if tasks_end:
            await shut_down(own, stopping, since)


async def _run_on_engine(
    main: Callable[[], Awaitable[T]], settings: str, began: asyncio.Event
) -> T:
    async with cluster_on_engine(settings) as cluster:
        own = OwnTask(cluster.resolver, cluster.resolver.cluster_spec(), "chief", 0)
        return await _run_main(main, own, (), began, asyncio.Event(), joinable=False)


def _evaluate(
    evaluator: Callable[[], Awaitable[Any]] | None, own: OwnTask, began: asyncio.Event
) -> Callable[[], Awaitable[int]]:
    """Return what runs on an evaluator."""
    if evaluator is None:
        raise ConfigurationError(
            "this process is the evaluator, and the program has none",
            hint="psync.run(main, evaluator=evaluate) with `async def evaluate():`",
        )
    fd = os.environ.pop("PSYNC_RUN_FD", None)
    patience = chief_timeouts(os.environ)
    tasks = own.addresses_of(("ps", "worker"))

    async def evaluate() -> int:
        training_began.set(began)
        with contextlib.ExitStack() as resources:
            resources.enter_context(opened(own.resolver))
            if fd is None:
                training_presence.set(TrainingPresence(SocketNetwork(), tasks, patience))
            else:
                run_over.set(resources.enter_context(end_of_run(int(fd))))
            await evaluator()
        return 0

    return evaluate


async def run_task(resolver: ClusterResolver | None = None, *, insecure: bool = False) -> None:
    """Serve as this process's ps or worker task in the cluster, until told to stop.

    Args:
        resolver: Resolver that describes the cluster; default: the result of
            ``psync.resolve_cluster()``.
        insecure: Whether to serve without a secret, to everybody who can reach the address.

    Raises:
        ConfigurationError: This process is neither ps nor worker; there is no secret; the address
            is taken; or a plugin (``PSYNC_PLUGINS``, entry points ``psync.plugins``) cannot be
            imported.
        TrainingEnded: No chief has come for too long (``PSYNC_CHIEF_TIMEOUT``).

    Cancellation: Updates that have begun are finished, then everything is closed.
    """
    own = own_task(resolver)
    load_plugins(own.name)
    await serve_as(own, insecure=insecure, shared=False)


def serve_forever(*, insecure: bool = False, chief_timeout: str | None = None) -> int:
    """Do ``run_task`` in this process until a message or SIGTERM says stop; for ``psync task``.

    Returns:
        The exit code.

    Args:
        insecure: As ``run_task``.
        chief_timeout: In place of ``PSYNC_CHIEF_TIMEOUT``.

    Raises:
        ConfigurationError, TrainingEnded: As ``run_task``.
    """
    own = own_task(None)
    watch_launcher()
    load_plugins(own.name)
    return run_loop(
        lambda: serve_as(own, insecure=insecure, shared=False, chief_timeout=chief_timeout),
        terminated_code=_terminated_code(own),
    )


def join_forever(
    chief: str, listen: str = "", *, shared: bool = False, chief_timeout: str | None = None
) -> int:
    """Join a running cluster as a worker, until a message or SIGTERM says stop.

    Args:
        chief: Where its chief listens.
        listen: Where this worker is to listen, host or host:port; by default at a free port of
            the interface by which it reaches the chief.
        shared: Whether this process runs the program's script.
        chief_timeout: In place of ``PSYNC_CHIEF_TIMEOUT``.

    Returns:
        The exit code.

    Raises:
        ConfigurationError, ConnectFailed, AuthenticationError, RemoteProtocolError, TrainingEnded:
            As ``joining.join``.
    """
    load_plugins(JOINING)

    def serving(own: OwnTask, awaited: str) -> Coroutine[Any, Any, int]:
        return serve_as(
            own, insecure=False, shared=shared, chief_timeout=chief_timeout, awaited=awaited
        )

    return run_loop(lambda: join(serving, chief, listen), terminated_code=0)


async def serve_as(
    own: OwnTask,
    *,
    insecure: bool,
    shared: bool,
    chief_timeout: str | None = None,
    awaited: str = "",
) -> int:
    """Do ``run_task`` as a task that is known already; return the exit code.

    Args:
        own: The task.
        insecure: As ``run_task``.
        shared: Whether this process runs the program's script.
        chief_timeout: In place of ``PSYNC_CHIEF_TIMEOUT``.
        awaited: What to say every ten seconds while there is no chief.

    Raises:
        ConfigurationError, TrainingEnded: As ``run_task``.

    Cancellation: As ``run_task``.
    """
    if own.job not in ("ps", "worker"):
        raise ConfigurationError(
            f"only ps and worker tasks serve, this process is {own.name}",
            hint="the chief and an evaluator run programs: psync.run(main, evaluator=evaluate)",
        )
    timeouts = chief_timeouts(os.environ, chief_timeout)
    platform = platform_of(own.resolver, own.address, insecure=insecure, listens=True)
    task = make_task(platform, own.job, own.index, own.address, main_by_name=shared)
    await task.start()
    # Who started this task by hand waits for this line; a launcher knows.
    level = logging.DEBUG if os.environ.get("PSYNC_LAUNCHED") else logging.INFO
    logger.log(level, "%s serves at %s", task.task, own.address)
    lacks_chief = not awaited and "chief" not in own.cluster.jobs
    if lacks_chief and (shared or own.job == "worker"):
        ways = [f"a task of type chief, where psync.run(main) runs main, is to be described in "
                f"{own.resolver.source}"] if shared else []  # fmt: skip
        if own.job == "worker":
            way = f"a chief takes it in with add_worker({own.address!r}, index={own.index})"
            ways.append(way)
        awaited = (
            f"{task.task} waits for a chief, and its cluster's description names none: "
            + ", or ".join(ways)
        )
    naming = naming_who_is_awaited(
        lambda: "" if task.chief.is_here else awaited, warn=shared and lacks_chief
    )
    try:
        async with _metrics(task):
            with described_by(task.describe), _leaving_first(task) as leaving, naming:
                await until_told(task.task, task.stopped, task.chief, timeouts)
    finally:
        await task.close()
    if getattr(task, "is_torn", False):  # a ps
        raise PsyncError(f"{task.task} ended: an update failed half-way, see the log")
    return _terminated_code(own) if leaving else 0


def _terminated_code(own: OwnTask) -> int:
    """Return with which code a task ends that serves, or evaluates, and gets SIGTERM."""
    return LEFT if own.job == "worker" and own.is_supervised else 0


def _metrics(task: PsTask | WorkerTask) -> contextlib.AbstractAsyncContextManager[None]:
    """Return a context in which a task's metrics are served, if somebody has asked for them."""
    if not os.environ.get("PSYNC_TASK_METRICS"):
        return contextlib.nullcontext()
    from psync.status.task_metrics import serving_metrics

    return serving_metrics(task)


@contextlib.contextmanager
def _leaving_first(task: PsTask | WorkerTask) -> Iterator[list[asyncio.Task[None]]]:
    """Let a worker leave in order when it gets its first SIGTERM, as before a machine is taken.

    Yields:
        A list, which is empty unless it leaves.
    """
    leave = getattr(task, "leave", None)
    leaving: list[asyncio.Task[None]] = []
    if leave is None:  # a ps
        yield leaving
        return

    def begin() -> None:
        work = leave("SIGTERM", hint="; another SIGTERM ends it at once")
        leaving.append(asyncio.get_running_loop().create_task(work))

    with asked_first(begin):
        yield leaving


def make_task(
    platform: Platform, job: str, index: int, address: str, *, main_by_name: bool = False
) -> PsTask | WorkerTask:
    """Return a ps or worker task, not started."""
    # Imported here: the chief needs neither, and each of them only one.
    if job == "ps":
        from psync.ps_task import PsTask

        return platform.parts.of(PsTask)(platform, index, address)
    from psync.worker_task import WorkerTask

    return WorkerTask(platform, index, address, main_by_name=main_by_name)


# The process.


def _exit(error: PsyncError, code: int) -> NoReturn:
    """Say what is wrong, and where the program met it, and exit."""
    lines = [f"psync: error: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    frames = traceback.extract_tb(error.__traceback__)
    psync = os.path.dirname(os.path.dirname(__file__))
    ours = (psync, os.path.dirname(asyncio.__file__))
    places = [
        frame
        for frame in frames
        if os.path.isabs(frame.filename) and not frame.filename.startswith(ours)
    ]
    if places and places[-1].name != "<module>":  # that one only calls run()
        lines.append(f"at {places[-1].filename}:{places[-1].lineno}, in {places[-1].name}")
    print(*lines, sep="\n", file=sys.stderr)
    sys.exit(code)


def _prepare_process(task: str) -> bool:
    """Set up logging and the lifeline; return whether a launcher started this process."""
    fill_standard_streams()
    tell_launcher()
    launched = bool(os.environ.get("PSYNC_LAUNCHED"))
    if launched:
        write_whole_lines()
    level = os.environ.get("PSYNC_LOG_LEVEL", "info")
    configure_logging(level, None if launched else task)
    watch_launcher()
    return launched
