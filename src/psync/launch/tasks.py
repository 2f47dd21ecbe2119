"""What a process does as its task: ``run`` for scripts, ``run_task`` for ps and workers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from psync.client.link import expect
from psync.cluster import CHIEF, ClusterSpec, join_address, split_address, task_name
from psync.errors import (
    AttachError,
    AuthenticationError,
    ConfigurationError,
    ConnectFailed,
    PsyncError,
    RemoteProtocolError,
    TrainingEnded,
    TransportError,
    UsageError,
    os_errors,
)
from psync.launch import process
from psync.launch.plugins import load_plugins, users_frame
from psync.net import chief_presence, environment
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform, Workforce, chief_timeouts, flag, workforce_of_launcher
from psync.net.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    interface_towards,
    opened,
    resolve_cluster,
    training_cluster,
)
from psync.net.secret import load_secret
from psync.net.shared.door_names import BACKLOG
from psync.net.shielding import first_of
from psync.net.task_reports import add_description
from psync.net.transport import SocketNetwork
from psync.wire.messages import Done, JoinCluster, LeaveCluster, Number, Shutdown

if TYPE_CHECKING:
    from psync.ps_task import PsTask
    from psync.worker_task import WorkerTask

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEFT = 128 + signal.SIGTERM
"""Exit code of a worker that SIGTERM has ended, where 0 would say that it is not needed again."""

SETUP_ERRORS = (
    ConfigurationError, ConnectFailed, AuthenticationError, RemoteProtocolError, AttachError,
)  # fmt: skip
"""What is wrong with the cluster rather than with the program, until training has begun."""

SHUTDOWN_TIMEOUT_S = 2.0
"""How long the chief waits, at its end, for each task to hear that it should exit."""


@dataclass(frozen=True, slots=True)
class OwnTask:
    """Who this process is."""

    resolver: ClusterResolver
    cluster: ClusterSpec
    job: str
    index: int
    # A scheduler starts tasks again that end with another code than 0 (Kubernetes' Jobs). So a
    # worker that leaves because of SIGTERM does not end with 0, which would say that all is done,
    # and only a chief that does tells the others to exit.
    is_supervised: bool = False

    @property
    def name(self) -> str:
        """As in ``/job:worker/task:0``."""
        return task_name(self.job, self.index)

    @property
    def leads(self) -> bool:
        """Whether the others exit when it does: the chief, or worker 0 where there is none."""
        first = (self.job, self.index) == ("worker", 0) and "chief" not in self.cluster.jobs
        return self.job == "chief" or first

    @property
    def address(self) -> str:
        """Where it is known."""
        return self.cluster.task_address(self.job, self.index)

    @property
    def terminated_code(self) -> int:
        """Exit code after SIGTERM, of a task that serves or evaluates."""
        return LEFT if self.job == "worker" and self.is_supervised else 0

    def addresses_of(self, jobs: Sequence[str]) -> dict[str, str]:
        """Return where the tasks of these jobs are, by name, so far as the cluster has them."""
        return {
            task_name(job, index): self.cluster.task_address(job, index)
            for job in jobs
            if job in self.cluster.jobs
            for index in self.cluster.task_indices(job)
        }


def own_task(resolver: ClusterResolver | None) -> OwnTask:
    """Return which task a resolver says this process is; without one, its surroundings say it.

    Raises:
        ConfigurationError: There is no cluster, or its description is wrong or does not say which
            task it is; or ``PSYNC_SUPERVISED`` is malformed.
    """
    known = resolver or resolve_cluster()
    cluster, job, index = training_cluster(known)
    if job == "evaluator" and index is None:
        index = 0
    if job is None or index is None:
        raise ConfigurationError(
            "the cluster's description does not say which task this process is",
            hint='TF_CONFIG needs a task, such as "task": {"type": "worker", "index": 0}',
        )
    return OwnTask(known, cluster, job, index, bool(flag(os.environ, "PSYNC_SUPERVISED")))


# Scripts.


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
      or a different one, an address is taken, a plugin cannot be imported, a task is missing or is
      another one, or ps tasks do not hold what a program that attaches declares. This applies until
      a coordinator or session has started; the other tasks then keep waiting for a chief.
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
            started. The other tasks are told to exit, except after an ``AttachError``.

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
            load_plugins(JOINING)
            joining = partial(join, chief, os.environ.pop("PSYNC_JOIN_LISTEN", ""), shared=True)
            sys.exit(process.run_loop(joining, terminated_code=0))
        if resolver is None and (settings := os.environ.pop("PSYNC_ON", None)):
            job = "chief"
            process.configure_logging(os.environ.get("PSYNC_LOG_LEVEL", "info"))
            if on_workers:
                raise ConfigurationError(
                    "psync.run(main, on_workers=True): on Ray and Dask only the chief runs main",
                    hint="psync run without --on, or psync task by hand, for programs of sessions",
                )
            return process.run_loop(lambda: _run_on_engine(main, settings, began))
        own = own_task(resolver)
        job = own.job
        launched = _prepare_process(f"{job}-{own.index}")
        # Who has written TF_CONFIG or a resolver knows.
        is_known = resolver is not None or isinstance(own.resolver, TFConfigClusterResolver)
        level = logging.DEBUG if is_known else logging.INFO
        logger.log(level, "this process is %s, as %s says", own.name, own.resolver.source)
        load_plugins(own.name)
        if job == "chief" or (on_workers and job == "worker"):
            jobs = ("ps",) if on_workers else ("worker", "ps")
            over = asyncio.Event()
            return process.run_loop(
                lambda: _run_main(
                    main, own, () if launched else jobs, began, over, joinable=not on_workers
                ),
                last_words=over if job == "worker" else None,
            )
        serving: Callable[[], Awaitable[int]] = partial(serve_as, own, insecure=False, shared=True)
        if job == "evaluator":
            serving = partial(_evaluate, evaluator, own, began)
        sys.exit(process.run_loop(serving, terminated_code=own.terminated_code))
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
    environment.script_is_shared.set(True)
    environment.training_began.set(began)
    environment.training_over.set(over)
    added: dict[str, str] = {}
    environment.added_workers.set(added)
    environment.note_incarnation(0)
    tasks_end, since = own.leads, time.time_ns()
    try:
        async with contextlib.AsyncExitStack() as stack:
            if joinable:
                await _open_to_joiners(stack, own, added)
            stack.enter_context(process.following_launcher(workforce_of_launcher()))
            stack.enter_context(opened(own.resolver))
            return await main()
    except SETUP_ERRORS as exc:
        # Whoever corrects what is wrong here, or starts who is missing, finds the others still
        # there. They may also serve a chief that has a better right to them. A variable that is
        # declared after the start may also differ from the one of which ps tasks hold the values.
        tasks_end = tasks_end and began.is_set() and not isinstance(exc, AttachError)
        raise
    except BaseException as exc:
        # Where it is started again it goes on with them, or waits for them.
        did_not_fit = isinstance(exc, BaseExceptionGroup) and exc.subgroup(AttachError) is not None
        tasks_end = tasks_end and not own.is_supervised and not did_not_fit
        raise
    finally:
        if tasks_end:
            await shut_down(own, stopping, since)


async def _run_on_engine(
    main: Callable[[], Awaitable[T]], settings: str, began: asyncio.Event
) -> T:
    # By its name: psync's own launchers do not load it.
    engines = importlib.import_module("psync.integrations.engines")
    async with engines.cluster_on_engine(settings) as cluster:
        own = OwnTask(cluster.resolver, cluster.resolver.cluster_spec(), "chief", 0)
        return await _run_main(main, own, (), began, asyncio.Event(), joinable=False)


async def _evaluate(
    evaluator: Callable[[], Awaitable[Any]] | None, own: OwnTask, began: asyncio.Event
) -> int:
    if evaluator is None:
        raise ConfigurationError(
            "this process is the evaluator, but the program has no evaluate function",
            hint="psync.run(main, evaluator=evaluate) with `async def evaluate():`",
        )
    fd = os.environ.pop("PSYNC_RUN_FD", None)
    environment.training_began.set(began)
    with contextlib.ExitStack() as resources:
        resources.enter_context(opened(own.resolver))
        if fd is None:
            tasks = own.addresses_of(("ps", "worker"))
            patience = chief_timeouts(os.environ)
            presence = chief_presence.TrainingPresence(SocketNetwork(), tasks, patience)
            environment.training_presence.set(presence)
        else:
            environment.run_over.set(resources.enter_context(process.end_of_run(int(fd))))
        await evaluator()
    return 0


def _exit(error: PsyncError, code: int) -> NoReturn:
    """Say what is wrong, and where the program met it, and exit."""
    text, frame = f"psync: error: {error}", users_frame(error)
    if frame is not None and frame.name != "<module>":  # that one only calls run()
        text += f"\nat {frame.filename}:{frame.lineno}, in {frame.name}"
    print(text, file=sys.stderr)
    sys.exit(code)


def _prepare_process(task: str) -> bool:
    """Set up logging and the lifeline; return whether a launcher started this process."""
    process.fill_standard_streams()
    environment.tell_launcher()
    launched = bool(os.environ.get("PSYNC_LAUNCHED"))
    if launched:
        process.write_whole_lines()
    level = os.environ.get("PSYNC_LOG_LEVEL", "info")
    process.configure_logging(level, None if launched else task)
    process.watch_launcher()
    return launched


# The end of a program.


async def shut_down(own: OwnTask, jobs: Sequence[str], began: int) -> None:
    """Tell every task of these jobs that training is over; those that do not hear it stay.

    It is said in the name of the program's last coordinator; if there was none, of the moment (in
    nanoseconds) at which the program ``began``: tasks that serve a newer chief are not ours to end.
    """
    try:
        # If there is no secret, main() has allowed that or has failed: it was said before.
        platform = environment.platform_of(
            own.resolver, own.address, insecure=True, warn=logger.debug
        )
    except ConfigurationError as exc:
        logger.debug("nobody was told to exit: %s", exc)
        return
    tasks = own.addresses_of(jobs) | (environment.added_workers.get() or {})
    await tell_to_end(platform, began, tasks)


async def tell_to_end(platform: Platform, began: int, tasks: Mapping[str, str]) -> None:
    """Tell tasks, given by name and address, that training is over; ``began`` as above."""
    endpoint = Endpoint(platform, CHIEF, environment.newest_incarnation() or began, {})

    async def tell(name: str, address: str) -> None:
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    peer = await endpoint.connect(address, name)
                    await peer.call(Shutdown("the chief has ended"))
            except PsyncError as exc:
                logger.info("%s was not told to exit: %s", name, exc)

    try:
        await asyncio.gather(*(tell(name, address) for name, address in tasks.items()))
    finally:
        await endpoint.close()


# Serving.


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
        chief_timeout: Replaces ``PSYNC_CHIEF_TIMEOUT``.
        awaited: Logged every ten seconds while there is no chief.
    """
    if own.job not in ("ps", "worker"):
        raise ConfigurationError(
            f"only ps and worker tasks serve, but this process is {own.name}",
            hint="the chief and an evaluator run programs: psync.run(main, evaluator=evaluate)",
        )
    timeouts = chief_timeouts(os.environ, chief_timeout)
    platform = environment.platform_of(own.resolver, own.address, insecure=insecure, listens=True)
    task = make_task(platform, own.job, own.index, own.address, main_by_name=shared)
    await task.start()
    # Who started this task by hand waits for this line; a launcher knows.
    level = logging.DEBUG if os.environ.get("PSYNC_LAUNCHED") else logging.INFO
    logger.log(level, "%s serves at %s", task.task, own.address)
    lacks_chief = not awaited and "chief" not in own.cluster.jobs
    ways = []
    if lacks_chief and shared:
        way = "a task of type chief, where psync.run(main) runs main, is to be described in "
        ways.append(way + own.resolver.source)
    if lacks_chief and own.job == "worker":
        ways.append(f"a chief takes it in with add_worker({own.address!r}, index={own.index})")
    if ways:
        what = "waits for a chief, and its cluster's description names none"
        awaited = f"{task.task} {what}: {', or '.join(ways)}"
    naming = chief_presence.naming_who_is_awaited(
        lambda: "" if task.chief.is_here else awaited, warn=shared and lacks_chief
    )
    leave: Any = getattr(task, "leave", None)  # a ps has none
    leaving: list[asyncio.Task[None]] = []

    def leave_first() -> None:  # in order, as before a machine is taken
        work = leave("SIGTERM", hint="; a second SIGTERM ends it immediately")
        leaving.append(asyncio.get_running_loop().create_task(work))

    try:
        async with contextlib.AsyncExitStack() as stack:
            if os.environ.get("PSYNC_TASK_METRICS"):
                from psync.status.http import address_in, serving_task_metrics

                address = address_in(os.environ, "PSYNC_TASK_METRICS")
                metrics = serving_task_metrics(address, task.task, task.statistics)
                await stack.enter_async_context(metrics)
            stack.callback(add_description(task.describe))
            if leave is not None:
                stack.enter_context(process.asked_first(leave_first))
            stack.enter_context(naming)
            await chief_presence.until_told(task.task, task.stopped, task.chief, timeouts)
    finally:
        await task.close()
    if getattr(task, "is_torn", False):  # a ps
        raise PsyncError(f"{task.task} ended: an update failed partway; see the log")
    return own.terminated_code if leaving else 0


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


