"""The services of a ps: what lives for one coordinator and timeline, built and replaced as a whole.

What a ps task has lives as long as

    its process    network, memory, long work, variables kept for the next program, snapshots
                   that are frozen or being read, backups of other ps tasks: ``PsTask``, which is
                   ``PsProcess`` to all that follows
    a coordinator  plans of clients (``ps.plans``)
    a timeline     store, ledger, and all that serves them: ``PsServices``. A newer coordinator, a
                   rollback and a replacement by the backup end it, and build another one
    a connection   requests that wait

The state of a ps, which its backup has as well, is the ``sections`` of ``PsServices``: shards,
slots, optimizers, the ledger and plans (``updates``); accumulators and their takes; groups, staged
parts of pushes and, on ps 0, the rule of synchronous steps and those it has decided (``sync``). All
else, as locks, staleness clocks, the gate of a cut, requests that wait, ends with the timeline or a
connection. To add one: ``backups.primary.Section``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import msgpack

from psync.backups.primary import BackupService, Live, PsProcess, Section
from psync.cluster import parse_task_name
from psync.errors import ConfigurationError, ConnectionLost, FencedError, PsyncError, UsageError
from psync.net.connection import Handler, Request
from psync.ps.accumulators import Accumulators
from psync.ps.admission import PsLocks, UpdateGate
from psync.ps.computes import Compute, Touches
from psync.ps.count_teller import NEWS_SHIFT, CountTeller
from psync.ps.executor import MAX_KEPT_BYTES, Executor
from psync.ps.life import Life
from psync.ps.plans import NO_BYTES, Plans
from psync.ps.pulls import PsPulls
from psync.ps.updates import PsUpdates, copied_by, nothing_is_left
from psync.specs import STEP_BITS
from psync.store.commit_log import CommitLog
from psync.store.snapshot import Frozen, Loaded, freeze
from psync.store.snapshot_state import pack_answer
from psync.sync.ps_sync import CLOSER, PsSync
from psync.sync.staleness_service import ClockService
from psync.sync.step_closer import StepCloser
from psync.wire import codec
from psync.wire.closure_numbers import unpack_kept
from psync.wire.codec import Message
from psync.wire.messages import (
    AttachPs,
    AwaitWaiters,
    BeginBackup,
    CheckState,
    CreateShards,
    Done,
    Fence,
    FinalBelow,
    LockShards,
    MarkRestore,
    Number,
    Read,
    ReportSchedule,
    SetOptimizer,
    TellCounts,
)

logger = logging.getLogger(__name__)

NOT_JUDGED = (Read, LockShards, SetOptimizer)
"""What the ledger does not look at, and a process that does not serve its ps must refuse."""


class PsServices:
    """All that serves one coordinator on one timeline. Ended once, never built anew.

    Args:
        process: The ps task.
        life: SERVING, HOSTED; else nothing is to be served, and this is what refuses it.
        attach: Who the coordinator is, where ps tasks are served; None: there was none yet.
        timeline: How often that coordinator has rolled back to a snapshot.
        contents: What is served from now on; ``PsTask`` has filled it.
        plans: Of the clients of this coordinator.

    Attributes:
        sync: Synchronous steps; on ps 0, once it is attached, it decides them.
        replayed: On a backup, who does what only the log of its primary says, or says otherwise.
    """

    def __init__(
        self,
        process: PsProcess,
        life: Life,
        attach: AttachPs | None,
        timeline: int,
        contents: Loaded,
        plans: Plans,
    ) -> None:
        platform, task, work, pool = process.platform, process.task, process.work, process.pool
        self.attach, self.timeline = attach, timeline
        self.store, self.ledger = store, ledger = contents.store, contents.ledger
        state = contents.state
        ledger.on_fence = lambda *_: process.cut_off()
        self.plans = plans
        self._process = process
        self._unheard: set[int] = set()  # optimizers of which others tell in vain
        self._report_version = 0  # of the coordinator's newest report
        self._ended = False  # something else is served; a step may still be on its way
        self.locks = PsLocks(task, store)
        parts = platform.parts
        log = parts.of(CommitLog)(task, MAX_KEPT_BYTES)
        log.digest = self.digest
        self.executor = executor = Executor(task, store, work, log)
        plans.note = lambda client, message: executor.note(client, message, nothing_is_left)
        served = (task, store, ledger, work, pool, self.locks, executor, plans)
        serves = life in (Life.SERVING, Life.HOSTED)
        self.clocks = ClockService(task, ledger.check_incarnation, lambda: self.sync.steps.waiting)
        self.sync: PsSync
        if attach is None or process.index:
            self.sync = parts.of(PsSync)(*served, platform, serves)
        else:
            self.sync = parts.of(StepCloser)(
                *served, platform, serves, attach, self.clocks, timeline,
                life is Life.HOSTED,
            )  # fmt: skip
        for number, raw in state.groups:
            self.sync.known(number, raw)
        self.accumulators = Accumulators(task, work, ledger, executor, state.accumulators)
        self.gate = parts.of(UpdateGate)(
            task, ledger, CLOSER, process.check_coordinator,
            functools.partial(self.sync.pause, "cut"), functools.partial(self.sync.resume, "cut"),
        )  # fmt: skip
        self.pulls = PsPulls(*served, self.sync.staging, platform.limits)
        self.sync.read_now = self.pulls.read_now
        self.updates = parts.of(PsUpdates)(
            *served, self.gate, self.pulls, self.sync, process.check_coordinator
        )
        addresses = () if attach is None else attach.ps_addresses
        self.teller = parts.of(CountTeller)(
            platform, process.index, self.closer_incarnation, addresses, store, pool
        )
        if life is not Life.HOSTED:
            self._tell_counts()
        self.sections: Sequence[Section] = (self.updates, self.accumulators, self.sync)
        self.backup = BackupService(process, self)
        self.sync.check = self.backup.check_group
        self.replayed: dict[type[Message], Handler] = {}
        if life is Life.HOSTED:
            self.sync.expect_moves()
            self.replayed = {
                BeginBackup: Handler(self._restore),
                CheckState: Handler(lambda r: executor.in_turn(lambda: log.execute(r.message), r)),
            }
            for section in self.sections:
                self.replayed.update(section.replayed())

    def _tell_counts(self) -> None:
        """Tell the other ps tasks from now on how many pushes are counted here."""
        self.updates.counted = self.teller.changed
        self.updates.num_others = len(self.teller.others)
        self.teller.begin()

    @property
    def coordinator(self) -> int:
        """Incarnation of the coordinator that is served; 0: none."""
        return 0 if self.attach is None else self.attach.coordinator

    @property
    def closer_incarnation(self) -> int:
        """With which ps 0 speaks to the others."""
        return self.coordinator + self.timeline

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        handlers: dict[type[Message], Handler] = {
            Fence: Handler(self._fence), FinalBelow: Handler(self._final_below),
            TellCounts: Handler(self._hear_counts),
        }  # fmt: skip
        for service in (self.updates, self.sync, self.locks, self.pulls, self.gate):
            handlers.update(service.handlers())
        if not self.sync.serves:  # this task has just been started again, or its backup serves
            handlers |= dict.fromkeys(NOT_JUDGED, Handler(lambda _: self.sync.check_served()))
        # What changes a ps as soon as it comes, beside what is admitted: entries as they are. What
        # is copied, or set as a whole, and how updates are computed: between computes.
        logged: dict[type[Message], Touches | None] = {
            CreateShards: copied_by,
            SetOptimizer: lambda message: (
                [] if message.step < 0 and message.learning_rate is None else self.store.keys()
            ),
            MarkRestore: lambda _: self.store.keys(),
            Fence: None, FinalBelow: None, TellCounts: None,
        }  # fmt: skip
        for kind, touches in logged.items():
            handlers[kind] = self.executor.logged(handlers[kind], touches)
        return {
            **handlers,
            AwaitWaiters: Handler(self._await_waiters),
            ReportSchedule: Handler(self._report_schedule),
            **self.accumulators.handlers(),
            **self.clocks.handlers(),
            **self.backup.handlers(),
        }

    def describe(self) -> list[str]:
        """Say who waits here; for reports."""
        services = (self.sync, self.locks, self.gate, self.backup, self.clocks)
        return [line for service in services for line in service.describe()]

    def statistics(self) -> dict[str, Any]:
        """Return counters of all services."""
        unreleased = self.executor.num_unreleased
        return {
            "iterations": self.store.iterations,
            "pulls": self.pulls.pulls,
            "row_pulls": self.pulls.row_pulls,
            "pushes": self.updates.pushes,
            "assigns": self.updates.assigns,
            "staleness": self.updates.staleness.statistics(),
            "waiting": {
                "gate": self.gate.num_waiting,
                "lock": self.locks.num_waiting,
                "backup": unreleased,
                "compute": self.executor.waiting - unreleased + self.executor.computes.waiting,
            },
            "store": self.store.statistics(),
            "ledger": self.ledger.statistics(),
            "locks": self.locks.statistics(),
            "staging": self.sync.staging.statistics(),
            "sync": self.sync.statistics(),
            "clocks": self.clocks.statistics(),
            "accumulators": self.accumulators.statistics(),
            "backup": self.backup.statistics(),
        }

    def digest(self) -> bytes:
        """Return a digest of the state that judging has made, equal on a backup of this ps.

        Not in it: what takes arrays, which is done later; what is defined in passing, until it is
        used; counters.
        """
        state = [section.control() for section in self.sections]
        return hashlib.blake2b(msgpack.encode(state), digest_size=16).digest()

    # What a backup begins with.

    async def live(self, plans: object) -> Live:
        """Return what no snapshot has. Cancellation: safe."""
        arrays: list[memoryview] = []
        sections = [await each.live(arrays) for each in self.sections]
        state = msgpack.encode((plans, sections, [len(each) for each in arrays]))
        return state, [each for each in arrays if each]

    async def _restore(self, request: Request[BeginBackup]) -> None:
        """Be, on a backup, where that is which has returned this."""
        packed, *present = request.segments
        plans, sections, lengths = msgpack.decode(packed)
        for task, incarnation, header in plans:
            self.plans.restore((task, incarnation), header)
        left = iter(present)
        arrays = iter([next(left) if length else NO_BYTES for length in lengths])
        for section, state in zip(self.sections, sections, strict=True):
            await section.restore(state, arrays)
        request.answer(Done())

    # Snapshots.

    def freeze(self) -> Frozen:
        """Hold what is served.

        Raises:
            BusyError: An update is under way.
        """
        self.executor.computes.check_idle()
        state = replace(
            self.ledger.snapshot(pack_answer, pending=self.sync.steps.pending()),
            accumulators=self.accumulators.packed(),
            groups=tuple(self.sync.raw_configs().items()),
        )
        return freeze(self.store, state)

    def restored(self, loaded: Loaded) -> Loaded:
        """Return what a snapshot holds, with what clients of this ps take for defined.

        That may be newer than the snapshot; the steps of accumulators do not count.
        """
        state = loaded.state
        for number, optimizer in self.store.optimizers.items():
            loaded.store.define_optimizer(number, optimizer.config)
        accumulators = *((each, 0) for each, _ in self.accumulators.packed()), *state.accumulators
        groups = {**self.sync.raw_configs(), **dict(state.groups)}
        loaded.state = replace(state, accumulators=accumulators, groups=tuple(groups.items()))
        return loaded

    def deterministic(self) -> Sequence[str]:
        """Return the names of the synchronous groups that are deterministic."""
        return [raw["name"] for raw in self.sync.raw_configs().values() if raw["deterministic"]]

    # What the coordinator says.

    def moved(self, addresses: Sequence[str], moves: int) -> None:
        """Ps tasks are served here now; if this was a backup, it goes on with the steps."""
        assert self.attach is not None, "it is served"
        is_other = len(addresses) != len(self.attach.ps_addresses)  # a cluster of another size
        if is_other or moves < self.attach.moves:
            return
        self.attach = codec.replace(self.attach, ps_addresses=list(addresses), moves=moves)
        self.sync.move(addresses)
        self.teller.move(addresses)
        self._tell_counts()

    def _fence(self, request: Request[Fence]) -> Compute | None:
        peer, message = request.peer, request.message
        if peer.task != CLOSER or peer.incarnation != self.closer_incarnation:
            self._process.check_coordinator(peer)
        return self.refuse_below(message.task, message.below)

    def refuse_below(self, task: str, below: int) -> Compute | None:
        """Serve no lower incarnation of a task; in its turn, as takes may be completed by that."""
        self.ledger.fence(task, below)
        self.gate.wake()
        self.sync.fence(task, below)
        return self.accumulators.fence(task, below)

    def _final_below(self, request: Request[FinalBelow]) -> None:
        peer, message, body = request.peer, request.message, request.segments
        if (peer.incarnation, message.timeline) == (self.coordinator, self.timeline):
            self.ledger.final_below(message.closure, unpack_kept(body))

    def _hear_counts(self, request: Request[TellCounts]) -> None:
        """Another ps says how many pushes are counted there."""
        peer, message = request.peer, request.message
        task = self._process.task
        if self.attach is None or peer.incarnation != self.closer_incarnation:
            raise FencedError(f"{task} serves another timeline than {peer.task}")
        job, index = parse_task_name(peer.task)
        num_ps = len(self.attach.ps_addresses)
        if job != "ps" or index >= num_ps or peer.task == task:
            raise UsageError(f"{task}: {peer.task} counts no pushes")
        is_news = False
        for number, config, base, row in message.counts:
            for about, count in row:
                if not (0 <= about < num_ps and 0 <= count < 1 << STEP_BITS and base >= 0):
                    said = f"{count} pushes after {base} without a part on ps {about}"
                    raise UsageError(f"{task}: {peer.task} has counted {said}")
            try:
                self.store.define_optimizer(number, config)
            except ConfigurationError as exc:  # as of a rule that is not known here
                if number not in self._unheard:
                    self._unheard.add(number)
                    logger.warning("%s counts no pushes of %s: %s", task, peer.task, exc)
                continue
            news = self.store.hear_count(number, index, base, row, self._process.index)
            is_news |= news > max(1, self.store.push_count(number).known >> NEWS_SHIFT)
        self.updates.counted()
        request.answer(Number(int(is_news)))

    async def _await_waiters(self, request: Request[AwaitWaiters]) -> None:
        peer = request.peer
        self._process.check_coordinator(peer)
        await self.clocks.wanted.wait()
        request.answer(Done())

    def _report_schedule(self, request: Request[ReportSchedule]) -> None:
        peer, message = request.peer, request.message
        self._process.check_coordinator(peer)
        if message.version > self._report_version:
            self._report_version = message.version
            self.clocks.hear(message)
            self.sync.hear(message)
        request.answer(Done())

    # Ends.

    def deposed(self) -> None:
        """The backup serves in place of the ps: of this, and not of what has followed it since."""
        if not self._ended:
            self._process.depose()

    async def drain(self) -> None:
        """Let go on who waits for a lock or at the gate; wait for what is being done."""
        self.locks.close()
        self.gate.close()
        await self.executor.drain()

    async def close(self) -> None:
        """Do nothing more, as the ps task ends. Cancellation: links to others may be left open."""
        self.backup.end()  # who waited for it hears nothing, and asks whoever takes over
        await self.sync.close()
        await self.teller.close()

    def end(
        self, life: Life, timeline: int, patience_s: float | None, torn: Callable[[], None]
    ) -> None:
        """Serve nobody any more; an update under way ends where it began.

        Args:
            life: DEPOSED: nobody serves here from now on.
            timeline: That is served from now on; 0: that on which a newer coordinator begins.
            patience_s: For a coordinator that keeps the variables: updates that wait are applied,
                and a step that is decided may take so long. None: both fail.
            torn: Called if it did not.
        """
        self._ended = True
        task, reason = self._process.task, "serves a newer coordinator"
        why: PsyncError = FencedError(f"{task} serves a newer program")
        if life is Life.DEPOSED:
            reason = "has been replaced by its backup"
            why = FencedError(f"{task} {reason}")
        elif timeline:  # those of the same program say again what they had said
            reason = "serves an earlier snapshot"
            why = ConnectionLost(f"{task} rolls back to a snapshot")
        self.accumulators.end()
        self._process.work.to_the_end(self.teller.close())
        self.locks.close()
        self.gate.close()
        self.sync.replaced(FencedError(f"{task} {reason}"))
        if patience_s is None:
            self.backup.end(why)
        else:
            self.backup.leave()
        self._process.work.to_the_end(self._finish(why, patience_s, torn))
        self.clocks.end()

    async def _finish(
        self, why: PsyncError, patience_s: float | None, torn: Callable[[], None]
    ) -> None:
        if patience_s is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.sync.pause("end")
            if self.sync.is_torn:
                torn()
            await self.gate.all_passed()
            await self.executor.finish()
            self.backup.end(why)
        await self.sync.close()
