"""The coordinator's connections to all tasks: how the cluster comes up, and its end.

``ClusterLinks`` keeps those to ps tasks, ``WorkerLinks`` those to workers; ``Membership`` decides
what a connection made or lost means. One coroutine for each task connects, attaches, waits for the
end of the connection, and begins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psync.backups.locate_ps import places
from psync.chief.watch import Events
from psync.client.link import Answers, Call, PsLink, all_of, ask, expect
from psync.client.ps import PsClient
from psync.closures.membership import (
    Flapping,
    Membership,
    TaskState,
    backoff,
)
from psync.closures.queue import ClosureQueue
from psync.closures.scaling import Load
from psync.cluster import CHIEF, ENQUIRER, ClusterSpec, parse_task_name, task_name
from psync.errors import (
    AttachError,
    ConnectFailed,
    ConnectionLost,
    FencedError,
    ParameterServerLost,
    PsyncError,
    TransportError,
    WorkerLost,
)
from psync.net.connection import Connection, Request
from psync.net.endpoint import Endpoint
from psync.net.environment import note_incarnation
from psync.net.platform import Platform
from psync.net.shielding import at_most, end_all, first_of
from psync.numerics.memory import BlockPool
from psync.store.reattach import BACK
from psync.wire import messages
from psync.wire.codec import Message

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker of the cluster, whether it is there or not. Its states:

    - away: ``peers`` is None, ``gone`` is set;
    - takes part: ``peers`` are its connections;
    - leaving (``leaving``): it begins nothing new, and is away next;
    - not kept (``is_kept`` is False): its supervisor ends with the next ``gone``.
    """

    name: str
    address: str
    place: int  # what steps call its index
    supervisor: asyncio.Task[None] | None = None
    is_kept: bool = True  # it is connected to again; False: it is not wanted any more
    joined: asyncio.Future[None] | None = None  # whoever added it waits for that
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set while it does not take part
    # For the status of the cluster:
    heard_at: float = 0.0  # loop time when it last said how closures had ended
    losses: int = 0  # how often it was lost
    missed: bool | None = None  # it was lost, or left; False: we have ended its session; None: new
    failed: int = 0  # closures that have raised on it
    last_error: tuple[float, str] | None = None  # loop time, and what the last of them has raised
    # Of its session:
    peers: tuple[Connection, Connection] | None = None  # control and bulk, while it takes part
    leaving: bool = False  # it has said that it leaves
    reason: str = ""  # what it gave as its reason for leaving, or for not going on
    sent_away: bool | None = None  # ended by us; True: what it runs is to blame

    def __post_init__(self) -> None:
        self.gone.set()


