"""ClusterCoordinator: scheduling, joins, datasets and workers, for a training program."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from psync.api.data_shards import Visits
from psync.api.datasets import (
    DatasetFunction,
    DistributedDataset,
    PerWorkerDataset,
    capture_dataset,
)
from psync.api.optimizers import optimizers_here
from psync.api.scheduling import Scheduling
from psync.api.strategy import ParameterServerStrategy
from psync.chief.declarations import OwnOptimizers
from psync.chief.links import CoordinatorOptions, FollowedWorkers
from psync.chief.recovery_rule import MAX_STARTS
from psync.chief.watch import Event
from psync.client.context import forbid_in_step
from psync.closures.membership import LIMIT, Flapping
from psync.closures.queue import MAX_LOSSES
from psync.cluster import ClusterSpec, parse_task_name
from psync.coordinator import Coordinator
from psync.errors import (
    ClosedError,
    ConfigurationError,
    DeadlineExceeded,
    ParameterServerLost,
    SerializationError,
    UsageError,
    check_fits,
    other_loop,
)
from psync.net.environment import (
    added_workers,
    exit_if_misplaced,
    note_training_began,
    platform_of,
    script_is_shared,
)
from psync.net.platform import PerProcess, Platform
from psync.net.platform import watchdog_timeout as watchdog_timeout_here
from psync.net.shielding import of_no_cell
from psync.net.task_reports import add_description
from psync.net.trace import Trace, tracing
from psync.specs import checked_kind
from psync.status.html_tables import table
from psync.status.sampling import StatusSource
from psync.status.serving import ServedStatus

if TYPE_CHECKING:
    from psync.status.model import Status


logger = logging.getLogger(__name__)


MAX_REPORTED = 100
"""Names: a status has all of them each second, and so has a run log."""


T = TypeVar("T")

_of_origin: PerProcess[weakref.WeakValueDictionary[str, ClusterCoordinator]] = PerProcess(
    weakref.WeakValueDictionary
)
"""The coordinator of each strategy, by the strategy's token, as long as somebody holds it."""