# Joining.


async def join(
    chief: str, listen: str = "", *, shared: bool = False, chief_timeout: str | None = None
) -> int:
    """Join a running cluster as a worker, serve until told to stop, return the exit code.

    Args:
        chief: Where its chief listens.
        listen: Where this worker is to listen, host or host:port; by default at a free port of
            the interface by which it reaches the chief.
        shared: Whether this process runs the program's script.
        chief_timeout: Replaces ``PSYNC_CHIEF_TIMEOUT``.

    Raises:
        ConfigurationError: An address is malformed or taken, or there is no secret.
        PsyncError: As for ``Membership.begin`` and ``run_task``.

    Cancellation: It leaves, without ending what it runs.
    """
    listener, address = listen_towards(chief, listen)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        platform = environment.platform_of(SimpleClusterResolver(ClusterSpec({})), address)
        membership = Membership(platform, chief, address)
        stack.push_async_callback(membership.end)
        await membership.begin()
        os.environ["PSYNC_LISTEN_FD"] = str(listener.detach())  # where ``platform_of`` finds it
        index = membership.index
        cluster = ClusterSpec({"chief": [chief], "worker": {index: address}})
        resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=index)
        own = OwnTask(resolver, cluster, "worker", index)
        logger.info("%s joins the cluster of %s, and listens at %s", own.name, chief, address)
        awaited = f"{own.name} waits for the coordinator of {chief} to connect to {address}"
        serving = serve_as(
            own, insecure=False, shared=shared, chief_timeout=chief_timeout, awaited=awaited
        )
        # The latter says why the chief does not want this worker any more.
        return await first_of(serving, membership.keep())


