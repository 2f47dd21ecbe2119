"""ClusterCoordinator: scheduling, joins, datasets and workers, for a training program."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from psync.api.coordinator_options import (
    add_worker,
    check_options,
    remove_worker,
    report,
    status,
    trace,
    watchdog_timeout_of,
)
from psync.api.data_shards import Visits
from psync.api.datasets import (
    DatasetFunction,
    DistributedDataset,
    PerWorkerDataset,
    capture_dataset,
)
from psync.api.optimizers.registry import optimizers_here
from psync.api.scheduling import Scheduling
from psync.api.seeing import SeenRun
from psync.api.strategy import ParameterServerStrategy
from psync.chief.events import Event
from psync.chief.followed_workers import FollowedWorkers
from psync.chief.reattachment import OwnOptimizers
from psync.chief.recovery_rule import MAX_STARTS
from psync.client.context import forbid_in_step
from psync.closures.flapping import LIMIT
from psync.closures.queue import MAX_LOSSES
from psync.cluster import parse_task_name
from psync.coordinator import Coordinator, CoordinatorOptions
from psync.errors import (
    ClosedError,
    ConfigurationError,
    ParameterServerLost,
    SerializationError,
    UsageError,
    other_loop,
)
from psync.net.environment import (
    exit_if_misplaced,
    note_training_began,
    platform_of,
    script_is_shared,
)
from psync.net.notebook_cells import of_no_cell
from psync.net.platform import Platform
from psync.net.process_state import PerProcess
from psync.net.task_reports import add_description
from psync.specs import checked_kind
from psync.status.html_tables import table_of_workers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_of_origin: PerProcess[weakref.WeakValueDictionary[str, ClusterCoordinator]] = PerProcess(
    weakref.WeakValueDictionary
)
"""The coordinator of each strategy, by the strategy's token, as long as somebody holds it."""


