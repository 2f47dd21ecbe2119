"""MonitoredTrainingSession: every worker runs the training loop, without a coordinator.

The same program runs on the chief and on every worker. Each makes its own strategy and declares
the same variables and optimizers in the same order, which is how their numbers agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from psync.api.strategy import ParameterServerStrategy
from psync.api.sync_replicas import SessionHook, wait_over
from psync.api.variables import Variable, get_or_create_global_step
from psync.chief.declarations import MESSAGE_SHARDS, Creation, as_sent
from psync.chief.links import enquire
from psync.client.context import Runtime, forbid_in_step
from psync.client.link import PsLink, always, ask, note_plugins
from psync.client.ps import PsClient
from psync.cluster import CHIEF, ENQUIRER, task_name
from psync.errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailed,
    EndOfData,
    FencedError,
    ParameterServerLost,
    PsyncError,
    RemoteError,
    RemoteProtocolError,
    TaskLost,
    TrainingEnded,
    TransportError,
    UsageError,
    other_loop,
)
from psync.net.chief_presence import naming_who_is_awaited
from psync.net.endpoint import Endpoint
from psync.net.environment import (
    note_incarnation,
    note_training_began,
    platform_of,
    training_over,
)
from psync.net.resolvers import training_cluster
from psync.numerics.memory import BlockPool
from psync.serialization.failures import describe_exception
from psync.status.sampling import SessionSource
from psync.status.serving import ServedStatus
from psync.wire import messages
from psync.wire.codec import Message

logger = logging.getLogger(__name__)


P = ParamSpec("P")
T = TypeVar("T")

LEAVE_TIMEOUT_S = 30.0
"""How long the chief, at its end, waits for workers that are in the middle of a step."""

GOODBYE_TIMEOUT_S = 2.0
"""How long a session that ends otherwise waits for ps 0 to hear of it."""

NETWORK_ERRORS = (TransportError, TaskLost, FencedError)
"""A worker that ends by one of these may take part again, if it is started again."""

PS_HINT = "is this task running, and is this its address?"
PS_LOST_HINT = (
    "its shards are gone, and a training session does not return to a checkpoint automatically: "
    "start the program again, as `psync run --chief-restarts` does, with a chief that restores the "
    'newest one: docs/howto/tensorflow.md, "What a session survives"'
)


class MonitoredTrainingSession:
    """A task's part in training without a scheduler: each worker runs its own loop.

    An async context manager. Inside it ``psync.pull``, ``apply_gradients`` and the methods of
    variables work anywhere in the program. The chief creates the variables; then other tasks may
    enter. Training begins when all workers of the cluster have come. When a worker dies,
    synchronous steps continue with the others; it takes part again when it restarts. When the chief
    leaves, training ends for all tasks.

    - A worker that leaves the block by an exception ends training for all: the chief raises a
      RemoteError with its traceback.
    - ``EndOfData``, ``StopIteration`` and ``StopAsyncIteration`` are not failures: this task
      leaves, and the program continues after the block.
    - A worker that is cancelled, or cannot reach a ps, counts as one that dies.
    - The loss of a ps ends training, even with a ``CheckpointManager``. When the chief restarts, it
      restores the newest checkpoint in ``after_create_session`` of a hook.

    Args:
        strategy: The strategy of this process. All tasks must declare all variables before the
            session begins, in the same order, and make optimizers in the same order.
        is_chief: Whether this task creates the variables. Default: it is the task of job "chief",
            or worker 0 if the cluster has no such job.
        hooks: Hooks into the stages of the session, such as
            ``opt.make_session_run_hook(is_chief)``.
        startup_delay_s: Seconds that this task waits before its first step. In asynchronous
            training it may help if workers begin one after the other. Leave it at 0 for synchronous
            training, whose first step would wait for the last worker.
        stop_at_step: Global step at which training ends; checked after each ``run``.
        trains: Whether this task computes gradients. Set it to False on a chief that only starts
            and ends training: steps then do not wait for its gradients.
        min_workers: Number of other workers for which the chief waits before training begins; the
            remaining ones may come later. Default: all of the cluster.
        connect_timeout: Seconds to wait for the ps tasks, the chief, and the workers.
        ps_timeout: Seconds after which an unreachable ps is lost.
        insecure: Whether to allow running without a secret.

    Raises:
        ConfigurationError: An option is out of range, or the strategy has ``ps_recovery="backup"``,
            which a session cannot use.
        RemoteError: A worker has left by an exception. Raised on the chief, when it leaves.
        ParameterServerLost: A ps was lost. Raised when a task leaves.
        TrainingEnded: Training has failed elsewhere; names the task. Raised when a worker leaves.

    Example:
        async with psync.MonitoredTrainingSession(strategy, hooks=[hook]) as session:
            while not session.should_stop():
                await session.run(step)

    Source: ``tf.compat.v1.train.MonitoredTrainingSession``, between-graph replication.
    """

    __psync_capture_error__ = "the session belongs to this task"
    __psync_capture_hint__ = "call it in the program, outside of steps"

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        *,
        is_chief: bool | None = None,
        hooks: Sequence[SessionHook] = (),
        startup_delay_s: float = 0.0,
        stop_at_step: int | None = None,
        trains: bool = True,
        min_workers: int | None = None,
        connect_timeout: float = 60.0,
        ps_timeout: float = 15.0,
        insecure: bool = False,
    ) -> None:
        forbid_in_step("making a training session")
        if not isinstance(strategy, ParameterServerStrategy):
            raise ConfigurationError(
                f"strategy: expected a ParameterServerStrategy, got {type(strategy).__name__}"
            )
        if strategy.ps_recovery == "backup":
            raise ConfigurationError(
                'ps_recovery="backup": a training session does not support backups of ps tasks',
                hint="leave it out, and let the chief restore the newest checkpoint when it "
                'restarts: docs/howto/tensorflow.md, "What a session survives"; or train with a '
                "psync.ClusterCoordinator, which supports backups",
            )
        self.strategy = strategy
        self._job, self._index = _own_task(strategy)
        self.is_chief = self._leads() if is_chief is None else is_chief
        others = self._num_others()
        if not self.is_chief and not trains:
            raise ConfigurationError("trains: only the chief may set trains=False")
        if not trains and not others:
            raise ConfigurationError("trains: the cluster has no other task that would train")
        if startup_delay_s < 0:
            raise ConfigurationError(
                f"startup_delay_s: expected seconds, 0 or above, got {startup_delay_s}"
            )
        lowest = 0 if trains else 1
        if min_workers is not None and not lowest <= min_workers <= others:
            raise ConfigurationError(
                f"min_workers: expected {lowest} to {others}, got {min_workers}"
            )
        if stop_at_step is not None and stop_at_step < 1:
            raise ConfigurationError(f"stop_at_step: expected at least 1, got {stop_at_step}")
        self._hooks = tuple(hooks)
        self._startup_delay_s = startup_delay_s
        self._stop_at_step = stop_at_step
        self._trains = trains
        self._min_workers = others if min_workers is None else min_workers
        self._connect_timeout_s = connect_timeout
        self._ps_timeout_s = ps_timeout
        self._insecure = insecure
        self._task = task_name(self._job, self._index)
        self._is_open = False  # between its begin and its end
        self._ps: PsClient  # once it is connected, like the next
        self._endpoint: Endpoint
        self._pool = BlockPool()
        self._connections = contextlib.AsyncExitStack()
        self._comparing = asyncio.Lock()
        self._global_step: Variable | None = None  # None: nobody has asked for a last step
        self._watchers: list[asyncio.Task[None]] = []
        self._seen: ServedStatus | None = None  # of a chief that has attached the ps tasks
        self._stopping = asyncio.Event()  # set once this task shall make no further step
        self._over: messages.TrainingOver | None = None  # what ps 0 has said about the end
        self._failure: Exception | None = None  # why ps 0 will not say it any more

    def __repr__(self) -> str:
        state = "running" if self._is_open else "not running"
        role = "chief" if self.is_chief else "worker"
        return f"<MonitoredTrainingSession of {self._task}, {role}, {state}>"

    # Begin.

    async def __aenter__(self) -> Self:
        """Take part in training: connect, and wait until it begins.

        If training is already over, this is not an error: ``should_stop`` returns True.

        Raises:
            ConnectFailed: ps tasks, chief or workers are not there in time; names them.
            ConfigurationError: There is no secret; or the chief has declared other variables.
            AuthenticationError, ProtocolError: Something else answers at an address.
            FencedError: A newer chief, or another process of this task, has taken its place.
            TrainingEnded: The chief failed before training began.
            ClosedError: The strategy was used before.

        Cancellation: Closes everything again.
        """
        if self._is_open or self.strategy._runtime is not None:
            raise UsageError("a session or coordinator of this strategy is already running")
        if self.strategy._created:
            raise ClosedError(
                "the session of this strategy has ended, and its variables with it",
                hint="create a new strategy",
            )
        if self._stop_at_step is not None:
            with self.strategy.scope():
                self._global_step = get_or_create_global_step()
        for hook in self._hooks:
            hook.begin()
        self._platform = platform_of(
            self.strategy.cluster_resolver,
            self.strategy.cluster.task_address(self._job, self._index),
            insecure=self._insecure,
        )
        self._is_open = True
        try:
            await self._begin()
        except BaseException as exc:
            await self._finish(exc)
            raise
        note_training_began()
        return self

    async def _begin(self) -> None:
        if self.is_chief:
            await self._use(await self._attach())
            source = await self._show()
            await self._declare()
            source.begun = True
        else:
            text = f"{self._task} waits for {self._leader()} to let it begin"
            with naming_who_is_awaited(lambda: text):
                await self._enter()
                await self._use(self._compare)
        ends: list[Coroutine[Any, Any, messages.TrainingOver]]
        ends = [wait_over(self._ps, self._task), *map(_until_lost, self._ps.links[1:])]
        self._watchers = [asyncio.create_task(self._watch(end)) for end in ends]
        if await self._is_at_last_step():
            await self._end_training(f"step {self._stop_at_step} is reached")
        if self._startup_delay_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._startup_delay_s):
                    await self._stopping.wait()

    async def _use(self, ensure_created: Callable[[], Awaitable[None]]) -> None:
        """Let the program use its variables, which are there once ``ensure_created`` returns."""
        self.strategy._runtime = Runtime(
            self._ps,
            self.strategy._origin,
            ensure_created=ensure_created,
            in_session=self._trains,
        )
        self.strategy._created = True
        await ensure_created()
        for hook in self._hooks:
            await hook.after_create_session(self)

    async def _show(self) -> SessionSource:
        """Let processes of this user ask for the status."""
        cluster = self.strategy.cluster
        own = self._job, self._index
        workers = {CHIEF: cluster.task_address(*own)} if self._trains else {}
        for index in cluster.task_indices("worker"):
            if ("worker", index) != own:
                workers[task_name("worker", index)] = cluster.task_address("worker", index)
        last = self._stop_at_step
        source = SessionSource(
            self._endpoint, self._ps.links, self.strategy._specs, workers,
            "the program" if last is None else f"step {last}",
        )  # fmt: skip
        self._seen = ServedStatus(source, self._platform)
        await self._seen.start()
        return source

    async def _watch(self, end: Awaitable[messages.TrainingOver]) -> None:
        try:
            self._over = over = await end
            usual = logging.INFO if self.is_chief else logging.DEBUG
            level = logging.WARNING if over.failed else usual
            logger.log(level, "training ends: %s", over.reason)
        except Exception as exc:  # the program gets it when it leaves
            if self._over is None:
                self._failure = exc
        self._stopping.set()

    # Connections of the chief, which attaches the ps tasks and lets workers enter.

    async def _attach(self) -> Callable[[], Awaitable[None]]:
        """Become the chief of all ps tasks; return what creates there what was declared."""
        addresses = self._ps_addresses()
        where = f"/job:ps/task:0 at {addresses[0]}"
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                incarnation = await enquire(self._platform, "/job:ps/task:0", addresses[0])
        except TimeoutError as exc:
            raise ConnectFailed(
                f"no connection within {self._connect_timeout_s:g} s to {where}", hint=PS_HINT
            ) from exc
        note_incarnation(incarnation)
        self._connect_as(CHIEF, incarnation)
        message = messages.AttachPs(incarnation, addresses, self._ps_timeout_s)

        async def attach(link: PsLink) -> None:
            note_plugins(link, await link.call(always(message)))

        await self._to_each_ps(attach)
        return Creation(self.strategy._uncreated, self._ps).ensure

    async def _declare(self) -> None:
        """Let the workers enter, when so many have come."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._tell(messages.Declared(self._trains, self._min_workers))
        except TimeoutError:
            link = self._ps.links[0]
            said, _ = await ask(link, messages.AskStatistics(), messages.Statistics)
            came = said.counters["session"].get("asking", ())
            raise ConnectFailed(
                f"{self._min_workers} workers were to take part in training, and within "
                f"{self._connect_timeout_s:g} s there came {', '.join(came) or 'none'}",
                hint="check that each of them runs this program: psync.run(main, on_workers=True)",
            ) from None

    # Connections of a worker, which compares what it has declared with what the chief has.

    async def _enter(self) -> None:
        """Take part, once the chief has declared its variables."""
        message = messages.EnterSession(self._platform.new_incarnation())
        endpoint = Endpoint(self._platform, self._task, ENQUIRER, {})
        first = self._ps_addresses()[:1]
        enquirer = self._platform.parts.of(PsClient)(endpoint, first, self._pool, math.inf)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                answer = (await enquirer.links[0].call(always(message))).message
        except TimeoutError:
            what = "the chief has not begun a training session"
            hint = "is the chief running, and does it wait for others?"
            if enquirer.links[0].incarnation is None:
                what, hint = f"no connection to /job:ps/task:0 at {first[0]}", PS_HINT
            raise ConnectFailed(f"{what} within {self._connect_timeout_s:g} s", hint=hint) from None
        finally:
            await enquirer.close()
            await endpoint.close()
        if isinstance(answer, messages.TrainingOver):
            raise TrainingEnded(answer.reason)
        if not isinstance(answer, messages.SessionEntered):
            raise RemoteProtocolError("ps 0 sent a wrong answer to EnterSession")
        self._connect_as(self._task, answer.incarnation)
        await self._to_each_ps(lambda link: link.peer("control"))

    async def _compare(self) -> None:
        """Compare what was declared with what the ps tasks hold for the chief, but once.

        Raises:
            ConfigurationError: The chief has declared something else, or nothing.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; goes on with the next call.
        """
        declared = self.strategy._uncreated
        while declared:
            async with self._comparing:
                batch = declared[:MESSAGE_SHARDS]
                by_ps: dict[int, list[tuple[str, int, int, int, list[int], str]]] = {}
                for shard in (shard for each in batch for shard in each.spec.shards):
                    by_ps.setdefault(shard.ps, []).append(as_sent(shard))
                for index, shards in by_ps.items():
                    for start in range(0, len(shards), MESSAGE_SHARDS):
                        message = messages.CheckShards(shards[start : start + MESSAGE_SHARDS])
                        await self._ps.links[index].call(always(message))
                del declared[: len(batch)]

    # Connections of both.

    def _ps_addresses(self) -> list[str]:
        cluster = self.strategy.cluster
        return [cluster.task_address("ps", index) for index in cluster.task_indices("ps")]

    def _connect_as(self, task: str, incarnation: int) -> None:
        self._endpoint = Endpoint(self._platform, task, incarnation, {}, self._pool)
        self._connections.push_async_callback(self._endpoint.close)
        client = self._platform.parts.of(PsClient)
        # One that was never here is late, not lost.
        self._ps = client(self._endpoint, self._ps_addresses(), self._pool, math.inf)
        self._connections.push_async_callback(self._ps.close)
        for link in self._ps.links:
            link.on_lost = lambda error: setattr(error, "hint", PS_LOST_HINT)

    async def _to_each_ps(self, act: Callable[[PsLink], Awaitable[object]]) -> None:
        """Do something at every ps for the first time."""
        missing = dict.fromkeys(self._ps.links)

        async def one(link: PsLink) -> None:
            await act(link)
            link.lost_after_s = self._ps_timeout_s
            del missing[link]

        try:
            async with asyncio.timeout(self._connect_timeout_s), asyncio.TaskGroup() as group:
                for link in self._ps.links:
                    group.create_task(one(link))
        except TimeoutError as exc:
            names = ", ".join(f"{link.task} at {link.address}" for link in missing)
            raise ConnectFailed(
                f"no connection within {self._connect_timeout_s:g} s to {names}",
                hint="are these tasks running, and are these their addresses?",
            ) from exc
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _tell(self, message: Message) -> Message:
        return (await self._ps.links[0].call(always(message))).message

    # The loop.

    def should_stop(self) -> bool:
        """Return whether this task should end its loop; never blocks."""
        return self._stopping.is_set()

    def request_stop(self) -> None:
        """Make ``should_stop`` True in this process. When the chief leaves, training ends."""
        self._stopping.set()

    async def run(
        self, step_fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run one step, and return its result; None if training has ended, before or meanwhile.

        Args:
            step_fn: A coroutine function that pulls, computes and applies gradients.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            UsageError: Outside the session, or on a chief that does not train.
            Exception: An exception of the step, except TrainingEnded.

        Cancellation: Cancels the step.
        """
        if not self._is_open:
            raise UsageError(
                "run outside the training session",
                hint="use it inside `async with psync.MonitoredTrainingSession(strategy):`",
            )
        self._check_loop("run")
        if not self._trains:
            raise UsageError(
                "run on a chief that does not train: its gradients would not be waited for",
                hint="await session.wait_until_stopped() there, or set trains=True",
            )
        if self.should_stop():
            return None
        try:
            result = await step_fn(*args, **kwargs)
            if await self._is_at_last_step():
                await self._end_training(f"step {self._stop_at_step} is reached")
        except PsyncError as exc:
            if not self._is_of_the_end(exc):
                raise
            self._stopping.set()
            return None
        if not self.should_stop():
            for hook in self._hooks:
                await hook.after_run(self, result)
        return result

    async def wait_until_stopped(self) -> None:
        """Wait until ``should_stop``; for a chief that does not train. Cancellation: safe."""
        self._check_loop("wait_until_stopped")
        await self._stopping.wait()

    def _check_loop(self, operation: str) -> None:
        if self._is_open and asyncio.get_running_loop() is not self._ps.loop:
            raise other_loop(f"{operation} of a training session")

    async def _is_at_last_step(self) -> bool:
        if self._global_step is None or self._stop_at_step is None:
            return False
        return int(await self._global_step.read()) >= self._stop_at_step

    async def _end_training(self, reason: str) -> None:
        self._stopping.set()
        if self._is_open:
            await self._tell(messages.EndTraining(reason, False))

    # The end.

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._check_loop("the end")
        if exc is not None and not (self._is_of_the_end(exc) or _has_no_more_data(exc)):
            await self._finish(exc)
            return False
        if self._failure_elsewhere() is None:
            try:
                for hook in self._hooks:
                    await hook.end(self)
            except BaseException as error:
                await self._finish(error)
                raise
        await self._finish(None)
        if (failure := self._failure_elsewhere()) is not None:
            raise failure from None
        return True

    def _is_of_the_end(self, error: BaseException) -> bool:
        """Whether a step failed because training has ended. Then ps tasks may have gone, too."""
        return isinstance(error, TrainingEnded) or (
            self._over is not None and isinstance(error, ParameterServerLost)
        )

    def _failure_elsewhere(self) -> Exception | None:
        """Return why training has ended before its time, as far as this task knows."""
        over = self._over
        if self._failure is not None or over is None or not over.failed:
            return self._failure
        if self.is_chief and over.error is not None:
            return RemoteError(*over.error)
        return TrainingEnded(over.reason)

    async def _finish(self, error: BaseException | None) -> None:
        """Say goodbye, and close everything.

        Cancellation: Connections may still be closing.
        """
        self._is_open = False
        self._stopping.set()
        if (last_words := training_over.get()) is not None:
            last_words.set()
        training = self.strategy._runtime is not None
        try:
            if training and self._failure is None:
                await self._say_goodbye(error)
        finally:
            for watcher in self._watchers:
                watcher.cancel()
            await asyncio.gather(*self._watchers, return_exceptions=True)
            self.strategy._runtime = None
            if self._seen is not None:
                await self._seen.close()
            await self._connections.aclose()

    async def _say_goodbye(self, error: BaseException | None) -> None:
        waits = self.is_chief and error is None and self._failure_elsewhere() is None
        timeout_s = LEAVE_TIMEOUT_S if waits else GOODBYE_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._ps.outgoing.drain()
                if self.is_chief and error is not None:
                    await self._tell(messages.EndTraining(_failure_of_chief(error), True))
                elif error is not None and _is_failure(error):
                    await self._tell(messages.LeaveSession(describe_exception(error).texts))
                elif not isinstance(error, NETWORK_ERRORS):  # else it is lost, and may come back
                    answer = await self._tell(messages.LeaveSession(None))
                    if isinstance(answer, messages.TrainingOver):  # it is the chief's
                        self._over = answer
                # On the same connection: the watcher has heard of the end before, if there is one.
        except TimeoutError:
            if waits:
                logger.warning("training: other tasks are still in a step after %g s", timeout_s)
        except PsyncError as exc:
            logger.info("training: could not tell ps 0 that training has ended: %s", exc)

    # The cluster.

    def _leads(self) -> bool:
        return self._job == "chief" or (
            self._job == "worker" and self._index == 0 and "chief" not in self.strategy.cluster.jobs
        )

    def _leader(self) -> str:
        cluster = self.strategy.cluster
        job = "chief" if "chief" in cluster.jobs else "worker"
        index = cluster.task_indices(job)[0]
        return f"{task_name(job, index)} at {cluster.task_address(job, index)}"

    def _num_others(self) -> int:
        cluster = self.strategy.cluster
        workers = cluster.num_tasks("worker") if "worker" in cluster.jobs else 0
        return workers - (self._job == "worker")


async def _until_lost(link: PsLink) -> NoReturn:
    """Raise what a call would raise, even if there are no calls."""
    while True:
        await (await link.peer("control")).wait_closed()


def _own_task(strategy: ParameterServerStrategy) -> tuple[str, int]:
    """Return job and index of this process."""
    _, job, index = training_cluster(strategy.cluster_resolver)
    if job not in ("chief", "worker") or index is None:
        raise ConfigurationError(
            "a training session is for the chief and for workers, and the cluster's description "
            f"says that this process is {job or 'no task of it'}"
        )
    return job, index


def _has_no_more_data(error: BaseException) -> bool:
    """Whether a task ends because it has no more data: that is no failure.

    A StopIteration leaves a coroutine, such as a step, as the cause of a RuntimeError.

    Source: ``MonitoredSession.__exit__``: OutOfRangeError and StopIteration.
    """
    if type(error) is RuntimeError and str(error).endswith(" raised StopIteration"):
        return isinstance(error.__cause__, StopIteration)
    return isinstance(error, (EndOfData, StopIteration, StopAsyncIteration))


def _is_failure(error: BaseException) -> bool:
    """Whether the program has failed; not the network, and it was not stopped."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception) and not isinstance(error, NETWORK_ERRORS)


def _failure_of_chief(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "the chief was stopped"
    text = str(error).partition("\n")[0]
    return f"the chief failed: {type(error).__name__}" + (f": {text}" if text else "")