async def _open_to_joiners(
    stack: contextlib.AsyncExitStack, own: OwnTask, added: dict[str, str]
) -> None:
    """Let workers join the chief's program until the stack is closed.

    Without a secret none may, nor where the chief cannot listen at its address. Of a set-up that is
    wrong otherwise the program hears when it starts its coordinator, in one error that is no log
    line.
    """
    with contextlib.suppress(ConfigurationError):
        if own.job != "chief" or load_secret(os.environ) is None:
            return
        platform = environment.platform_of(own.resolver, own.address, listens=True)
        try:
            door = Door(platform, own.address, workforce_of_launcher(), added)
            await stack.enter_async_context(door)
        except ConfigurationError as exc:
            logger.info("workers cannot join this program: %s", exc.message)


JOINING = "/job:worker/joining"
"""What a worker calls itself to the door, before it has an index."""

SAY_GOODBYE_S = 2.0
"""A chief that has not heard by then that a worker has left, notices it."""

FIRST_JOINED = 10_000
"""Index of the first worker that joins: whoever started the others goes on numbering below it."""

FORGET_AFTER_S = 60.0
"""A worker that was lost silently has been killed, or is back by then."""


class Membership:
    """That of this process, which listens at ``address``, in the cluster of a ``chief``."""

    def __init__(self, platform: Platform, chief: str, address: str) -> None:
        self._endpoint = Endpoint(platform, JOINING, platform.new_incarnation(), {})
        self._chief = chief
        self._address = address
        self.index = -1
        self._peer: Connection  # the newest, once it has joined

    async def begin(self) -> None:
        """Join the cluster.

        Raises:
            ConnectFailed: The chief does not answer.
            AuthenticationError: The chief has another secret.
            RemoteProtocolError: Something else answers, or another version of psync.
            ConfigurationError: The chief refuses this worker.
        """
        try:
            peer = await self._endpoint.connect(self._chief, CHIEF)
        except ConnectFailed as exc:
            raise ConnectFailed(
                exc.message,
                hint="is the program running, and is this the address of its chief? Workers can "
                "join only while it runs, and only if it ends in psync.run(main)",
            ) from exc
        await self._ask(peer)

    async def _ask(self, peer: Connection) -> None:
        answer = await peer.call(JoinCluster(self._address, self.index, process.PYTHON))
        received = expect(answer, Number, CHIEF, "JoinCluster")
        if self.index not in (-1, received.value):
            raise ConfigurationError(
                f"worker {self.index} was away from {self._chief} for so long that another worker "
                "has its index",
                hint="restart it: it joins as a new worker",
            )
        self._peer, self.index = peer, received.value

    async def keep(self) -> NoReturn:
        """Come back to the door whenever the connection is lost, until cancelled.

        Raises:
            PsyncError: The chief does not want this worker any more.
        """
        while True:
            await self._peer.wait_closed()
            logger.debug("the connection to the door of %s is lost", self._chief)
            peer = await self._endpoint.connect_retrying(self._chief, CHIEF, level=logging.INFO)
            with contextlib.suppress(TransportError):
                await self._ask(peer)

    async def end(self) -> None:
        """Say that this worker has left, and close. Cancellation: the chief misses it."""
        try:
            if self.index >= 0 and self._peer.is_open:
                async with asyncio.timeout(SAY_GOODBYE_S):
                    await self._peer.call(LeaveCluster("it has left"))
        except (TimeoutError, PsyncError) as exc:
            logger.debug("the chief was not told that this worker has left: %s", exc)
        finally:
            await self._endpoint.close()


