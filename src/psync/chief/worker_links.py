"""The coordinator's connections to workers: lost and re-established, workers that join and leave.

One supervising coroutine per worker: connect, attach, wait for the end, classify it, again.
``closures.membership.SessionEnd`` has the table of ends; what it asks is known before an end comes,
or by the worker's last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass

from psync.chief.attached_workers import AttachedWorkers, WorkerRecord
from psync.chief.ps_links import PsLinks
from psync.chief.supervision import Supervision
from psync.closures.flapping import Flapping
from psync.closures.membership import Membership, SessionEnd, TaskState, backoff
from psync.cluster import parse_task_name, task_name
from psync.errors import (
    ConnectFailed,
    FencedError,
    PsyncError,
    TransportError,
    WorkerLost,
)
from psync.net.connection import Connection
from psync.wire.messages import AttachWorker, EndSession, LeaveCluster

logger = logging.getLogger(__name__)

STRANGER_PAUSE_S = 5.0
"""Pause before an address is tried again at which something else than our task answered."""


@dataclass(eq=False)
class WorkerLinks:
    """All connections of one coordinator to workers.

    Attributes:
        attached: Those that take part.
        on_joined: Called with the name of one that is ready for closures.
        on_lost: Called with the name of one that is not there any more, and whether what it held
            may be the cause.
        on_forgotten: Called with the name of one that is not connected to again.
        given_up: By name, what became of those that will not return.
        started: Set once workers are connected to; before that none can be added.
    """

    supervision: Supervision
    membership: Membership
    ps: PsLinks  # workers are told of them, and they are told to refuse workers
    workers: InitVar[Mapping[str, str]]  # address of every worker, by name
    flapping: Flapping  # decides who is set aside
    tokens: tuple[str, str]  # of the strategy, and of this process

    def __post_init__(self, workers: Mapping[str, str]) -> None:
        self._endpoint = self.supervision.endpoint
        self._loop = asyncio.get_running_loop()
        self._places = {name: place for place, name in enumerate(workers)}  # also of those gone
        self._workers = {
            name: WorkerRecord(name, address, self._places[name])
            for name, address in workers.items()
        }
        self.attached = AttachedWorkers(self._workers)
        self.flapping.is_anyone_there = lambda: bool(self.attached.ready())
        self._one_less = asyncio.Event()  # pulsed when a worker ends, or is about to leave
        self.on_joined: Callable[[str], None] = lambda _: None
        self.on_lost: Callable[[str, bool], None] = lambda _, __: None
        self.on_forgotten: Callable[[str], None] = lambda _: None
        self.given_up: dict[str, str] = {}
        self.started = asyncio.Event()

    def start(self) -> None:
        """Connect to all of them, from now on."""
        self.started.set()
        for worker in self._workers.values():
            worker.supervisor = self.supervision.supervise(self._keep(worker))

    def names(self) -> list[str]:
        """Return the name of each worker there ever was, by what steps call its index."""
        return list(self._places)

    def addresses(self) -> dict[str, str]:
        """Return where each worker of the cluster listens, by name."""
        return {worker.name: worker.address for worker in self._workers.values()}

    def records(self) -> list[WorkerRecord]:
        """Return all workers of the cluster, those too that are not there; to be read only."""
        return list(self._workers.values())

    def describe(self) -> list[str]:
        """Say who is set aside and who is about to leave."""
        aside = "is set aside for %.0f s, for it was lost again and again"
        now = self._loop.time()
        return (
            [f"{name} {aside % seconds}" for name, seconds in self.flapping.set_aside(now)]
            + [
                f"{worker.name} leaves when its closure has ended"
                for worker in self._workers.values()
                if worker.leaving
            ]
            + [f"{name} {reason}" for name, reason in self.given_up.items()]
        )

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
        assert name not in self._workers, "add_worker has looked"
        place = self._places.setdefault(name, len(self._places))
        worker = self._workers[name] = WorkerRecord(name, address, place)
        self.given_up.pop(name, None)
        self.membership.add_worker(name, address)
        worker.joined = self._loop.create_future()
        worker.supervisor = self.supervision.supervise(self._keep(worker))
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
        return name

    async def remove(self, name: str, reason: str) -> None:
        """Ask a worker to leave, wait until it has, and forget it; one that is not there, at once.

        Cancellation: It leaves all the same, and is not connected to again.
        """
        worker = self._workers[name]
        if worker.peers is not None:
            try:
                worker.is_kept = False
                await worker.peers[0].call(LeaveCluster(reason))
            except TransportError as exc:
                logger.info("%s was not told to leave: %s", name, exc)
        await self._forget_gone(worker, "was removed")

    async def give_up(self, name: str, reason: str) -> None:
        """Forget a worker whose process has ended, and is not started again.

        Args:
            name: Of the worker; one that was removed meanwhile is forgotten already.
            reason: What became of it.

        Cancellation: It is not connected to again.
        """
        worker = self._workers.get(name)
        if worker is not None:
            # Its connections end as it did: it is lost, or left.
            await self._forget_gone(worker, reason)
            if name not in self._workers:
                self.given_up[name] = reason

    async def _forget_gone(self, worker: WorkerRecord, reason: str) -> None:
        worker.is_kept = False
        await worker.gone.wait()
        await self._forget(worker)
        if worker.joined is not None and not worker.joined.done():  # somebody adds it just now
            worker.joined.set_exception(ConnectFailed(f"{worker.name} {reason}"))

    def all_given_up(self) -> WorkerLost | None:
        """Return who is gone, if there is no worker that might come again."""
        if self._workers or not self.given_up:
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
        worker = self._workers.get(name)
        if worker is not None and worker.peers is not None:
            worker.sent_away = blame
            for peer in worker.peers:
                peer.abort(error)

    def end_sessions(self, error: Exception) -> None:
        """End what all workers do for us; nobody is blamed."""
        for name in list(self._workers):
            self.end_session(name, error, blame=False)

    # What workers say.

    def leaves(self, peer: Connection, message: LeaveCluster) -> bool:
        """A worker is about to leave; return whether that is news."""
        worker = self.attached.current(peer)
        if worker is None or worker.leaving:
            return False
        worker.leaving, worker.reason = True, message.reason
        logger.info("%s is leaving (%s)", worker.name, message.reason)
        self._note_one_less()
        return True

    def session_ends(self, peer: Connection, message: EndSession) -> None:
        """A worker has nothing more to say."""
        worker = self._workers.get(peer.task)
        if worker is None or peer.lane != "control" or (worker.peers and peer not in worker.peers):
            return
        worker.reason = message.reason  # also where the answer to its attachment is being taken
        worker.leaving = worker.leaving and message.in_order
        if worker.leaving:
            self._end(worker)

    # Supervision.

    async def _keep(self, worker: WorkerRecord) -> None:
        supervision, failures = self.supervision, 0
        while worker.is_kept:
            if failures:
                await asyncio.sleep(backoff(failures, self._endpoint.platform.uniform()))
            await self._wait_while_set_aside(worker.name)
            mine = self._endpoint.incarnation
            worker.begin()
            try:
                lanes = await self._attach(worker)
            except WorkerLost as exc:
                logger.info("%s", exc.message)  # the next process of that name may stay
                failures += 1
                continue
            except PsyncError as exc:
                if not supervision.is_up and isinstance(exc, FencedError):
                    await supervision.ask_again(mine, worker.name, worker.address)
                    continue
                if worker.joined is not None and not worker.joined.done():
                    worker.joined.set_exception(exc)
                    return
                if not supervision.is_up or isinstance(exc, FencedError):
                    raise
                logger.error("%s cannot join: %s", worker.name, exc)
                await asyncio.sleep(STRANGER_PAUSE_S)
                continue
            if lanes is None:
                failures += 1
                self._count_loss(worker)
                continue
            failures = 0
            worker.peers = lanes
            worker.gone.clear()
            self.flapping.joined(worker.name, self._loop.time())
            if worker.missed is not None:
                again = logging.INFO if worker.missed else logging.DEBUG
                logger.log(again, "%s has rejoined", worker.name)
            if worker.missed is not False:
                supervision.note("joined", f"{worker.name} takes part")
            self.on_joined(worker.name)
            supervision.changed.set()
            if worker.joined is not None and not worker.joined.done():
                worker.joined.set_result(None)
            await wait_any_closed(*lanes)
            self._end(worker)
            for peer in lanes:
                peer.abort()

    def _end(self, worker: WorkerRecord) -> None:
        """A worker does not take part any more."""
        if worker.peers is None:
            return  # it had left before its connections ended
        error = worker.peers[0].error or worker.peers[1].error or "it closed the connection"
        error = error.message if isinstance(error, PsyncError) else error
        worker.peers = None
        missing = [task for task, _ in self.membership.missing()]
        misses_ps = any(parse_task_name(task)[0] == "ps" for task in missing)
        misses_ps = misses_ps or any(link.is_held for link in self.ps.links)
        end = SessionEnd.of(
            worker.name, worker.leaving, worker.sent_away, worker.reason, error, misses_ps=misses_ps
        )
        worker.missed = end.in_order or end.blame or end.counts
        if end.in_order:
            logger.info("%s", end.text)
            self.supervision.note("left", end.text)
            self.ps.fence(self.membership.left(worker.name))
        else:
            self._lost(worker.name)
            if worker.missed:
                logger.warning("%s; its closures run again", end.text)
                self.supervision.note("lost", end.text)
                worker.losses += 1
            else:  # of a ps, as a rule, which the log says
                logger.debug("%s; its closures run again", end.text)
        if end.counts:
            self._count_loss(worker)
        worker.leaving = False
        self.on_lost(worker.name, end.blame)
        worker.gone.set()
        self._note_one_less()

    def _note_one_less(self) -> None:
        self._one_less.set()
        self._one_less.clear()

    async def _wait_while_set_aside(self, name: str) -> None:
        while (seconds := self.flapping.remaining(name, self._loop.time())) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._one_less.wait()  # it may be needed now

    def _count_loss(self, worker: WorkerRecord) -> None:
        pause = self.flapping.lost(worker.name, self._loop.time())
        if pause and self.flapping.is_anyone_there():
            logger.warning("%s is lost repeatedly; it is set aside for %g s", worker.name, pause)
            self.supervision.note("set aside", f"{worker.name}, for {pause:g} s")
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
        has_left = self.membership.state(worker.name) is TaskState.LEFT
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
                # ``ps.succession.CoordinatorGrants``.
                self.membership.connected(worker.name, self._endpoint.incarnation)
                message = self._attachment(worker)
                try:
                    await control.call(message)
                    # A ps may have moved meanwhile: then it is attached anew.
                    attached = list(self.ps.addresses.values()) == message.ps_addresses
                except TransportError as exc:
                    logger.info("%s: attaching it failed: %s", worker.name, exc)
                finally:
                    if not attached:
                        self._lost(worker.name)
        finally:
            if not attached:  # also if it refuses: it has room for so many connections only
                for lane in lanes:
                    lane.abort()
        return (control, bulk) if attached else None

    def _attachment(self, worker: WorkerRecord) -> AttachWorker:
        """Return what a worker is told."""
        return AttachWorker(
            worker.place, len(self._places), self.membership.incarnation(worker.name),
            self._endpoint.incarnation, *self.tokens, list(self.ps.addresses.values()),
            self.ps.ps_timeout_s,
        )  # fmt: skip

    def _lost(self, worker: str) -> None:
        self.ps.fence(self.membership.disconnected(worker))

    async def _forget(self, worker: WorkerRecord) -> None:
        """Let go of a worker, whatever it does."""
        worker.is_kept = False
        supervisor = worker.supervisor
        if supervisor is not None and not supervisor.done():
            supervisor.cancel()
            await asyncio.wait((supervisor,))
        if self._workers.get(worker.name) is not worker:
            return  # somebody else has done it meanwhile
        if worker.peers is not None:
            for peer in worker.peers:
                peer.abort()
            worker.leaving = True
            worker.reason = worker.reason or "it was removed"
            self._end(worker)
        self.ps.fence(self.membership.left(worker.name))
        self.flapping.forget(worker.name)
        self._workers.pop(worker.name, None)
        self.on_forgotten(worker.name)


async def wait_any_closed(*peers: Connection) -> None:
    """Wait until one of the connections is gone. Cancellation: safe."""
    gone = asyncio.Event()

    def listener(_: Connection) -> None:
        gone.set()

    for peer in peers:
        if peer.is_closed:
            return
        peer.on_closed.append(listener)
    await gone.wait()
