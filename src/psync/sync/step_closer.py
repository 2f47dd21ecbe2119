"""Synchronous steps on ps 0: pushes into the log, the rule's decisions carried out.

Joins the rule (``SyncSteps``) with the network. Whatever the rule is told is an entry of the log,
with the time at which it came; so the backup of ps 0 is told the same, and has the same rule.

    Update           the same       ─► SyncSteps.contribute → Answer, Refuse: to who waits for that
    (group is new)   BeginGroup     ─► SyncSteps.define, init_tokens
    ReportSchedule   the same       ─► SyncSteps.members, schedule; end
    FinishSteps      the same       ─► SyncSteps.finish → Close: decided; it is carried
    a deadline       Tick           ─► SyncSteps.tick       to every ps (``OutgoingSteps``)
    nobody waits     ForgetPush     ─► SyncSteps.forget

A ps 0 that dies before the backup has an entry has told nobody of it: the closure runs again, and
makes the same push. One object serves one coordinator and timeline. When another one comes, pending
requests fail, and a step that is outgoing reaches no ps that already serves the newer one.

Steps that are decided (``OutgoingSteps``) are carried to every ps, until all have applied them.

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
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import msgspec

from psync.cluster import task_name
from psync.errors import (
    ClosedError,
    FencedError,
    PsyncError,
    RemoteProtocolError,
    check_fits,
)
from psync.net.connection import AsIfFrom, Handler, OwnRequest, Request
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.ps.cooperative_work import Changing
from psync.ps.executor import LATER, Later
from psync.store.ledger import Client
from psync.store.step_norms import Factors, StepNorms
from psync.sync.ps_peers import AllPs
from psync.sync.ps_sync import CLOSER, FROM_CLOSER, PsSync, Reads
from psync.sync.staging import PushKey
from psync.sync.staleness_service import ClockService
from psync.sync.step import NOWHERE, Part
from psync.sync.steps import Action, Answer, Close, Contribution, Listed, Refuse, Replica, SyncSteps
from psync.wire.codec import Message, decode, encode, replace
from psync.wire.messages import (
    AttachPs,
    BeginGroup,
    CloseStep,
    Done,
    Failure,
    FinishSteps,
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
        self.cancel()
        self.deadline = deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline + self._ahead, self._ring)

    def _ring(self) -> None:
        # A timer may ring early, by its clock's resolution and by what sums of floats lose. An
        # entry of that time would change nothing, and the timer ring at once, again and again.
        assert self.deadline is not None, "it is cancelled with its timer"
        self._latest = max(self._latest, self.deadline)
        self.deadline = self._timer = None
        self._expired()

    def cancel(self) -> None:
        """Call at no time."""
        self.deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


HOSTED = "it is a backup"
"""Why nothing is carried until the coordinator has said where all ps tasks are served."""


class OutgoingSteps(Changing):
    """The outgoing steps of one coordinator's cluster; requests wait for pauses, and for steps.

    Args:
        sync: The part of ps 0 itself.
        all_ps: The ps tasks.
        steps: The rule.
        perform: Does what the rule has decided.
        failed: Called with a group of which a step could not be applied: its pushes are over.
        is_hosted: Whether it is that of a backup.

    Attributes:
        pauses: For what nothing is carried.
        carried: Groups of which a step is on its way to every ps.
    """

    def __init__(
        self,
        sync: PsSync,
        all_ps: AllPs,
        steps: SyncSteps,
        perform: Callable[[Iterable[Action]], None],
        failed: Callable[[int], None],
        *,
        is_hosted: bool,
    ) -> None:
        super().__init__()
        self.pauses = {HOSTED} if is_hosted else set()
        self._wanted: set[str] = set()  # pauses that are wanted, also before they begin
        self._is_over = False  # nothing is decided here any more
        self._sync = sync
        self._all_ps = all_ps
        self._steps = steps
        self._perform, self._failed = perform, failed
        self.carried: set[int] = set()
        self._self = AsIfFrom(FROM_CLOSER)
        self._is_torn = False  # a step that was decided could not be applied everywhere

    @property
    def is_torn(self) -> bool:
        """Whether a step that was decided is perhaps not applied everywhere."""
        return self._is_torn or bool(self.carried)

    def decide(self, close: Close) -> None:
        """A step is decided: it is outgoing from now on."""
        self._sync.groups[close.group].outgoing = close
        if not self.pauses:
            self._carry(close)

    def restore(self) -> None:
        """Be where the rule is, which was restored: what it has decided is outgoing."""
        for close in self._steps.closing():
            self.decide(close)

    def _carry(self, close: Close) -> None:
        """Let every ps that has not done so apply a step."""
        known = self._sync.groups[close.group]
        self.carried.add(close.group)
        norms, passes = known.norms, list[str]()
        is_whole = close.step < known.elsewhere or len(self._all_ps.addresses) < 2
        if known.takes_norms and not is_whole and not close.is_measured:
            norms = StepNorms(known.rule)
            passes = norms.passes_together(spread=known.spread)
        self._go_on(close, norms, passes)

    def _go_on(self, close: Close, norms: StepNorms, passes: list[str]) -> None:
        """Begin the next round of a step."""
        step = close.group, None, close.step, close.pushes
        if passes:
            known = _listed(norms.scales), _listed(norms.ratios)
            then = functools.partial(self._measured, close, norms, passes)
            self._all_ps.tell(CloseStep(*step, *known, passes[0]), close.places, then)
        else:
            message = CloseStep(*step, close.scales, close.ratios)
            self._all_ps.tell(message, close.places, functools.partial(self._ended, close))

    def _measured(
        self,
        close: Close,
        norms: StepNorms,
        passes: list[str],
        answers: list[Message],
        failed: Exception | None,
    ) -> None:
        if failed is None:
            try:
                self._conclude(norms, passes, answers)
            except Exception as exc:
                failed = exc
        if failed is not None:
            self._ended(close, [], failed)
        elif passes:
            self._go_on(close, norms, passes)
        else:
            factors = _listed(norms.scales), _listed(norms.ratios)
            message = NormsMeasured(close.group, close.step, *factors)

            def act() -> None:
                self.note_factors(message)
                self._go_on(close, norms, passes)

            self._submit(close, message, act)

    def _conclude(self, norms: StepNorms, passes: list[str], answers: list[Message]) -> None:
        sums = [
            (variable, index, first, second)
            for each in cast(list[Measured], answers)
            for variable, index, first, second in each.sums
        ]
        norms.conclude(passes.pop(0), sums)

    def _submit(self, close: Close, message: Message, act: Callable[[], None]) -> None:
        """Put into the log how far a step is; once that has ended, another one carries it again."""

        def dropped(outcome: object) -> None:
            if isinstance(outcome, PsyncError):
                self.carried.discard(close.group)
                self.wake()

        request = OwnRequest(self._self, message, (), dropped)
        self._sync.executor.submit(request, message, (), act)

    def note_factors(self, message: NormsMeasured) -> None:
        """Execute an entry: a step that is outgoing is to be closed with these factors."""
        close = self._sync.groups[message.group].outgoing
        if close is not None and close.step == message.step:
            close.is_measured = True
            close.scales, close.ratios = message.scales, message.ratios

    def _ended(self, close: Close, _: list[Message], failed: Exception | None) -> None:
        """Every ps has applied a step, or it cannot be."""
        failure = b""
        if failed is not None:
            if not isinstance(failed, PsyncError):
                failed = PsyncError(f"{type(failed).__name__} while a step was applied: {failed}")
            failure = encode(failure_of(failed))
            self._is_torn = True

        message = StepApplied(close.group, close.step, failure)

        def act() -> None:
            self.carried.discard(close.group)
            self.note_applied(message)
            if self.waiting:
                self.wake()

        self._submit(close, message, act)

    def note_applied(self, message: StepApplied) -> None:
        """Execute an entry: a step is outgoing no more."""
        group = message.group
        self._sync.groups[group].outgoing = None
        if not message.failure:
            self._perform(self._steps.closed(group, message.step))
            return
        error = exception_of(cast(Failure, decode(message.failure)), CLOSER)
        logger.error(
            "%s: step %d of %s cannot be closed: %s",
            CLOSER, message.step, self._sync.groups[group].config.name, error.message,
        )  # fmt: skip
        self._perform(self._steps.close_failed(group, error))
        self._sync.end_group(group, error)
        self._failed(group)

    async def finish(self, client: Client, message: FinishSteps) -> None:
        """Nothing is left to do: let all that was counted be applied, as far as it can be.

        Raises:
            PsyncError: The log has ended.

        Cancellation: Safe.
        """
        asked = False  # after what is in the log by now
        while not (self._is_over or (asked and self._steps.is_settled)):
            if self.carried or self.pauses or (asked and self._steps.closing()):
                await self.changed()
            else:  # also if something was counted behind what was asked
                await self._sync.executor.run(client, message, self.close_all)
                asked = True

    def close_all(self, _: FinishSteps) -> None:
        """Execute an entry: close the steps in which something was counted."""
        self._perform(self._steps.finish())

    def end(self) -> None:
        """Another one decides from now on, or nobody."""
        self._is_over = True
        self.wake()

    # Pausing.

    async def pause(self, why: str) -> None:
        """Carry no step from now on, and wait for those that are on their way.

        On what was a backup that begins when it serves: until then a step may be outgoing whose
        parts are applied here, and nowhere else.

        Cancellation: Safe; it may be paused.
        """
        self._wanted.add(why)
        while HOSTED in self.pauses and not self._is_over:
            await self.changed()
        if why not in self._wanted:  # it has ended meanwhile
            return
        self.pauses.add(why)
        while self.carried:
            await self.changed()

    def resume(self, why: str) -> None:
        """End a pause; carry what was decided meanwhile if it was the last."""
        self.pauses.discard(why)
        self._wanted.discard(why)
        if not self.pauses and not self._is_over:
            for group, known in self._sync.groups.items():
                if known.outgoing is not None and group not in self.carried:
                    self._carry(known.outgoing)
        self.wake()


def _listed(factors: Factors | None) -> Listed:
    return None if factors is None else list(factors.items())


logger = logging.getLogger(__name__)

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


class StepCloser:
    """Decides the synchronous steps of one coordinator's cluster, and closes them.

    Args:
        platform: Network, secret.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        pool: Memory for what comes in.
        clocks: Told when ``steps.waiting`` may have changed.
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
        clocks: ClockService,
        timeline: int = 0,
        *,
        is_hosted: bool = False,
    ) -> None:
        self.steps = platform.parts.of(SyncSteps)(len(attach.ps_addresses) - 1)
        self._coordinator = (task_name("chief", 0), attach.coordinator)
        self._sync = sync
        self.all_ps = AllPs(platform, attach, sync, pool, self._heard, self._unheard, timeline)
        self._clocks = clocks
        self._loop = asyncio.get_running_loop()
        sync.took, sync.judged, sync.left = self._took, self._judge, self._left
        sync.applied = self._applied
        self.outgoing = platform.parts.of(OutgoingSteps)(
            sync, self.all_ps, self.steps, self._perform,
            self._go_on_without, is_hosted=is_hosted,
        )  # fmt: skip
        self._here: dict[PushKey, _Here] = {}  # pushes of steps that are not closed
        self._clock = LogClock(self._expired)
        self._lacked: Mapping[str, int] = {}  # at how many looks in a row
        self._look()
        self._over: PsyncError | None = None  # why nothing is decided here any more

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            BeginGroup: Handler(self._init_tokens),
            FinishSteps: Handler(self._finish),
        }

    def describe(self) -> list[str]:
        """Say what open steps wait for, but for pushes; for reports."""
        return [
            f"step {self.steps.present(group)} of {known.config.name} waits for {lack}"
            for group, known in self._sync.groups.items()
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
        outgoing = self._sync.groups[group].outgoing
        if outgoing is not None and group in self.outgoing.carried:
            lacks = [
                f"/job:ps/task:{ps}, which applies step {outgoing.step}"
                for ps in self.all_ps.awaited(group)
            ]
        elif outgoing is not None:
            lacks = [f"the end of a pause ({', '.join(sorted(self.outgoing.pauses))})"]
        parts = [
            (task, push, ps)
            for (number, (task, _), push), here in self._here.items()
            if number == group and not here.is_over
            for ps in ((0,) if here.waits is None else here.waits[1].known.others)
            if ps not in here.held
        ]
        return lacks + [
            f"the part of {task} at /job:ps/task:{ps} (push {push})" for task, push, ps in parts
        ]

    def _look(self) -> None:
        """Look what open steps lack, again and again; log what they have lacked for long."""
        lacks = [lack for group in self._sync.groups for lack in self._lacks(group)]
        self._lacked = {lack: self._lacked.get(lack, 0) + 1 for lack in lacks}
        is_hosted = HOSTED in self.outgoing.pauses  # its primary says it
        if not is_hosted and any(looks % LOOKS_A_NOTE == 0 for looks in self._lacked.values()):
            for line in self.describe():
                logger.warning("%s: %s", CLOSER, line)
        self._looking = self._loop.call_later(LOOK_EVERY_S, self._look)

    # A section of the state, with that of what ps 0 has itself.

    def control(self) -> list[Any]:
        """Return what is staged and decided, and the state of the rule."""
        return [*self._sync.control(), self.steps.snapshot()]

    async def live(self, arrays: list[memoryview]) -> Any:
        """Return what ps 0 has itself, and the state of the rule."""
        return await self._sync.live(arrays), self.steps.snapshot()

    async def restore(self, state: Any, arrays: Iterator[memoryview]) -> None:
        """Be where the rule is of the one whose backup this is."""
        held, rule = state
        await self._sync.restore(held, arrays)
        configs = {group: known.config for group, known in self._sync.groups.items()}
        self.steps.restore(rule, configs)
        self._clock.note(rule["now"])
        self.outgoing.restore()

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes which entry of the log of the one whose backup this is."""

        logged = self._sync.executor.logged

        def replay(act: Callable[[Any], None]) -> Handler:
            return logged(Handler(lambda request: act(request.message)))

        return {
            **self._sync.replayed(),
            ForgetPush: logged(Handler(lambda r: self._forget(r.peer.client, r.message))),
            BeginGroup: replay(self._define),
            ReportSchedule: replay(self._set_members),
            Tick: replay(self._tick),
            NormsMeasured: replay(self.outgoing.note_factors),
            StepApplied: replay(self.outgoing.note_applied),
            FinishSteps: replay(self.outgoing.close_all),
        }

    def _note(self, message: Message, act: Callable[[Any], None]) -> None:
        """Put into the log what nobody waits for; nothing once that has ended."""
        self._sync.executor.note(FROM_CLOSER, message, lambda: act(message))

    # Its end, and the end of its life as a backup.

    def replaced(self, why: str) -> None:
        """Another one decides from now on: pending requests fail, and later ones."""
        self._over = FencedError(f"{CLOSER} {why}")
        self._looking.cancel()
        self._here.clear()
        self._sync.fail_all(self._over)
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
        self._looking.cancel()
        self.outgoing.end()
        self._clock.cancel()
        await self.all_ps.close()

    # Pushes.

    def _took(self, request: Request[Update], part: Part) -> None:
        """The part of a push has come in that is for ps 0."""
        if self._over is not None:
            self._check()
        key, others = part.key, part.known.others
        if not self.all_ps.following.keys() >= {*others}:
            self.all_ps.follow(others)
        is_stale = self.steps.is_stale(key[0], part.local_step)
        if is_stale is None:
            request.start(self._take_first(request, part))
        elif is_stale or not others:
            self._sync.submit(request, part)
        else:
            here = self._here.get(key)
            if here is None:
                here = self._here[key] = _Here(part.local_step)
            here.is_over = here.held.issuperset(others)
            if here.is_over:
                self._sync.submit(request, part)
            else:
                self._sync.wait(request, part)
                here.waits = request, part

    async def _take_first(self, request: Request[Update], part: Part) -> None:
        """The group is new: its first step is that of the global step."""
        await self._begin(part.known.optimizer)
        self._took(request, part)

    def _heard(self, request: Request[Held]) -> None:
        """Another ps holds parts of pushes. It says so again on each connection."""
        message = request.message
        if request.peer.task != f"/job:ps/task:{message.ps}":
            raise RemoteProtocolError(f"{request.peer.task} says what ps {message.ps} holds")
        for group, task, incarnation, push, local_step in message.parts:
            key = group, (task, incarnation), push
            here = self._here.get(key)
            if here is None:
                if self._over is not None or self.steps.is_stale(group, local_step):
                    continue
                here = self._here[key] = _Here(local_step)
            here.held.add(message.ps)
            if here.waits is not None:
                waiting, part = here.waits
                is_complete = here.held.issuperset(part.known.others)
                if is_complete or self.steps.is_stale(group, local_step):
                    here.waits, here.is_over = None, True
                    self._sync.submit(waiting, part)

    def _unheard(self, ps: int, error: Exception) -> None:
        """A ps is lost: pushes that wait for their parts there fail."""
        for key, here in list(self._here.items()):
            if here.waits is not None and ps in here.waits[1].known.others and ps not in here.held:
                here.waits, here.is_over = None, True
                self._sync.fail(key, error)

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
                self._sync.submit(*here.waits)

    def _judge(self, request: Request[Update], part: Part) -> Later:
        request.segments = ()
        message, known = request.message, part.known
        group, replica, push = part.key
        try:
            self._sync.ledger.check_incarnation(*replica)
        except PsyncError as exc:
            self._sync.staging.give_back(part.key)
            self._sync.fail(part.key, exc)
            return LATER
        here = self._sync.groups[group]
        if here.broken is None:
            self._sync.staging.stage(part)
        else:
            self._sync.staging.give_back(part.key)
        here.spread = here.spread or known.spread
        if known.others and here.elsewhere == NOWHERE:
            here.elsewhere = self.steps.present(group)
        self._perform(
            self.steps.contribute(
                group,
                Contribution(
                    replica, push, message.acked_below,
                    message.closure if message.closure >= 0 else None, message.ordinal,
                    known.variable_set, message.local_step, message.weight, known.others,
                ),
            )
        )  # fmt: skip
        if self.outgoing.waiting:
            self.outgoing.wake()  # a join waits
        return LATER

    def _left(self, key: PushKey) -> None:
        """Nobody waits for a push any more."""
        group, replica, push = key
        if key in self._here:  # what others hold they have told, and it may come again
            self._here[key].waits, self._here[key].is_over = None, True
        message = ForgetPush(group, push)
        self._sync.executor.note(replica, message, lambda: self._forget(replica, message))

    def _forget(self, replica: Replica, message: ForgetPush) -> None:
        self.steps.forget(message.group, replica, message.push)
        self._perform(())

    async def _init_tokens(self, request: Request[BeginGroup]) -> None:
        message = request.message
        self._check()
        self._sync.known(message.group, message.config)
        if self.steps.is_stale(message.group, 0) is None:
            await self._begin(message.group)
        await self._sync.executor.run(request.peer.client, message, self._define)
        request.answer(Number(self.steps.present(message.group)))

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

    async def _begin(self, group: int) -> None:
        """Begin a group at the present global step; whoever has read it first decides."""
        known = self._sync.groups[group]
        try:
            step = await self.all_ps.read_global_step(known.config)
            expected = f"{known.config.name}: expected a global step of at least 0"
            check_fits(step >= 0, expected, step)
            message = BeginGroup(group, known.raw, step=step)
            await self._sync.executor.run(FROM_CLOSER, message, self._define)
        except PsyncError:
            self._check()
            raise
        self._check()

    def _define(self, message: BeginGroup) -> None:
        config = self._sync.known(message.group, message.config).config
        if message.step >= 0:
            self.steps.define(message.group, config, message.step)
        if message.count is not None:
            self._perform(self.steps.init_tokens(message.group, message.count))

    # Membership, and time.

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

    def lost(self, task: str, below: int) -> None:
        """Incarnations of ``task`` below ``below`` are over, says an entry: they wait no more."""
        self._go_on([key for key in self._here if key[1][0] == task and key[1][1] < below])
        self._perform(self.steps.fence(task, below))

    def _expired(self) -> None:
        self._note(Tick(self._clock.now()), self._tick)

    def _tick(self, message: Tick) -> None:
        self._clock.note(message.now)
        self._perform(self.steps.tick(message.now))

    def _applied(self, message: CloseStep) -> None:
        """A step is applied here: answer the pushes of which each ps has a part."""
        known = self._sync.groups[message.group]
        if known.outgoing is not None and known.outgoing.step == message.step:
            known.answered = message.step
            reads: Reads = {}
            for answer in known.outgoing.answers:
                self._answer(answer, reads)

    def _answer(self, answer: Answer, reads: Reads) -> None:
        alone = answer.token <= self._sync.groups[answer.group].elsewhere
        key, made = (answer.group, answer.replica, answer.number), partial(answer.message, alone)
        self._sync.answer(key, made, reads if answer.count else None)

    def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the rule has decided, then look when it wants to be asked again."""
        reads: Reads = {}
        for action in actions:
            if isinstance(action, Close):
                self.outgoing.decide(action)
                self._loop.call_soon(self._go_on_without, action.group, action.step)
            elif self._over is None:
                key = action.group, action.replica, action.number
                if isinstance(action, Refuse):
                    self._sync.fail(key, action.error)
                    continue
                known = self._sync.groups[action.group]
                close = known.outgoing
                if close is None or known.answered == close.step or action not in close.answers:
                    self._answer(action, reads)
        may_wait = self.steps.is_short or self._clock.deadline is not None
        if may_wait and HOSTED not in self.outgoing.pauses and self._over is None:
            deadline = self.steps.next_deadline()
            if deadline != self._clock.deadline:
                self._clock.set_deadline(deadline)
        if self._clocks.heeds_groups:
            self._clocks.look_again()
