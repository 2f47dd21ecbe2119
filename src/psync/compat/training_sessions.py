"""MonitoredTrainingSession: every worker runs the training loop, without a coordinator.

The same program runs on the chief and on every worker. Each makes its own strategy and declares
the same variables and optimizers in the same order, which is how their numbers agree.

Nothing is scheduled, but the chief decides who takes part, with the links and the membership of a
coordinator: it attaches the ps tasks, fences workers that are lost, and reports to ps 0 who lives,
as the target of a synchronous step follows the living workers. Chief and workers talk by the board
of ps 0, which only passes on what they post, and tells who has a connection (``board``).

    chief posts    the shards it has declared, the process and the incarnation of each worker that
                   takes part, and why training has ended
    worker posts   its process, a reason to end training, whether it has left, whether it has
                   finished, and its error

    what dies                  what follows
    a worker, before its part  the chief waits for it, as long as too few have come
    a worker that takes part   without a connection for ``GRACE_S`` it is fenced, and steps go on
                               without it; its next process is a new member
    the last worker            if the chief does not train, training ends after ``DESERTED_S``
    the chief                  workers go on for ``GRACE_S`` and then end with an error, or as soon
                               as the next chief has attached the ps tasks
    a ps                       every task sees that on its own links

**Incarnations.** A worker does not know the chief's, below which the ps tasks serve no task, so the
chief gives it its own. Workers are members from then on, before they have connections: all that
wait when training begins take part in its first step.

**The end.** Only the chief ends training: it saves the last checkpoint, and the next chief begins
with the newest one, or with new variables. So a worker that makes the last step, or has no more
data, stays until the chief knows. If the chief is gone, the worker ends with an error, as all do,
and its next process makes these steps again.

A worker that the chief lets go while training continues has *finished*. Its post stays on the board
when it ends, and when the chief dies: the next chief does not wait for it, and ends training if all
have finished. A worker that leaves because training is over has not: if the chief then dies before
it has saved, the next one needs it again. A chief that ends in order clears the board.

The first reason counts, unless a worker fails after it: the chief, which leaves last, raises that
error. Then ps 0 lets nobody wait for a token or at a clock any more. A worker that asks to enter
after a failure, while the chief is still there, gets that failure.

Source: TensorFlow's between-graph replication; there a worker that dies leaves all others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from msgspec import msgpack

from psync.api.strategy import ParameterServerStrategy
from psync.api.sync_replicas import SessionHook, until_lost
from psync.api.variables import Variable, get_or_create_global_step
from psync.chief.declarations import Creation, as_sent
from psync.chief.links import ClusterLinks, CoordinatorOptions, addresses_in
from psync.client.context import Runtime, forbid_in_step
from psync.client.link import ask
from psync.client.ps import PsClient
from psync.closures.membership import TaskState
from psync.cluster import CHIEF, ENQUIRER, ClusterSpec, task_name
from psync.errors import (
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    EndOfData,
    FencedError,
    ParameterServerLost,
    PsyncError,
    RemoteError,
    TaskLost,
    TrainingEnded,
    TransportError,
    UsageError,
    check_fits,
    other_loop,
)
from psync.net.chief_presence import naming_who_is_awaited
from psync.net.connection import fail
from psync.net.endpoint import Endpoint
from psync.net.environment import note_training_began, platform_of, training_over
from psync.net.platform import Platform
from psync.net.shielding import at_most, end_all, first_of, shielded
from psync.numerics.memory import BlockPool
from psync.serialization.payloads import describe_exception
from psync.specs import checked_kind
from psync.status.sampling import SessionSource
from psync.status.serving import ServedStatus
from psync.wire.messages import Done, Post, Posted, ReportSchedule

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LEAVE_TIMEOUT_S = 30.0
"""How long the chief, at its end, waits for workers that are in the middle of a step."""

GOODBYE_TIMEOUT_S = 2.0
"""How long a session that ends otherwise waits for the others to hear of it."""

SAME_ORDER = "every task must declare the same variables in the same order, before its session"

NETWORK_ERRORS = (TransportError, TaskLost, FencedError)
"""A worker that ends by one of these may take part again, if it is started again."""

GRACE_S = 5.0
"""How long a worker or the chief may be without a connection to ps 0."""

DESERTED_S = 60.0
"""How long a lost worker may take to come back when there is no other."""

PS_LOST_HINT = (
    "its shards are gone, and a training session does not return to a checkpoint automatically: "
    "start the program again, as `psync run --chief-restarts` does, with a chief that restores the "
    'newest one: docs/howto/tensorflow.md, "What a session survives"'
)


def _advise(error: ParameterServerLost) -> None:
    error.hint = PS_LOST_HINT


class Part(ABC):
    """Base class of the chief and the workers: posts this task's value, and reacts to news.

    Args:
        session: Told of the end.
        ps: Links to the ps tasks.

    Attributes:
        ps: As given.
        over: Why training has ended, and whether before its time; None: it has not.
    """

    def __init__(self, session: MonitoredTrainingSession, ps: PsClient) -> None:
        self.ps = ps
        self.over: tuple[str, bool] | None = None
        self._note_end, self._note_lost = session._note_end, session._note_lost
        self._loop = asyncio.get_running_loop()
        self._served = 0  # incarnation of the chief that ps 0 serves
        self._seen = -1  # version of the news
        self._said: dict[str, tuple[bool, list[Any]]] = {}  # by task: is it connected; its value
        self._forgets = False  # whether the board shall forget what others have posted
        self._deadline: float | None = None  # loop time at which to look, whatever comes
        self._due = asyncio.Event()  # set when there is something to say, or to look at
        self._following: asyncio.Task[Any] | None = None

    @abstractmethod
    def _value(self) -> list[Any]:
        """Return the value that this task posts."""

    @abstractmethod
    async def _look(self) -> None:
        """React to news, or to the time that has passed."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the connections."""

    async def _exchange(self, seen: int) -> None:
        """Post the value, and take the news once there are some that were not seen."""
        post = Post(seen, self._forgets)
        asking = ask(self.ps.links[0], post, Posted, [msgpack.encode(self._value())])
        posted, values = await asking
        if posted.version >= self._seen:
            self._seen, self._served = posted.version, posted.coordinator
            said = zip(posted.tasks, map(msgpack.decode, values), strict=True)
            self._said = {name: (is_here, value) for (name, is_here), value in said}

    async def tell(self) -> None:
        """Post the value; return when ps 0 has it. Raises what a call to a ps does."""
        await self._exchange(-1)
        self._due.set()

    async def _follow(self) -> NoReturn:
        """Post the value and react to news, until a ps is lost."""
        while True:
            # It may wait for days, and outlive more connections than a request is allowed.
            with contextlib.suppress(TimeoutError, ConnectionLost):
                async with asyncio.timeout_at(self._deadline):
                    await first_of(self._exchange(self._seen), self._due.wait())
            self._due.clear()
            await self._look()

    async def _until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something, or until a ps is lost, which raises. Cancellation: safe."""
        if self._following is None:
            following = first_of(self._follow(), *map(until_lost, self.ps.links))
            self._following = self._loop.create_task(following)
            self._following.add_done_callback(self._note_lost)
        return await first_of(work, shielded(self._following))

    async def close(self) -> None:
        """Close everything. Cancellation: connections may still be closing."""
        try:
            if self._following is not None:
                await end_all([self._following])
        finally:
            await self._disconnect()


class ChiefPart(Part):
    """The chief of a session.

    Attributes:
        links: Those of a coordinator, whose membership has the workers.
        is_open: Whether workers may take part.
    """

    def __init__(self, session: MonitoredTrainingSession, platform: Platform) -> None:
        options = CoordinatorOptions(session._ps_timeout_s, session._connect_timeout_s)
        only_ps = ClusterSpec({**session.strategy.cluster.as_dict(), "worker": {}})
        self.links = ClusterLinks(platform, only_ps, options, program="")
        self.links.on_ps_lost = _advise
        super().__init__(session, self.links.ps)
        self._members = self.links.membership
        self._addresses = session._others
        self._asking: list[str] = []  # workers that are there and do not take part
        self._entered: dict[str, int] = {}  # the process of each that takes part, or last did
        self._away: dict[str, float] = {}  # loop time at which such a worker lost its connection
        self._is_replica = session._trains  # until it leaves
        self._declared: Sequence[object] = ()
        self._min_workers = math.inf  # that have to come before any may take part
        self._reported: object = None
        self._versions = itertools.count(1)
        self._deserted_at = math.inf  # loop time at which training ends for want of replicas
        self._ending: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._empty = asyncio.Event()  # set once no replica is left after the end
        self.is_open = False

    async def attach(self, timeout_s: float) -> None:
        """Attach all ps tasks.

        Raises:
            ConnectFailed: They are not there in time; names them.
            PsyncError: Something else answers, or serves a newer chief.

        Cancellation: Half connected: call ``close``.
        """
        await self.links.start(0, timeout_s)
        for name, address in self._addresses.items():
            self._members.add_worker(name, address)
        await self.tell()

    async def open(self, declared: Sequence[object], min_workers: int, timeout_s: float) -> None:
        """Let the workers take part, when so many have come.

        Args:
            declared: Shards, as ``as_sent`` describes them.
            min_workers: How many workers to wait for.
            timeout_s: How long they may take, in seconds.

        Raises:
            ConnectFailed: They have not come; names those that have.

        Cancellation: Safe.
        """
        self._declared, self._min_workers = declared, min_workers
        self._due.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(self._opened.wait())
        except TimeoutError:
            raise ConnectFailed(
                f"{min_workers} workers were to take part in training, and within {timeout_s:g} s "
                f"there came {', '.join(self._asking) or 'none'}",
                hint="check that each of them runs this program: psync.run(main, on_workers=True)",
            ) from None

    def _in_state(self, state: TaskState) -> list[str]:
        return [name for name in self._addresses if self._members.state(name) is state]

    def _value(self) -> list[Any]:
        members = self._in_state(TaskState.ALIVE)
        entered = {n: (self._entered[n], self._members.incarnation(n)) for n in members}
        return [self._declared, entered, self.over]

    async def _look(self) -> None:
        now, said, finished, deadlines = self._loop.time(), self._said, 0, []
        self._asking = []
        for name in [each for each in self._addresses if each in said]:
            is_here, (process, ends, has_left, has_finished, error) = said[name]
            if process != self._entered.get(name):
                self._lose(name)
                if has_finished:  # under an earlier chief
                    self._members.left(name)
                    finished += 1
                elif is_here and not has_left:
                    self._asking.append(name)
            elif self._members.state(name) is TaskState.ALIVE:
                if error is not None:
                    text = f"{name} failed: {_headline(*error[:2])}"
                    await self.end(text, True, [name, *error])
                elif ends:
                    await self.end(ends)
                lost_at = math.inf if is_here else self._away.setdefault(name, now) + GRACE_S
                if has_left:
                    self._members.left(name)
                elif is_here:
                    self._away.pop(name, None)
                elif now >= lost_at:
                    self._lose(name)
                else:
                    deadlines.append(lost_at)
        self.is_open = self.is_open or len(self._asking) + finished >= self._min_workers
        if self.is_open and (self.over is None or not self.over[1]):
            for name in self._asking:
                self._entered[name] = said[name][1][0]
                self._members.connected(name, self.links.endpoint.incarnation)
        await self._report()
        # Without a replica, training ends.
        members, lost = self._in_state(TaskState.ALIVE), self._in_state(TaskState.LOST)
        if self._is_replica or members or not self.is_open:
            self._deserted_at = math.inf
        elif self.over is not None:
            self._empty.set()
        elif not lost:
            await self.end("all replicas have left")
        elif now >= self._deserted_at:
            await self.end(f"no replica is left: {', '.join(lost)} did not come back", True)
        else:
            self._deserted_at = min(self._deserted_at, now + DESERTED_S)
            deadlines.append(self._deserted_at)
        self._deadline = min(deadlines, default=None)

    def _lose(self, name: str) -> None:
        """A worker has had no connection for too long, or was started again."""
        self._away.pop(name, None)
        if self._members.state(name) is TaskState.ALIVE:
            logger.info("%s is lost", name)
            self.links.fence(self._members.disconnected(name))

    async def _report(self) -> None:
        """Tell ps 0 who lives, once training has begun, and when that changes."""
        alive = [(n, self._members.incarnation(n)) for n in self._in_state(TaskState.ALIVE)]
        if self._is_replica:
            alive.append((CHIEF, self.links.endpoint.incarnation))
        state = alive, self._in_state(TaskState.LOST)
        if self.is_open and state != self._reported:
            self._reported = state
            await asyncio.sleep(0)  # those that are lost are fenced first
            report = ReportSchedule(next(self._versions), *state, True, [])
            await ask(self.ps.links[0], report, Done)
            self._opened.set()

    async def end(
        self, reason: str, failed: bool = False, error: Sequence[str] | None = None
    ) -> None:
        """Training is over, before its time if it has failed; ``error`` is that of a worker.

        Cancellation: It is over.
        """
        if self.over is None or (error is not None and not self.over[1]):
            self.over = reason, failed
            self._note_end(reason, failed, error)
            self._due.set()
        if self._ending is None:
            self._ending = self.links.supervise(self._end_steps(reason))
        await asyncio.wait((self._ending,))

    async def _end_steps(self, reason: str) -> None:
        await self.tell()  # first, as workers whose waits for tokens end look for the reason
        report = ReportSchedule(next(self._versions), [], [], False, [], reason)
        await ask(self.ps.links[0], report, Done)

    async def leave(self, error: BaseException | None) -> None:
        """End training; return when all others have left, if no error ends it.

        Cancellation: Safe.
        """
        if error is not None:
            await self.end(_failure_of_chief(error), failed=True)
            return
        await self.end("the chief has left")
        self._is_replica = False
        self._due.set()
        await self._until(self._empty.wait())
        self._forgets = True  # the next chief does not go on with this training
        await self.tell()

    async def _disconnect(self) -> None:
        await self.links.close()


class WorkerPart(Part):
    """A worker of a session."""

    def __init__(self, session: MonitoredTrainingSession, platform: Platform) -> None:
        cluster, pool = session.strategy.cluster, BlockPool()
        addresses = list(addresses_in(cluster, "ps").values())
        self._endpoint = Endpoint(platform, session._task, ENQUIRER, {}, pool)
        # One that was never here is late, not lost.
        make = platform.parts.of(PsClient)
        super().__init__(session, make(self._endpoint, addresses, pool, math.inf))
        for link in self.ps.links:
            link.on_lost = _advise
        self._ps_timeout_s = session._ps_timeout_s
        self._process = platform.new_incarnation()
        self._ends = ""  # why it asks the chief to end training
        # Whether it has left; whether the chief has let it go, although not for the end; its error.
        self._left: tuple[bool, bool, Sequence[str] | None] = False, False, None
        self._coordinator = 0  # incarnation of the chief under which it takes part
        self._entered: asyncio.Future[list[Any]] = self._loop.create_future()
        self._let_go = asyncio.Event()  # set once the chief knows that it has left

    async def begin(self, timeout_s: float) -> dict[tuple[int, int], list[Any]]:
        """Take part when the chief says so; return the shards that it has declared, by their keys.

        Raises:
            ConnectFailed: ps 0 or the chief is not there in time.
            AuthenticationError, ProtocolError: Something else answers.
            TrainingEnded: The chief has failed before.

        Cancellation: Half connected: call ``close``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                declared = await self._until(shielded(self._entered))
        except TimeoutError:
            what = "the chief has not begun a training session"
            hint = "is the chief running, and does it wait for others?"
            if (ps_0 := self.ps.links[0]).incarnation is None:
                what = f"no connection to {ps_0.task} at {ps_0.address}"
                hint = "is this task running, and is this its address?"
            raise ConnectFailed(f"{what} within {timeout_s:g} s", hint=hint) from None
        return {(shard[1], shard[2]): shard for shard in declared}

    def _value(self) -> list[Any]:
        return [self._process, self._ends, *self._left]

    async def _look(self) -> None:
        now = self._loop.time()
        is_here, (declared, entered, over) = self._said.get(CHIEF, (False, [None, {}, None]))
        process, incarnation = entered.get(self._endpoint.task, (0, 0))
        if self._coordinator not in (0, self._served):
            self._end("a new chief has attached the ps tasks", True)
        if is_here and not self._coordinator and process == self._process:
            self._coordinator, self._endpoint.incarnation = self._served, incarnation
            for peer in self._endpoint.peers:
                peer.close()
            for link in self.ps.links:
                link.lost_after_s = self._ps_timeout_s
            self._entered.set_result(declared)
        if is_here and self._left[0] and not process:
            self._let_go.set()
        if over is not None and (self._coordinator or (is_here and over[1])):
            self._end(*over)
        if is_here or not self._coordinator or self.over is not None:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = now + GRACE_S
        elif now >= self._deadline:
            self._end(f"the chief, {CHIEF}, was lost", True)
            for link in self.ps.links:  # ps 0 knows nothing of the end, and lets steps wait
                link.give_up("cannot be used without the chief")

    def _end(self, reason: str, failed: bool) -> None:
        fail(self._entered, TrainingEnded(reason))
        self._let_go.set()
        if self.over is None:
            self.over = reason, failed
            self._note_end(reason, failed, None)

    async def tell(self) -> None:
        """Post the value; return when ps 0 has it, and what the chief has posted is known here."""
        await super().tell()
        await self._look()

    async def end(self, reason: str) -> None:
        """Let the chief end training; return when it has. Cancellation: it does all the same."""
        self._ends = reason
        await self.tell()
        await self._until(self._let_go.wait())

    async def leave(self, error: BaseException | None) -> None:
        """Leave; return when the chief knows it, or training is over. Cancellation: it leaves."""
        if isinstance(error, NETWORK_ERRORS):
            return  # it is lost, and may come back
        texts = None if error is None else _failure_of(error)
        self._left, goes_early = (True, False, texts), error is None and self.over is None
        await self.tell()
        await self._until(self._let_go.wait())
        if goes_early and (self.over is None or not self.over[1]):
            self._left = True, True, None
            await self.tell()

    async def _disconnect(self) -> None:
        await self.ps.close()
        await self._endpoint.close()


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
        expected = "strategy: expected a ParameterServerStrategy"
        checked_kind(expected, strategy, ParameterServerStrategy)
        if strategy.ps_recovery == "backup":
            raise ConfigurationError(
                'ps_recovery="backup": a training session does not support backups of ps tasks',
                hint="leave it out, and let the chief restore the newest checkpoint when it "
                'restarts: docs/howto/tensorflow.md, "What a session survives"; or train with a '
                "psync.ClusterCoordinator, which supports backups",
            )
        self.strategy = strategy
        cluster, (job, index) = strategy.cluster, strategy.task
        if job not in ("chief", "worker") or index is None:
            raise ConfigurationError(
                "a training session is for the chief and for workers, and the cluster's "
                f"description says that this process is {job or 'no task of it'}"
            )
        self._task, self._address = task_name(job, index), cluster.task_address(job, index)
        workers = addresses_in(cluster, "worker") if "worker" in cluster.jobs else {}
        chiefs = addresses_in(cluster, "chief") if "chief" in cluster.jobs else workers
        self._leader = next(iter(chiefs.items()))
        self.is_chief = self._leader[0] == self._task if is_chief is None else is_chief
        self._others = {name: workers[name] for name in workers if name != self._task}
        others = len(self._others)
        if not self.is_chief and not trains:
            raise ConfigurationError("trains: only the chief may set trains=False")
        if not trains and not others:
            raise ConfigurationError("trains: the cluster has no other task that would train")
        expected = "startup_delay_s: expected seconds, 0 or above"
        check_fits(startup_delay_s >= 0, expected, startup_delay_s)
        lowest, chosen = 0 if trains else 1, others if min_workers is None else min_workers
        check_fits(
            lowest <= chosen <= others, f"min_workers: expected {lowest} to {others}", min_workers
        )
        fits = stop_at_step is None or stop_at_step >= 1
        check_fits(fits, "stop_at_step: expected at least 1", stop_at_step)
        self._hooks = tuple(hooks)
        self._startup_delay_s = startup_delay_s
        self._stop_at_step = stop_at_step
        self._trains = trains
        self._min_workers = chosen
        self._connect_timeout_s = connect_timeout
        self._ps_timeout_s = ps_timeout
        self._insecure = insecure
        self._is_open = False  # between its begin and its end
        self._part: ChiefPart | WorkerPart  # once it begins, like the next
        self._loop: asyncio.AbstractEventLoop
        self._global_step: Variable | None = None  # None: nobody has asked for a last step
        self._seen: ServedStatus | None = None  # of a chief that has attached the ps tasks
        self._stopping = asyncio.Event()  # set once this task shall make no further step
        self._failure: BaseException | None = None  # why this task cannot go on

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
        self.strategy._check_not_closed("start of a training session")
        if self._stop_at_step is not None:
            with self.strategy.scope():
                self._global_step = get_or_create_global_step()
        for hook in self._hooks:
            hook.begin()
        self._loop = asyncio.get_running_loop()
        resolver = self.strategy.cluster_resolver
        platform = platform_of(resolver, self._address, insecure=self._insecure)
        self._part = (ChiefPart if self.is_chief else WorkerPart)(self, platform)
        self._is_open = True
        try:
            await self._begin(platform)
        except BaseException as exc:
            await self._finish(exc)
            raise
        note_training_began()
        return self

    async def _begin(self, platform: Platform) -> None:
        part, patience_s = self._part, self._connect_timeout_s
        if isinstance(part, ChiefPart):
            await part.attach(patience_s)
            await self._use(Creation(self.strategy._uncreated, part.ps).ensure)
            await self._show(part, platform)
            variables = self.strategy.variables
            shards = [as_sent(shard) for each in variables for shard in each.spec.shards]
            await part.open(shards, self._min_workers, patience_s)
        else:
            text = f"{self._task} waits for {' at '.join(self._leader)} to let it begin"
            with naming_who_is_awaited(lambda: text):
                declared = await part.begin(patience_s)
            await self._use(partial(self._compare, declared))
        await self._stop_at_last_step()
        if self._startup_delay_s:
            await at_most(self._startup_delay_s, self._stopping.wait())

    async def _use(self, ensure_created: Callable[[], Awaitable[None]]) -> None:
        """Let the program use its variables, which are there once ``ensure_created`` returns."""
        self.strategy._runtime = Runtime(
            self._part.ps,
            self.strategy._origin,
            ensure_created=ensure_created,
            in_session=self._trains,
        )
        self.strategy._created = True
        await ensure_created()
        for hook in self._hooks:
            await hook.after_create_session(self)

    async def _show(self, part: ChiefPart, platform: Platform) -> None:
        """Let processes of this user ask for the status."""
        last = self._stop_at_step
        workers = {CHIEF: self._address} if self._trains else {}
        source = SessionSource(
            part.links, self.strategy._specs, workers | self._others,
            lambda: (part.is_open, part.over), "the program" if last is None else f"step {last}",
        )  # fmt: skip
        self._seen = ServedStatus(source, platform)
        await self._seen.start()

    def _note_lost(self, following: asyncio.Task[NoReturn]) -> None:
        """A ps is lost, or refuses this task; the program gets the error when it leaves."""
        if not following.cancelled():
            error = following.exception()
            self._failure = error if self._part.over is None else self._failure
            self._stopping.set()

    def _note_end(self, reason: str, failed: bool, error: Sequence[str] | None) -> None:
        """Training has ended; ``error`` is that of a worker that has failed."""
        usual = logging.INFO if self.is_chief else logging.DEBUG
        logger.log(logging.WARNING if failed else usual, "training ends: %s", reason)
        if failed and self._failure is None:
            self._failure = TrainingEnded(reason) if error is None else RemoteError(*error)
        self.strategy._training_over.set()
        self._stopping.set()

    async def _compare(self, chiefs: Mapping[tuple[int, int], list[Any]]) -> None:
        """Compare what was declared with the shards of the chief, by their keys.

        Raises:
            ConfigurationError: The chief has declared something else, or nothing.
        """
        declared = self.strategy._uncreated
        for shard in (shard for each in declared for shard in each.spec.shards):
            theirs, ours = chiefs.get(shard.key), list(as_sent(shard))
            if theirs is None:
                text = f"the chief did not declare {_described(ours)} before training began"
                raise ConfigurationError(text, hint=SAME_ORDER)
            if theirs != ours:
                text = f"the chief has declared {_described(theirs)}, but this task declared "
                raise ConfigurationError(text + _described(ours), hint=SAME_ORDER)
        declared.clear()

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
            await self._stop_at_last_step()
        except PsyncError as exc:
            if not await self._is_of_the_end(exc):
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
        if self._is_open and asyncio.get_running_loop() is not self._loop:
            raise other_loop(f"{operation} of a training session")

    async def _stop_at_last_step(self) -> None:
        if self._global_step is not None and self._stop_at_step is not None:
            if int(await self._global_step.read()) >= self._stop_at_step:
                self._stopping.set()
                await self._part.end(f"step {self._stop_at_step} is reached")

    # The end.

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> bool:
        self._check_loop("the end")
        if exc is not None and not (await self._is_of_the_end(exc) or _has_no_more_data(exc)):
            await self._finish(exc)
            return False
        if self._failure is None:
            try:
                for hook in self._hooks:
                    await hook.end(self)
            except BaseException as error:
                await self._finish(error)
                raise
        await self._finish(None)
        if self._failure is not None:
            raise self._failure from None
        return True

    async def _is_of_the_end(self, error: BaseException) -> bool:
        """Whether a step failed because training has ended. Then ps tasks may have gone, too."""
        if isinstance(error, TrainingEnded):  # as ps 0 says; the chief says why
            with contextlib.suppress(PsyncError):
                await self._part.tell()
            return True
        return self._part.over is not None and isinstance(error, ParameterServerLost)

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
            if training and not isinstance(self._failure, NETWORK_ERRORS):
                await self._say_goodbye(error)
        finally:
            self.strategy._runtime = None
            if self._seen is not None:
                await self._seen.close()
            await self._part.close()

    async def _say_goodbye(self, error: BaseException | None) -> None:
        part = self._part
        waits = error is None and self._failure is None
        timeout_s = LEAVE_TIMEOUT_S if waits else GOODBYE_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await part.ps.outgoing.drain()
                await part.leave(error)
        except TimeoutError:
            if waits:
                logger.warning("training: other tasks are still in a step after %g s", timeout_s)
        except PsyncError as exc:
            logger.info("training: the others do not hear that this task leaves: %s", exc.message)


