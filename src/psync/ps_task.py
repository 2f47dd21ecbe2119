"""The ps task: who is served, what is declared; and what serves the rest.

It owns a ``ShardStore`` (values, slots, optimizers) and a ``Ledger`` (identity of updates)
and connects both to the network. It runs no user code and unpickles nothing.

A new coordinator gets a new store, a new ledger, and new objects that serve its tasks: what was
begun for an earlier one ends where it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from psync.cluster_roles import ENQUIRER
from psync.errors import ConnectionLost, FencedError, PsyncError, UsageError
from psync.net.chief_presence import ChiefPresence
from psync.net.endpoint import Endpoint
from psync.net.peer import Handler, Peer, Reply
from psync.net.platform import Platform
from psync.net.transport import Listener
from psync.numerics.blocks import BlockPool
from psync.ps.accumulators import AccumulatorService
from psync.ps.backup import BackupService
from psync.ps.backup_accumulators import AccumulatorImage
from psync.ps.backup_host import ReplicaHost
from psync.ps.backup_sender import Served
from psync.ps.committer import Committer
from psync.ps.cooperative_work import LongWork
from psync.ps.creation import ShardCreation
from psync.ps.cut_gate import GateService
from psync.ps.locks import PsLocks
from psync.ps.pulls import PsPulls, RowPulls
from psync.ps.report import describe_ps
from psync.ps.snapshots import (
    ImageService,
    pack_accumulators,
    pack_answer,
    unpack_accumulators,
)
from psync.ps.succession import AdoptionService, CoordinatorGrants, ServedService
from psync.ps.updates import PsUpdates
from psync.store.ledger import (
    Ledger,
)
from psync.store.locate_ps import Primary
from psync.store.snapshot import Frozen, Thawed, freeze, settling
from psync.store.store import ShardStore
from psync.sync.groups import CLOSER
from psync.sync.ps_sync import PsSync
from psync.sync.replay import SyncFollower, SyncImage
from psync.sync.staleness_service import ClockService
from psync.sync.step_closer import StepCloser
from psync.wire.accumulator_messages import DefineAccumulator
from psync.wire.codec import Message
from psync.wire.lock_messages import LockShards, PullLocked
from psync.wire.messages import AskStatistics, Done, Hello, Refused, Shutdown, Statistics
from psync.wire.ps_messages import (
    AskOptimizer,
    AttachPs,
    CreateShards,
    DefineOptimizer,
    Fence,
    FinalBelow,
    Pull,
    SetOptimizer,
    SetSlots,
)
from psync.wire.recovery_messages import CoordinatorGranted, GrantCoordinator, TakeImage
from psync.wire.session_messages import ON_EACH_PS, ON_PS_0
from psync.wire.sync_messages import ReportSchedule

if TYPE_CHECKING:
    from psync.compat.session_service import SessionService

logger = logging.getLogger(__name__)

NOT_JUDGED = frozenset(
    {Pull, PullLocked, LockShards, SetSlots, SetOptimizer, DefineOptimizer, AskOptimizer}
)
"""What the ledger does not look at, and who was replaced must not be served with all the same."""

COMMITTED = (CreateShards, Fence, SetSlots, SetOptimizer, DefineOptimizer, AskOptimizer)
"""What changes a ps beside updates: a backup must have it before it is answered."""


class PsTask:
    """One parameter server.

    Args:
        platform: Network, secret, randomness.
        index: Of this task among the ps tasks.
        address: Where to listen.
        stopped: Set when someone asked this task to end; default: an event of its own.
        is_hosted: Whether it is a backup, in the process of another one.
    """

    def __init__(
        self,
        platform: Platform,
        index: int,
        address: str,
        stopped: asyncio.Event | None = None,
        *,
        is_hosted: bool = False,
    ) -> None:
        self.task = f"/job:ps/task:{index}"
        self.stopped = asyncio.Event() if stopped is None else stopped
        self._platform = platform
        self._index = index
        self._address = address
        self._pool = BlockPool()
        self._work = LongWork(self.task, self.stopped.set)
        self._coordinator = 0  # incarnation of the one that is served; 0 before the first
        self._attached: AttachPs | None = None  # what it has said
        self._is_deposed = False  # its backup serves in its place
        self._timeline = 0  # how often it has let this task go back to an image
        self._is_hosted = is_hosted
        # Of ps 0's own process, wherever ps 0 is served: every chief knows that address.
        self._grants = CoordinatorGrants() if index == 0 and not is_hosted else None
        self._parts = platform.parts
        self._store = self._parts.of(ShardStore)(self.task, self._pool)
        self._ledger = self._parts.of(Ledger)()
        self._accumulators = AccumulatorService(self.task, self._work, self._ledger)
        self._accumulated = AccumulatorImage(self._accumulators)
        self._closer: StepCloser | None = None  # on ps 0, once there is a coordinator
        self._follower: SyncFollower | None = None  # while this is a backup
        self._replayed: dict[type[Message], Handler] = {}  # what only a log says
        self._host = ReplicaHost(
            self.task, self._pool, self._make_backup, lambda: self._coordinator, self._parts
        )
        self._new_services()
        self._rows = RowPulls(
            self.task, platform.limits, self._work, self._pool,
            lambda: self._store, lambda: self._sync.steps(),
        )  # fmt: skip
        self._clocks = ClockService(
            self.task, lambda *who: self._ledger.check_incarnation(*who), self._in_groups
        )
        self._sessions: SessionService | None = None  # until a training session asks
        self._adoption = AdoptionService(
            self.task, self._work, self._check_coordinator, lambda: self._store
        )
        self._images = ImageService(
            self.task, self._work, self._pool, self._check_coordinator, self, self._parts
        )  # fmt: skip
        self._endpoint = Endpoint(
            platform, self.task, platform.new_incarnation(), self._handlers(), self._pool,
            self._admit,
        )  # fmt: skip
        self.chief = ChiefPresence(self._endpoint)

    async def start(self) -> Listener:
        """Listen. Raises ConfigurationError if the address is taken. Cancellation: safe."""
        return await self._endpoint.listen(self._address)

    async def close(self) -> None:
        """Finish the updates that have begun, then close all connections.

        Cancellation: Safe; updates go on.
        """
        self._locks.close()  # who waits for one has its turn
        self._gate.close()
        await self._backup.drain()
        await self._work.drain()  # and let their senders know
        await self._endpoint.close()
        self._backup.end()  # who waited for that hears nothing, and asks whoever takes over
        await self._host.close()
        if self._closer is not None:
            await self._closer.close()
        if self._sessions is not None:
            self._sessions.close()
        await self._adoption.close()
        await self._work.drain()  # what began meanwhile

    @property
    def is_torn(self) -> bool:
        """Whether an update failed half-way, so that the task had to stop."""
        return self._work.is_torn or any(task.is_torn for task in self._host.serving)

    def describe(self) -> list[str]:
        """Say what this task holds and who waits here; for reports."""
        waits = [
            *self._locks.describe(), *self._gate.describe(), *self._backup.describe(),
            *self._host.describe(),
        ]  # fmt: skip
        return describe_ps(
            self.task, self._coordinator, self.statistics(), waits, self._in_groups(),
            self._endpoint.peers,
        )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Return counters: store, ledger, connections."""
        return {
            "iterations": self._store.iterations,
            "pulls": self._pulls.pulls,
            "row_pulls": self._rows.pulls,
            "pushes": self._updates.pushes,
            "assigns": self._updates.assigns,
            "store": _counters(self._store.statistics()),
            "ledger": _counters(self._ledger.statistics()),
            "network": self._endpoint.statistics(),
            "locks": self._locks.statistics(),
            "staging": self._sync.statistics(),
            "sync": {} if self._closer is None else self._closer.steps.statistics(),
            "clocks": self._clocks.statistics(),
            "accumulators": self._accumulators.statistics(),
            "session": {} if self._sessions is None else self._sessions.statistics(),
            "image": {**self._images.statistics(), "timeline": self._timeline},
            "backup": self._backup.statistics(),
        }

    def _handlers(self) -> dict[type[Message], Handler]:
        return {
            AttachPs: Handler(self._attach),
            **self._adoption.handlers(),
            GrantCoordinator: Handler(self._grant),
            ReportSchedule: Handler(self._report_schedule),
            AskStatistics: Handler(lambda *_: Reply(Statistics(self.statistics()))),
            Shutdown: Handler(self._shutdown),
            **self._rows.handlers(),
            **self._images.handlers(),
            **self._service_handlers(),
            **self._clocks.handlers(),
            **self._host.handlers(),
            **dict.fromkeys(
                ON_EACH_PS if self._index else ON_PS_0 + ON_EACH_PS, Handler(self._of_session)
            ),
            **self._served_service(),
        }

    def _served_service(self) -> dict[type[Message], Handler]:
        if self._is_hosted:  # the process is asked at its own address
            return {}
        return ServedService(self.task, self, self._host).handlers()

    # Membership.

    @property
    def newest(self) -> int:
        """Incarnation of the newest coordinator that was heard of in this process; 0: none."""
        return max(self._coordinator, self._host.newest)

    def _admit(self, hello: Hello) -> Refused | None:
        is_worker = hello.task.startswith("/job:worker/") and hello.incarnation != ENQUIRER
        if is_worker and (not self._coordinator or self._is_deposed):
            # It would find no variable here, and take that for a mistake of its program, if this
            # task has just been started again. It tries until the coordinator has decided.
            return Refused("early", "it serves no coordinator yet")
        try:
            self._ledger.check_incarnation(hello.task, hello.incarnation)
        except FencedError as exc:
            return Refused("fenced", exc.message)
        return None

    def _grant(self, peer: Peer, message: GrantCoordinator, _: list[memoryview]) -> Reply:
        _check_chief(peer)
        granted = self.newest
        if self._grants is not None:
            clock = self._platform.new_incarnation()
            self._grants.note(self.newest)
            granted = self._grants.grant(clock, message.previous, message.seen)
        return Reply(CoordinatorGranted(granted))

    def _attach(self, peer: Peer, message: AttachPs, _: list[memoryview]) -> Awaitable[Reply]:
        _check_chief(peer)
        if message.coordinator != peer.incarnation:
            raise UsageError(f"{peer.task} speaks for another coordinator than itself")
        if message.coordinator < self.newest:
            raise FencedError(
                f"{self.task} serves a newer coordinator than {peer.task} "
                f"(incarnation {message.coordinator})"
            )
        if message.coordinator > self._coordinator:
            previous = self._coordinator
            if previous:
                kept = "kept" if message.keep else "dropped"
                logger.info("%s: a new coordinator takes over, variables are %s", self.task, kept)
            if message.keep and self._attached is not None:
                # What was decided gets to its end, wherever the others are served by now.
                self._moved_to(message.ps_addresses, self._attached.moves)
            self._coordinator = message.coordinator
            self._ledger.raise_floor(message.coordinator)  # also for what waits for its turn
            store = self._store
            self._begin(message)
            self._adoption.begin(store, previous, message.coordinator, keep=message.keep)
            self._clocks.restart()
            if self._sessions is not None:
                self._sessions.attached(message.coordinator)
            if not message.keep:  # else it may have to go on with what is here, see EndFormer
                self._host.end_below(message.coordinator)
        else:
            self._moved_to(message.ps_addresses, message.moves)
        return self._adoption.settled()

    def _begin(self, attach: AttachPs) -> None:
        """Begin empty for a new coordinator."""
        self._attached, self._timeline, self._is_deposed = attach, 0, False
        self._images.forget()
        self._serve_nothing(attach.coordinator)

    def _serve_nothing(self, floor: int) -> None:
        store = self._parts.of(ShardStore)(self.task, self._pool)
        self._serve(store, self._parts.of(Ledger)(floor), ())

    def _serve(
        self,
        store: ShardStore,
        ledger: Ledger,
        accumulators: Iterable[tuple[DefineAccumulator, int]],
    ) -> None:
        """Serve this from now on; what was begun before ends where it began."""
        self._store, self._ledger = store, ledger
        self._accumulators.restart(ledger, accumulators)
        backup = self._backup
        # Those of the same program say again what they had said of what was there before.
        going_back = ConnectionLost(f"{self.task} goes back to an image")
        ended = going_back if self._timeline else FencedError(f"{self.task} serves a newer program")
        if self._closer is None:
            backup.end(ended)
        self._locks.close()
        self._gate.close()
        self._new_services()
        self._endpoint.handlers.update(self._service_handlers())
        if self._index == 0 and self._attached is not None:
            shares = None
            if self._closer is not None:
                self._closer.replaced(
                    "an earlier image" if self._timeline else "a newer coordinator"
                )
                self._work.to_the_end(self._end_closer(self._closer, backup, ended))
                shares = self._closer.shares if self._timeline else None
            self._closer = StepCloser(
                self._platform, self._attached, self._sync, self._work, self._pool,
                self._clocks.look_again, self._timeline, shares,
            )  # fmt: skip
            self._endpoint.handlers.update(self._closer.handlers())

    def _end_closer(
        self, closer: StepCloser, backup: BackupService, ended: PsyncError
    ) -> Coroutine[Any, Any, None]:
        """End what decided steps; where variables are kept, a step that is decided is applied.

        Its part of this ps, and the global step, wait for their turns in the log before that ends.
        """
        attach = self._attached
        keep = attach is not None and attach.keep and not (self._timeline or self._is_deposed)
        patience_s = attach.ps_timeout_s if attach is not None and keep else 0.0
        if not keep:
            backup.end(ended)

        async def end() -> None:
            if keep:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await closer.pause("end")
                if closer.is_torn:
                    self._adoption.lost()
                backup.end(ended)
            await closer.close()

        return end()

    # Images, see ``image_service.Held``.

    @property
    def floor(self) -> int:
        """The lowest incarnation of any task that may be served."""
        return self._coordinator

    def settling(self) -> Iterator[None]:
        """Make ``freeze`` quick, in pieces."""
        return settling(self._store)

    def check_gate(self, cut: int) -> None:
        """Refuse a cut that may have missed updates; see ``image_service.Held``."""
        self._gate.check(cut)

    def freeze(self) -> tuple[Frozen, list[int]]:
        """Hold what is served; see ``image_service.Held``."""
        steps = None if self._closer is None else self._closer.steps
        pending = [] if steps is None else steps.pending_closures()
        frozen = freeze(
            self._store, self._ledger, pack_answer,
            pack_accumulators(self._accumulators.definitions()), self._sync.raw_configs(),
            () if steps is None else steps.calls(), pending,
        )  # fmt: skip
        return frozen, pending

    def take(self, thawed: Thawed, message: TakeImage) -> None:
        """Serve what an image holds from now on; see ``image_service.Held``.

        What clients of this task take for known stays known, if the image is older than that.
        """
        store, state = thawed.store, thawed.state
        for number, optimizer in self._store.optimizers().items():
            store.define_optimizer(number, optimizer.config)
        groups = {**self._sync.raw_configs(), **state.groups}
        accumulators = {each.name: (each, 0) for each, _ in self._accumulators.definitions()}
        for definition, step in unpack_accumulators(state.accumulators):
            accumulators[definition.name] = definition, step
        logger.info("%s: goes back to an image, timeline %d", self.task, message.timeline)
        self._timeline, self._is_deposed = message.timeline, False
        self._adoption.lost()  # until the program says that all have it
        self._serve(store, thawed.ledger, accumulators.values())
        for number, raw in groups.items():
            self._sync.define(number, raw)
        if self._closer is not None:
            self._closer.steps.note_calls(state.counted, state.ledger.final_below)
        self._clocks.restart()
        for task, below in (*message.fences, (CLOSER, self._closer_incarnation)):
            self._refuse_below(task, below)

    @property
    def _closer_incarnation(self) -> int:
        """With which ps 0 speaks to the others."""
        return self._coordinator + self._timeline

    def _in_groups(self) -> frozenset[tuple[str, int]]:
        return frozenset() if self._closer is None else self._closer.steps.waiting

    def _new_services(self) -> None:
        """Make what serves the pulls and updates of one coordinator's tasks."""
        self._locks = PsLocks(self.task, self._store)
        self._gate = GateService(
            self.task, self._ledger, CLOSER, self._check_coordinator, self._pause_steps,
            self._resume_steps, self._parts,
        )  # fmt: skip
        served = self.task, self._store, self._ledger, self._work, self._pool, self._locks
        self._sync = self._parts.of(PsSync)(self._platform, *served)
        self._sync.serves = bool(self._coordinator) and not self._is_deposed
        self._follower, self._replayed = None, {}
        self._sync_image = SyncImage(self._sync, lambda: self._closer)
        self._pulls = PsPulls(self.task, self._store, self._work, self._sync.steps, self._locks)
        self._updates = self._parts.of(PsUpdates)(*served, self._gate)
        self._backup = BackupService(
            self._platform, self._served, self._store, self._work, self._check_coordinator,
            lambda: self.freeze()[0], self._committing, self._depose, self._sync_image,
            self._accumulated.entries,
        )  # fmt: skip

    def _service_handlers(self) -> dict[type[Message], Handler]:
        creation = self._parts.of(ShardCreation)(
            self.task, self._index, self._store, self._work, self._pool, self._check_coordinator
        )
        handlers: dict[type[Message], Handler] = {Fence: Handler(self._fence)}
        for service in (creation, self._updates, self._sync, self._locks, self._pulls, self._gate):
            handlers.update(service.handlers())
        for kind in NOT_JUDGED & handlers.keys():
            handlers[kind] = self._of_served(handlers[kind])
        backup = self._backup
        for kind in COMMITTED:
            handlers[kind] = backup.committed(handlers[kind])
        handlers[FinalBelow] = backup.notified(Handler(self._final_below))
        return {**handlers, **self._accumulators.handlers(), **backup.handlers()}

    # Backups: that of this ps, and those of others in this process.

    def _served(self) -> Served | None:
        attach = self._attached
        if attach is None or self._is_deposed:
            return None
        return Served(self._index, attach, self._timeline, self._adoption.life)

    def _committing(self, committer: Committer) -> None:
        """From now on every change is done in the order of a log."""
        self._updates.committer = self._accumulators.committer = committer
        self._sync.commit_with(committer)
        if self._closer is not None:
            self._closer.expect_moves()

    def _depose(self) -> None:
        """Its backup serves in its place: the coordinator says that to everybody, this hangs up."""
        logger.warning("%s: has been replaced by its backup, and serves nobody any more", self.task)
        self._is_deposed = True
        self._adoption.lost()
        for peer in self._endpoint.peers:
            if not peer.task.startswith("/job:ps/"):
                peer.abort(ConnectionLost(f"{self.task} has been replaced by its backup"))
        asyncio.get_running_loop().call_soon(self._empty)

    def _empty(self) -> None:
        if self._is_deposed:
            self._serve_nothing(self._coordinator)

    def _make_backup(self, index: int) -> PsTask:
        host, _, _ = self._address.rpartition(":")
        address = f"{host}:0" if host else f"{self._address}.{index}"
        # One that is damaged ends the process.
        make = self._parts.of(PsTask)
        made = make(self._platform, index, address, self.stopped, is_hosted=True)
        self.chief.watch(made._endpoint)
        return made

    def take_over(self, attach: AttachPs, thawed: Thawed, timeline: int, life: int) -> None:
        """Hold what an image of another one holds; see ``replica_host.BackupTask``."""
        self._coordinator, self._attached, self._timeline = attach.coordinator, attach, timeline
        self._adoption.copied(life)
        state = thawed.state
        self._serve(thawed.store, thawed.ledger, unpack_accumulators(state.accumulators))
        for number, raw in state.groups.items():
            self._sync.define(number, raw)
        closer = self._closer
        if closer is not None:
            closer.steps.note_calls(state.counted, state.ledger.final_below)
            closer.expect_moves()
        self._follower = SyncFollower(
            self.task, self._sync, None if closer is None else closer.shares
        )
        self._replayed = {
            **self._follower.handlers(), **self._accumulators.replayed(),
            **self._accumulated.handlers(),
        }  # fmt: skip

    def primary(self, address: str, epoch: int) -> Primary | None:
        """Return what a newer coordinator has to know; see ``served_service.OwnTask``."""
        if not self._coordinator or self._is_deposed:
            return None
        waits_for = self._backup.waits_for()
        return Primary(self._index, address, self._coordinator, self._timeline, epoch, *waits_for)

    def end_below(self, coordinator: int) -> None:
        """Hold nothing, if it has been replaced; see ``served_service.OwnTask``."""
        if 0 < self._coordinator < coordinator and not self._is_deposed:
            self._depose()

    def handler(self, kind: type[Message]) -> Handler:
        """Return who does an entry; see ``replica_host.BackupTask``."""
        return self._replayed.get(kind) or self._endpoint.handlers[kind]

    def _moved_to(self, addresses: Sequence[str], moves: int) -> None:
        """Ps tasks are served here now; if this was a backup, it goes on with the steps."""
        assert self._attached is not None, "it is served"
        known = self._attached.ps_addresses
        if len(addresses) != len(known):  # of a cluster of another size: these are others
            return
        if moves < self._attached.moves or (self._follower is None and addresses == known):
            return
        self._attached = dataclasses.replace(
            self._attached, ps_addresses=list(addresses), moves=moves
        )
        if self._closer is not None:
            self._closer.moved(addresses)
            if self._follower is not None:
                self._closer.follow(self._follower.steps, self._follower.spread)
        self._follower, self._replayed = None, {}

    def end_of_log(self) -> None:
        """Nobody waits in it; see ``replica_host.BackupTask``."""
        self._accumulators.promoted()

    def refuse_below(self, task: str, below: int) -> None:
        """Serve no lower incarnation of a task; see ``replica_host.BackupTask``."""
        self._refuse_below(task, below)

    def _of_served(self, handler: Handler) -> Handler:
        """Refuse whoever was replaced, over a connection that it had before.

        And ps 0, if this task has just been started again: it is not refused at the handshake.
        """

        def run(peer: Peer, message: Any, body: list[memoryview]) -> Any:
            self._ledger.check_incarnation(peer.task, peer.incarnation)
            self._sync.check_served()
            return handler.run(peer, message, body)

        return Handler(run, handler.prepare)

    async def _pause_steps(self) -> None:
        await self._sync_image.pause("cut")

    def _resume_steps(self) -> None:
        self._sync_image.resume("cut")

    def _fence(self, peer: Peer, message: Fence, _: list[memoryview]) -> Reply | Awaitable[Reply]:
        if peer.task != CLOSER or peer.incarnation != self._closer_incarnation:
            self._check_coordinator(peer)
        rest = self._refuse_below(message.task, message.below)
        return Reply(Done()) if rest is None else _done_after(rest)

    def _refuse_below(self, task: str, below: int) -> Awaitable[None] | None:
        """Serve no lower incarnation of a task; return what large work follows from that."""
        self._ledger.fence(task, below)
        self._sync.fence(task, below)
        self._gate.look_again()
        if self._closer is not None:
            self._closer.lost(task, below)
        return self._accumulators.fence(task, below)

    def _final_below(self, peer: Peer, message: FinalBelow, _: list[memoryview]) -> None:
        if peer.incarnation == self._coordinator:  # a notification: nobody hears of an error
            self._ledger.final_below(message.closure)
            if self._follower is not None:
                self._follower.steps.final_below(message.closure)
            if self._closer is not None:
                self._closer.steps.final_below(message.closure)

    def _report_schedule(self, peer: Peer, message: ReportSchedule, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        self._clocks.hear(message)
        if self._closer is not None:
            self._closer.hear(message)
        return Reply(Done())

    def _of_session(self, peer: Peer, message: Message, body: list[memoryview]) -> Any:
        if self._sessions is None:
            self._sessions = import_module("psync.compat.session_service").SessionService(
                self._endpoint, self._coordinator, self._clocks, self._check_coordinator,
                self._refuse_below, lambda: self._store, lambda: self._closer,
            )  # fmt: skip
        return self._sessions.handlers()[type(message)].run(peer, message, body)

    def _shutdown(self, peer: Peer, message: Shutdown, _: list[memoryview]) -> Reply:
        _check_chief(peer)
        if peer.incarnation < self.newest:  # it has been replaced, and may not know
            raise FencedError(f"{self.task} serves a newer coordinator than {peer.task}")
        logger.info("%s: %s asks to stop: %s", self.task, peer.task, message.reason)
        self.stopped.set()
        return Reply(Done())

    def _check_coordinator(self, peer: Peer) -> None:
        _check_chief(peer)
        if peer.incarnation != self._coordinator:
            raise FencedError(f"{self.task}: {peer.task} is not the coordinator that it serves")


async def _done_after(rest: Awaitable[None]) -> Reply:
    await rest
    return Reply(Done())


def _check_chief(peer: Peer) -> None:
    if not peer.task.startswith("/job:chief/"):
        raise UsageError(f"{peer.task} is not a coordinator")


def _counters(statistics: Any) -> dict[str, Any]:
    """Return a snapshot as plain data that msgpack takes."""
    counters = dataclasses.asdict(statistics)
    counters.pop("versions", None)  # by shard: keys that are no text
    return counters
