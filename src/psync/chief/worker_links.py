"""The coordinator's connections to workers: lost and re-established, workers that join and leave.

One supervising coroutine per worker: connect, attach, wait for the end, classify it, again.
``closures.membership.SessionEnd`` has the table of ends; what it asks is known before an end comes,
or by the worker's last message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from psync.chief.attached_workers import AttachedWorkers
from psync.closures.flapping import Flapping
from psync.closures.membership import Assign, Membership, SessionEnd, TaskState, backoff
from psync.cluster import parse_task_name, task_name
from psync.errors import ConnectFailed, FencedError, PsyncError, TransportError, WorkerLost
from psync.net.endpoint import Endpoint
from psync.net.peer import Peer
from psync.wire.recovery_messages import EndSession, LeaveCluster

if TYPE_CHECKING:
    from psync.chief.cluster_links import ClusterLinks

logger = logging.getLogger(__name__)

STRANGER_PAUSE_S = 5.0
"""Pause before an address is tried again at which something else than our task answered."""


class _Worker:
    """One worker of the cluster, whether it is there or not. Its states:

    - away: ``peers`` is None, ``gone`` is set;
    - takes part: ``peers`` are its connections;
    - leaving (``leaving``): it begins nothing new, and is away next;
    - not kept (``is_kept`` is False): its supervisor ends with the next ``gone``.
    """

    __slots__ = (
        "address", "gone", "is_kept", "joined", "leaving", "name", "peers", "place", "reason",
        "sent_away", "supervisor",
    )  # fmt: skip

    def __init__(self, name: str, address: str, place: int) -> None:
        self.name = name
        self.address = address
        self.place = place  # what steps call its index
        self.supervisor: asyncio.Task[None] | None = None
        self.is_kept = True  # it is connected to again; False: it is not wanted any more
        self.joined: asyncio.Future[None] | None = None  # whoever added it waits for that
        self.gone = asyncio.Event()  # set while it does not take part
        self.gone.set()
        self.begin()

    def begin(self) -> None:
        """A new session: nothing is known of its end."""
        self.peers: tuple[Peer, Peer] | None = None  # control and bulk, once it takes part
        self.leaving = False  # it has said that it leaves
        self.reason = ""  # what it gave as its reason for leaving, or for not going on
        self.sent_away: bool | None = None  # ended by us; True: what it runs is to blame


class WorkerLinks:
    """All connections of one coordinator to workers.

    Args:
        endpoint: Makes them.
        membership: Of the cluster.
        owner: The cluster's links.
        workers: Address of every worker, by name.
        flapping: Decides who is set aside.

    Attributes:
        attached: Those that take part.
        on_joined: Called with the name of one that is ready for closures.
        on_lost: Called with the name of one that is not there any more, and whether what it held
            may be the cause.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        membership: Membership,
        owner: ClusterLinks,
        workers: dict[str, str],
        flapping: Flapping,
    ) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._owner = owner
        self._flapping = flapping
        self.attached = AttachedWorkers()
        self.on_joined: Callable[[str], None] = lambda _: None
        self.on_lost: Callable[[str, bool], None] = lambda _, __: None
        self.given_up: dict[str, str] = {}  # by name, what became of those that will not return
        self._loop = asyncio.get_running_loop()
        self._places = {name: place for place, name in enumerate(workers)}  # also of those gone
        self._workers = {
            name: _Worker(name, address, self._places[name]) for name, address in workers.items()
        }

    def start(self) -> None:
        """Connect to all of them, from now on."""
        for worker in self._workers.values():
            worker.supervisor = self._owner.supervise(self._keep(worker))

    def names(self) -> list[str]:
        """Return the name of each worker there ever was, by what steps call its index."""
        return list(self._places)

    def addresses(self) -> dict[str, str]:
        """Return where each worker of the cluster listens, by name."""
        return {worker.name: worker.address for worker in self._workers.values()}

    def describe(self) -> list[str]:
        """Say who is set aside and who is about to leave."""
        now = self._loop.time()
        return (
            [
                f"{name} is set aside for {seconds:.0f} s, for it was lost again and again"
                for name, seconds in self._flapping.set_aside(now)
            ]
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
        worker = self._workers[name] = _Worker(name, address, place)
        self.given_up.pop(name, None)
        self._membership.add_worker(name, address)
        worker.joined = self._loop.create_future()
        worker.supervisor = self._owner.supervise(self._keep(worker))
        try:
            async with asyncio.timeout(timeout_s):
                await worker.joined
        except BaseException as exc:
            await self._forget(worker)
            if isinstance(exc, TimeoutError) and not isinstance(exc, PsyncError):
                raise ConnectFailed(
                    f"{name} at {address} could not be added within {timeout_s:g} s",
                    hint="is it running, is this its address, and the task index its own?",
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
        worker.is_kept = False
        if worker.peers is not None:
            try:
                await worker.peers[0].call(LeaveCluster(reason))
            except TransportError as exc:
                logger.info("%s was not told to leave: %s", name, exc)
            await worker.gone.wait()
        await self._forget(worker)

    async def give_up(self, name: str, reason: str) -> None:
        """Forget a worker whose process has ended, and is not started again.

        Args:
            name: Of the worker.
            reason: What became of it.

        Cancellation: It is not connected to again.
        """
        worker = self._workers.get(name)
        if worker is None:
            return  # it was removed meanwhile
        worker.is_kept = False
        await worker.gone.wait()  # its connections end as it did: it is lost, or has left
        await self._forget(worker)
        if name not in self._workers:
            self.given_up[name] = reason

    def all_given_up(self) -> WorkerLost | None:
        """Return who is gone, if there is no worker that might come again."""
        if self._workers or not self.given_up:
            return None
        *others, (last, reason) = self.given_up.items()
        before = "".join(f"; {name} {why}" for name, why in others)
        return WorkerLost(
            last,
            f"{reason}, and there is no other worker{before}",
            hint="what they wrote says why they ended; add_worker(address) takes in another one",
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

    def leaves(self, peer: Peer, message: LeaveCluster) -> bool:
        """A worker is about to leave; return whether that is news."""
        worker = self._current(peer)
        if worker is None or worker.leaving:
            return False
        worker.leaving, worker.reason = True, message.reason
        self.attached.leaves(worker.name)
        logger.info("%s is about to leave (%s)", worker.name, message.reason)
        return True

    def session_ends(self, peer: Peer, message: EndSession) -> None:
        """A worker has nothing more to say."""
        worker = self._current(peer)
        if worker is None or peer.lane != "control":
            return
        worker.reason = message.reason
        worker.leaving = worker.leaving and message.in_order
        if worker.leaving:
            self._end(worker)

    def _current(self, peer: Peer) -> _Worker | None:
        return self._workers.get(peer.task) if self.attached.is_current(peer) else None

    # Supervision.

    async def _keep(self, worker: _Worker) -> None:
        failures, returns = 0, False
        while worker.is_kept:
            pause = self._flapping.remaining(worker.name, self._loop.time())
            if failures:
                pause = max(pause, backoff(failures, self._endpoint.platform.uniform()))
            await asyncio.sleep(pause)
            mine = self._owner.incarnation
            try:
                lanes = await self._attach(worker)
            except WorkerLost as exc:
                logger.info("%s", exc.message)  # the next process of that name may stay
                failures += 1
                continue
            except PsyncError as exc:
                if not self._owner.is_up and isinstance(exc, FencedError):
                    await self._owner.ask_again(mine, worker.name, worker.address)
                    continue
                if worker.joined is not None and not worker.joined.done():
                    worker.joined.set_exception(exc)
                    return
                if not self._owner.is_up or isinstance(exc, FencedError):
                    raise
                logger.error("%s cannot take part: %s", worker.name, exc)
                await asyncio.sleep(STRANGER_PAUSE_S)
                continue
            if lanes is None:
                failures += 1
                self._count_loss(worker)
                continue
            if returns:
                logger.warning("%s takes part again", worker.name)
            failures, returns = 0, True
            worker.begin()
            worker.peers = lanes
            worker.gone.clear()
            self.attached.joined(worker.name, *lanes)
            self.on_joined(worker.name)
            self._owner.worker_joined()
            if worker.joined is not None and not worker.joined.done():
                worker.joined.set_result(None)
            await wait_any_closed(*lanes)
            self._end(worker)
            for peer in lanes:
                peer.abort()

    def _end(self, worker: _Worker) -> None:
        """A worker does not take part any more."""
        if worker.peers is None:
            return  # it had left before its connections ended
        control, bulk = worker.peers
        worker.peers = None
        end = SessionEnd.of(
            worker.leaving, worker.sent_away, worker.reason, misses_ps=self._misses_ps()
        )
        if end.in_order:
            logger.info("%s has left (%s)", worker.name, worker.reason)
            self._owner.perform(self._membership.left(worker.name))
        else:
            self._lost(worker.name)
            error = control.error or bulk.error or "it closed the connection"
            if end.blame:
                what = f"{worker.name} is lost ({error})"
            elif worker.sent_away is not None:
                what = f"the session of {worker.name} was ended ({error})"
            else:
                what = f"{worker.name} cannot go on ({worker.reason})"
            logger.warning("%s; its closures run again", what)
            if end.counts:
                self._count_loss(worker)
        worker.leaving = False
        self.attached.gone(worker.name)
        self.on_lost(worker.name, end.blame)
        worker.gone.set()

    def _count_loss(self, worker: _Worker) -> None:
        pause = self._flapping.lost(worker.name, self._loop.time())
        if pause:
            logger.warning(
                "%s is lost again and again; it is set aside for %g s", worker.name, pause
            )

    async def _attach(self, worker: _Worker) -> tuple[Peer, Peer] | None:
        """Return its control and bulk connection; None if one is gone already.

        Raises:
            WorkerLost: It is about to leave.
            PsyncError: The worker refuses, or something else answers.
        """
        # Nobody waits for one that has left, so nobody wants to read of it.
        has_left = self._membership.state(worker.name) is TaskState.LEFT
        level = logging.DEBUG if has_left else logging.WARNING
        connect = self._endpoint.connect_retrying
        control = await connect(worker.address, worker.name, level=level)
        try:
            bulk = await connect(worker.address, worker.name, "bulk", level=level)
        except BaseException:
            control.abort()
            raise
        attached = False
        try:
            if control.is_open and bulk.is_open and bulk.incarnation == control.incarnation:
                incarnation = self._connected(worker.name)
                message = self._owner.attachment(worker.place, len(self._places), incarnation)
                try:
                    await control.call(message)
                    # A ps may have moved meanwhile: then it is attached anew.
                    attached = self._owner.ps_addresses() == message.ps_addresses
                except TransportError as exc:
                    logger.info("%s: attaching it failed: %s", worker.name, exc)
                finally:
                    if not attached:
                        self._lost(worker.name)
        finally:
            if not attached:  # also if it refuses: it has room for so many connections only
                control.abort()
                bulk.abort()
        return (control, bulk) if attached else None

    def _connected(self, worker: str) -> int:
        # In our own range, whatever the worker's clock says: ps tasks refuse whoever worked for an
        # earlier coordinator, and nobody who works for the next one. See
        # ``ps.succession.CoordinatorGrants``.
        actions = self._membership.connected(worker, self._owner.incarnation)
        self._owner.perform(actions)
        return next(action.incarnation for action in actions if isinstance(action, Assign))

    def _lost(self, worker: str) -> None:
        self._owner.perform(self._membership.disconnected(worker, self._loop.time()))

    def _misses_ps(self) -> bool:
        return any(parse_task_name(task)[0] == "ps" for task, _ in self._membership.missing())

    async def _forget(self, worker: _Worker) -> None:
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
        self._owner.perform(self._membership.left(worker.name))
        self._flapping.forget(worker.name)
        self._workers.pop(worker.name, None)


async def wait_any_closed(*peers: Peer) -> None:
    """Wait until one of the connections is gone. Cancellation: safe."""
    gone = asyncio.Event()

    def listener(_: Peer) -> None:
        gone.set()

    for peer in peers:
        if peer.is_closed:
            return
        peer.on_closed.append(listener)
    await gone.wait()
