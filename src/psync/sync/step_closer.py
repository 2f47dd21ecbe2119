"""Synchronous steps on ps 0: pushes into the log, the rule's decisions carried out.

Joins the rule (``SyncSteps``) with the network. Whatever the rule is told is an entry of the log,
with the time at which it came; so the backup of ps 0 is told the same, and has the same rule.

    Contribute       the same       ─► SyncSteps.contribute → Answer, Refuse: to who waits for that
    (group is new)   BeginGroup     ─► SyncSteps.define
    ReportSchedule   SetMembers     ─► SyncSteps.members, schedule
    FinishSteps      the same       ─► SyncSteps.finish → Close: decided; it is carried
    a deadline       Tick           ─► SyncSteps.tick       to every ps (``outgoing_steps``)
    nobody waits     ForgetPush     ─► SyncSteps.forget

A ps 0 that dies before the backup has an entry has told nobody of it: the closure runs again, and
makes the same push. What becomes of a step that is decided: ``outgoing_steps``. One object serves
one coordinator and timeline. When another one comes, pending requests fail, and a step that is
outgoing reaches no ps that already serves the newer one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack

from psync.cluster import task_name
from psync.errors import ClosedError, FencedError, PsyncError, ValueMismatchError
from psync.net.connection import Handler, OwnRequest, Request
from psync.net.platform import Platform
from psync.net.shielding import shielded
from psync.numerics.memory import BlockPool
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import Listed
from psync.ps.plans import NO_PLANS
from psync.sync.cross_ps_sets import FOR_VALUES, WholeSet
from psync.sync.groups import CLOSER, FROM_CLOSER
from psync.sync.log_clock import LogClock
from psync.sync.outgoing_steps import HOSTED, OutgoingSteps
from psync.sync.ps_peers import AllPs
from psync.sync.ps_sync import PsSync
from psync.sync.pushes import Action, Close, Contribution, Refuse
from psync.sync.step_update import Part
from psync.sync.steps import SyncSteps
from psync.sync.token_waits import PushKey, TokenWaits
from psync.sync.tokens import Replica
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStep,
    AttachPs,
    BeginGroup,
    Contribute,
    Done,
    EndSteps,
    FinishSteps,
    ForgetPush,
    InitTokens,
    NormsMeasured,
    ReportSchedule,
    SetGroups,
    SetMembers,
    StepApplied,
    SyncStep,
    Tick,
)

logger = logging.getLogger(__name__)


class StepCloser:
    """Decides the synchronous steps of one coordinator's cluster, and closes them.

    Args:
        platform: Network, secret.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        pool: Memory for what comes in.
        work: What takes long.
        waits_changed: Called when ``steps.waiting`` may have changed.
        timeline: How often the cluster has rolled back to a snapshot.
        is_hosted: Whether it is that of a backup.

    Attributes:
        all_ps: The ps tasks, and where they are served.
        steps: The rule.
        outgoing: The steps that are decided.
    """

    def __init__(
        self,
        platform: Platform,
        attach: AttachPs,
        sync: PsSync,
        pool: BlockPool,
        work: LongWork,
        waits_changed: Callable[[], None],
        timeline: int = 0,
        *,
        is_hosted: bool = False,
    ) -> None:
        self.steps = platform.parts.of(SyncSteps)()
        self._coordinator = (task_name("chief", 0), attach.coordinator)
        self._sync = sync
        self.all_ps = AllPs(platform, attach, sync, pool, work, timeline)
        self._waits_changed = waits_changed
        self._loop = asyncio.get_running_loop()
        self._report_version = 0
        self._waits = TokenWaits(sync, self._left)
        self.outgoing = platform.parts.of(OutgoingSteps)(
            platform.parts, sync, self.all_ps, self.steps, self._waits, self._perform,
            is_hosted=is_hosted,
        )  # fmt: skip
        self._beginning: dict[int, asyncio.Task[None]] = {}  # groups whose first step is read
        self._clock = LogClock(self._expired)
        self._over: PsyncError | None = None  # why nothing is decided here any more

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Contribute: Handler(self._contribute, self._prepare_contribute),
            AskStep: Handler(self._ask_step),
            InitTokens: Handler(self._init_tokens),
            FinishSteps: Handler(self._finish),
        }

    # A section of the state, with that of what ps 0 has itself.

    def control(self) -> list[Any]:
        """Return what is staged and decided, and the state of the rule."""
        return [*self._sync.control(), self.steps.snapshot()]

    async def entries(self) -> list[Listed]:
        """Return entries that give a backup what no snapshot has."""
        return await self._sync.entries(self.steps.snapshot())

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes which entry of the log of the one whose backup this is."""

        def replay(act: Callable[[Any], None]) -> Handler:
            def run(request: Request[Any]) -> None:
                message = request.message
                self._sync.executor.submit(request, message, (), lambda: act(message))

            return Handler(run)

        def forget(request: Request[ForgetPush]) -> None:
            replay(functools.partial(self._forget, request.peer.client)).run(request)

        return {
            **self._sync.replayed(),
            SetGroups: Handler(self._restore),
            Contribute: Handler(self._replay_count),
            ForgetPush: Handler(forget),
            BeginGroup: replay(self._define),
            SetMembers: replay(self._set_members),
            Tick: replay(self._tick),
            NormsMeasured: replay(self.outgoing.note_factors),
            StepApplied: replay(self.outgoing.note_applied),
            EndSteps: replay(self._end),
            InitTokens: replay(self._put_initial),
            FinishSteps: replay(self.outgoing.close_all),
        }

    def _note(self, message: Message, act: Callable[[Any], None]) -> None:
        """Put into the log what nobody waits for; nothing once that has ended."""
        self._sync.executor.note(FROM_CLOSER, message, lambda: act(message))

    # Its end, and the end of its life as a backup.

    def replaced(self, why: str) -> None:
        """Another one decides from now on: pending requests fail, and later ones."""
        self._over = FencedError(f"{CLOSER} {why}")
        self._waits.refuse_all(self._over)
        self.outgoing.end()

    def serve(self) -> None:
        """It was a backup, and the coordinator has said where all ps tasks are served."""
        if HOSTED in self.outgoing.pauses:
            self._clock.go_on()
            self.outgoing.resume(HOSTED)
            self._perform(())  # the timer

    async def close(self) -> None:
        """Close the links to the other ps tasks; a step that is outgoing gets no further.

        Cancellation: Links may be left open.
        """
        self._over = self._over or ClosedError(f"{CLOSER} ends")
        self.outgoing.end()
        self._clock.cancel()
        await self.all_ps.close()
        while self._beginning:  # all ends with its links
            await asyncio.wait(list(self._beginning.values()))

    def _restore(self, request: Request[SetGroups]) -> None:
        """Be where the rule is of the one whose backup this is."""
        message = request.message
        self._sync.set_groups(message)
        configs = {group: self._sync.known(group, None).config for group, *_ in message.groups}
        self.steps.restore(state := msgpack.unpackb(request.segments[0]), configs)
        self._clock.note(state["now"])
        self.outgoing.restore()
        request.answer(Done())

    # Pushes.

    def _prepare_contribute(self, request: Request[Contribute]) -> Sequence[memoryview]:
        message, lengths = request.message, request.lengths
        self._check()
        known = self._sync.wholes.plan(request.peer.client, message.plan)
        known.fit(self._sync.store, lengths, CLOSER, message.rows)
        request.token = (self, known)
        return self._sync.reserve(request, sum(lengths))

    def _contribute(self, request: Request[Contribute]) -> None:
        message, wholes, client = request.message, self._sync.wholes, request.peer.client
        if self._over is not None:
            self._check()
        brought: WholeSet | None = None
        wanted: WholeSet | None = None
        if message.plan >= 0:
            if not request.segments:
                raise ValueMismatchError(
                    f"{CLOSER}: no arrays come with a push that should bring them"
                )
            token = request.token
            if isinstance(token, tuple) and token[0] is self:  # else another timeline has begun
                brought = token[1]
            else:
                brought = wholes.plan(client, message.plan)
        if message.ahead >= 0:
            wanted = wholes.of.get(client, NO_PLANS).get(message.ahead)
            if wanted is None:
                wanted = wholes.plan(client, message.ahead)
        ready = self._is_ready(message.group, message.config)
        if (
            ready
            and (brought is None or message.group in brought.checked_for)
            and (wanted is None or FOR_VALUES in wanted.checked_for)
        ):
            self._take(request, brought, wanted)
        else:
            request.start(self._contribute_first(request, brought, wanted))

    async def _contribute_first(
        self, request: Request[Contribute], brought: WholeSet | None, wanted: WholeSet | None
    ) -> None:
        """The group is new: its first step is that of the global step; or a set is."""
        group, config = request.message.group, request.message.config
        if not self._is_ready(group, config):
            await self._begin(group)
        if brought is not None and group not in brought.checked_for:
            await self.all_ps.describe(brought, group, self._sync.known(group, None).raw)
        if wanted is not None and FOR_VALUES not in wanted.checked_for:
            await self.all_ps.describe(wanted, FOR_VALUES, None)
        self._check()
        self._take(request, brought, wanted)

    def _take(
        self, request: Request[Contribute], brought: WholeSet | None, wanted: WholeSet | None
    ) -> None:
        message, replica = request.message, request.peer.client
        part = None
        if brought is not None:
            if not self._sync.executor.is_alone:
                self._sync.wholes.keep(replica, brought)
            part = self._sync.part_of(message, brought, request.segments)
        self._waits.add(request, (message.group, replica, message.push), wanted)

        def counted(outcome: object) -> None:
            request.rest()  # its part is staged
            if isinstance(outcome, PsyncError):
                self._waits.answer(Refuse(message.group, replica, message.push, outcome))

        entry = OwnRequest(request.peer, message, (), counted)
        entry.header = request.header
        self._submit_push(entry, part)

    def _replay_count(self, request: Request[Contribute]) -> None:
        message, part = request.message, None
        self._sync.known(message.group, message.config)
        if message.plan >= 0:
            brought = self._sync.wholes.plan(request.peer.client, message.plan)
            part = self._sync.part_of(message, brought, request.segments)
        self._submit_push(request, part)

    def _submit_push(self, request: Request[Contribute], part: Part | None) -> None:
        message, body = request.message, () if part is None else part.body

        def act() -> None:
            self._perform(self._judge(request.peer.client, message, part))
            self.outgoing.wake()  # a join waits

        self._sync.executor.submit(request, message, body, act)

    def _judge(self, replica: Replica, message: Contribute, part: Part | None) -> Sequence[Action]:
        group = message.group
        try:
            if part is None:
                self._sync.ledger.check_incarnation(*replica)
            else:
                self._sync.keep(replica, message, part)
        except PsyncError as exc:
            return (Refuse(group, replica, message.push, exc),)
        self._sync.known(group, None).spread |= message.spread
        push = Contribution(
            replica, message.push, message.acked_below,
            message.closure if message.closure >= 0 else None, message.ordinal,
            message.variable_set, message.local_step, message.weight,
        )  # fmt: skip
        return self.steps.contribute(group, push)

    def _left(self, key: PushKey) -> None:
        """Nobody waits for a push any more."""
        group, replica, push = key
        message = ForgetPush(group, push)
        self._sync.executor.note(replica, message, lambda: self._forget(replica, message))

    def _forget(self, replica: Replica, message: ForgetPush) -> None:
        self.steps.forget(message.group, replica, message.push)
        self._waits_changed()

    def _ask_step(self, request: Request[AskStep]) -> None:
        self._check()
        request.answer(SyncStep(*self.steps.present_and_first(request.message.group)))

    async def _init_tokens(self, request: Request[InitTokens]) -> None:
        message = request.message
        self._check()
        if not self._is_ready(message.group, message.config):
            await self._begin(message.group)
            self._check()
        await self._sync.executor.run(request.peer.client, message, self._put_initial)
        request.answer(SyncStep(*self.steps.present_and_first(message.group)))

    def _put_initial(self, message: InitTokens) -> None:
        self._perform(self.steps.init_tokens(message.group, message.count))

    async def _finish(self, request: Request[FinishSteps]) -> None:
        client = request.peer.client
        if client != self._coordinator:
            raise FencedError(f"{CLOSER}: {client[0]} is not the coordinator that it serves")
        await self.outgoing.finish(client, request.message)
        request.answer(Done())

    def _check(self) -> None:
        if self._over is not None:
            raise self._over.with_traceback(None)  # it is raised many times

    # The first step of a group.

    def _is_ready(self, group: int, raw: dict[str, Any] | None) -> bool:
        """Return whether a group is known; raise if it is known as something else."""
        self._sync.known(group, raw)
        return self.steps.knows(group)

    async def _begin(self, group: int) -> None:
        """Begin a group at the present global step, read once for all who ask meanwhile."""
        beginning = self._beginning.get(group)
        if beginning is None:
            beginning = self._loop.create_task(self._read_first(group))
            self._beginning[group] = beginning
            beginning.add_done_callback(functools.partial(self._begun, group))
        try:
            await shielded(beginning)
        except PsyncError:
            self._check()
            raise

    async def _read_first(self, group: int) -> None:
        known = self._sync.known(group, None)
        step = await self.all_ps.read_global_step(known.config)
        message = BeginGroup(group, known.raw, step)
        await self._sync.executor.run(FROM_CLOSER, message, self._define)

    def _begun(self, group: int, task: asyncio.Task[None]) -> None:
        del self._beginning[group]
        # It is seen, even if those who asked have gone.
        if not task.cancelled() and not isinstance(error := task.exception(), PsyncError | None):
            logger.error("synchronous group %d cannot begin", group, exc_info=error)

    def _define(self, message: BeginGroup) -> None:
        config = self._sync.known(message.group, message.config).config
        self.steps.define(message.group, config, message.step)

    # Membership, and time.

    def hear(self, message: ReportSchedule) -> None:
        """Note a report of the coordinator, unless a newer one was there."""
        if message.version > self._report_version:
            self._report_version = message.version
            closures = [closure for closure, _ in message.in_flight]
            members = SetMembers(
                self._clock.now(), message.workers, message.missing, message.queued, closures
            )
            self._note(members, self._set_members)

    def _set_members(self, message: SetMembers) -> None:
        self._clock.note(message.now)
        actions = self.steps.members(dict(message.alive), message.missing, message.now)
        self._perform([*actions, *self.steps.schedule(message.queued, message.in_flight)])

    def lost(self, task: str, below: int) -> None:
        """Incarnations of ``task`` below ``below`` are over, says an entry: they wait no more."""
        self._perform(self.steps.fence(task, below))

    def end(self, reason: str) -> None:
        """Training is over: pending requests fail, and later pushes."""
        self._note(EndSteps(reason), self._end)

    def _end(self, message: EndSteps) -> None:
        self._perform(self.steps.end(message.reason))

    def _expired(self) -> None:
        self._note(Tick(self._clock.now()), self._tick)

    def _tick(self, message: Tick) -> None:
        self._clock.note(message.now)
        self._perform(self.steps.tick(message.now))

    def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the rule has decided, then look when it wants to be asked again."""
        for action in actions:
            if isinstance(action, Close):
                self.outgoing.decide(action)
            elif self._over is None:
                self._waits.answer(action)
        if HOSTED not in self.outgoing.pauses and self._over is None:
            deadline = self.steps.next_deadline()
            if deadline != self._clock.deadline:
                self._clock.set_deadline(deadline)
        self._waits_changed()
