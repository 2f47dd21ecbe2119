"""Synchronous steps on ps 0: contributions in, decisions out, rounds and tokens carried out.

Joins the rule (``SyncSteps``) with the network: answers wait here until there is a token, and
a decided step goes to every ps.

    Contribute    → SyncSteps.contribute → Answer, Refuse: to whoever waits for that push
                                           Close: ``StepRounds`` carries it to every ps, and
                                                  raises the global step by one;
                                                  then SyncSteps.closed → Answer, …

One object serves one coordinator and timeline. When another one comes, whoever waits here is told,
and a step that is being closed reaches no ps that already serves the newer one. How far each group
is, and whether closing is paused: ``group_phases``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from psync.cluster import task_name
from psync.errors import ClosedError, FencedError, GradientError, PsyncError
from psync.net.peer import Handler, Later, Peer, Received, Reply
from psync.net.platform import Platform
from psync.numerics.blocks import BlockPool
from psync.store.sync_config import SyncConfig
from psync.sync.cross_ps_sets import FOR_VALUES, ShareNumbers, Values, WholeSet, whole_set_of
from psync.sync.followed_steps import FollowedSteps
from psync.sync.group_phases import GroupEvent, GroupPhases, Phase
from psync.sync.groups import CLOSER
from psync.sync.log_entries import counted_entry, push_of
from psync.sync.ps_peers import AllPs
from psync.sync.ps_sync import PsSync
from psync.sync.step_rounds import ClosedStep, StepRounds, go_on
from psync.sync.steps import Action, Close, Contribution, SyncSteps
from psync.sync.token_waits import PushKey, TokenWaits
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.ps_messages import AttachPs, Fence
from psync.wire.sync_messages import (
    AskStep,
    Contribute,
    FinishSteps,
    InitTokens,
    ReportSchedule,
    SyncStep,
)

logger = logging.getLogger(__name__)


class StepCloser:
    """Decides the synchronous steps of one coordinator's cluster, and closes them.

    Args:
        platform: Network, secret.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        pool: Memory for what comes in.
        waits_changed: Called when ``steps.waiting`` may have changed.
        timeline: How often the cluster has rolled back to a snapshot.
        shares: Numbers of before that.

    Attributes:
        all_ps: The ps tasks, and where they are served.
        steps: The rule.
        phases: How far each group is.
    """

    def __init__(
        self,
        platform: Platform,
        attach: AttachPs,
        sync: PsSync,
        pool: BlockPool,
        waits_changed: Callable[[], None],
        timeline: int = 0,
        shares: ShareNumbers | None = None,
    ) -> None:
        self.steps = platform.parts.of(SyncSteps)()
        self.phases = GroupPhases()
        self._coordinator = (task_name("chief", 0), attach.coordinator)
        self._sync = sync
        self.all_ps = AllPs(platform, attach, sync, pool, timeline, shares)
        self._rounds = platform.parts.of(StepRounds)(self.all_ps, sync)
        self._waits_changed = waits_changed
        self._loop = asyncio.get_running_loop()
        self._report_version = 0
        self._members: tuple[Mapping[str, int], Sequence[str]] | None = None  # told last
        self._waits = TokenWaits(sync, self._left)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None  # of the timer
        self._over: PsyncError | None = None  # why nothing is decided here any more
        self._is_torn = False  # a step that was decided could not be applied everywhere

    @property
    def is_torn(self) -> bool:
        """Whether a step that was decided is perhaps not applied everywhere."""
        return self._is_torn or bool(self.phases.carried())

    @property
    def shares(self) -> ShareNumbers:
        """Numbers of what other ps tasks hold of sets that connections to this ps use."""
        return self.all_ps.shares

    @property
    def spread(self) -> Collection[int]:
        """Groups with a variable on several ps tasks."""
        return self._rounds.spread

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Contribute: Handler(self._contribute, self._prepare_contribute),
            AskStep: Handler(self._ask_step),
            InitTokens: Handler(self._init_tokens),
            FinishSteps: Handler(self._finish),
        }

    def replaced(self, by: str = "a newer coordinator") -> None:
        """Another one decides from now on: tell whoever waits, or comes later."""
        self._over = FencedError(f"{CLOSER} serves {by}")
        self._waits.refuse_all(self._over)

    # A backup that goes on.

    def follow(self, steps: FollowedSteps[ClosedStep], spread: Iterable[int]) -> None:
        """Go on with the steps of the one whose backup this was; it was told of these moves.

        Args:
            steps: What is known of them.
            spread: Groups with a variable on several ps tasks.
        """
        for group in spread:
            self._rounds.note_spread(group)
        self.steps.add_calls(steps.calls())
        for group in {*dict(self._sync.steps()), *steps.last, *steps.left()}:
            self.phases.begin(group, GroupEvent.REPLAY, self._replay(group, steps))

    async def _replay(self, group: int, steps: FollowedSteps[ClosedStep]) -> None:
        last, left = steps.last.get(group), steps.left().get(group, ())
        config = self._sync.define(group, None)
        try:
            first = await go_on(group, last, left, self._sync, self._rounds)
        except PsyncError as exc:  # nothing is counted where nobody knows the step
            self._is_torn = True
            self._define(group, config, 0)
            self._perform(self.steps.close_failed(group, exc))
            raise
        self._define(group, config, first)
        self._perform(self.steps.recount(group, left))

    async def close(self) -> None:
        """Close the links to the other ps tasks; a step that is being closed gets no further.

        Cancellation: Links may be left open.
        """
        self._over = self._over or ClosedError(f"{CLOSER} ends")
        self.phases.drop()
        if self._timer is not None:
            self._timer.cancel()
        await self.all_ps.close()
        await self.phases.drain()  # all ends with its links

    # Messages.

    def _prepare_contribute(
        self, peer: Peer, message: Contribute, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        self._check(peer)
        known = self._set_of(peer, message.set_id, message.members)
        known.fit(self._sync.store, lengths, CLOSER, message.rows)
        return self._sync.reserve(peer, message, sum(lengths))

    def _contribute(
        self, peer: Peer, message: Contribute, body: list[memoryview]
    ) -> Later | Awaitable[Later]:
        self._check(peer)
        brought = wanted = None
        if message.set_id >= 0:
            if not body:
                raise GradientError(f"{CLOSER}: no arrays come with a push that should bring them")
            brought = self._set_of(peer, message.set_id, None)
        if message.ahead >= 0:
            wanted = self._set_of(peer, message.ahead, message.ahead_members)
        ready = self._is_ready(message.group, message.config)
        if (
            ready
            and (brought is None or message.group in brought.checked_for)
            and (wanted is None or FOR_VALUES in wanted.checked_for)
        ):
            return self._judge(peer, message, brought, body, wanted)
        return self._contribute_first(peer, message, brought, body, wanted)

    async def _contribute_first(
        self,
        peer: Peer,
        message: Contribute,
        brought: WholeSet | None,
        body: list[memoryview],
        wanted: WholeSet | None,
    ) -> Later:
        """The group is new: its first step is that of the global step; or a set is."""
        group = message.group
        if not self._is_ready(group, message.config):
            await self._begin(group, message.config)
        if brought is not None and group not in brought.checked_for:
            await self.all_ps.describe(brought, group, self._sync.raw_config(group))
        if wanted is not None and FOR_VALUES not in wanted.checked_for:
            await self.all_ps.describe(wanted, FOR_VALUES, None)
        self._check(peer)
        return self._judge(peer, message, brought, body, wanted)

    def _set_of(self, peer: Peer, number: int, members: Sequence[Sequence[int]] | None) -> WholeSet:
        return whole_set_of(peer, number, members, self.all_ps.shares, CLOSER)

    def _judge(
        self,
        peer: Peer,
        message: Contribute,
        brought: WholeSet | None,
        body: list[memoryview],
        wanted: WholeSet | None,
    ) -> Later:
        if brought is not None:
            part = self._sync.part_of(message, brought, body[0])
            self._sync.keep(peer, message, part)
        if message.spread:
            self._rounds.note_spread(message.group)
        replica = (peer.task, peer.incarnation)
        push = push_of(message, replica, message.acked_below)
        key = (message.group, replica, message.push)
        step, counted = self.steps.step(message.group), self.steps.is_counted(*key)
        actions = self.steps.contribute(message.group, push)
        if self._sync.committer.is_begun and not counted and self.steps.is_counted(*key):
            self._log_count(message.group, step, push)
        waiter = self._waits.add(key, wanted)
        self._perform(actions)
        return waiter

    def _log_count(self, group: int, step: int, push: Contribution) -> None:
        """Let the backup know of a push before anybody hears that it counts."""
        entry, body = counted_entry(
            group, step, push, self._sync.staged(group, push.replica, push.number),
            self._sync.raw_config(group), spread=group in self._rounds.spread,
        )  # fmt: skip
        self._sync.committer.commit(push.replica, entry, body, lambda: None)

    def _ask_step(self, peer: Peer, message: AskStep, _: list[memoryview]) -> Reply:
        self._check(peer)
        return self._step_of(message.group)

    async def _init_tokens(self, peer: Peer, message: InitTokens, _: list[memoryview]) -> Reply:
        self._check(peer)
        if not self._is_ready(message.group, message.config):
            await self._begin(message.group, message.config)
            self._check(peer)
        self._perform(self.steps.init_tokens(message.group, message.count))
        return self._step_of(message.group)

    def _step_of(self, group: int) -> Reply:
        return Reply(SyncStep(self.steps.step(group), self.steps.first_step(group)))

    async def _finish(self, peer: Peer, message: FinishSteps, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        replaying = functools.partial(self.phases.of, Phase.REPLAYING)
        while self._over is None and (replaying() or not self.steps.is_settled):
            self._perform(self.steps.finish())
            if not await self.phases.settled() and self._sync.committer.is_begun:
                await self._when_in_log()
        return Reply(Done())

    async def _when_in_log(self) -> None:
        """What was decided is done at its turn."""
        try:
            await self._sync.committer.at_turn(lambda: None)
        except PsyncError:
            if self._over is None:
                raise

    def _check_coordinator(self, peer: Peer) -> None:
        if (peer.task, peer.incarnation) != self._coordinator:
            raise FencedError(f"{CLOSER}: {peer.task} is not the coordinator that it serves")

    def _check(self, peer: Peer) -> None:
        self._sync.ledger.check_incarnation(peer.task, peer.incarnation)
        if self._over is not None:
            raise self._over.with_traceback(None)  # it is raised many times

    # Membership.

    def hear(self, message: ReportSchedule) -> None:
        """Note a report of the coordinator, unless a newer one was there."""
        if message.version <= self._report_version:
            return
        self._report_version = message.version
        alive = {task_name("worker", index): born for index, born in message.workers}
        self.set_members(alive, message.missing)
        in_flight = [closure for closure, _ in message.in_flight]
        self._perform(self.steps.schedule(message.queued, in_flight))

    def set_members(self, alive: Mapping[str, int], missing: Sequence[str]) -> None:
        """Take note of who lives (task → incarnation), and of the names of those who should."""
        self._members = (alive, missing)
        self._perform(self.steps.members(alive, missing, self._loop.time()))

    def lost(self, task: str, below: int) -> None:
        """Incarnations of ``task`` below ``below`` are over: nobody waits for their answers."""
        self._perform(self.steps.fence(task, below))

    def end(self, reason: str) -> None:
        """Training is over: whoever waits, or pushes later, is told."""
        self._perform(self.steps.end(reason))

    def fence(self, task: str, below: int) -> None:
        """Let the other ps tasks refuse incarnations of ``task`` below ``below``."""
        message = Fence(task, below)
        if calls := self.all_ps.ask_others(message):
            self.phases.carry(_fence_others(calls))

    # Decisions.

    def _left(self, key: PushKey) -> None:
        """Nobody waits for a push any more."""
        self.steps.forget(*key)
        self._waits_changed()

    def _perform(self, actions: Sequence[Action]) -> None:
        """Do what the rule has decided, then look when it wants to be asked again."""
        if not self._sync.committer.is_begun:
            self._act(actions)
        elif actions:  # once the backup has what they come from
            self._sync.committer.at_turn(functools.partial(self._act, actions))
        deadline = self.steps.next_deadline()
        if deadline != self._deadline:
            self._set_timer(deadline)
        self._waits_changed()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Close):
                self._close(action)
            else:
                self._waits.answer(action)

    def _set_timer(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = deadline
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._deadline = self._timer = None
        self._perform(self.steps.tick(self._loop.time()))

    # The first step of a group.

    def _is_ready(self, group: int, raw: dict[str, Any] | None) -> bool:
        """Return whether a group is known; raise if it is known as something else."""
        self._sync.define(group, raw)
        return self.steps.knows(group)

    async def _begin(self, group: int, raw: dict[str, Any] | None) -> None:
        """Begin a group at the present global step, read once for all who ask meanwhile."""
        config = self._sync.define(group, raw)
        beginning = self.phases.beginning(group)
        if beginning is None:
            reading = self._read_first(group, config)
            beginning = self.phases.begin(group, GroupEvent.READ, reading)
        try:
            await asyncio.shield(beginning)
        except PsyncError:
            if self._over is not None:
                raise self._over.with_traceback(None) from None
            raise

    async def _read_first(self, group: int, config: SyncConfig) -> None:
        self._define(group, config, await self.all_ps.read_global_step(config))

    def _define(self, group: int, config: SyncConfig, first: int) -> None:
        self.phases.move(group, GroupEvent.DEFINE)
        # Where this ps has closed a step of it already, as a backup, -1 is older than that.
        goes_on = group in dict(self._sync.steps())
        self.steps.define(group, config, first, goes_on=goes_on)
        if self._members is not None:
            self.set_members(*self._members)  # a group knows since when too few live

    # Closing.

    def resume(self, why: str) -> None:
        """End a pause, see ``GroupPhases.pause``; close what was held if it was the last."""
        for close in self.phases.resume(why):
            self._close(close)

    def _close(self, close: Close) -> None:
        if self.phases.hold(close):
            return
        self.phases.close(close.group)
        self._rounds.carry(
            close,
            functools.partial(self._waits.wanted_shares, close.group),
            functools.partial(self._go_on, close),
        )

    def _go_on(self, close: Close, values: Values, failed: Exception | None) -> None:
        """Give the tokens of the next step, with the values that are wanted; or give up."""
        self.phases.ended(close.group)
        self._is_torn |= failed is not None
        if self._over is not None:
            return
        if failed is None:
            self._waits.bring(values)
            self._perform(self.steps.closed(close.group, close.step))
            self._waits.done()
            return
        error = failed if isinstance(failed, PsyncError) else _unexpected(failed)
        logger.error(
            "%s: step %d of group %d cannot be closed: %s",
            CLOSER, close.step, close.group, error.message,
        )  # fmt: skip
        self._perform(self.steps.close_failed(close.group, error))


async def _fence_others(calls: Sequence[asyncio.Task[Received]]) -> None:
    for failed in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(failed, Exception):
            logger.warning("%s: a ps was not told of a fence: %s", CLOSER, failed)


def _unexpected(error: Exception) -> PsyncError:
    wrapped = PsyncError(f"{type(error).__name__} while a step was applied: {error}")
    wrapped.__cause__ = error
    return wrapped
