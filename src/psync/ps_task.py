"""A ps task: one parameter server, from its first coordinator to its end.

It joins the network with ``PsServices``, which hold the variables of one coordinator on one
timeline, judge what comes in, and answer. This file says when these are replaced, as a whole:

    message          event      then serve
    AttachPs         ATTACH     nothing yet, for a newer coordinator, which may want what was there
    RestoreSnapshot  ROLL_BACK  a snapshot, on a new timeline
    BackUp, ...      DEPOSE     nothing: another process has answered as this ps's backup
    LogEntries       COPY       a snapshot of another process's ps, which BeginBackup has begun, and
                                what the log of that one says
    Promote          PROMOTE    that, from now on to everybody

The states: ``ps/life.py``; what lives for how long: ``sync/ps_services.py``. No user code runs
here, and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from psync.backups.host import BackupHost
from psync.cluster import CHIEF, ENQUIRER
from psync.errors import ConnectionLost, FencedError, UsageError
from psync.net.chief_presence import ChiefPresence
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.trace import SpanRecorder
from psync.net.transport import Listener
from psync.numerics.memory import BlockPool
from psync.numerics.rules import registered
from psync.ps.cooperative_work import LongWork
from psync.ps.life import Life, LifeEvent
from psync.ps.plans import Plans
from psync.ps.snapshots import Snapshots, load
from psync.ps.succession import (
    REPLACED,
    Succession,
    check_chief,
    check_newest,
)
from psync.specs import some_of
from psync.store.snapshot import Loaded
from psync.store.snapshot_state import NOTHING
from psync.sync.ps_services import PsServices
from psync.sync.ps_sync import CLOSER
from psync.wire import messages
from psync.wire.codec import Message

if TYPE_CHECKING:
    from psync.compat.board import Board

logger = logging.getLogger(__name__)

MAX_LISTED = 20
"""Peers and locks that a report names."""


@dataclass(eq=False, repr=False)
class PsTask:
    """One parameter server.

    Args:
        platform: Network, secret, randomness.
        index: Of this task among the ps tasks.
        address: Where to listen.
        stopped: Set when someone asked this task to end; default: an event of its own.
        is_hosted: Whether it is a backup, in the process of another one.

    Attributes:
        life: Its state.
        services: What serves the present coordinator, on the present timeline.
    """

    platform: Platform
    index: int
    address: str
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _: KW_ONLY
    is_hosted: bool = False

    def __post_init__(self) -> None:
        platform, index, is_hosted = self.platform, self.index, self.is_hosted
        self.task = task = f"/job:ps/task:{index}"
        self.life = Life.EMPTY
        self.pool = BlockPool(source=platform.memory.take, run=platform.memory.take_run)
        self.work = LongWork(self.task, self.stopped.set)
        nothing = self._nothing(0)
        make = platform.parts.of(PsServices)
        self.services = make(self, self.life, None, 0, nothing, Plans(task))
        self._board: Board | None = None  # until a task of a training session posts
        self._host = BackupHost(self)
        # Every chief knows the process's own address: it is asked there what it serves, and that
        # of ps 0 grants incarnations, wherever ps 0 is served.
        clock = None if index or is_hosted else platform.new_incarnation
        self._succession = Succession(self, clock)
        self._snapshots = platform.parts.of(Snapshots)(self)
        handlers: dict[type[Message], Handler] = {
            messages.AttachPs: Handler(self._attach),
            messages.AskStatistics: Handler(
                lambda request: request.answer(messages.Statistics(self.statistics()))
            ),
            messages.Shutdown: Handler(self._shutdown),
            messages.Post: Handler(self._post),
            **self._succession.handlers(),
            **self._snapshots.handlers(),
            **self._host.handlers(),
            messages.FillSnapshot: Handler(self._fill),
            **({} if is_hosted else {messages.AskServed: Handler(self._host.ask_served)}),
            **self.services.handlers(),
        }
        incarnation = platform.new_incarnation()
        self._endpoint = Endpoint(platform, task, incarnation, handlers, self.pool, self._admit)
        self.chief = ChiefPresence(self._endpoint)
        self._recorder = SpanRecorder(platform, task, self._facts, self._counters)
        self._recorder.watch_endpoint(self._endpoint)
        handlers[messages.AskSpans] = Handler(self._recorder.answer)

    async def start(self) -> Listener:
        """Listen. Raises ConfigurationError if the address is taken. Cancellation: safe."""
        return await self._endpoint.listen(self.address)

    async def close(self) -> None:
        """Finish the updates that have begun, then close all connections.

        Cancellation: Updates go on; what is not closed yet stays open: call it again.
        """
        await self.services.drain()
        await self.work.drain()  # and let their senders know
        self._recorder.close()
        await self._endpoint.close(goes_on=True)  # updates do, for a while
        self.life = self.life.after(LifeEvent.CLOSE, self.task)
        await self.services.close()
        await self._host.close()
        await self._succession.close()
        await self.work.drain()  # what began meanwhile
        self.work.close()
        if not self.is_hosted:
            self.platform.memory.end()

    @property
    def is_torn(self) -> bool:
        """Whether an update failed half-way, so that the task had to stop."""
        return self.work.is_torn or self._host.is_torn

    def describe(self) -> list[str]:
        """Say what this task holds and who waits here; for reports."""
        counters = self.statistics()
        store, groups = counters.pop("store"), counters.pop("sync")
        serves = f"serves coordinator {self.floor}" if self.floor else "waits for a coordinator"
        held = self.services.describe() + self._host.describe()
        lines = [
            f"{self.task}: {serves}",
            f"  {store['shards']} shards, {store['bytes']} bytes, {store['slot_bytes']} of slots",
            *(f"  {line}" for line in some_of(held, MAX_LISTED)),
        ]
        for name, group in groups.items():
            lines.append(
                f"  synchronous group {name}: step {group['step']}, {group['counted']} of "
                f"{group['target']} counted, {group['waiting']} wait for a token"
            )
        if waiting := sorted(self.services.sync.steps.waiting):
            names = [f"{name} ({incarnation})" for name, incarnation in waiting]
            lines.append(f"  waiting for others: {', '.join(some_of(names, MAX_LISTED))}")
        peers = self._endpoint.peers
        ends = sorted(f"{peer.task} ({peer.incarnation}) {peer.lane}" for peer in peers)
        lines.append(f"  connections: {', '.join(some_of(ends, MAX_LISTED)) or 'none'}")
        return [*lines, f"  counters: {json.dumps(counters, default=str)}"]

    def statistics(self) -> dict[str, Any]:
        """Return counters: store, ledger, connections."""
        return {
            **self.services.statistics(),
            "network": self._endpoint.statistics(),
            "hosted": {"diverged": self._host.diverged},
            "snapshot": self._snapshots.statistics(),
        }

    def _facts(self) -> dict[str, Any]:
        """Return what a trace has to know: the variables of plans, by their numbers."""
        plans = [plan for of in self.services.plans.of.values() for plan in of.values()]
        return {"plans": {str(plan.says.plan): [key[0] for key in plan.keys] for plan in plans}}

    def _counters(self) -> dict[str, float]:
        executor = self.services.executor
        return {"queue": executor.waiting + executor.computes.waiting}

    def _replace(
        self, attach: messages.AttachPs, timeline: int, contents: Loaded, patience_s: float | None
    ) -> None:
        """Serve something else from now on; what was begun before ends where it began.

        Args:
            attach: Who the coordinator is.
            timeline: Of it.
            contents: What is served.
            patience_s: See ``PsServices.end``.
        """
        self.services.end(self.life, timeline, patience_s, self._succession.lost)
        plans = self.services.plans.since(attach.coordinator)
        make = self.platform.parts.of(PsServices)
        self.services = make(self, self.life, attach, timeline, contents, plans)
        self._endpoint.handlers.update(self.services.handlers())

    def _nothing(self, floor: int) -> Loaded:
        return load(NOTHING, self, self.task, floor)

    # The coordinator.

    @property
    def floor(self) -> int:
        """Incarnation of the coordinator that is served, below which no task may be; 0: none."""
        return self.services.coordinator

    @property
    def newest(self) -> int:
        """Incarnation of the newest coordinator that was heard of in this process; 0: none."""
        return max(self.floor, self._host.newest)

    def check_coordinator(self, peer: Connection) -> None:
        """Raise FencedError unless a peer is the coordinator that is served."""
        attach = self.services.attach
        if attach is None or (peer.task, peer.incarnation) != (CHIEF, attach.coordinator):
            check_chief(peer)
            who = f"{peer.task}, {peer.incarnation}, is not the coordinator that it serves"
            raise FencedError(f"{self.task}: {who}, {self.floor or 'none yet'}")

    def _admit(self, hello: messages.Hello) -> messages.Refused | None:
        is_worker = hello.task.startswith("/job:worker/") and hello.incarnation != ENQUIRER
        if is_worker and self.life is not Life.SERVING:
            # It would find no variable here, and take that for a mistake of its program, if this
            # task has just been started again. It tries until the coordinator has decided.
            return messages.Refused("early", "it serves no coordinator yet")
        try:
            self.services.ledger.check_incarnation(hello.task, hello.incarnation)
        except FencedError as exc:
            newer = f"it serves {REPLACED.format(hello.task)}"
            return messages.Refused("fenced", newer if hello.task == CHIEF else exc.message)
        return None

    def cut_off(self) -> None:
        """Close the connections of tasks that have been replaced: so nobody asks at each message.

        What they make instead is refused, see ``_admit``. Other ps tasks are refused by message.
        """
        for peer in self._endpoint.peers:
            if not peer.task.startswith("/job:ps/"):
                try:
                    self.services.ledger.check_incarnation(*peer.client)
                except FencedError:
                    peer.close()  # once its last answers are written

    async def _attach(self, request: Request[messages.AttachPs]) -> None:
        peer, message = request.peer, request.message
        check_chief(peer)
        if message.coordinator != peer.incarnation:
            expected = f"{self.task}: expected AttachPs for incarnation {peer.incarnation}"
            raise UsageError(f"{expected}, the sender's, got {message.coordinator}")
        if message.coordinator < self.newest:
            raise FencedError(f"{self.task} serves {REPLACED.format(peer.task)}")
        if message.coordinator > self.floor:
            self._begin(message)
        else:
            self.services.moved(message.ps_addresses, message.moves)
        await self._succession.settled()
        request.answer(messages.PsAttached(registered()))

    def _begin(self, attach: messages.AttachPs) -> None:
        """Begin empty for a newer coordinator."""
        before = self.services
        if before.attach is not None:
            kept = "kept" if attach.keep else "dropped"
            logger.info("%s: a new coordinator takes over, variables are %s", self.task, kept)
            if attach.keep:
                # What was decided gets to its end, wherever the others are served by now.
                before.moved(attach.ps_addresses, before.attach.moves)
        # Also for synchronous pushes that wait for their turn; see ``PsServices.end`` for the rest.
        before.ledger.raise_floor(attach.coordinator)
        self.life = self.life.after(LifeEvent.ATTACH, self.task)
        self._snapshots.forget()
        # Where variables are kept, a step that is decided is applied.
        patience_s = attach.ps_timeout_s if attach.keep else None
        self._replace(attach, 0, self._nothing(attach.coordinator), patience_s)
        self._succession.begin(attach, before)
        if self._board is not None:
            self._board.begin(attach.coordinator)
        self.cut_off()
        if not attach.keep:  # else it may have to go on with what is here, see AskServed
            self._host.end_below(attach.coordinator)

    def _post(self, request: Request[messages.Post]) -> None:
        if self._board is None:
            self._board = import_module("psync.compat.board").Board(self.floor)
        self._board.post(request)

    def _shutdown(self, request: Request[messages.Shutdown]) -> None:
        peer, message = request.peer, request.message
        check_newest(peer, self.task, self.newest)
        logger.info("%s: %s asks it to stop: %s", self.task, peer.task, message.reason)
        self.stopped.set()
        request.answer(messages.Done())

    # Rollback.

    def _fill(self, request: Request[messages.FillSnapshot]) -> Coroutine[Any, Any, None]:
        is_backup = request.peer.task.startswith("/job:ps/")
        return self._host.fill(request) if is_backup else self._snapshots.fill(request)

    def take(self, loaded: Loaded, message: messages.RestoreSnapshot) -> None:
        """Serve what a snapshot holds from now on; see ``snapshots.Snapshots``."""
        before = self.services
        assert before.attach is not None, "only the coordinator that is served asks"
        logger.info("%s: rolls back to a snapshot, timeline %d", self.task, message.timeline)
        contents = before.restored(loaded)
        self.life = self.life.after(LifeEvent.ROLL_BACK, self.task)
        self._succession.lost()  # until the program says that all have it
        self._replace(before.attach, message.timeline, contents, None)
        for task, below in (*message.fences, (CLOSER, self.services.closer_incarnation)):
            self.services.refuse_below(task, below)

    # The backup of this ps.

    def lineage(self) -> int | None:
        """Return that of what is served, see ``store.reattach``; None: nothing is."""
        return self._succession.former.lineage if self.life is Life.SERVING else None

    def depose(self) -> None:
        """Its backup serves in its place: the coordinator says that to everybody, this hangs up."""
        logger.warning(
            "%s: has been replaced by its backup, and serves no more requests", self.task
        )
        self.life = self.life.after(LifeEvent.DEPOSE, self.task)
        self._succession.lost()
        for peer in self._endpoint.peers:
            if not peer.task.startswith("/job:ps/"):
                peer.abort(ConnectionLost(f"{self.task} has been replaced by its backup"))
        asyncio.get_running_loop().call_soon(self._drop)

    def _drop(self) -> None:
        """Hold nothing any more."""
        attach = self.services.attach
        if self.life is Life.DEPOSED and attach is not None:
            self._replace(attach, self.services.timeline, self._nothing(self.floor), None)

    def primary(self, address: str, epoch: int) -> messages.Primary | None:
        """Return what a newer coordinator has to know; see ``backups.host``."""
        if self.life is not Life.SERVING:
            return None
        timeline, waits_for = self.services.timeline, self.services.backup.waits_for()
        return messages.Primary(self.index, address, self.floor, timeline, epoch, *waits_for)

    def end_below(self, coordinator: int) -> None:
        """Hold nothing, if it has been replaced; see ``backups.host``."""
        if self.life is Life.SERVING and self.floor < coordinator:
            self.depose()

    # Backups of other ps tasks in this process; and being one, see ``backups.host``.

    def make_backup(self, index: int) -> PsTask:
        """Return a ps task of this process that does not listen."""
        host, _, _ = self.address.rpartition(":")
        address = f"{host}:0" if host else f"{self.address}.{index}"
        make = self.platform.parts.of(PsTask)
        # It shares ``stopped``: one that is damaged ends the process.
        made = make(self.platform, index, address, self.stopped, is_hosted=True)
        self.chief.watch(made._endpoint)
        return made

    def take_over(
        self, attach: messages.AttachPs, loaded: Loaded, timeline: int, lineage: int
    ) -> dict[type[Message], Handler]:
        """Hold what a snapshot of another one holds; return who does which entry of its log."""
        contents = self.services.restored(loaded)
        self.life = self.life.after(LifeEvent.COPY, self.task)
        self._succession.former.lineage = lineage
        self._replace(attach, timeline, contents, None)
        return {**self._endpoint.handlers, **self.services.replayed}

    async def promote(self, fences: Sequence[tuple[str, int]]) -> Listener:
        """Serve what was a backup until now; incarnations below ``fences`` are refused.

        Raises ConfigurationError if the address is taken. Cancellation: it may be listening.
        """
        self.life = self.life.after(LifeEvent.PROMOTE, self.task)
        self.services.accumulators.promoted()  # nobody waits in the log, which has ended
        for fence in fences:
            self.services.executor.in_turn(functools.partial(self.services.refuse_below, *fence))
        return await self.start()