class ClusterCoordinator(Scheduling):
    """Schedules step functions onto the workers of a strategy's cluster.

    An async context manager: entering it connects to the cluster, leaving it cancels what is
    not done and closes the connections. There is one coordinator for a strategy.

    Args:
        strategy: A ParameterServerStrategy.
        min_workers: Workers that must be there before work begins; default: all of the cluster.
        connect_timeout: Seconds to wait for them, and for all ps tasks; later, for a lost worker to
            be back whose data are all that is left.
        ps_timeout: Seconds after which a ps that cannot be reached is lost.
        closure_timeout: Seconds after which a worker that still runs the same closure is given
            up: the closure runs again elsewhere. Time in which a step waits for other workers
            does not count: at a synchronous step, a staleness bound, in a collective, for a lock
            or an accumulator. None: a step may take as long as it likes.
        max_losses: A closure that was lost with its worker this often seems to be the cause, and
            is reported instead of killing further workers (Dask's number). Where workers also die
            without it, it is reported later: at the latest when it was lost twelve times more
            often. A worker that leaves in order, or whose session the coordinator ends, is no loss.
        max_flaps: A worker that is lost more often than this within a minute is not connected to
            again for 30 s, then for twice as long, up to 5 minutes, while another worker takes
            part. None: it always is.
        watchdog_timeout: Seconds after which the log says what runs where and on whom everybody
            waits, and shows the stacks of this process, if there is work and no closure has ended
            meanwhile; again after as long a silence. None: ``PSYNC_WATCHDOG_TIMEOUT``; 0: never.
        on_stall: Called with the text of each such report, on the loop.
        insecure: Whether it may run without a secret.
        attach: Whether the program goes on with the values that an earlier one has left on the ps
            tasks. It must declare the same variables and make the same optimizers before it
            schedules anything; what it has not declared then is dropped. Slots, steps and learning
            rates go on, too. Closures are new. If there are no values, this is a normal start.
        metrics: Address for Prometheus, "host:port"; the log has the URL. None: ``PSYNC_METRICS``.
        dashboard: Address of a web page that shows the run, "127.0.0.1:0"; its URL, with the token
            that it needs, is printed, and is ``dashboard_url``. None: ``PSYNC_DASHBOARD``.
        run_log: File to record the run in, for ``psync dashboard``. None: ``PSYNC_RUN_LOG``.

    Raises:
        ConfigurationError: If an option is out of range, the strategy is no
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
        known = _of_origin().get(strategy.origin)
        if known is not None:
            return known  # type: ignore[return-value]  # a subclass would be made first
        made = super().__new__(cls)
        _of_origin()[strategy.origin] = made
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
        self._options = CoordinatorOptions(
            min_workers=num_workers if min_workers is None else min_workers,
            connect_timeout_s=connect_timeout,
            ps_timeout_s=ps_timeout,
            closure_timeout_s=closure_timeout,
            max_losses=max_losses,
            max_flaps=max_flaps,
            watchdog_timeout_s=watchdog_timeout_of(watchdog_timeout),
            on_stall=on_stall,
            insecure=insecure,
            attach=attach,
        )
        check_options(self._options, num_workers)
        self._shown: dict[str, Any] = {
            "metrics": metrics, "dashboard": dashboard, "run_log": run_log,
        }  # fmt: skip
        self.strategy = strategy
        self._undescribe: Callable[[], None] = lambda: None
        self._unfollow: Callable[[], object] = lambda: None
        self._coordinator: Coordinator | None = None  # None before start and after close
        self._seen: SeenRun  # like it
        self._starting = False

    def __repr__(self) -> str:
        state = "not running" if self._coordinator is None else "running"
        return f"<ClusterCoordinator of {self.strategy!r}, {state}>"

    def _repr_html_(self) -> str:
        return table_of_workers(self._coordinator)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None and self._coordinator is not None:
            self._coordinator.joins.warn_of_leftovers()
        await self.close()

    async def start(self) -> None:
        """Connect to every ps and to the workers.

        A ps that dies meanwhile, and is started again, is connected to again: nothing was on it.

        Raises:
            AttachError: With ``attach=True``: a ps that was started again has lost its part of the
                variables, or they are others than those declared so far. What is declared later is
                compared when something first needs it.
            ConnectFailed: They are not there in time; names who is missing, and where.
            ParameterServerLost: A ps has died again and again, or is not started again.
            AuthenticationError: A task holds another secret.
            ProtocolError: Something else answers at a task's address.
            ConfigurationError: There is no secret; or a ps lacks the update rule or the schedule of
                an optimizer that this program has made and not used yet.
            ClosedError: The coordinator was started before.

        Cancellation: Everything is closed again.
        """
        if self._starting or self._coordinator is not None:
            raise UsageError("the coordinator of this strategy is running already")
        if self.strategy.created:
            raise ClosedError(
                "the coordinator of this strategy was closed, and its variables with it",
                hint="create a new strategy",
            )
        platform = platform_of(
            self.strategy.cluster_resolver, self._own_address(), insecure=self._options.insecure
        )
        self._starting = True
        declared, here = self.strategy.declared, list(self.strategy.declared)
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
        self.strategy.created = True

    async def _start_on(self, platform: Platform) -> None:
        """Start a coordinator; as ``start``. Nothing is left of one that did not."""
        optimizers = optimizers_here()
        coordinator = platform.parts.of(Coordinator)(
            platform,
            platform.workforce.present(self.strategy.cluster),
            self.strategy.declared,
            self._options,
            origin=self.strategy.origin,
            program=optimizers.process,
            main_by_name=script_is_shared.get(),
            own=OwnOptimizers(optimizers.of_the_program, optimizers.note_learning_rate),
            has_backups=self.strategy.ps_recovery == "backup",
        )
        seen = SeenRun(coordinator, platform, self.strategy, **self._shown)
        optimizers.begin_cluster()
        follower = FollowedWorkers(coordinator.links, coordinator.recovery.queue)
        unfollow = platform.workforce.follow(follower)  # workers may come and leave meanwhile
        try:
            await of_no_cell(seen.start())
            await of_no_cell(coordinator.start())
            optimizers.check_unused(coordinator.links.ps.links)
        except BaseException:
            unfollow()
            await seen.close()
            await coordinator.close()
            raise
        self._coordinator, self._seen, self._unfollow = coordinator, seen, unfollow
        self._undescribe = add_description(coordinator.describe)
        self.strategy.runtime = coordinator.runtime
        self.strategy.gangs = coordinator.gangs

    @property
    def attached(self) -> bool:
        """Whether the program goes on with values that an earlier one has left on the ps tasks.

        False without ``attach=True``, and where nothing was left: then restore a checkpoint.
        """
        return self._coordinator is not None and self._coordinator.left is not None

    @property
    def partial_updates(self) -> int:
        """Updates of an earlier program that some ps tasks have, and others lack for ever."""
        return 0 if self._coordinator is None else self._coordinator.partial_updates

    async def close(self) -> None:
        """Cancel what is not done, and close all connections; tasks go on waiting for a chief.

        Updates of the program that were begun are waited for, for as long as a ps may be out of
        reach before it is lost.

        Cancellation: Connections may still be closing.
        """
        if self._coordinator is not None:
            self._running("close")
        coordinator, self._coordinator = self._coordinator, None
        self._undescribe()
        self._unfollow()
        self.strategy.runtime = self.strategy.gangs = None
        if coordinator is not None:
            try:
                await self._seen.close()
            finally:
                await coordinator.close()

    async def join(self, timeout: float | None = None) -> None:
        """Wait for everything that was scheduled before this call.

        Gradients that were accepted in a synchronous step are applied when it returns: if nothing
        is left to do, in a partial step, however few workers live.

        Args:
            timeout: Seconds, or None: for ever. Every ten seconds without news the log says
                on whom it waits.

        Raises:
            Exception: The first error of a step, with its own type where it can be imported
                here; its cause is a RemoteError with the remote traceback, its notes name the
                further errors. When it is raised, nothing is running any more and nothing is
                queued; the next closures run normally.
            EndOfData: A step found no further batch on any worker (its message says how many each
                had), all others are done and none failed.
            UsageError: A task or thread that a step had started pushed, assigned or pulled after
                the step had returned, and was refused; names steps, variables and how often. The
                other closures are not concerned.
            DeadlineExceeded: After ``timeout`` seconds; says what is running where.
            ParameterServerLost: A ps is gone.
            WorkerLost: A ``LocalCluster`` has given up its last worker; names them all.
            FencedError: A newer coordinator has taken the cluster over.

        Cancellation: Safe; what was scheduled goes on.

        Source: ``ClusterCoordinator.join``; there, further errors are lost.
        """
        await self._running("join").join(timeout, finish_steps=optimizers_here().any_synchronous())

    @property
    def stop_reason(self) -> str | None:
        """Why a step has asked for the end of training with ``psync.request_stop``.

        None unless one has asked since the latest ``join`` returned, or before it did.

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
        """Return whether nothing is queued or running; never blocks, never raises an error
        of a step."""
        return self._running("done").done()

    def create_per_worker_dataset(
        self, dataset_fn: DatasetFunction[T] | Iterable[T], *, end: str = "all"
    ) -> PerWorkerDataset[T]:
        """Return a dataset of which every worker reads its own.

        Workers need not have equally many batches: a closure that finds none on one worker runs on
        another one that has some, unless it had made updates before. A worker that is lost and
        comes back starts its iterators from the beginning.

        Args:
            dataset_fn: A function that each worker calls, in a thread, with no argument or with an
                ``InputContext`` (which pipeline of how many this worker is), and that returns
                an iterable of batches; it must not call psync. Or an iterable that can be iterated
                over more than once, captured by value now: each worker reads the whole of it.
                Or a distributed dataset: each worker reads its share. Batches are loaded ahead.
            end: When steps meet ``EndOfData``: "all", when the data of all workers have ended;
                "first", wherever one of them has ended, as in TensorFlow.

        Raises:
            UsageError: It is none of these; says what to give instead.
            ConfigurationError: It makes a variable; or ``end`` is another word.
            SerializationError: It captures or holds something that cannot be sent.
            ClosedError: The coordinator is not running.

        Source: ``ClusterCoordinator.create_per_worker_dataset``.
        """
        coordinator = self._running("create_per_worker_dataset")
        if end not in ("all", "first"):
            raise ConfigurationError(
                f'create_per_worker_dataset: end: expected "all" or "first", got {end!r}',
                hint='"all" trains on every batch; "first" ends when one worker has no data left',
            )
        try:
            captured, function = capture_dataset(dataset_fn, coordinator.functions)
        except (
            SerializationError
        ) as error:  # it is about the program, and begins where that has called
            raise error.with_traceback(None) from error.__cause__
        num_workers = len(coordinator.links.workers.names())
        if isinstance(dataset_fn, DistributedDataset):
            num_workers = dataset_fn.num_workers
        own: DistributedDataset[T] = DistributedDataset(captured, num_workers, None)
        return PerWorkerDataset(own, function, self, end)

    add_worker = add_worker
    remove_worker = remove_worker

    def distribute_once(
        self,
        shards: Sequence[Any],
        num_epochs: int = 1,
        *,
        shuffle_seed: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Visits:
        """Return visits of data shards, of which each is done exactly once in each epoch.

        Args:
            shards: What names the data: file names, ranges, anything that can be sent.
            num_epochs: How often every shard is to be done.
            shuffle_seed: Orders the shards of each epoch anew; None: as they are given.
            state: What ``Visits.state`` returned, in this program or an earlier one.

        Raises:
            UsageError: The shards are no list, or none are given.
            ConfigurationError: A number is out of range, or the state is of other shards.
            SerializationError: A shard cannot be sent to a worker.
            ClosedError: The coordinator is not running.
        """
        self._running("distribute_once")
        try:
            return Visits(self._schedule_shard, self.join, shards, num_epochs, shuffle_seed, state)
        except SerializationError as error:
            raise error.with_traceback(None) from error.__cause__

    status = status
    report = report
    trace = trace

    @property
    def dashboard_url(self) -> str:
        """The URL of the dashboard, with the token that it needs; "" where there is none.

        Raises:
            ClosedError: The coordinator is not running.
        """
        self._running("dashboard_url")
        return self._seen.url

    def statistics(self) -> dict[str, Any]:
        """Return counters: closures queued, in flight, finished, put back; bytes on the wire."""
        return self._running("statistics").statistics()

    async def backed_up(self) -> None:
        """Wait until every ps has a complete backup; at once without ``ps_recovery="backup"``.

        It is so when ``start`` returns, and again some time after a ps was lost, if that is started
        again or another process has room for its share. With ``attach=True`` backups are made when
        the program has declared all that it goes on with: at the latest now.

        Raises:
            AttachError: As for ``start``.
            ClosedError: The coordinator is not running.

        Cancellation: Safe.
        """
        await self._running("backed_up").recovery.backed_up()

    def events(self) -> AsyncIterator[Event]:
        """Return the events of this coordinator, from the first on, as they come.

        Yields:
            ``RollbackEvent``, when a ps was lost and all went back to a checkpoint;
            ``FailoverEvent``, when backups took over. It ends when the coordinator is closed.

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

    def _own_address(self) -> str:
        cluster = self.strategy.cluster
        if "chief" in cluster.jobs:
            return cluster.task_address("chief", cluster.task_indices("chief")[0])
        return "127.0.0.1:1"  # not in the cluster: it listens nowhere

    def _running(self, operation: str) -> Coordinator:
        if self._coordinator is None:
            raise ClosedError(
                f"{operation}: the coordinator is not running",
                hint="use it inside `async with ClusterCoordinator(strategy) as coordinator:`",
            )
        if asyncio._get_running_loop() is not self._coordinator.loop:
            raise other_loop(operation)
        return self._coordinator


@asynccontextmanager
async def running_coordinator(
    strategy: ParameterServerStrategy,
) -> AsyncGenerator[ClusterCoordinator, None]:
    """Return a context manager with the strategy's coordinator, which runs in it.

    One that was not running before is closed in the end.
    """
    coordinator = ClusterCoordinator(strategy)
    if coordinator._coordinator is not None:
        yield coordinator
        return
    async with coordinator:
        yield coordinator


def coordinator_of(origin: str) -> Coordinator | None:
    """Return what serves a strategy, if its coordinator is running here.

    Args:
        origin: Token of the strategy.
    """
    known = _of_origin().get(origin)
    return None if known is None else known._coordinator
