"""Client of synchronous steps: parts staged on every ps, then the contribution to ps 0.

    StagePush to each ps   keeps its part; no trace of it if what follows never happens
    Contribute to ps 0     decides; answers with the outcome and a token, as soon as there is one

A push of at most 64 KiB is no more than the second message, which carries it whole; of a larger
one it carries ps 0's own part, if that is small. Pushes are numbered separately in each group.

A ps of this host keeps a part where it is lent, until the step is applied. Where that is memory of
the caller's own (``psync.empty_like``), which may be written to once the push has returned, it must
not be read any more then. It is not where the token is of a later step than the push counts in, or
the push does not count. Else, or after an error, each ps is sent the same part again, as a copy,
which takes the place of the first one, and the push returns when that has been given back.

Values may come with the token: ps 0 sends all, and the other ps tasks have sent theirs to it when
the step was applied: up to 64 KiB, if no shard is busy and there is no second group. A push asks by
itself for the set that was pulled right after the last one, so a step of small variables needs no
pull. Those values are of a pull that was made early: read on the ps tasks after the push was sent,
and used later. The caller of that pull must not be able to tell, so they are dropped unless all of
this holds:

- The pull is the next thing that this task does with the ps tasks.
- It begins in a closure that was on this worker when the push was sent: what a program did before
  it scheduled the closure, or before it gave it its inputs, is in the values then.
- No update of this task was under way when the push was sent, and no other answer of a ps has come
  since.
- It begins in the turn of the loop in which the push is answered, and within a millisecond: a step
  that waits for anything in between, or computes, may have learned of newer values by other ways.
  If the closure ends in that turn, the values are for the next one, until that waits for something.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psync.client.counters import Numbers
from psync.client.link import Answers, Call, PsLink, ask
from psync.client.plan import (
    BODY_PER_REQUEST,
    MEMBERS_PER_REQUEST,
    Array,
    Landing,
    Plan,
    Request,
    Whole,
    bodies_of,
)
from psync.client.ps import PsClient
from psync.errors import ConfigurationError, PsyncError
from psync.net.connection import Connection
from psync.numerics.memory import BlockPool
from psync.numerics.rows import IndexedSlices
from psync.wire import messages
from psync.wire.frames import SMALL_BODY_BYTES, Segment
from psync.wire.tensors import to_bytes_view

ASK_FROM_SMALLS = 16
"""More than so many small bodies, 1 MiB, are not sent before ps 0 has been asked whether they would
be stale. The question costs a round trip each time; of less, what is sent for nothing costs no
more."""

GOOD_FOR_S = 0.001
"""A step that has not let go of the loop for so long has computed, or read something."""

NEVER = 1 << 62
"""When a closure came in that is to get nothing that was sent ahead."""


class PulledAhead:
    """What one task has been sent ahead. Single owner.

    Args:
        links: To all ps tasks.
        now: The time, in seconds: finer than ``GOOD_FOR_S``.

    Attributes:
        is_used: Whether anything was pulled.
        arrivals: How often closures have come in.
    """

    def __init__(self, links: Sequence[PsLink], now: Callable[[], float]) -> None:
        self.is_used = False
        self.arrivals = 0
        self._arrivals_then = NEVER - 1  # when the last push was sent; before the first: anything
        self._links = links
        self._now = now
        self._pool = BlockPool()
        self._plan: Plan | None = None  # of the first pull after the last push
        self._is_first = True  # whether the next pull is that
        self._in_turn = True  # whether the loop has not gone on since a push was answered
        self._turns = 0  # so far; a number for ``_end_turn``
        self._calls_then = -1  # expected once the last push is answered; before the first: any
        self._asked: Landing | None = None  # by the last push
        self._wanted: Landing | None = None  # the same, once its values have come
        self._came = 0.0  # when they did

    def want(self, announced: Plan | None = None) -> Landing | None:
        """A push is about to be sent, one message: return what it should ask for, if anything.

        Args:
            announced: What the program says that it pulls next; None: it does not say.
        """
        self._asked = self._wanted = None
        self._is_first = True
        self._arrivals_then = self.arrivals
        self._calls_then = self._calls() + 2  # and its answer
        plan = announced or self._plan
        if plan is None or plan.whole.nbytes > SMALL_BODY_BYTES:
            return None
        for link in self._links:
            if link.updates.under_way:
                return None
        self._asked = Landing(plan, self._pool)
        return self._asked

    def put(self, wanted: Landing | None) -> None:
        """The push was answered, with values if any were wanted, and there were some.

        They are good for this turn of the loop: in it nothing is heard from anybody.
        """
        if wanted is not None and wanted is self._asked and wanted.arrays is not None:
            self._wanted, self._came = wanted, self._now()
        self._begin_turn()

    def begin_closure(self) -> None:
        """The next closure of this task begins, or what comes before it and may wait."""
        if self.is_used and self._in_turn:
            self._begin_turn()

    def end_closure(self) -> None:
        """A closure has returned; the turn in which it did goes on when the next one begins."""
        self._turns += 1

    def _begin_turn(self) -> None:
        self._in_turn, self._turns = True, self._turns + 1
        asyncio.get_running_loop().call_soon(self._end_turn, self._turns)

    def _end_turn(self, turn: int) -> None:
        if turn == self._turns:
            self._in_turn, self._wanted = False, None

    def take(self, plan: Plan, arrival: int) -> Landing | None:
        """Somebody pulls: return the values if they are what would be pulled now.

        Args:
            plan: What is pulled.
            arrival: When the closure that pulls came in, by ``arrivals``; 0: it is no closure.
        """
        self.is_used = True
        silent = self._calls_then in (-1, self._calls())  # nothing else was asked, or answered
        fresh = self._in_turn and arrival <= self._arrivals_then and silent
        if self._is_first:  # where they come too late once, they will the next time
            is_in_time = self._in_turn and silent  # a closure may come in sooner the next time
            self._is_first, self._plan = False, plan if is_in_time else None
        wanted, self._wanted = self._wanted, None
        if not fresh or wanted is None or wanted.plan is not plan:
            return None
        return wanted if self._now() - self._came <= GOOD_FOR_S else None

    def _calls(self) -> int:
        calls = 0
        for link in self._links:
            calls += link.num_calls
        return calls


@dataclass(slots=True)
class _Group:
    """What this task knows of one group."""

    pushes: Numbers = field(default_factory=Numbers)
    token: int | None = None  # the last one
    is_decided: bool = False  # the rule at ps 0 knows its configuration
    staging: set[int] = field(default_factory=set)  # ps tasks that know it


class _Part(NamedTuple):
    """What a push has for one ps."""

    request: Request
    segments: Sequence[Segment]
    rows: list[int] | None  # as the wire has it
    nbytes: int

    def views(self) -> Iterator[memoryview]:
        """Return what is lent of it: segments of whole shards."""
        return (each for each in self.segments if isinstance(each, memoryview) and len(each))


class _Push(NamedTuple):
    """What every message of a push says of it."""

    group: int
    config: dict[str, Any]
    number: int
    local_step: int
    read: list[_Part]  # where they lie: in the caller's memory

    def is_applied(self, answer: messages.Contributed) -> bool:
        """Return whether nothing will be computed from it any more, now that it is answered."""
        if answer.outcome != "accepted":
            return True
        # It counts in a step up to its local step, and later tokens come when that is applied.
        return answer.token > self.local_step >= 0


class SyncClient:
    """All synchronous groups as one task sees them.

    Args:
        ps: All ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        self._groups: dict[int, _Group] = {}

    def token(self, group: int) -> int | None:
        """Return the last token that this task got, or None before the first."""
        known = self._groups.get(group)
        return None if known is None else known.token

    def _group(self, group: int) -> _Group:
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group()
        return known

    async def contribute(
        self,
        plan: Plan,
        gradients: Sequence[Array],
        *,
        group: int,
        config: dict[str, Any],
        local_step: int,
        call: tuple[int, int],
        weight: float,
        ahead: PulledAhead | None = None,
        announced: Plan | None = None,
    ) -> messages.Contributed:
        """Contribute a gradient for each of a plan's variables to the group's step.

        Args:
            plan: Of the variables.
            gradients: As for ``PsClient.push``.
            group: Number of the synchronous optimizer.
            config: ``SyncConfig.to_config()``, for a ps that does not know the group yet.
            local_step: Of the values that the gradients were computed from; -1: of before
                the group's first step.
            call: Id of the closure, or -1; and the ordinal of the call within it.
            weight: Of these gradients in the mean.
            ahead: Gets the values that the answer brings; None: none are wanted.
            announced: What the program says that it pulls next.

        Returns:
            What became of it, and the token; there may be a long wait for that.

        Raises:
            TrainingEnded: No further step will be closed.
            NotEnoughReplicas: Too few workers have lived for too long.
            ConfigurationError: The group is known with another configuration; or the variables
                are too many for one message to a ps. Nothing was contributed.
            FencedError: This task was replaced.
            ParameterServerLost: A ps is gone.

        Cancellation: Cancelled before ps 0 was told, the push does not count: what is staged of it
            goes with the step. Afterwards it does, and nobody waits for its token.
        """
        if plan.in_parts:
            ps = next(request.ps for request in plan.requests if request.part)
            raise ConfigurationError(
                f"a synchronous push to /job:ps/task:{ps} carries at most "
                f"{MEMBERS_PER_REQUEST} shards and {BODY_PER_REQUEST >> 30} GiB",
                hint="spread the variables over more ps tasks",
            )
        known = self._group(group)
        pushes = known.pushes
        push = _Push(group, config, pushes.draw(), local_step, [])
        try:
            with self._ps.work.push:
                along, segments, rows = await self._stage_large(plan, gradients, push)
            landing = None if ahead is None else ahead.want(announced)
            next_set = None
            if landing is not None:
                next_set = landing.plan.whole
                asyncio.get_running_loop().call_soon(landing.make_room)  # meanwhile

            def build(peer: Connection) -> messages.Contribute:
                if landing is not None:
                    landing.arrays = None  # of an answer that did not come in whole
                for whole in (along, next_set):
                    if whole is not None and whole.definition.plan not in peer.state["plans"]:
                        self._ps.links[0].define(peer, whole.definition)
                return messages.Contribute(
                    group, None if known.is_decided else config, push.number,
                    pushes.acked_below, *call, plan.digest, local_step, weight,
                    -1 if along is None else along.definition.plan,
                    -1 if next_set is None else next_set.definition.plan, rows, plan.spread,
                )  # fmt: skip

            asked = Call(
                self._ps.links[0], build, segments,
                into=None if landing is None else landing.into_whole,
                lengths=None if next_set is None else next_set.lengths,
            )  # fmt: skip
            answers = Answers(messages.Contributed, "a push", [asked], "the values", may_lack=True)
            with self._ps.work.wait:
                try:
                    (answer,) = await answers.send().all()
                except PsyncError:
                    with contextlib.suppress(PsyncError):
                        await self._own(push)
                    raise
            if push.read and not push.is_applied(answer):
                await self._own(push)
        finally:
            pushes.answered(push.number)
        known.is_decided = True
        known.token = answer.token
        if ahead is not None:
            if landing is not None:
                landing.steps = [[(group, answer.token)]]
            ahead.put(landing)
        return answer

    async def init_tokens(self, group: int, config: dict[str, Any], count: int) -> int:
        """Put the initial tokens of a group, if nobody has yet; return the group's step.

        Raises:
            ConfigurationError: They are too few for the first step.
            ParameterServerLost: ps 0 is gone.

        Cancellation: Safe; they may have been put.
        """
        tokens = messages.InitTokens(group, config, count)
        present, _ = await ask(self._ps.links[0], tokens, messages.SyncStep)
        self._group(group).is_decided = True
        return present.step

    async def _stage_large(
        self, plan: Plan, gradients: Sequence[Array], push: _Push
    ) -> tuple[Whole | None, Sequence[Segment], list[int] | None]:
        """Stage what is too large to go along with the word that decides.

        Returns:
            What goes along with it, or None; its segments; its rows.
        """
        whole = plan.whole
        if whole.nbytes <= SMALL_BODY_BYTES and IndexedSlices not in map(type, gradients):
            views = list(map(to_bytes_view, gradients))  # type: ignore[arg-type]
            segments = []
            for index, start, stop in whole.cuts:
                segments.append(views[index][start:stop])
            return whole, segments, None
        bodies = bodies_of(plan, self._ps.in_order(gradients))
        parts = [_Part(each, *body) for each, body in zip(plan.requests, bodies, strict=True)]
        if await self._is_over(parts, push):
            return None, (), None
        own = None
        for part in parts:
            if part.request.ps == 0 and part.nbytes <= SMALL_BODY_BYTES:
                own = part
        # Each replica may contribute several times to a step: then it is copied from the beginning.
        several = push.config["replicas_to_aggregate"] > push.config["total_num_replicas"]
        await self._stage([part for part in parts if part is not own], push, several)
        if own is None:
            return None, (), None
        if own.request.alone is None:
            own.request.alone = Whole.of([own.request])
        return own.request.alone, own.segments, own.rows

    async def _is_over(self, parts: Sequence[_Part], push: _Push) -> bool:
        """Ask ps 0, before many bytes travel, whether the push would be stale."""
        travel = sum(part.nbytes for part in parts if not self._ps.links[part.request.ps].lends)
        if travel <= ASK_FROM_SMALLS * SMALL_BODY_BYTES:
            return False
        present, _ = await ask(self._ps.links[0], messages.AskStep(push.group), messages.SyncStep)
        return (push.local_step if push.local_step >= 0 else present.first) < present.step

    async def _stage(self, parts: Sequence[_Part], push: _Push, copied: bool) -> None:
        """Send each ps its part, or a copy of it.

        Whether one says "stale" makes no difference: ps 0 decides before any ps can know, so it
        will say the same of the whole push.
        """
        if not parts:
            return
        staging = self._group(push.group).staging

        def build(part: _Part, peer: Connection) -> messages.StagePush:
            request, config = part.request, None if part.request.ps in staging else push.config
            self._ps.links[request.ps].define(peer, request.values)
            return messages.StagePush(
                push.group, config, push.number, push.local_step, request.values.plan, part.rows
            )

        calls = []
        for part in parts:
            link, build_it = self._ps.links[part.request.ps], functools.partial(build, part)
            calls.append(Call(link, build_it, part.segments, part.nbytes, copied=copied))
        if not copied:
            region_of = self._ps.memory.own_region_of
            push.read.extend(part for part in parts if any(map(region_of, part.views())))
        answers = Answers(messages.Staged, "a part of a push", calls)
        self._ps.outgoing.send(answers)
        await answers.all()
        staging.update(part.request.ps for part in parts)

    async def _own(self, push: _Push) -> None:
        """Let nobody read any more where the caller has the gradients of a push.

        Raises:
            PsyncError: As for any part of a push.

        Cancellation: As for the push.
        """
        if push.read:
            await self._stage(push.read, push, True)
            await self._ps.memory.returned(view for part in push.read for view in part.views())