class ClusterCoordinator(Scheduling):
    """Schedules step functions onto the workers of a strategy's cluster.

    An async context manager: entering it connects to the cluster; leaving it cancels unfinished
    closures and closes the connections. Each strategy has one coordinator.

    Args:
        strategy: A ParameterServerStrategy.
        min_workers: Workers that must be connected before work begins. Default: all workers of the
            cluster.
        connect_timeout: Seconds to wait for these workers and for all ps tasks. Later: seconds to
            wait for a lost worker when only its data is left.
        ps_timeout: Seconds after which an unreachable ps is lost.
        closure_timeout: Seconds a worker may spend on one closure. After that the worker is given
            up and the closure runs again elsewhere. Time spent waiting for other workers does not
            count: at a synchronous step or staleness bound, in a collective, for a lock or an
            accumulator. None: no limit.
        max_losses: Number of times a closure may be lost with its worker. Then the closure is
            reported as the likely cause, so that it kills no further workers. The default is
            Dask's. If workers also die without it, the limit is higher, by twelve at most. A worker
            is not lost if it leaves in order, or if the coordinator ends its session.
        max_flaps: Number of losses within a minute that a worker may have. Above it the worker is
            not reconnected for 30 s, then for twice as long each time, up to 5 minutes, as long as
            another worker takes part. None: always reconnect.
        watchdog_timeout: Seconds without a finished closure, while there is work, after which the
            log reports what runs where, which tasks are being waited for, and the stacks of this
            process. The report repeats after each further such period. None:
            ``PSYNC_WATCHDOG_TIMEOUT``; 0: never.
        on_stall: Called on the loop with the text of each such report.
        insecure: Whether to allow running without a secret.
        attach: Whether to continue with the values that an earlier program left on the ps tasks.
            The program must declare the same variables and make the same optimizers before it
            schedules anything; values of undeclared variables are dropped. Slots, steps and
            learning rates continue as well; closures are new. If no value was updated, or a
            restore was cut short, this is a normal start.
        metrics: Address for Prometheus, "host:port"; the log shows the URL. None:
            ``PSYNC_METRICS``.
        dashboard: Address of a web page that shows the run, "127.0.0.1:0". Its URL, including the
            token it needs, is printed and is ``dashboard_url``. None: ``PSYNC_DASHBOARD``.
        run_log: File to record the run in, for ``psync dashboard``. None: ``PSYNC_RUN_LOG``.

    Raises:
        ConfigurationError: An option is out of range, the strategy is not a
            ParameterServerStrategy, or this process is a ps or worker of its cluster.

    Source: ``tf.distribute.coordinator.ClusterCoordinator``; there, calls block.
    """

    __psync_capture_error__ = "the coordinator lives on the chief; steps cannot schedule"
    __psync_capture_hint__ = (
        "return a value from the step, and let the program schedule what comes next"
    )

    def __new__(cls, strategy: ParameterServerStrategy, **options: Any) -> Self:
        expected = "strategy: expected a ParameterServerStrategy"
        checked_kind(expected, strategy, ParameterServerStrategy)
        known = _of_origin().get(strategy._origin)
        if known is not None:
            return known  # type: ignore[return-value]  # a subclass would be made first
        made = super().__new__(cls)
        _of_origin()[strategy._origin] = made
        return made

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        *,
        min_workers: int | None = None,
        connect_timeout: float = 60.0,
        ps_timeout: float = 15.0,
        closure_timeout: float | None = None,
        max_losses: int = MAX_LOSSES,
        max_flaps: int | None = LIMIT,
        watchdog_timeout: float | None = None,
        on_stall: Callable[[str], object] | None = None,
        insecure: bool = False,
        attach: bool = False,
        metrics: str | None = None,
        dashboard: str | None = None,
        run_log: str | os.PathLike[str] | None = None,
    ) -> None:
        if hasattr(self, "strategy"):
            return  # made before for this strategy
        forbid_in_step("making a ClusterCoordinator")
        if strategy.task[0] == "evaluator":  # it would take training away from the chief
            raise ConfigurationError(
                "this process is the evaluator, which takes no part in training",
                hint="psync.SidecarEvaluator evaluates the checkpoints that the chief saves",
            )
        if strategy.task[0] in ("ps", "worker"):  # it would be a second chief
            exit_if_misplaced()
            raise ConfigurationError(
                f"this process is a {strategy.task[0]}, which serves the chief's coordinator and "
                "cannot open its own",
                hint="psync.run(main), instead of asyncio.run(main()), runs main on the chief and "
                "serves on all other tasks",
            )
        num_workers = strategy.cluster.num_tasks("worker")
        min_workers = num_workers if min_workers is None else min_workers
        if watchdog_timeout is None:
            watchdog_timeout = watchdog_timeout_here() or 0.0
        fits = 0 <= watchdog_timeout < math.inf
        check_fits(fits, "watchdog_timeout: expected seconds, 0 or above", watchdog_timeout)
        fits = 1 <= min_workers <= num_workers
        check_fits(fits, f"min_workers: expected 1 to {num_workers}", min_workers)
        if closure_timeout is not None:
            expected = "closure_timeout: expected seconds above 0"
            check_fits(closure_timeout > 0, expected, closure_timeout)
        check_fits(max_losses >= 1, "max_losses: expected at least 1", max_losses)
        Flapping(max_flaps)  # is it a limit?
        self._options = CoordinatorOptions(
            origin=strategy._origin,
            min_workers=min_workers,
            connect_timeout_s=connect_timeout,
            ps_timeout_s=ps_timeout,
            closure_timeout_s=closure_timeout,
            max_losses=max_losses,
            max_flaps=max_flaps,
            watchdog_timeout_s=watchdog_timeout or None,
            on_stall=on_stall,
            attach=attach,
            has_backups=strategy.ps_recovery == "backup",
        )
        self._insecure = insecure
        self._metrics, self._dashboard, self._run_log = metrics, dashboard, run_log
        self.strategy = strategy
        self._ending = AsyncExitStack()  # what ``close`` has to do
        self._coordinator: Coordinator | None = None  # None before start and after close
        self._seen: ServedStatus  # of the latest start
        self._starting = False

    def __repr__(self) -> str:
        state = "not running" if self._coordinator is None else "running"
        return f"<ClusterCoordinator of {self.strategy!r}, {state}>"

    def _repr_html_(self) -> str:
        if self._coordinator is None:
            return table("ClusterCoordinator, not running", (), ())
        closures = self._coordinator.statistics()["closures"]
        here = {each.worker: each for each in closures.workers}
        rows: list[tuple[object, ...]] = []
        for name, address in self._coordinator.links.workers.addresses().items():
            if (worker := here.get(name)) is None:
                rows.append((name, address, "away", 0, 0, ""))
                continue
            mean = "" if worker.mean_s is None else f"{worker.mean_s * 1e3:,.1f} ms"
            rows.append((name, address, "here", worker.in_flight, worker.finished, mean))
        title = (
            f"ClusterCoordinator: {len(here)} of {len(rows)} workers; closures: "
            f"{closures.queued + closures.waiting:,} queued, {closures.in_flight:,} in flight, "
            f"{closures.finished:,} finished, {closures.failed:,} failed"
        )
        return table(title, ("worker", "address", "state", "in flight", "finished", "takes"), rows)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None and self._coordinator is not None:
            self._coordinator.joins.warn_of_leftovers()
        await self.close()

    async def start(self) -> None:
        """Connect to every ps and to the workers.

        A ps that dies meanwhile and restarts is connected to again.

        Raises:
            AttachError: ``attach=True``, and a restarted ps has lost its part of the variables, or
                the variables differ from those declared so far. Variables that are declared later
                are compared when they are first needed.
            ConnectFailed: Tasks are missing after ``connect_timeout``; names the tasks and
                addresses.
            ParameterServerLost: A ps died repeatedly, or does not restart.
            AuthenticationError: A task holds a different secret.
            ProtocolError: Something else answers at a task's address.
            ConfigurationError: There is no secret; or a ps lacks the update rule or the schedule of
                an optimizer that this program has made and not used yet.
            ClosedError: The coordinator was started before.

        Cancellation: Closes everything again.
        """
        if self._starting or self.strategy._runtime is not None:
            raise UsageError("the coordinator or session of this strategy is running already")
        self.strategy._check_not_closed("start")
        cluster, own = self.strategy.cluster, "127.0.0.1:1"  # not in the cluster: listens nowhere
        if "chief" in cluster.jobs:
            own = cluster.task_address("chief", cluster.task_indices("chief")[0])
        platform = platform_of(self.strategy.cluster_resolver, own, insecure=self._insecure)
        self._starting = True
        declared, here = self.strategy._uncreated, list(self.strategy._uncreated)
        try:
            for tries_left in reversed(range(MAX_STARTS)):
                try:
                    await self._start_on(platform)
                    break
                except ParameterServerLost as exc:
                    at = self.strategy.cluster.task_address(*parse_task_name(exc.task))
                    if not tries_left or platform.given_up.reason(at) is not None:
                        raise
                    logger.warning("%s; nothing has been computed yet: starting again", exc.message)
                    left = set(map(id, declared))
                    declared[:0] = [each for each in here if id(each) not in left]
        finally:
            self._starting = False
        note_training_began()
        self.strategy._created = True

    async def _start_on(self, platform: Platform) -> None:
        """Start a coordinator; as ``start``. Nothing is left of one that did not."""
        optimizers, strategy = optimizers_here(), self.strategy
        coordinator = platform.parts.of(Coordinator)(
            platform,
            platform.workforce.present(strategy.cluster),
            strategy._uncreated,
            self._options,
            program=optimizers.process,
            main_by_name=script_is_shared.get(),
            own=OwnOptimizers(optimizers.of_the_program, optimizers.note_learning_rate),
        )
        source = StatusSource(coordinator, strategy._specs)
        self._seen = ServedStatus(source, platform, self._metrics, self._dashboard, self._run_log)
        optimizers.begin_cluster()
        follower = FollowedWorkers(coordinator.links, coordinator.recovery.queue)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(coordinator.close)
            stack.push_async_callback(self._seen.close)
            stack.callback(platform.workforce.follow(follower))  # workers may come meanwhile
            await of_no_cell(self._seen.start())
            await of_no_cell(coordinator.start())
            optimizers.check_unused(coordinator.links.ps.links)
            stack.callback(add_description(coordinator.describe))
            self._ending = stack.pop_all()
        self._coordinator = coordinator
        strategy._runtime = coordinator.runtime
        strategy._gangs = coordinator.gangs

    @property
    def attached(self) -> bool:
        """Whether this program continues with values that an earlier one left on the ps tasks.

        Otherwise restore a checkpoint. False without ``attach=True``; if nothing was updated since
        the variables were created or restored; and if that program died during a restore.
        """
        return self._coordinator is not None and self._coordinator.attached

    @property
    def partial_updates(self) -> int:
        """Updates of an earlier program that only some ps tasks have, and others never will."""
        return 0 if self._coordinator is None else self._coordinator.creation.partial_updates

    async def close(self) -> None:
        """Cancel unfinished closures and close all connections; tasks keep waiting for a chief.

        Waits for updates that the program has begun, for as long as a ps may be unreachable before
        it is lost.

        Cancellation: Connections may still be closing.
        """
        if self._coordinator is not None:
            self._running("close")
        ending, self._ending = self._ending, AsyncExitStack()
        self._coordinator = self.strategy._runtime = self.strategy._gangs = None
        await ending.aclose()

    async def join(self, timeout: float | None = None) -> None:
        """Wait for all closures scheduled before this call.

        When it returns, gradients accepted in a synchronous step are applied. If no work is left,
        they are applied in a partial step, however few workers live.

        Args:
            timeout: Seconds; None: no limit. The log names the awaited tasks after every ten
                seconds without news.

        Raises:
            Exception: The first error of a step, with its own type if that can be imported here.
                Its cause is a RemoteError with the remote traceback; its notes name further errors.
                By then nothing is running or queued, and the next closures run normally.
            EndOfData: A step found no further batch on any worker, all other closures have ended
                and none failed. The message says how many batches each worker had.
            UsageError: A task or thread that a step had started pushed, assigned or pulled after
                the step had returned, and was refused. The message names steps, variables and
                counts. Other closures are not affected.
            DeadlineExceeded: ``timeout`` seconds have passed; the message says what is running
                where, and which ps tasks do not answer within another half second.
            ParameterServerLost: A ps is lost.
            WorkerLost: A ``LocalCluster`` has given up its last worker; names all of them.
            FencedError: A newer coordinator has taken over the cluster.

        Cancellation: Safe; scheduled closures continue.

        Source: ``ClusterCoordinator.join``; there, further errors are lost.
        """
        await self._running("join").join(timeout, finish_steps=optimizers_here().any_synchronous())

    @property
    def stop_reason(self) -> str | None:
        """The reason that a step gave to ``psync.request_stop``, or None.

        It covers the request with which the latest ``join`` ended, and requests made since.

        Example:
            while True:
                for _ in range(100):
                    coordinator.schedule(step)
                await coordinator.join()
                if coordinator.stop_reason is not None:
                    break
        """
        return self._running("stop_reason").stop_reason

    def done(self) -> bool:
        """Return whether nothing is queued or running; never blocks or raises a step's error."""
        return self._running("done").done()

    def create_per_worker_dataset(
        self, dataset_fn: DatasetFunction[T] | Iterable[T], *, end: str = "all"
    ) -> PerWorkerDataset[T]:
        """Return a dataset that every worker reads separately.

        Workers may have different numbers of batches: a closure that finds no batch on one worker
        runs on another one that has some, unless the closure has already made updates. A worker
        that is lost and restarts begins its iterators again.

        Args:
            dataset_fn: One of three. A function that each worker calls in a thread, with no
                argument or with an ``InputContext`` (the worker's index and the number of workers);
                it returns an iterable of batches and must not call psync. An iterable that can be
                iterated over repeatedly, captured by value now: each worker reads all of it. A
                distributed dataset: each worker reads its share. Batches are loaded ahead.
            end: When steps meet ``EndOfData``: "all", when the data of all workers has ended;
                "first", as soon as one worker's data has ended, as in TensorFlow.

        Raises:
            UsageError: ``dataset_fn`` is none of these; the message says what to pass instead.
            ConfigurationError: ``dataset_fn`` makes a variable; or ``end`` is unknown.
            SerializationError: ``dataset_fn`` captures or holds something that cannot be sent.
            ClosedError: The coordinator is not running.

        Source: ``ClusterCoordinator.create_per_worker_dataset``.
        """
        coordinator = self._running("create_per_worker_dataset")
        hint = '"all" trains on every batch; "first" ends when one worker has no data left'
        expected = 'create_per_worker_dataset: end: expected "all" or "first"'
        check_fits(end in ("all", "first"), expected, end, hint)
        try:
            captured, function = capture_dataset(dataset_fn, coordinator.functions)
        except SerializationError as error:
            # It is about the program, and begins where that has called.
            raise error.with_traceback(None) from error.__cause__
        num_workers = len(coordinator.links.workers.names())
        if isinstance(dataset_fn, DistributedDataset):
            num_workers = dataset_fn.num_workers
        own: DistributedDataset[T] = DistributedDataset(captured, num_workers, None)
        return PerWorkerDataset(own, function, self, end)

    async def add_worker(
        self,
        address: str,
        *,
        index: int | None = None,
        timeout: float | None = 60.0,
    ) -> str:
        """Add a worker that was not in the cluster at the start; return its task name.

        The worker serves under that name. Its ``TF_CONFIG`` or resolver may name only itself:
        ``{"cluster": {"worker": {"3": "host:port"}}, "task": {"type": "worker", "index": 3}}``.
        From then on it is like the others: it gets closures, is reconnected when it is lost, takes
        part in the next ``strategy.run``, and is told to exit at the end of ``psync.run``.

        Existing datasets and variables keep the number of workers they were made for. The new
        worker reads the share of worker ``get_worker_index() % number``, from the beginning, and
        shares that worker's copy of a variable that is synchronized on read.

        Args:
            address: Address at which the worker listens.
            index: Task index; None: the lowest free index of the cluster.
            timeout: Seconds to wait for the worker, which may still be starting. None: no limit.

        Raises:
            ConnectFailed: The worker is not there in time. It is not added.
            ConfigurationError: The address or the index is malformed, or belongs to another task.
            ProtocolError: Another task answers there, such as a worker with another index.
            AuthenticationError: The worker holds a different secret.
            ClosedError: The coordinator is not running.

        Cancellation: The worker is not added.
        """
        workers, cluster = self._running("add_worker").workers, self.strategy.cluster
        known = {parse_task_name(name)[1]: at for name, at in workers.addresses().items()}
        if index is None:
            index = next(number for number in itertools.count() if number not in known)
        elif index in known:
            raise ConfigurationError(
                f"index: the cluster has a worker {index} already, at {known[index]}",
                hint="leave it out, or give the task index that the new worker's TF_CONFIG names",
            )
        # Is it an address, and nobody else's? Is the index one?
        ClusterSpec({**cluster.as_dict(), "worker": {**known, index: address}})
        name = await workers.add(address, index, timeout)
        added = added_workers.get()
        if added is not None:
            added[name] = address
        return name

    async def remove_worker(self, task: str, timeout: float | None = None) -> None:
        """Ask a worker to leave, and wait until it has left; its process exits with code 0.

        The worker gives back closures that it has not begun and finishes the one it runs. An
        unreachable worker is removed at once. Its index becomes free. Its share of per-worker
        datasets is no longer read.

        Args:
            task: Task name, such as ``/job:worker/task:3``.
            timeout: Seconds to wait; None: as long as its closure takes.

        Raises:
            ConfigurationError: The cluster has no such worker.
            DeadlineExceeded: The worker has not left in time; it leaves when its closure ends.
            ClosedError: The coordinator is not running.

        Cancellation: The worker leaves all the same.
        """
        workers = self._running("remove_worker").workers
        known = workers.addresses()
        expected = f"task: expected a worker of the cluster ({', '.join(known)})"
        check_fits(task in known, expected, task)
        try:
            async with asyncio.timeout(timeout):
                await workers.remove(task, "the program removes it")
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"{task} has not left within {timeout:g} s: what it runs has not ended",
                hint="it leaves once the closure ends; wait again, or stop its process to remove "
                "it now",
            ) from exc
        added = added_workers.get()
        if added is not None:
            added.pop(task, None)

    def distribute_once(
        self,
        shards: Sequence[Any],
        num_epochs: int = 1,
        *,
        shuffle_seed: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Visits:
        """Return visits of data shards that process each shard exactly once per epoch.

        Args:
            shards: Names of the data: file names, ranges, anything that can be sent.
            num_epochs: Number of times every shard is processed.
            shuffle_seed: Seed of the order of the shards, which differs in each epoch; None: as
                given.
            state: Result of ``Visits.state``, from this program or an earlier one.

        Raises:
            UsageError: ``shards`` is not a list, or is empty.
            ConfigurationError: A number is out of range, or the state belongs to other shards.
            SerializationError: A shard cannot be sent to a worker.
            ClosedError: The coordinator is not running.
        """
        self._running("distribute_once")
        try:
            return Visits(self._schedule_shard, self.join, shards, num_epochs, shuffle_seed, state)
        except SerializationError as error:
            raise error.with_traceback(None) from error.__cause__

    async def status(self) -> Status:
        """Return the state of the cluster: workers, ps tasks, steps, closures, recent events.

        - Rates are averages over the last five seconds.
        - All ps tasks are asked at the same time, at most once in 0.2 s. A ps that does not answer
          within a second keeps its previous numbers, which then have an age.
        - Workers are not asked, so a computing step delays nothing.
        - The queue, the workers and their closures are as of this call: right after ``join``,
          ``queue.finished`` includes all joined closures.

        ``psync top`` shows the status from outside.

        Raises:
            ClosedError: The coordinator is not running.

        Cancellation: Safe.

        Example:
            status = await coordinator.status()
            for worker in status.workers:
                print(worker.task, worker.state, worker.closures_per_s)
        """
        self._running("status")
        return await self._seen.source.status()

    @asynccontextmanager
    async def trace(self, path: str | os.PathLike[str]) -> AsyncGenerator[Trace, None]:
        """Return a context that records a trace into a file, for ui.perfetto.dev or chrome://tracing.

        Each task is a process in the trace: the steps of workers with their pulls, pushes, waits
        and computation; requests, on the sending and the serving side; synchronous steps and
        counters. The clocks of tasks are aligned. Nothing is recorded outside the context.
        ``docs/seeing.md`` explains how to read a trace; ``psync trace`` records one from outside.

        Args:
            path: Path of the file; an existing file is replaced.

        Yields:
            An object whose ``summary`` has, afterwards, seconds, events, tasks, and dropped events.

        Raises:
            ConfigurationError: The file cannot be written.
            ClosedError: The coordinator is not running.

        Cancellation: The events recorded so far are written.

        Example:
            async with coordinator.trace("out.json"):
                for _ in range(100):
                    coordinator.schedule(step)
                await coordinator.join()
        """
        self._running("trace")
        source = self._seen.source
        async with tracing(source.spans.read_all, source.program, path) as traced:
            yield traced

    def report(self, values: Mapping[str, float]) -> None:
        """Show the program's own values in its status: the loss, the epoch, an accuracy.

        ``Trainer.fit`` does this automatically; call it in custom loops. The status shows the
        newest value of each name.

        Args:
            values: Numbers by name; of more than 100 names the newest are shown.

        Raises:
            ConfigurationError: A value is not a number.
            ClosedError: The coordinator is not running.

        Example:
            coordinator.report({"epoch": epoch, "loss": np.mean(await coordinator.fetch(losses))})
        """
        self._running("report")
        for name, value in values.items():
            try:
                self._seen.source.reported[str(name)] = float(value)
            except (TypeError, ValueError) as exc:
                raise ConfigurationError(
                    f"report: {name}: expected a number, got {value!r}"
                ) from exc
        reported = self._seen.source.reported
        for name in list(reported)[:-MAX_REPORTED]:  # of names that are new with every step
            del reported[name]

    @property
    def dashboard_url(self) -> str:
        """The URL of the dashboard, including its token; "" if there is no dashboard.

        Raises:
            ClosedError: The coordinator is not running.
        """
        self._running("dashboard_url")
        return self._seen.dashboard_url

    def statistics(self) -> dict[str, Any]:
        """Return counters: closures queued, in flight, finished, put back; bytes on the wire."""
        return self._running("statistics").statistics()

    async def backed_up(self) -> None:
        """Wait until every ps has a complete backup.

        Returns at once without ``ps_recovery="backup"``.

        Backups are complete when ``start`` returns. After the loss of a ps they are complete again
        some time after it restarts, or after another process has room for its share. With
        ``attach=True`` backups are made once the program has declared all variables it continues
        with, at the latest in this call.

        Raises:
            AttachError: See ``start``.
            ClosedError: The coordinator is not running.

        Cancellation: Safe.
        """
        await self._running("backed_up").recovery.backed_up()

    def events(self) -> AsyncIterator[Event]:
        """Return the events of this coordinator as they happen, beginning with the first.

        Yields:
            ``RollbackEvent`` when a ps was lost and all ps tasks returned to a checkpoint;
            ``FailoverEvent`` when backups took over. The iterator ends when the coordinator is
            closed.

        Raises:
            ClosedError: The coordinator is not running.

        Example:
            async for event in coordinator.events():
                print(event)
        """
        return self._running("events").events.stream()

    async def ps_statistics(self) -> list[dict[str, Any]]:
        """Return each ps task's counters. Raises ParameterServerLost. Cancellation: safe."""
        return await self._running("ps_statistics").links.ps_statistics()

    def _running(self, operation: str) -> Coordinator:
        if self._coordinator is None:
            raise ClosedError(
                f"{operation}: the coordinator is not running",
                hint="use it inside `async with ClusterCoordinator(strategy) as coordinator:`",
            )
        if asyncio._get_running_loop() is not self._coordinator.loop:
            raise other_loop(operation)
        return self._coordinator


def coordinator_of(origin: str) -> Coordinator | None:
    """Return what serves a strategy, if its coordinator is running here.

    Args:
        origin: Token of the strategy.
    """
    known = _of_origin().get(origin)
    return None if known is None else known._coordinator
