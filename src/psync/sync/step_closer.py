"""Synchronous steps on ps 0: pushes into the log, the rule's decisions carried out.

Joins the rule (``SyncSteps``) with the network. Whatever the rule is told is an entry of the log,
with the time at which it came; so the backup of ps 0 is told the same, and has the same rule.

    Update           the same       ─► SyncSteps.contribute → Answer, Refuse: to who waits for that
    (group is new)   BeginGroup     ─► SyncSteps.define, init_tokens
    ReportSchedule   the same       ─► SyncSteps.members, schedule; end
    FinishSteps      the same       ─► SyncSteps.finish → Close: decided; it is carried
    a deadline       Tick           ─► SyncSteps.tick       to every ps (``AllPs``)
    nobody waits     ForgetPush     ─► SyncSteps.forget

A ps 0 that dies before the backup has an entry has told nobody of it: the closure runs again, and
makes the same push. One object serves one coordinator and timeline. When another one comes, pending
requests fail, and a step that is outgoing reaches no ps that already serves the newer one.

Steps that are decided are carried to every ps (``AllPs``), until all have applied them.

    decided         the step is closing, or *outgoing*, a part of the state of ps 0
    norms measured  NormsMeasured, an entry: it is sent to be closed. Where no norms are needed that
                    is done at once
    all applied it  StepApplied, an entry: who still waits gets tokens of the next step

Who dies:

    ps 0, with a step outgoing   the promoted backup, which has the same entries, carries it again;
                                 each ps that has applied it ignores that
    ps 0, while it is measured   likewise; norms that are no entry yet are measured again
    ps 0, before it is decided   the promoted backup has all pushes that are in the log
    ps 0, without a backup       rollback, or the end of the program (``chief.recovery_rule``)
    another ps                   its link waits until it is served elsewhere, or the coordinator
                                 rolls all back

Whenever a ps dies, sessions of workers end, and their closures run again: what was counted is
answered "duplicate".

The rounds of a step over all ps tasks:

    round                                     when
    CloseStep to every ps, which measures     norms are clipped, of what lies on several ps tasks
      "gradients"
    CloseStep to every ps, which measures     a layer-wise rule needs norms of such a variable
      "updates"
    the factors become an entry of the log    if there were such rounds
    CloseStep to every ps, with the factors   always

A round begins when all have answered the one before, and the first error ends it all. Measuring
changes nothing. Once a ps may have closed the step the factors are in the log: a backup that is
promoted sends the same ``CloseStep`` again, and each ps that has closed it ignores that.

Nothing is carried while that is *paused*: for a cut, for a copy to a backup, at the end, and on a
backup until the coordinator has said where all ps tasks are served.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec

from psync.client.link import Call, PsLink
from psync.client.ps import PsClient
from psync.cluster import task_name
from psync.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLost,
    FencedError,
    NotServedError,
    ParameterServerLost,
    PsyncError,
    RemoteProtocolError,
    check_fits,
)
from psync.net.connection import AsIfFrom, Handler, OwnRequest, Request, fail
from psync.net.endpoint import Endpoint
from psync.ps.cooperative_work import Changing
from psync.ps.executor import LATER, Later
from psync.specs import ShardSpec, VariableSpec
from psync.store.step_norms import StepNorms
from psync.store.sync_config import SyncConfig
from psync.sync.ps_sync import CLOSER, FROM_CLOSER, PsSync, Reads
from psync.sync.staging import Part, PushKey
from psync.sync.staleness_service import ClockService
from psync.sync.step import GLOBAL_STEP_DTYPE, NOWHERE
from psync.sync.steps import Action, Answer, Close, Contribution, Listed, Refuse, Replica, SyncSteps
from psync.wire.closure_numbers import PART_BITS
from psync.wire.codec import Message, decode, encode, replace
from psync.wire.frames import Frame
from psync.wire.messages import (
    AttachPs,
    BeginGroup,
    CloseStep,
    Contributed,
    Done,
    Failure,
    FinishSteps,
    FollowParts,
    ForgetPush,
    Held,
    Measured,
    NormsMeasured,
    Number,
    ReportSchedule,
    StepApplied,
    Tick,
    Update,
)
from psync.wire.remote_errors import exception_of, failure_of

logger = logging.getLogger(__name__)


class LogClock:
    """The clock of a log, and the one timer that is set by it.

    Times in a log are written into its entries by the ps that serves, and judging reads no other.
    They do not run backwards when a backup serves, whose own clock begins at another zero: it goes
    on from the last time that the log has.

    Args:
        expired: Called at the deadline.
    """

    def __init__(self, expired: Callable[[], None]) -> None:
        self._expired = expired
        self._latest = 0.0  # no entry has an earlier one
        self._ahead = 0.0  # this process's clock is by so much
        self.deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return the time for an entry, in seconds."""
        return max(self._latest, asyncio.get_running_loop().time() - self._ahead)

    def note(self, now: float) -> None:
        """An entry is executed that came at this time."""
        self._latest = max(self._latest, now)

    def go_on(self) -> None:
        """This was a backup, and serves: from now on the time is its own, from the latest on."""
        self._ahead = asyncio.get_running_loop().time() - self._latest

    def set_deadline(self, deadline: float | None) -> None:
        """Call at this time, and no other; None: at none."""
        if self._timer is not None:
            self._timer.cancel()
        self.deadline, self._timer = deadline, None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline + self._ahead, self._ring)

    def _ring(self) -> None:
        # A timer may ring early, by its clock's resolution and by what sums of floats lose. An
        # entry of that time would change nothing, and the timer ring at once, again and again.
        assert self.deadline is not None, "it is cancelled with its timer"
        self._latest = max(self._latest, self.deadline)
        self.deadline = self._timer = None
        self._expired()