STRANGER_PAUSE_S = 5.0
"""Pause before an address is tried again at which something else than our task answered."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """As the arguments of ``ClusterCoordinator`` and of its strategy, which explain them.

    Defaults: those of one that has no workers to schedule closures on.
    """

    ps_timeout_s: float
    connect_timeout_s: float
    min_workers: int = 0
    origin: str = ""  # token of the strategy
    closure_timeout_s: float | None = None  # None: a step may take as long as it likes
    max_losses: int = 1
    max_flaps: int | None = None  # None: as often as it likes
    watchdog_timeout_s: float | None = None  # None: there is no watchdog
    on_stall: Callable[[str], object] | None = None
    attach: bool = False
    has_backups: bool = False


class WorkerLinks:
    """All connections of one coordinator to workers.

    Args:
        cluster: The other connections: workers are told of ps tasks, which refuse lost workers.
        workers: Address of every worker, by name.

    Attributes:
        records: All workers of the cluster by name, those too that are not there; to be read only.
        controls: The control connections of those that take part, by name.
        flapping: Decides who is set aside.
        on_joined: Called with the name of one that is ready for closures.
        on_lost: Called with the name of one that is not there any more, and whether what it held
            may be the cause.
        on_forgotten: Called with the name of one that is not connected to again.
        given_up: By name, what became of those that will not return.
        started: Set once workers are connected to; before that none can be added.
    """

    def __init__(self, cluster: ClusterLinks, workers: Mapping[str, str]) -> None:
        self._cluster, self.flapping = cluster, Flapping(cluster.options.max_flaps)
        self._membership, self._endpoint = cluster.membership, cluster.endpoint
        self._loop = asyncio.get_running_loop()
        self._places = {name: place for place, name in enumerate(workers)}  # also of those gone
        places = self._places
        self.records = {each: WorkerRecord(each, workers[each], places[each]) for each in workers}
        self.controls: dict[str, Connection] = {}
        self.flapping.is_anyone_there = lambda: bool(self.ready())
        self._one_less = asyncio.Event()  # pulsed when a worker ends, or is about to leave
        self.on_joined: Callable[[str], None] = lambda _: None
        self.on_lost: Callable[[str, bool], None] = lambda _, __: None
        self.on_forgotten: Callable[[str], None] = lambda _: None
        self.given_up: dict[str, str] = {}
        self.started = asyncio.Event()

    def start(self) -> None:
        """Connect to all of them, from now on."""
        self.started.set()
        for worker in self.records.values():
            worker.supervisor = self._cluster.supervise(self._keep(worker))

    def names(self) -> list[str]:
        """Return the name of each worker there ever was, by what steps call its index."""
        return list(self._places)

    def addresses(self) -> dict[str, str]:
        """Return where each worker of the cluster listens, by name."""
        return {worker.name: worker.address for worker in self.records.values()}

    def describe(self) -> list[str]:
        """Say who is set aside and who is about to leave."""
        aside = "is set aside for %.0f s, for it was lost again and again"
        set_aside = self.flapping.set_aside(self._loop.time())
        lines = [f"{name} {aside % seconds}" for name, seconds in set_aside]
        leaving = [each.name for each in self.records.values() if each.leaving]
        lines += [f"{name} leaves when its closure has ended" for name in leaving]
        return lines + [f"{name} {reason}" for name, reason in self.given_up.items()]

    # Workers that come and leave.

    async def add(self, address: str, index: int, timeout_s: float | None) -> str:
        """Take a worker into the cluster; return its name once it takes part.

        Args:
            address: Where it listens.
            index: What it calls itself; no other worker has it.
            timeout_s: Seconds to wait for it; None: for ever.

        Raises:
            ConnectFailed: It is not there in time.
            PsyncError: It refuses, or something else answers.

        Cancellation: It is forgotten, as after an error.
        """
        name = task_name("worker", index)
        assert name not in self.records, "add_worker has looked"
        place = self._places.setdefault(name, len(self._places))
        worker = self.records[name] = WorkerRecord(name, address, place)
        self.given_up.pop(name, None)
        self._membership.add_worker(name, address)
        worker.joined = self._loop.create_future()
        worker.supervisor = self._cluster.supervise(self._keep(worker))
        try:
            async with asyncio.timeout(timeout_s):
                await worker.joined
        except BaseException as exc:
            await self._forget(worker)
            if isinstance(exc, TimeoutError) and not isinstance(exc, PsyncError):
                raise ConnectFailed(
                    f"{name} at {address} could not be added within {timeout_s:g} s",
                    hint="is it running, and are its address and task index correct?",
                ) from exc
            raise
        finally:
            worker.joined = None
            self._cluster.on_worker_given_up()  # it may have been the last hope
        return name

    async def remove(self, name: str, reason: str) -> None:
        """Ask a worker to leave, wait until it has, and forget it; one that is not there, at once.

        Cancellation: It leaves all the same, and is not connected to again.
        """
        worker = self.records[name]
        if worker.peers is not None:
            try:
                worker.is_kept = False
                await worker.peers[0].call(messages.LeaveCluster(reason))
            except TransportError as exc:
                logger.info("%s was not told to leave: %s", name, exc)
        await self._forget_gone(worker, "was removed")
        self._cluster.on_worker_given_up()

    async def give_up(self, name: str, reason: str) -> None:
        """Forget a worker whose process has ended, and is not started again.

        Args:
            name: Of the worker; one that was removed meanwhile is forgotten already.
            reason: What became of it.

        Cancellation: It is not connected to again.
        """
        if (worker := self.records.get(name)) is not None:
            # Its connections end as it did: it is lost, or left.
            await self._forget_gone(worker, reason)
            if name not in self.records:
                self.given_up[name] = reason

    async def _forget_gone(self, worker: WorkerRecord, reason: str) -> None:
        worker.is_kept = False
        await worker.gone.wait()
        await self._forget(worker)
        if worker.joined is not None and not worker.joined.done():  # somebody adds it just now
            worker.joined.set_exception(ConnectFailed(f"{worker.name} {reason}"))

    def all_given_up(self) -> WorkerLost | None:
        """Return who is gone, if there is no worker that might come again."""
        if self.records or not self.given_up:
            return None
        *others, (last, reason) = self.given_up.items()
        before = "".join(f"; {name} {why}" for name, why in others)
        return WorkerLost(
            last,
            f"{reason}, and there is no other worker{before}",
            hint="their output says why they ended; add_worker(address) adds another one",
        )

    def end_session(self, name: str, error: Exception, *, blame: bool) -> None:
        """End what a worker does for us, and attach it anew: nothing that speaks against it.

        Args:
            name: Of the worker; nothing happens if it does not take part.
            error: What its connections end with.
            blame: Whether what it runs is the reason.
        """
        worker = self.records.get(name)
        if worker is not None and worker.peers is not None:
            worker.sent_away = blame
            for peer in worker.peers:
                peer.abort(error)

    def end_sessions(self, error: Exception) -> None:
        """End what all workers do for us; nobody is blamed."""
        for name in list(self.records):
            self.end_session(name, error, blame=False)

    # Those that take part.

    def current(self, peer: Connection) -> WorkerRecord | None:
        """Return whose connection this is, unless that was given up."""
        worker = self.records.get(peer.task)
        return worker if worker is not None and peer in (worker.peers or ()) else None

    def note_error(self, name: str, text: str) -> None:
        """Note that a closure has raised on a worker."""
        worker = self.records[name]
        worker.failed += 1
        worker.last_error = self._loop.time(), text

    def ready(self) -> list[str]:
        """Return the workers that are ready for closures, by index."""
        ready = [name for name in self.controls if not self.records[name].leaving]
        return sorted(ready, key=lambda name: parse_task_name(name)[1])

    async def waits(
        self, names: Collection[str], within_s: float
    ) -> dict[str, tuple[float, float]]:
        """Ask some of them how long they have waited for others; see ``watchdog.Waits``.

        Cancellation: Safe.
        """
        deadline = self._loop.time() + within_s
        answers = await self.ask(messages.AskStatistics(), names, deadline)
        found: dict[str, tuple[float, float]] = {}
        for name, answer in answers.items():
            if isinstance(answer, messages.Statistics) and (work := answer.counters["work"]):
                found[name] = work["since"], work["wait"]
        return found

    async def ask(
        self, message: Message, names: Collection[str] | None = None, deadline: float | None = None
    ) -> dict[str, Message]:
        """Return what workers that are there answer, by name: all of them, or those of ``names``.

        One that is lost meanwhile is left out, as is one that does not answer by ``deadline``. A
        worker answers when its step leaves the loop.

        Cancellation: Safe.
        """
        controls = self.controls.items()
        peers = {name: peer for name, peer in controls if names is None or name in names}
        calls = (peer.call(message, deadline=deadline) for peer in peers.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, Message] = {}
        for name, answer in zip(peers, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[name] = answer.message
            elif not isinstance(answer, PsyncError):
                raise answer
        return found

    # What workers say.

    def leaves(self, peer: Connection, message: messages.LeaveCluster) -> bool:
        """A worker is about to leave; return whether that is news."""
        worker = self.current(peer)
        if worker is None or worker.leaving:
            return False
        worker.leaving, worker.reason = True, message.reason
        logger.info("%s is leaving (%s)", worker.name, message.reason)
        self._note_one_less()
        return True

    def session_ends(self, request: Request[messages.EndSession]) -> None:
        """A worker has nothing more to say."""
        peer, worker = request.peer, self.records.get(request.peer.task)
        if worker is not None and peer.lane == "control" and peer in (worker.peers or (peer,)):
            # Also where the answer to its attachment is being taken.
            worker.reason = request.message.reason
            worker.leaving = worker.leaving and request.message.in_order
            if worker.leaving:
                self._end(worker)
        request.answer(messages.Done())

    # Supervision.

    async def _keep(self, worker: WorkerRecord) -> None:
        cluster, failures = self._cluster, 0
        while worker.is_kept:
            if failures:
                await asyncio.sleep(backoff(failures, self._endpoint.platform.uniform()))
            while (seconds := self.flapping.remaining(worker.name, self._loop.time())) > 0:
                await at_most(seconds, self._one_less.wait())  # it may be needed now
            mine = self._endpoint.incarnation
            worker.leaving, worker.reason, worker.sent_away = False, "", None
            try:
                lanes = await self._attach(worker)
            except WorkerLost as exc:
                logger.info("%s", exc.message)  # the next process of that name may stay
                failures += 1
                continue
            except PsyncError as exc:
                if not cluster.is_up and isinstance(exc, FencedError):
                    await cluster.ask_again(mine, worker.name, worker.address)
                    continue
                if worker.joined is not None and not worker.joined.done():
                    worker.joined.set_exception(exc)
                    return
                if not cluster.is_up or isinstance(exc, FencedError):
                    raise
                logger.error("%s cannot join: %s", worker.name, exc)
                await asyncio.sleep(STRANGER_PAUSE_S)
                continue
            if lanes is None:
                failures += 1
                self._count_loss(worker)
                continue
            failures = 0
            worker.peers, self.controls[worker.name] = lanes, lanes[0]
            worker.gone.clear()
            self.flapping.joined(worker.name, self._loop.time())
            if worker.missed is not None:
                again = logging.INFO if worker.missed else logging.DEBUG
                logger.log(again, "%s has rejoined", worker.name)
            if worker.missed is not False:
                cluster.note("joined", f"{worker.name} takes part")
            self.on_joined(worker.name)
            cluster.changed.set()
            if worker.joined is not None and not worker.joined.done():
                worker.joined.set_result(None)
            await first_of(*(lane.wait_closed() for lane in lanes))
            self._end(worker)
            for peer in lanes:
                peer.abort()

    def _end(self, worker: WorkerRecord) -> None:
        """A worker does not take part any more.

        | the end | its closures | the worker |
        |---|---|---|
        | it leaves | come back, if any are left | is not waited for; may return |
        | we end it | come back; are blamed if one was too slow | begins again |
        | it cannot go on, and says why | come back | is lost; counts unless a ps is missing |
        | without a word | come back, and are blamed | is lost, which counts |

        A worker whose losses count is set aside if there are too many; see ``Flapping``.
        """
        if worker.peers is None:
            return  # it had left before its connections ended
        error = worker.peers[0].error or worker.peers[1].error or "it closed the connection"
        error = error.message if isinstance(error, PsyncError) else error
        worker.peers = None
        del self.controls[worker.name]
        held = any(link.is_held for link in self._cluster.ps.links)
        misses_ps = held or len(self._cluster.attached) < len(self._cluster.processes)
        blame = counts = False
        if worker.leaving:
            text = f"{worker.name} has left ({worker.reason})"
        elif worker.sent_away is False:
            text = f"the session of {worker.name} was ended ({error})"
        elif worker.reason and worker.sent_away is None:
            text, counts = f"{worker.name} cannot go on ({worker.reason})", not misses_ps
        else:
            text, blame = f"{worker.name} is lost ({error})", True
            counts = worker.sent_away is None
        worker.missed = worker.leaving or blame or counts
        if worker.leaving:
            logger.info("%s", text)
            self._cluster.note("left", text)
            self._cluster.fence(self._membership.left(worker.name))
        else:
            self._cluster.fence(self._membership.disconnected(worker.name))
            if worker.missed:
                logger.warning("%s; its closures run again", text)
                self._cluster.note("lost", text)
                worker.losses += 1
            else:  # of a ps, as a rule, which the log says
                logger.debug("%s; its closures run again", text)
        if counts:
            self._count_loss(worker)
        worker.leaving = False
        self.on_lost(worker.name, blame)
        worker.gone.set()
        self._note_one_less()

    def _note_one_less(self) -> None:
        self._one_less.set()
        self._one_less.clear()

    def _count_loss(self, worker: WorkerRecord) -> None:
        pause = self.flapping.lost(worker.name, self._loop.time())
        if pause and self.flapping.is_anyone_there():
            logger.warning("%s is lost repeatedly; it is set aside for %g s", worker.name, pause)
            self._cluster.note("set aside", f"{worker.name}, for {pause:g} s")
        elif pause:
            logger.warning(
                "%s is lost repeatedly; it is not set aside, because there is no other worker",
                worker.name,
            )

    async def _attach(self, worker: WorkerRecord) -> tuple[Connection, Connection] | None:
        """Return its control and bulk connection; None if one is gone already.

        Raises:
            WorkerLost: It is about to leave.
            PsyncError: The worker refuses, or something else answers.
        """
        # Nobody waits for one that has left, so nobody wants to read of it.
        has_left = self._membership.state(worker.name) is TaskState.LEFT
        level = logging.DEBUG if has_left else logging.WARNING
        connect = self._endpoint.connect_retrying
        lanes = [await connect(worker.address, worker.name, level=level)]
        attached = False
        try:
            lanes.append(await connect(worker.address, worker.name, "bulk", level=level))
            control, bulk = lanes
            if control.is_open and bulk.is_open and bulk.incarnation == control.incarnation:
                # In our own range, whatever the worker's clock says: ps tasks refuse whoever worked
                # for an earlier coordinator, and nobody who works for the next one. See
                # ``ps.succession.Succession``.
                self._membership.connected(worker.name, self._endpoint.incarnation)
                incarnations = self._membership.incarnation(worker.name), self._endpoint.incarnation
                addresses = self._cluster.ps_addresses()
                message = messages.AttachWorker(
                    worker.place, *incarnations,
                    self._cluster.options.origin, self._cluster.program, addresses,
                    self._cluster.options.ps_timeout_s,
                )  # fmt: skip
                try:
                    await control.call(message)
                    # A ps may have moved meanwhile: then it is attached anew.
                    attached = self._cluster.ps_addresses() == addresses
                except TransportError as exc:
                    logger.info("%s: attaching it failed: %s", worker.name, exc)
                finally:
                    if not attached:
                        self._cluster.fence(self._membership.disconnected(worker.name))
        finally:
            if not attached:  # also if it refuses: it has room for so many connections only
                for lane in lanes:
                    lane.abort()
        return (control, bulk) if attached else None

    async def _forget(self, worker: WorkerRecord) -> None:
        """Let go of a worker, whatever it does."""
        worker.is_kept = False
        if worker.supervisor is not None:
            await end_all([worker.supervisor])
        if self.records.get(worker.name) is not worker:
            return  # somebody else has done it meanwhile
        if worker.peers is not None:
            for peer in worker.peers:
                peer.abort()
            worker.leaving = True
            worker.reason = worker.reason or "it was removed"
            self._end(worker)
        self._cluster.fence(self._membership.left(worker.name))
        self.flapping.forget(worker.name)
        self.records.pop(worker.name, None)
        self.on_forgotten(worker.name)


ANSWER_WITHIN_S = 1.0
"""A task that is there accepts a connection sooner."""


async def _ask_retrying(
    endpoint: Endpoint, task: str, address: str, message: Message, answer: type[M]
) -> M:
    """Return an answer, however often connections are lost."""
    losses = 0
    while True:
        peer = await endpoint.connect_retrying(address, task)
        try:
            return expect(await peer.call(message), answer, task, type(message).__name__)
        except ConnectionLost as exc:
            logger.info("%s: the request is retried: %s", task, exc.message)
            await asyncio.sleep(backoff(losses, endpoint.platform.uniform()))
            losses += 1
        finally:
            peer.close()


async def absent(platform: Platform, tasks: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (name, address) of those that do not answer at once, for a message.

    Args:
        platform: Network, secret, randomness.
        tasks: Address of each task, by its name.

    Cancellation: Safe.
    """
    endpoint = Endpoint(platform, CHIEF, ENQUIRER, {})

    async def answers(task: str, address: str) -> bool:
        try:
            await asyncio.wait_for(endpoint.connect(address, task), ANSWER_WITHIN_S)
        except PsyncError as exc:  # one that refuses us is there
            return not isinstance(exc, ConnectFailed | TimeoutError)
        except TimeoutError:
            return False
        return True

    try:
        here = await asyncio.gather(*(answers(*task) for task in tasks.items()))
    finally:
        await endpoint.close()
    return [task for task, answered in zip(tasks.items(), here, strict=True) if not answered]