def _described(shard: Sequence[Any]) -> str:
    name, _, index, _, shape, dtype = shard
    return f'variable "{name}" ({dtype}, shard {index} of shape {tuple(shape)})'


def _has_no_more_data(error: BaseException) -> bool:
    """Whether a task ends because it has no more data: that is no failure.

    A StopIteration leaves a coroutine, such as a step, as the cause of a RuntimeError.

    Source: ``MonitoredSession.__exit__``: OutOfRangeError and StopIteration.
    """
    if type(error) is RuntimeError and str(error).endswith(" raised StopIteration"):
        return isinstance(error.__cause__, StopIteration)
    return isinstance(error, (EndOfData, StopIteration, StopAsyncIteration))


def _failure_of(error: BaseException) -> Sequence[str] | None:
    """Describe an error of the program; None if it is the network's, or the program was stopped."""
    if isinstance(error, SystemExit):
        is_failure = error.code not in (None, 0)
    else:
        is_failure = isinstance(error, Exception) and not isinstance(error, NETWORK_ERRORS)
    return describe_exception(error).texts if is_failure else None


def _failure_of_chief(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "the chief was stopped"
    return f"the chief failed: {_headline(type(error).__name__, str(error))}"


def _headline(type_name: str, text: str) -> str:
    first = text.partition("\n")[0]
    return f"{type_name}: {first}" if first else type_name