HOSTED = "it is a backup"
"""Why nothing is carried until the coordinator has said where all ps tasks are served."""

LOOK_EVERY_S = 2.0
"""What an open step has lacked at two looks is shown to people, and what it has lacked for another
``LOOKS_A_NOTE`` is logged."""

LOOKS_A_NOTE = 5


class _Here(msgspec.Struct, eq=False):
    """What ps tasks have of one push. It is no part of the state: all is told again to a backup."""

    local_step: int
    held: set[int] = msgspec.field(default_factory=set)  # ps tasks but 0 that have their part
    waits: tuple[Request[Update], Part] | None = None  # ps 0's part, until all have theirs
    is_over: bool = False  # the rule was asked, or nobody waits for it


@dataclass(eq=False)
class StepCloser(PsSync):
    """The synchronous groups of ps 0, which decides the steps of its cluster, and closes them.

    Args:
        attach: Says who the coordinator is, and where the ps tasks are.
        clocks: Told when ``steps.waiting`` may have changed.
        timeline: How often the cluster has rolled back to a snapshot.
        is_hosted: Whether it is that of a backup.

    Attributes:
        all_ps: The ps tasks, and where they are served.
        carried: Groups of which a step is on its way to every ps.
        pauses: For what nothing is carried.
    """

    attach: AttachPs
    clocks: ClockService
    timeline: int
    is_hosted: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        num_others = len(self.attach.ps_addresses) - 1
        self.steps = self.platform.parts.of(SyncSteps)(self.ledger, num_others)
        self.all_ps = AllPs(self)
        self.carried: set[int] = set()
        self.pauses = {HOSTED} if self.is_hosted else set()
        self._carrying = Changing()  # what is carried, and pauses
        self._is_torn = False  # a step that was decided could not be applied everywhere
        self._here: dict[PushKey, _Here] = {}  # pushes of steps that are not closed
        self._loop = asyncio.get_running_loop()
        self._clock = LogClock(self._expired)
        self._lacked: Mapping[str, int] = {}  # at how many looks in a row
        self.over: PsyncError | None = None  # why nothing is decided here any more
        self._look()

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            **super().handlers(),
            BeginGroup: Handler(self._init_tokens),
            FinishSteps: Handler(self._finish),
        }

    # Reports.

    def describe(self) -> list[str]:
        """Say what open steps wait for, but for pushes; for reports."""
        return [
            f"step {self.steps.present(group)} of {known.config.name} waits for {lack}"
            for group, known in self.groups.items()
            for lack in self._lacks(group)
        ]

    def statistics(self) -> dict[str, Any]:
        """Return counters of each group, by its name and number.

        Among them "lacks": what its step has waited for at the last look, too, in words.
        """
        return self.steps.statistics(
            lambda group: [lack for lack in self._lacks(group) if lack in self._lacked]
        )

    def _lacks(self, group: int) -> list[str]:
        lacks = list[str]()
        for step in [close.step for close in self.steps.closing() if close.group == group]:
            if group in self.carried:
                away = sorted(self.all_ps.away.get(group, ())) or [0]
                lacks = [f"/job:ps/task:{ps}, which applies step {step}" for ps in away]
            else:
                lacks = [f"the end of a pause ({', '.join(sorted(self.pauses))})"]
        for (number, (task, _), push), here in self._here.items():
            if number == group and not here.is_over:
                wanted = (0,) if here.waits is None else here.waits[1].known.others
                lacks += [
                    f"the part of {task} at /job:ps/task:{ps} (push {push})"
                    for ps in wanted
                    if ps not in here.held
                ]
        return lacks

    def _look(self) -> None:
        """Look what open steps lack, again and again; log what they have lacked for long."""
        lacks = [lack for group in self.groups for lack in self._lacks(group)]
        self._lacked = {lack: self._lacked.get(lack, 0) + 1 for lack in lacks}
        is_hosted = HOSTED in self.pauses  # its primary says it
        if not is_hosted and any(looks % LOOKS_A_NOTE == 0 for looks in self._lacked.values()):
            for line in self.describe():
                logger.warning("%s: %s", CLOSER, line)
        self._looking = self._loop.call_later(LOOK_EVERY_S, self._look)

    # A section of the state, with what every ps has.

    def control(self) -> list[Any]:
        """Return what is staged and decided, and the state of the rule."""
        return [*super().control(), self.steps.snapshot()]

    async def live(self, arrays: list[memoryview]) -> Any:
        """Return what every ps has, and the state of the rule."""
        return await super().live(arrays), self.steps.snapshot()

    async def restore(self, state: Any, arrays: Iterator[memoryview]) -> None:
        """Restore both."""
        held, rule = state
        await super().restore(held, arrays)
        self.steps.restore(rule, {group: known.config for group, known in self.groups.items()})
        self._clock.note(rule["now"])

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes which entry of the log of the one whose backup this is."""

        def replay(act: Callable[[Any], None]) -> Handler:
            return logged(Handler(lambda request: act(request.message)))

        logged = self.executor.logged
        return {
            **super().replayed(),
            ForgetPush: logged(Handler(lambda r: self._forget(r.peer.client, r.message))),
            BeginGroup: replay(self._define),
            ReportSchedule: replay(self._set_members),
            Tick: replay(self._tick),
            NormsMeasured: replay(self._note_factors),
            StepApplied: replay(self._note_applied),
            FinishSteps: replay(self._close_all),
        }

    # Its end, and the end of its life as a backup.

    def replaced(self, error: PsyncError) -> None:
        """Another one decides from now on: pending requests fail, and later ones."""
        self._end(error)
        self._here.clear()
        super().replaced(error)

    async def close(self) -> None:
        """Close the links to the other ps tasks; a step that is outgoing gets no further.

        Cancellation: Links may be left open.
        """
        self._end(ClosedError(f"{CLOSER} ends"))
        self._clock.set_deadline(None)
        await self.all_ps.close()

    def _end(self, error: PsyncError) -> None:
        self.over = self.over or error
        self._looking.cancel()
        self._carrying.wake()

    def expect_moves(self) -> None:
        """From now on wait for a ps that is lost until it is served elsewhere, see ``move``."""
        self.all_ps.expect_moves()

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served; if this was a backup, go on with the steps."""
        if list(addresses) != self.all_ps.addresses:
            self.all_ps.move(addresses)
        self.serve()

    def serve(self) -> None:
        """Go on with the steps, if this was a backup: where all ps tasks are served is known."""
        if HOSTED in self.pauses:
            self._clock.go_on()
            self.pauses.discard(HOSTED)
            self._carry_on()  # what was decided before other pauses, too
            self._perform(())  # the timer

    # Pushes.

    def took(self, request: Request[Update], part: Part) -> None:
        """Take the part of a push that is for ps 0: it is judged when all have theirs."""
        if self.over is not None:
            self._check()
        key, others = part.key, part.known.others
        if not self.all_ps.following.keys() >= {*others}:
            self.all_ps.follow(others)
        is_stale = self.steps.is_stale(key[0], part.local_step)
        if is_stale is None:
            request.start(self._take_first(request, part))
        elif is_stale or not others:
            self.submit(request, part)
        else:
            here = self._here.get(key)
            if here is None:
                here = self._here[key] = _Here(part.local_step)
            here.is_over = here.held.issuperset(others)
            if here.is_over:
                self.submit(request, part)
            else:
                self.wait(request, part)
                here.waits = request, part

    async def _take_first(self, request: Request[Update], part: Part) -> None:
        """The group is new: its first step is that of the global step."""
        await self._begin(part.known.optimizer)
        self.took(request, part)

    def heard(self, request: Request[Held]) -> None:
        """Another ps holds parts of pushes. It says so again on each connection."""
        message = request.message
        if request.peer.task != f"/job:ps/task:{message.ps}":
            raise RemoteProtocolError(f"{request.peer.task} says what ps {message.ps} holds")
        for group, task, incarnation, push, local_step in message.parts:
            key = group, (task, incarnation), push
            here = self._here.get(key)
            if here is None:
                if self.over is not None or self.steps.is_stale(group, local_step):
                    continue
                here = self._here[key] = _Here(local_step)
            here.held.add(message.ps)
            if here.waits is not None:
                waiting, part = here.waits
                is_complete = here.held.issuperset(part.known.others)
                if is_complete or self.steps.is_stale(group, local_step):
                    here.waits, here.is_over = None, True
                    self.submit(waiting, part)

    def unheard(self, ps: int, error: Exception) -> None:
        """A ps is lost: pushes that wait for their parts there fail."""
        for key, here in list(self._here.items()):
            if here.waits is not None and ps in here.waits[1].known.others and ps not in here.held:
                here.waits, here.is_over = None, True
                self.fail(key, error)

    def _go_on_without(self, group: int, step: int = NOWHERE) -> None:
        """As ``_go_on``, of pushes that count in no later step than this: they are stale."""
        self._go_on([
            key for key, here in self._here.items() if key[0] == group and here.local_step <= step
        ])  # fmt: skip

    def _go_on(self, keys: Iterable[PushKey]) -> None:
        """Forget who has which parts of some pushes; those that wait are judged as they are."""
        for key in keys:
            here = self._here.pop(key)
            if here.waits is not None:
                self.submit(*here.waits)

    def _judge(self, request: Request[Update], part: Part) -> Later:
        """Hold a part, and let the rule decide. Raises nothing."""
        request.segments = ()
        message, known = request.message, part.known
        group, replica, push = part.key
        here = self.groups[group]
        here.spread = here.spread or known.says.spread
        if known.others and here.elsewhere == NOWHERE:
            here.elsewhere = self.steps.present(group)
        call = (message.closure, message.ordinal << PART_BITS) if message.closure >= 0 else None
        contribution = Contribution(
            replica, push, message.acked_below, call, known.says.variable_set,
            message.local_step, message.weight, known.others,
        )  # fmt: skip
        try:
            actions = self.steps.contribute(group, contribution)
        except FencedError as exc:
            self.staging.give_back(part.key)
            self.fail(part.key, exc)
            return LATER
        if here.broken is None:
            self.staging.stage(part)
        else:
            self.staging.give_back(part.key)
        self._perform(actions)
        if self._carrying.waiting:
            self._carrying.wake()  # a join waits
        return LATER

    def _forsake(self, key: PushKey) -> None:
        """Nobody waits for a push any more."""
        group, replica, push = key
        if key in self._here:  # what others hold they have told, and it may come again
            self._here[key].waits, self._here[key].is_over = None, True
        message = ForgetPush(group, push)
        self.executor.note(replica, message, lambda: self._forget(replica, message))

    def _forget(self, replica: Replica, message: ForgetPush) -> None:
        self.steps.forget(message.group, replica, message.push)
        self._perform(())

    def _check(self) -> None:
        if self.over is not None:
            raise self.over.with_traceback(None)  # it is raised many times

    # The first step of a group, and the end of all.

    async def _init_tokens(self, request: Request[BeginGroup]) -> None:
        message = request.message
        self._check()
        self.known(message.group, message.config)
        if self.steps.is_stale(message.group, 0) is None:
            await self._begin(message.group)
        await self.executor.run(request.peer.client, message, self._define)
        request.answer(Number(self.steps.present(message.group)))

    async def _begin(self, group: int) -> None:
        """Begin a group at the present global step; whoever has read it first decides."""
        known = self.groups[group]
        try:
            step = await self.all_ps.read_global_step(known.config)
            expected = f"{known.config.name}: expected a global step of at least 0"
            check_fits(step >= 0, expected, step)
            message = BeginGroup(group, known.raw, step=step)
            await self.executor.run(FROM_CLOSER, message, self._define)
        except PsyncError:
            self._check()
            raise
        self._check()

    def _define(self, message: BeginGroup) -> None:
        config = self.known(message.group, message.config).config
        if message.step >= 0:
            self.steps.define(message.group, config, message.step)
        if message.count is not None:
            self._perform(self.steps.init_tokens(message.group, message.count))

    async def _finish(self, request: Request[FinishSteps]) -> None:
        """Nothing is left to do: let all that was counted be applied, as far as it can be."""
        client = request.peer.client
        if client != (task_name("chief", 0), self.attach.coordinator):
            raise FencedError(f"{CLOSER}: {client[0]} is not the coordinator that it serves")
        asked = False  # after what is in the log by now
        while self.over is None and not (asked and self.steps.is_settled):
            if self.carried or self.pauses or (asked and self.steps.closing()):
                await self._carrying.changed()
            else:  # also if something was counted behind what was asked
                await self.executor.run(client, request.message, self._close_all)
                asked = True
        request.answer(Done())

    def _close_all(self, _: FinishSteps) -> None:
        """Execute an entry: close the steps in which something was counted."""
        self._perform(self.steps.finish())

    # Membership, and time.

    def _note(self, message: Message, act: Callable[[Any], None]) -> None:
        """Put into the log what nobody waits for; nothing once that has ended."""
        self.executor.note(FROM_CLOSER, message, lambda: act(message))

    def hear(self, message: ReportSchedule) -> None:
        """Note a report of the coordinator."""
        self._note(replace(message, now=self._clock.now()), self._set_members)

    def _set_members(self, message: ReportSchedule) -> None:
        self._clock.note(message.now)
        if message.ended is not None:  # pending requests fail, and later pushes
            self._perform(self.steps.end(message.ended))
            self._go_on(list(self._here))
            return
        actions = self.steps.members(dict(message.workers), message.missing, message.now)
        closures = [closure for closure, _ in message.in_flight]
        self._perform([*actions, *self.steps.schedule(message.queued, closures)])

    def fence(self, task: str, below: int) -> None:
        """Incarnations of ``task`` below ``below`` are over, says an entry: they wait no more."""
        super().fence(task, below)
        self._go_on([key for key in self._here if key[1][0] == task and key[1][1] < below])
        self._perform(self.steps.fence(task, below))

    def _expired(self) -> None:
        self._note(Tick(self._clock.now()), self._tick)

    def _tick(self, message: Tick) -> None:
        self._clock.note(message.now)
        self._perform(self.steps.tick(message.now))

    # What the rule has decided.

    def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the rule has decided, then look when it wants to be asked again."""
        reads: Reads = {}
        for action in actions:
            if type(action) is Close:
                if not self.pauses:
                    self._carry(action)
                self._loop.call_soon(self._go_on_without, action.group, action.step)
            elif self.over is not None:
                continue
            elif type(action) is Answer:
                close = self.steps.groups[action.group].closing
                answered = self.groups[action.group].answered
                if close is None or answered == close.step or action not in close.answers:
                    self._answer(action, reads)
            elif type(action) is Refuse:
                self.fail((action.group, action.replica, action.number), action.error)
        may_wait = self.steps.is_short or self._clock.deadline is not None
        if may_wait and HOSTED not in self.pauses and self.over is None:
            deadline = self.steps.next_deadline()
            if deadline != self._clock.deadline:
                self._clock.set_deadline(deadline)
        if self.clocks.heeds_groups:
            self.clocks.look_again()

    def _answer_step(self, message: CloseStep) -> None:
        """A step is applied here: answer the pushes of which each ps has a part."""
        close = self.steps.groups[message.group].closing
        if close is not None and close.step == message.step:
            self.groups[message.group].answered = message.step
            reads: Reads = {}
            for answer in close.answers:
                self._answer(answer, reads)

    def _answer(self, answer: Answer, reads: Reads) -> None:
        alone = answer.token <= self.groups[answer.group].elsewhere
        message = Contributed(
            answer.group, answer.outcome, answer.staleness, answer.token, answer.partial,
            answer.count, None, alone,
        )  # fmt: skip
        key = answer.group, answer.replica, answer.number
        self.answer(key, message, reads if answer.count else None)

    # Steps that are decided.

    @property
    def is_torn(self) -> bool:
        """Whether a step that was decided is perhaps not applied everywhere."""
        return self._is_torn or bool(self.carried)

    async def pause(self, why: str) -> None:
        """Carry no step from now on, and wait for those that are on their way.

        A backup waits until it serves: a step may be outgoing whose parts are applied here, and
        nowhere else.

        Cancellation: Safe; it may be paused.
        """
        self.pauses.add(why)
        while self.carried or (HOSTED in self.pauses and self.over is None):
            await self._carrying.changed()

    def resume(self, why: str) -> None:
        """End a pause; carry what was decided meanwhile if it was the last."""
        self.pauses.discard(why)
        if not self.pauses:
            self._carry_on()

    def _carry_on(self) -> None:
        if self.over is None:
            for close in self.steps.closing():
                if close.group not in self.carried:
                    self._carry(close)
        self._carrying.wake()

    def _carry(self, close: Close) -> None:
        """Let every ps apply a step, once its norms are measured, if it needs any."""
        known = self.groups[close.group]
        self.carried.add(close.group)
        is_whole = close.step < known.elsewhere or len(self.all_ps.addresses) < 2
        if known.takes_norms and not is_whole and not close.is_measured:
            norms = StepNorms(known.rule)
            passes = norms.passes_together(spread=known.spread)
            if passes:
                self.all_ps.own.spawn(self._measure_all(close, norms, passes))
                return
        step = close.group, None, close.step, close.pushes, close.scales, close.ratios
        self.all_ps.tell(CloseStep(*step), close.places, partial(self._ended, close))

    async def _measure_all(self, close: Close, norms: StepNorms, passes: Sequence[str]) -> None:
        """Let every ps measure a step, and apply it with the factors that follow from that."""
        try:
            for what in passes:
                measured: asyncio.Future[list[Message]] = self._loop.create_future()
                step = close.group, None, close.step, close.pushes, *_factors(norms), what
                self.all_ps.tell(CloseStep(*step), close.places, partial(_settle, measured))
                self._conclude(norms, what, await measured)
            message = NormsMeasured(close.group, close.step, *_factors(norms))
            await self.executor.run(FROM_CLOSER, message, self._note_factors)
        except Exception as exc:
            self._ended(close, [], exc)
        else:
            self._carry(close)

    def _conclude(self, norms: StepNorms, what: str, answers: list[Message]) -> None:
        sums = [
            (variable, index, first, second)
            for each in cast(list[Measured], answers)
            for variable, index, first, second in each.sums
        ]
        norms.conclude(what, sums)

    def _note_factors(self, message: NormsMeasured) -> None:
        """Execute an entry: a step that is outgoing is to be closed with these factors."""
        close = self.steps.groups[message.group].closing
        if close is not None and close.step == message.step:
            close.is_measured = True
            close.scales, close.ratios = message.scales, message.ratios

    def _ended(self, close: Close, _: list[Message], failed: Exception | None) -> None:
        """Every ps has applied a step, or it cannot be: put that into the log.

        Once that has ended, another one carries the step again.
        """
        failure = b""
        if failed is not None:
            if not isinstance(failed, PsyncError):
                failed = PsyncError(f"{type(failed).__name__} while a step was applied: {failed}")
            failure = encode(failure_of(failed))
        message = StepApplied(close.group, close.step, failure)

        def dropped(outcome: object) -> None:
            if isinstance(outcome, PsyncError):
                self.carried.discard(close.group)
                self._carrying.wake()

        request = OwnRequest(self.all_ps.own, message, (), dropped)
        self.executor.submit(request, message, (), partial(self._note_applied, message))

    def _note_applied(self, message: StepApplied) -> None:
        """Execute an entry: a step is outgoing no more."""
        group = message.group
        self.carried.discard(group)
        if not message.failure:
            self._perform(self.steps.closed(group, message.step))
        else:
            self._is_torn = True
            error = exception_of(cast(Failure, decode(message.failure)), CLOSER)
            logger.error(
                "%s: step %d of %s cannot be closed: %s",
                CLOSER, message.step, self.groups[group].config.name, error.message,
            )  # fmt: skip
            self._perform(self.steps.close_failed(group, error))
            self.end_group(group, error)
            self._go_on_without(group)
        if self._carrying.waiting:
            self._carrying.wake()


def _settle(done: asyncio.Future[Any], answers: object, failed: Exception | None) -> None:
    if failed is not None:
        fail(done, failed)
    elif not done.done():
        done.set_result(answers)


def _factors(norms: StepNorms) -> tuple[Listed, Listed]:
    """Return the scales and ratios that are known so far, as messages have them."""
    scales, ratios = norms.scales, norms.ratios
    return (
        None if scales is None else list(scales.items()),
        None if ratios is None else list(ratios.items()),
    )


Then = Callable[[list[Message], Exception | None], None]
"""Called once, with the answers and the first error. Must not raise."""


class AllPs:
    """The ps tasks of one coordinator's cluster, ps 0 itself among them.

    Args:
        closer: That of ps 0.

    Attributes:
        addresses: Where each ps is served.
        own: From whom ps 0 has what it says to itself.
        following: By ps, the request for which it tells ``closer.heard`` what parts it holds.
        away: By group, the ps tasks that have not answered what they were last told of a step.
    """

    def __init__(self, closer: StepCloser) -> None:
        attach, platform, pool = closer.attach, closer.platform, closer.pool
        # A ps that serves a newer coordinator or timeline refuses what comes from this one.
        incarnation = attach.coordinator + closer.timeline
        handlers: dict[type[Message], Handler] = {Held: Handler(closer.heard)}
        self._closer = closer
        self._endpoint = Endpoint(platform, CLOSER, incarnation, handlers, pool)
        self._client: PsClient = platform.parts.of(PsClient)(
            self._endpoint, attach.ps_addresses, pool, attach.ps_timeout_s
        )
        self.own = AsIfFrom(FROM_CLOSER, spawn=self._endpoint.spawn)
        self.addresses = list(attach.ps_addresses)
        self.following: dict[int, Call | None] = {}
        self.away: dict[int, set[int]] = {}
        self._told: set[tuple[int, int | None]] = set()  # (ps, group) that knows its configuration
        self._moves = False  # a ps that is lost is served elsewhere soon
        self._moved = 0  # how often we heard where they are served

    def tell(self, message: CloseStep, places: Sequence[Sequence[int]], then: Then) -> None:
        """Tell every ps of a step, all at once. It is carried as far as it goes.

        Where nothing of the group is elsewhere so far no other is told, nor of what ps 0 itself
        refuses at once.

        Args:
            message: Says it.
            places: Of each push, the other ps tasks that have a part.
            then: Called once, when all have answered.
        """
        closer, group = self._closer, message.group
        is_alone = message.step < closer.groups[group].elsewhere
        links = self._client.links[:1] if is_alone else self._client.links
        away = self.away[group] = {*range(len(links))}
        answers: list[Message] = []
        failed: Exception | None = None

        def done(ps: int, outcome: Any) -> None:
            nonlocal failed
            away.discard(ps)
            if isinstance(outcome, tuple):
                answers.append(outcome[0])
            else:
                failed = failed or outcome
            if not away:
                then(answers, failed)

        # It runs to completion, but it may wait for a lock, or in the log.
        request = OwnRequest(self.own, message, (), partial(done, 0))
        try:
            closer.execute(request)
        except Exception as exc:
            request.fail(exc)
        if failed is not None and away:
            then(answers, failed)
            return
        for link in links[1:]:
            named = zip(message.pushes, places, strict=True)
            here = [push for push, tasks in named if link.index in tasks]
            is_whole = len(here) == len(message.pushes)
            each = message if is_whole else replace(message, pushes=here)
            expected = Measured if message.measures else Done
            self._tell(link, each, expected, partial(done, link.index), group)

    def _tell(
        self,
        link: PsLink,
        message: CloseStep | FollowParts,
        expected: type[Message],
        done: Callable[[Any], None],
        group: int | None = None,
    ) -> None:
        moved = self._moved

        def build() -> Message:
            if group is None or (link.index, group) in self._told:
                return message
            return replace(message, config=self._closer.groups[group].raw)

        def answered(outcome: Frame | Exception) -> None:
            if not isinstance(outcome, Exception):
                answer = outcome.message
                if type(answer) is expected:
                    if expected is Done:  # it is in its log
                        self._told.add((link.index, group))
                    done((answer, ()))
                else:
                    name = type(message).__name__
                    error = f"{link.task} answered {name} with {type(answer).__name__}"
                    done(RemoteProtocolError(error))
            elif isinstance(outcome, FencedError) and self._moves:
                self._await_move(link, moved)
                # By no reference to this function: that would keep all that came until the
                # garbage collector finds it.
                self._tell(link, message, expected, done, group)
            elif isinstance(outcome, NotServedError):
                done(_came_back(link, outcome))
            else:
                done(outcome)

        call = link.ask(Call(link, build=build, then=answered))
        if group is None and link.index in self.following:
            self.following[link.index] = call

    def follow(self, others: Sequence[int]) -> None:
        """Hear from now on which parts of pushes are held on the other ps tasks.

        Raises:
            RemoteProtocolError: One of these is none.
        """
        for ps in others:
            if ps in self.following or self._closer.over is not None:
                continue
            if not 0 < ps < len(self.addresses):
                raise RemoteProtocolError(
                    f"{CLOSER}: a push with shards on ps {ps}, but there are only "
                    f"{len(self.addresses)} ps tasks"
                )
            self.following[ps] = None
            then = partial(self._unfollowed, ps)
            self._tell(self._client.links[ps], FollowParts(), Done, then)

    def _unfollowed(self, ps: int, outcome: Any) -> None:
        """A ps cannot be followed: who waits for parts there waits in vain."""
        self.following.pop(ps, None)
        if isinstance(outcome, ConnectionLost):  # however often: it lost no connection
            self.follow((ps,))
        elif isinstance(outcome, Exception) and self._closer.over is None:
            self._closer.unheard(ps, outcome)

    async def read_global_step(self, config: SyncConfig) -> int:
        """Return the present value of a group's global step.

        Raises:
            ConfigurationError: It is no single integer, or on a ps that there is not.
            UnknownVariableError: It is not on the ps that it should be on.
            ParameterServerLost: Its ps is gone.

        Cancellation: Safe.
        """
        ps, variable, index = config.global_step
        if not 0 <= ps < len(self.addresses):
            raise ConfigurationError(
                f"{config.name}: its global step is on ps {ps}, but there are only "
                f"{len(self.addresses)} ps tasks"
            )
        if ps == 0:
            return await self._closer.read_global_step(config)
        # The shard, as a variable of its own.
        name, link = f"{config.name}: global step", self._client.links[ps]
        shard = ShardSpec(name, variable, index, 0, (), GLOBAL_STEP_DTYPE, ps)
        spec = VariableSpec(name, variable, (), GLOBAL_STEP_DTYPE, False, (shard,), "")
        wanted, moved = self._client.plan((spec,)), self._moved
        while True:  # until it, or its backup, answers
            try:
                (value,) = await self._client.pull(wanted)
                return int(value)
            except FencedError as exc:
                if self._moves:
                    moved = self._await_move(link, moved)
                elif isinstance(exc, NotServedError):
                    raise _came_back(link, exc) from exc
                else:
                    raise

    async def close(self) -> None:
        """Close the links; what is under way on them fails. Cancellation: they may be left open."""
        for call in self.following.values():
            if call is not None:
                call.give_up()
        await self._client.close()
        await self._endpoint.close(goes_on=True)

    # Where others are served by backups.

    def expect_moves(self) -> None:
        """From now on wait for a ps that is lost until it is served elsewhere, see ``move``.

        Which one is lost the coordinator says: what cannot be reached from here may serve all the
        same, and is looked for as long as it takes.
        """
        self._moves = True
        for link in self._client.links:
            link.lost_after_s = math.inf
            link.on_lost = lambda _, link=link: link.hold()

    def _await_move(self, link: PsLink, moved: int) -> int:
        """A ps was replaced by its backup: where that is we shall hear, or have heard already.

        ``moved`` is how often we had heard when it was asked. Returns how often we have by now.
        """
        if moved == self._moved:
            link.hold()
        return self._moved

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served now; what is under way goes there."""
        self.addresses = list(addresses)
        self._moved += 1
        for link, address in zip(self._client.links, addresses, strict=True):
            if link.address != address or link.lost is not None:
                link.revive()
                link.address = address
                self._told = {(ps, group) for ps, group in self._told if ps != link.index}
            link.release()


def _came_back(link: PsLink, refused: NotServedError) -> ParameterServerLost:
    """Return what it means that a ps without a backup serves nothing: it was started again.

    A step must not fail with the refusal itself: the coordinator knows what to do about a loss.
    """
    lost = ParameterServerLost(link.task, f"refuses {CLOSER}: {refused.message}")
    lost.__cause__ = refused
    return lost