class ClusterLinks:
    """All connections of one coordinator.

    A chief does not know yet under which incarnation it will be served, so it asks under
    ``ENQUIRER``, which is never refused, on a connection that serves for nothing else. The process
    at ps 0's own address grants incarnations (``ps.succession``), wherever ps 0 is served. If
    another ps or a worker refuses the number, because ps 0 was restarted with a clock behind, the
    chief asks for a higher one; if ps 0 has granted another chief since, it gives up: two that
    start at once do not overtake each other for ever. With ``attach=True`` it also asks the ps
    processes which ps tasks they serve, before it attaches any of them.

    Args:
        platform: Network, secret, randomness.
        cluster: The training cluster.
        options: With ``attach``, ps tasks set aside what they hold, to be adopted. Then ps 0 is
            attached first: a synchronous step that is being closed gets to its end before others
            refuse it. With backups, a ps may be served elsewhere than at its own address.
        program: Token of this process.

    Attributes:
        ps: The client that has the links to ps tasks.
        workers: Keeps those to workers.
        events: Of this coordinator.
        processes: Address of each ps at first, by name; that of ps 0 grants incarnations.
        homes: In whose process each is served.
        attached: Under which incarnation of ours each ps serves that is there, by name.
        is_up: Whether the cluster came up.
        changed: Set when a task was attached, or a supervisor failed.
        on_ps_lost: Called when variables are gone.
        on_replaced: Called when a newer coordinator has taken the cluster over.
        on_worker_given_up: Called when a worker will not come again.
    """

    def __init__(
        self, platform: Platform, cluster: ClusterSpec, options: CoordinatorOptions, program: str
    ) -> None:
        self.on_worker_given_up: Callable[[], None] = lambda: None
        self._platform, self.options, self.program = platform, options, program
        workers, ps = addresses_in(cluster, "worker"), addresses_in(cluster, "ps")
        pool = BlockPool()
        # Its incarnation is 0 until ps 0 has granted one.
        self.endpoint = Endpoint(platform, task_name("chief", 0), 0, {}, pool)
        client = platform.parts.of(PsClient)
        self.ps = client(self.endpoint, list(ps.values()), pool, options.ps_timeout_s)
        self.membership = Membership(workers)
        self.events = Events()
        self.note = self.events.note
        self.processes = ps
        self.homes = list(range(len(ps)))
        self.on_ps_lost: Callable[[ParameterServerLost], None] = lambda _: None
        self.on_replaced: Callable[[FencedError], None] = lambda _: None
        self.is_up = False
        self.changed = asyncio.Event()
        self._failure: BaseException | None = None  # why the cluster cannot come up
        self._is_closing = False  # connections end because they are closed here
        self._enquiring = asyncio.Lock()  # while another incarnation is asked for
        self._supervisors: set[asyncio.Task[None]] = set()
        self._moves = 0  # how often addresses of ps tasks have changed
        self._ps_0_attached = asyncio.Event()
        self.attached: dict[str, int] = {}
        self.workers = WorkerLinks(self, workers)
        # By process, what it has said to this incarnation: that binds none in between.
        self._served: dict[str, messages.ServedHere] = {}
        self._silent: dict[str, str] = {}  # processes that have not answered yet
        self._min_workers = len(workers)  # wanted at the start, at most
        self._unlisten: Callable[[], object] = lambda: None
        self._asking: asyncio.Timeout | None = None  # until ps 0 has granted an incarnation

    async def start(self, min_workers: int, timeout_s: float) -> None:
        """Connect to all tasks; return when every ps and ``min_workers`` workers are there.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds; names who is missing.
            AuthenticationError, ProtocolError, FencedError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        self.expect(min_workers)
        first = self.ps.links[0]
        try:
            async with asyncio.timeout(timeout_s) as self._asking:
                self._unlisten = self._platform.given_up.listen(self._given_up)
                await self.enquire()  # nobody else is asked for anything before
                self._asking = None
                if self.options.attach:
                    await self._find_served()
                for link in self.ps.links:
                    link.on_lost = self.on_ps_lost
                    link.lost_after_s = math.inf  # one that was never here is late, not lost
                    self.supervise(self._keep_ps(link))
                self.workers.start()
                await self._all_there()
                if self.options.attach:
                    await all_of([self._ask_served(task, ends=True) for task in self.processes])
                    await self._all_there()
        except TimeoutError as exc:
            missing = list(self._silent.items()) or self.missing()
            if self._asking is not None:  # ps 0 has not answered, and nobody else was tried
                if first.lost is not None:
                    raise first.lost from exc
                silent = await absent(self._platform, dict(missing))
                missing = silent or [(first.task, first.address)]
            who = ", ".join(f"{task} at {address}" for task, address in missing)
            raise ConnectFailed(
                f"the cluster did not come up within {timeout_s:g} s: no connection to {who}",
                hint="are these tasks running, and are these their addresses?",
            ) from exc
        finally:
            self._asking = None
        self.is_up = True

    async def _all_there(self) -> None:
        while not self._is_ready():
            if self._failure is not None:
                raise self._failure
            self.changed.clear()
            await self.changed.wait()

    def _is_ready(self) -> bool:
        return (
            len(self.workers.controls) >= self._min_workers
            and all(self.attached.get(ps) == self.endpoint.incarnation for ps in self.processes)
            # A new incarnation begins with empty ps tasks: what is created now would be gone.
            and not self._enquiring.locked()
        )

    async def close(self) -> None:
        """Close everything. Cancellation: connections may still be closing."""
        self._unlisten()
        self._is_closing = True
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.endpoint.close)
            stack.push_async_callback(self.ps.close)
            await end_all(self._supervisors)

    def missing(self) -> list[tuple[str, str]]:
        """Return (name, address) of every task that is waited for, ps tasks first."""
        ps = [item for item in self.processes.items() if item[0] not in self.attached]
        return ps + self.membership.missing()

    def expect(self, num_workers: int) -> None:
        """There will be so many workers: a cluster that is coming up waits for no more."""
        self._min_workers = min(self._min_workers, num_workers)
        self.changed.set()

    async def ps_counters(self, within_s: float) -> list[dict[str, Any] | None]:
        """Return the counters of each ps task; None: it has not answered in so many seconds.

        Cancellation: Safe.
        """

        async def counters(link: PsLink) -> dict[str, Any] | None:
            asking = ask(link, messages.AskStatistics(), messages.Statistics, urgent=True)
            try:
                return (await asyncio.wait_for(asking, within_s))[0].counters
            except (PsyncError, TimeoutError):
                return None

        return await asyncio.gather(*map(counters, self.ps.links))

    async def ps_statistics(self) -> list[dict[str, Any]]:
        """Return each ps task's counters. Raises ParameterServerLost. Cancellation: safe."""
        answers = [
            await ask(link, messages.AskStatistics(), messages.Statistics) for link in self.ps.links
        ]
        return [message.counters for message, _ in answers]

    async def _find_served(self) -> None:
        """Find where each ps is served; from then on no other one begins to serve it.

        Waits for all processes as long as it takes.

        Raises:
            AttachError: It cannot be told, or it is where this program cannot keep it.
            FencedError: A newer coordinator has come.
            AuthenticationError, ProtocolError: Something else answers at an address.

        Cancellation: Safe.
        """
        while late := [task for task in self.processes if task not in self._served]:
            await all_of([self._find(task) for task in late])
        found = places([self._served[task] for task in self.processes])
        for link, place in zip(self.ps.links, found, strict=True):
            self.homes[link.index] = place.process
            if not place.address:
                continue
            where = list(self.processes)[place.process]
            if not self.options.has_backups:
                raise AttachError(
                    f"{link.task} has been replaced by its backup, in the process of {where}",
                    hint='continue with ParameterServerStrategy(..., ps_recovery="backup"); or '
                    f"{BACK}",
                )
            logger.info("%s is served in the process of %s, at %s", link.task, where, place.address)
            self.move_ps(link, place.address)

    async def _find(self, task: str) -> None:
        mine = self.endpoint.incarnation
        try:
            answer = await self._ask_served(task)
        except FencedError:
            await self.ask_again(mine, task, self.processes[task])
            return
        if self.endpoint.incarnation == mine:
            self._served[task] = answer

    async def _ask_served(self, task: str, *, ends: bool = False) -> messages.ServedHere:
        """Ask the process at a ps task's own address, wherever that is served."""
        self._silent[task] = address = self.processes[task]
        question, kind = messages.AskServed(ends), messages.ServedHere
        answer = await _ask_retrying(self.endpoint, task, address, question, kind)
        del self._silent[task]
        return answer

    def _given_up(self, address: str, reason: str) -> None:
        """Whoever has started the task at this address does not start it again."""
        for name, at in self.workers.addresses().items():
            if at == address:
                self.supervise(self._give_up_worker(name, reason))
        for link in self.ps.links:
            if link.address == address:
                link.give_up(f"at {address} is lost: it {reason}")
                if not link.index and self._asking is not None and not self._asking.expired():
                    self._asking.reschedule(0.0)

    async def _give_up_worker(self, name: str, reason: str) -> None:
        await self.workers.give_up(name, reason)
        if not self.is_up and len(self.workers.addresses()) < self._min_workers:
            raise ConnectFailed(
                f"the cluster did not come up: {name} {reason}",
                hint="its output says why it ended",
            )
        self.on_worker_given_up()

    # Supervision: one coroutine for each task. The error of one is that of all.

    def supervise(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a supervisor until ``close``."""
        task = asyncio.get_running_loop().create_task(work)
        self._supervisors.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._supervisors.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self.changed.set()
            if self.is_up and isinstance(error, FencedError):
                self.on_replaced(error)
            elif not isinstance(error, PsyncError):
                logger.error("a supervisor of the coordinator failed", exc_info=error)

    async def enquire(self, previous: int = 0, seen: int = 0) -> None:
        """Let ps 0 grant an incarnation, see ``_granted``; it is borne from now on."""
        incarnation = await self._granted(*next(iter(self.processes.items())), previous, seen)
        note_incarnation(incarnation)
        self.endpoint.incarnation = incarnation
        self._served.clear()

    async def _granted(self, task: str, address: str, previous: int = 0, seen: int = 0) -> int:
        """Ask ps 0 for a new incarnation, or another task for the highest that it has served.

        Waits for the task as long as it takes, and asks again if a connection is lost.

        Args:
            task: Whom to ask.
            address: Where it listens.
            previous: What this coordinator was granted before; 0: nothing.
            seen: The highest that another task has served; 0: none is known.

        Raises:
            FencedError: Another coordinator has asked after this one.
            AuthenticationError, ProtocolError: Something else answers at that address.

        Cancellation: Safe.
        """
        endpoint = Endpoint(self._platform, CHIEF, ENQUIRER, {})
        try:
            grant = messages.GrantCoordinator(previous, seen)
            return (await _ask_retrying(endpoint, task, address, grant, messages.Number)).value
        finally:
            await endpoint.close()

    async def ask_again(self, refused: int, task: str, address: str) -> None:
        """A task has served a higher incarnation than ``refused``: ask ps 0 for one above that.

        So it is where ps 0 was started anew on a machine whose clock is behind. All tasks are
        attached again.

        Raises:
            FencedError: It is not so: a newer coordinator has come.
        """
        try:
            async with self._enquiring:
                if self.endpoint.incarnation != refused:
                    return  # somebody has asked meanwhile
                seen = await self._granted(task, address)
                if seen <= refused:
                    raise FencedError(f"{task} serves a newer coordinator than this one")
                logger.warning("%s has seen a newer coordinator than ps 0 has granted", task)
                await self.enquire(refused, seen)
                for peer in self.endpoint.peers:
                    peer.abort(ConnectionLost("this coordinator has a new incarnation"))
        finally:
            self.changed.set()

    # Ps tasks: attached, attached again, told whom to refuse.

    async def _keep_ps(self, link: PsLink) -> None:
        first = True
        while True:
            mine = self.endpoint.incarnation
            try:
                if link.index and self.options.attach:
                    await self._ps_0_attached.wait()
                peer = await link.peer("control")
                link.lost_after_s = self.options.ps_timeout_s
                await self.attach_ps(link, urgent=False)
            except ParameterServerLost:
                if not await link.recovered():
                    raise
                continue
            except FencedError:
                if self.is_up:
                    raise
                await self.ask_again(mine, link.task, link.address)
                continue
            if not peer.is_open:
                continue
            self.attached[link.task] = mine
            if not link.index:
                self._ps_0_attached.set()
            for fence in self.membership.fences():
                self.supervise(self._fence(link, messages.Fence(*fence)))
            if not first:
                logger.info("%s is reachable again", link.task)
                self.note("reachable", f"{link.task} is reachable again")
            first = False
            self.changed.set()
            await peer.wait_closed()
            del self.attached[link.task]
            logger.info("%s is unreachable; waiting for it", link.task)
            self.note("unreachable", f"{link.task} cannot be reached; waiting for it")

    async def attach_ps(self, link: PsLink, *, urgent: bool = True) -> None:
        """Attach a ps, which may have been started again.

        Args:
            link: To the ps.
            urgent: Whether others are held back meanwhile.

        Raises:
            ParameterServerLost: It was lost again.

        Cancellation: Safe.
        """

        def attachment() -> messages.AttachPs:
            # One that was started again while this program runs is of no lineage: see
            # ``store.reattach``.
            keep = self.options.attach or self.is_up
            return messages.AttachPs(
                self.endpoint.incarnation, self.ps_addresses(),
                self.options.ps_timeout_s, keep, self._moves,
            )  # fmt: skip

        call = Call(link, build=attachment, lane="control", urgent=urgent)
        (answer,) = await Answers(messages.PsAttached, "an attachment", [call]).send().all()
        link.plugins = answer.plugins

    def ps_addresses(self) -> list[str]:
        """Return where each ps is served now."""
        return [link.address for link in self.ps.links]

    def move_ps(self, link: PsLink, address: str) -> None:
        """Look for a ps at another address, which workers that are attached then are told."""
        link.revive()
        link.address = address
        self._moves += 1

    def tell_addresses(self) -> None:
        """Tell all ps tasks where each is served, after some have moved."""
        if self._moves:
            for link in self.ps.links:
                self.supervise(self._tell_addresses(link))

    async def _tell_addresses(self, link: PsLink) -> None:
        try:
            await self.attach_ps(link, urgent=False)
        except PsyncError as exc:  # it will be attached again
            logger.info("%s was not told the addresses of the ps tasks: %s", link.task, exc)

    def fence(self, fence: messages.Fence | None) -> None:
        """Let the ps tasks that are there refuse a worker; None: there is nothing to refuse."""
        if self._is_closing or fence is None:
            return  # whoever goes now is not lost; the next coordinator fences
        for link in self.ps.links:
            if link.task in self.attached:
                self.supervise(self._fence(link, fence))

    async def _fence(self, link: PsLink, fence: messages.Fence) -> None:
        try:
            await ask(link, fence, messages.Done)
        except PsyncError as exc:
            logger.warning("a fence was not accepted: %s", exc)


def addresses_in(cluster: ClusterSpec, job: str) -> dict[str, str]:
    """Return the address of each task of a job, by name."""
    indices = cluster.task_indices(job)
    return {task_name(job, index): cluster.task_address(job, index) for index in indices}


class FollowedWorkers:
    """Takes the workers in, and lets them leave in order; a ``net.platform.Follower``.

    Args:
        links: Of the coordinator, which runs or is starting.
        queue: Its closures.
    """

    def __init__(self, links: ClusterLinks, queue: ClosureQueue) -> None:
        self._links = links
        self._queue = queue

    def load(self) -> Load:
        """Return what there is to do."""
        return self._queue.statistics().load()

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        """Add and remove workers; see ``Follower``."""
        known = self._links.workers.addresses()
        names = {task_name("worker", index): at for index, at in added.items()}
        work = [self._add(name, at) for name, at in names.items() if known.get(name) != at]
        leaving = [name for index in removed if (name := task_name("worker", index)) in known]
        self._links.expect(len(known) - len(leaving))
        work += [self._remove(name) for name in leaving]
        return [self._links.supervise(each) for each in work]

    async def _add(self, name: str, address: str) -> None:
        workers = self._links.workers
        await workers.started.wait()
        try:
            while name in workers.addresses():  # its predecessor, which has left or is about to
                await workers.give_up(name, "was replaced")
            await workers.add(address, int(name.rpartition(":")[2]), None)
        except PsyncError as exc:
            logger.error("%s at %s was not added: %s", name, address, exc)

    async def _remove(self, name: str) -> None:
        if name in self._links.workers.addresses():
            await self._links.workers.remove(name, "the cluster is made smaller")