def listen_towards(chief: str, listen: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and its address as others have to know it."""
    chief_host, chief_port = split_address(chief)
    if not chief_port:
        raise ConfigurationError(f"expected host:port of the chief, got {chief!r}")
    if load_secret(os.environ) is None:  # whatever PSYNC_INSECURE says
        raise ConfigurationError(
            "no secret is set, and joining requires the cluster's secret",
            hint="set PSYNC_SECRET, or PSYNC_SECRET_FILE to the path of a file with it",
        )
    if listen:
        host, port = split_address(listen if ":" in listen else f"{listen}:0")
    else:
        port = 0
        with os_errors(f"{chief} is unreachable"):
            host, _ = interface_towards(chief_host, chief_port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with os_errors(f"this worker cannot listen on {listen or host}"):
        listener = socket.create_server((host, port or 0), family=family, backlog=BACKLOG)
    return listener, join_address(host, listener.getsockname()[1])


class Door:
    """Takes in workers that join. An async context manager; it listens while it is entered.

    Args:
        platform: Network, secret.
        address: Of the chief.
        workforce: Told of workers that come and leave.
        added: Gets the address of each worker that is present, by name: for the program's end.

    Raises:
        ConfigurationError: From entering it: the address is in use, or not this machine's.
    """

    def __init__(
        self, platform: Platform, address: str, workforce: Workforce, added: dict[str, str]
    ) -> None:
        self._address = address
        self._workforce = workforce
        self._added = added
        self._members: dict[int, tuple[str, Connection]] = {}  # address, newest connection
        self._next = FIRST_JOINED
        self._endpoint = Endpoint(
            platform, CHIEF, platform.new_incarnation(),
            {JoinCluster: Handler(self._join), LeaveCluster: Handler(self._leave)},
        )  # fmt: skip

    async def __aenter__(self) -> None:
        await self._endpoint.listen(self._address)

    async def __aexit__(self, *exc_info: object) -> None:
        self._members.clear()
        await self._endpoint.close()

    def _join(self, request: Request[JoinCluster]) -> None:
        peer, message = request.peer, request.message
        if message.python != process.PYTHON:
            raise ConfigurationError(
                f"the chief runs Python {process.PYTHON}, but the worker at {message.address} runs "
                f"{message.python} and could not read the program's functions",
                hint="start the worker with the same Python version as the chief",
            )
        split_address(message.address)  # is it one?
        index = message.index
        known_at, _ = self._members.get(index, (message.address, peer))
        if index < FIRST_JOINED or known_at != message.address:
            index = self._next
        self._next = max(self._next, index + 1)
        self._members[index] = message.address, peer
        peer.on_closed.append(lambda _: self._miss(index, peer))
        name = task_name("worker", index)
        logger.info("%s joins, from %s", name, message.address)
        self._added[name] = message.address
        self._workforce.change({index: message.address}, ())
        request.answer(Number(index))

    def _leave(self, request: Request[LeaveCluster]) -> None:
        for index in list(self._members):
            self._forget(index, request.peer, request.message.reason)
        request.answer(Done())

    def _miss(self, index: int, peer: Connection) -> None:
        why = f"it was lost {FORGET_AFTER_S:g} s ago"
        asyncio.get_running_loop().call_later(FORGET_AFTER_S, self._forget, index, peer, why)

    def _forget(self, index: int, peer: Connection, reason: str) -> None:
        """Forget a member, unless it has come back over another connection."""
        if self._members.get(index, ("", None))[1] is not peer:
            return
        del self._members[index]
        name = task_name("worker", index)
        logger.info("%s is no longer a worker of the cluster: %s", name, reason)
        self._added.pop(name, None)
        self._workforce.change({}, (index,))
