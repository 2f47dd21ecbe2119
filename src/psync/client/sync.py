"""Client of synchronous steps: each ps gets its part of a push, ps 0 decides.

ps 0 gets one in any case. It answers with the outcome and a token, as soon as there is one; another
ps answers when a step with the part is applied there. So a push that counts in a step is over when
all have answered, and any other one when ps 0 has. If ps 0 is lost, no other ps hears of the step:
then what is missing is not waited for. Nor if ps 0 reaches some ps no more: it is asked again every
few seconds, and says so. Pushes are numbered separately in each group.

A ps of this host holds a part where it is lent, until the step is applied. Where that is memory of
the caller's own (``psync.empty_like``), which may be written to once the push has returned, it must
not be read any more then. It is not where the token is of a later step than the push counts in, or
the push does not count. Else, or after an error, each ps is told to copy the part (``KeepPart``),
and the push returns when what was lent has been given back. So it is with what is still on its way
when a push is over that does not count: nothing comes behind it.

Values may come with the answers: up to 64 KiB, if no shard is busy. A push asks by itself for the
set that was pulled right after the last one, so a step of small variables needs no pull. Those
values are of a pull that was made early: read on the ps tasks after the push was sent, and used
later. The caller of that pull must not be able to tell, so they are dropped unless all of this
holds:

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
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from psync.client.counters import Numbers, PulledSteps
from psync.client.link import Answers, Call, ask
from psync.client.plan import (
    BODY_PER_REQUEST,
    MEMBERS_PER_REQUEST,
    Array,
    Landing,
    Plan,
    Request,
    bodies_of,
)
from psync.client.ps import PsClient, brought
from psync.errors import ConfigurationError, PsyncError, RemoteProtocolError
from psync.numerics.memory import BlockPool
from psync.wire import messages
from psync.wire.frames import LENT_ABOVE_BYTES, SMALL_BODY_BYTES, flat

GOOD_FOR_S = 0.001
"""A step that has not let go of the loop for so long has computed, or read something."""

NEVER = 1 << 62
"""When a closure came in that is to get nothing that was sent ahead."""


class PulledAhead:
    """What one task has been sent ahead. Single owner.

    Args:
        ps: All ps tasks.

    Attributes:
        is_used: Whether anything was pulled.
        arrivals: How often closures have come in.
    """

    def __init__(self, ps: PsClient) -> None:
        self.is_used = False
        self.arrivals = 0
        self._arrivals_then = NEVER - 1  # when the last push was sent; before the first: anything
        self._links, self._client = ps.links, ps.outgoing
        self._now = ps.now  # finer than ``GOOD_FOR_S``
        self._pool = BlockPool()
        self._plan: Plan | None = None  # of the first pull after the last push
        self._is_first = True  # whether the next pull is that
        self._in_turn = True  # whether the loop has not gone on since a push was answered
        self._turns = 0  # so far; a number for ``_end_turn``
        self._calls_then = -1  # expected once the last push is answered; before the first: any
        self._asked: Landing | None = None  # by the last push
        self._wanted: Landing | None = None  # the same, once its values have come
        self._came = 0.0  # when they did

    def want(self, push: Plan, announced: Plan | None = None) -> Landing | None:
        """A push is about to be sent: return what it should ask for, if anything.

        Args:
            push: Of its variables.
            announced: What the program says that it pulls next; None: it does not say.
        """
        self._asked = self._wanted = None
        self._is_first = True
        self._arrivals_then = self.arrivals
        asked = push.first.keys() | {0}
        self._calls_then = self._client.calls + 2 * len(asked)  # and the answers
        plan = announced or self._plan
        if plan is None or plan.nbytes > SMALL_BODY_BYTES or not plan.first.keys() <= asked:
            return None
        for link in self._links:
            if link.updates.under_way:
                return None
        self._asked = Landing(plan, self._pool)
        return self._asked

    def put(self, wanted: Landing | None = None) -> None:
        """A turn begins: the push was answered, with values if any were wanted and there were some.

        They are good for this turn of the loop: in it nothing is heard from anybody.
        """
        if wanted is not None and wanted is self._asked and wanted.arrays is not None:
            self._wanted, self._came = wanted, self._now()
        self._in_turn, self._turns = True, self._turns + 1
        asyncio.get_running_loop().call_soon(self._end_turn, self._turns)

    def begin_closure(self) -> None:
        """The next closure of this task begins, or what comes before it and may wait."""
        if self.is_used and self._in_turn:
            self.put()

    def end_closure(self) -> None:
        """A closure has returned; the turn in which it did goes on when the next one begins."""
        self._turns += 1

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
        silent = self._calls_then in (-1, self._client.calls)  # nothing else was asked, or answered
        fresh = self._in_turn and arrival <= self._arrivals_then and silent
        if self._is_first:  # where they come too late once, they will the next time
            is_in_time = self._in_turn and silent  # a closure may come in sooner the next time
            self._is_first, self._plan = False, plan if is_in_time else None
        wanted, self._wanted = self._wanted, None
        if not fresh or wanted is None or wanted.plan is not plan:
            return None
        return wanted if self._now() - self._came <= GOOD_FOR_S else None


class _Group(msgspec.Struct, eq=False):
    """What this task knows of one group."""

    pushes: Numbers = msgspec.field(default_factory=Numbers)
    token: int = -1  # the last one
    alone: int = -1  # until this step nothing of it was on another ps than 0, as far as known


NOTHING = Request(0, 0)
"""What ps 0 is sent that has none of a push's variables."""


class PartAnswers(Answers[messages.Pushed | messages.Contributed]):
    """The answers to a push, of which none is missing that it needs; see above."""

    ends_early = True


class SyncClient:
    """All synchronous groups as one task sees them.

    Args:
        ps: All ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        self._answers = ps.parts.of(PartAnswers)
        self._groups: dict[int, _Group] = {}

    def token(self, group: int) -> int | None:
        """Return the last token that this task got, or None before the first."""
        known = self._groups.get(group)
        return None if known is None or known.token < 0 else known.token

    async def contribute(
        self,
        plan: Plan,
        gradients: Sequence[Array],
        *,
        group: int,
        config: dict[str, Any],
        pulled: PulledSteps | None,
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
            pulled: What the values are of that the gradients were computed from. None, or nothing
                since the last push: of the last token.
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

        Cancellation: If all of its parts had arrived by then the push counts, and nobody waits for
            its token. Otherwise it does not: what is staged of it goes with the step.
        """
        if plan.in_parts:
            ps = next(request.ps for request in plan.requests if request.part)
            raise ConfigurationError(
                f"a synchronous push to /job:ps/task:{ps} carries at most "
                f"{MEMBERS_PER_REQUEST} shards and {BODY_PER_REQUEST >> 30} GiB",
                hint="spread the variables over more ps tasks",
            )
        known = self._groups.get(group) or self._groups.setdefault(group, _Group())
        local_step = known.token  # -1: of before the group's first step
        if pulled is not None:
            lowest = pulled.lowest(group, known.alone, push=True)
            local_step = known.token if lowest is None else lowest
        requests: Sequence[Request] = plan.requests
        bodies = bodies_of(plan, gradients, self._ps.empty)
        if 0 not in plan.first:
            requests, bodies = [NOTHING, *requests], [((), None, 0), *bodies]
        landing = None if ahead is None else ahead.want(plan, announced)
        brings = None if landing is None else landing.plan
        what = "synchronous", group, brings
        definitions = plan.defined.get(what) or plan.define(
            what,
            lambda request: {
                "pull": brought(brings, request.ps),
                "others": None if request.ps else [ps for ps in plan.first if ps],
            },
            requests, optimizer=group, config=config, variable_set=plan.digest, spread=plan.spread,
        )  # fmt: skip
        pushes = known.pushes
        number = pushes.draw()
        # Each replica may contribute several times to a step: then what is lent is a copy.
        copied = config["replicas_to_aggregate"] > config["total_num_replicas"]
        calls: list[Call] = []
        for request, definition, body in zip(requests, definitions, bodies, strict=True):
            segments, rows, nbytes = body
            update = messages.Update(
                number, pushes.acked_below, *call, definition.plan, 0, 0, None, rows, None, 0,
                local_step, weight,
            )  # fmt: skip
            link = self._ps.links[request.ps]
            calls += [Call(link, update, segments, nbytes, copied=copied, definition=definition)]
        kind = messages.Pushed | messages.Contributed
        answers = self._answers(kind, "a push", calls, "the values", landing)
        with self._ps.work.wait:
            try:
                self._ps.links[0].relied_on[answers] = plan.first.get(0, 0)
                answers.send()
                if landing is not None:
                    for buffer in range(len(landing.plan.buffers)):  # meanwhile
                        self._ps.loop.call_soon(landing.buffer, buffer)
                came = await answers.all()
            except BaseException:
                with contextlib.suppress(PsyncError):
                    await self._let_go(group, number, answers, copied)
                raise
            finally:
                pushes.answered(number)
                self._ps.links[0].relied_on.pop(answers, None)
            answer: messages.Contributed | None = None
            for each in came:
                if type(each) is messages.Contributed:
                    answer = each
            if answer is None:
                raise RemoteProtocolError(
                    f"{self._ps.links[0].task} answered a synchronous push with Pushed, and says "
                    "nothing of a step"
                )
            # It counts in a step up to its local step; later tokens come when that is applied.
            is_over = answer.outcome != "accepted" or answer.token > local_step >= 0
            if answers.missing or not is_over:
                await self._let_go(group, number, answers, copied or is_over)
        known.token = answer.token
        if answer.alone:
            known.alone = answer.token
        if ahead is not None:
            if landing is not None and len(landing.steps) == len(landing.plan.requests):
                landing.settle()
            ahead.put(landing)
        return answer

    async def _let_go(self, group: int, push: int, asked: Answers[Any], copied: bool) -> None:
        """Let nobody read any more where the caller has the gradients of a push.

        Neither what is on its way, nor, unless that is ``copied``, a part that is held where it is.

        Raises:
            PsyncError: A ps is gone.

        Cancellation: Safe; then they may be read.
        """
        region_of, keep = self._ps.memory.own_region_of, messages.KeepPart(group, push)
        calls, lent = [], list[memoryview]()
        for call, outcome in zip(asked.calls, asked.outcomes, strict=True):
            if call.nbytes <= min(SMALL_BODY_BYTES, LENT_ABOVE_BYTES):
                continue  # it was copied when it was sent
            _, views = flat(call.segments)
            if not copied:
                lent += filter(region_of, cast(list[memoryview], views))
            if views and (outcome is None or not copied):  # it comes behind what is on its way
                calls.append(Call(call.link, keep, lane=call.lane))

        async def kept() -> None:
            try:
                await Answers(messages.Done, "a part to be kept", calls).send().all()
            finally:
                await self._ps.memory.returned(lent)

        if calls:
            await self._ps.outgoing.shielded(kept)

    async def init_tokens(self, group: int, config: dict[str, Any], count: int) -> int:
        """Put the initial tokens of a group, if nobody has yet; return the group's step.

        Raises:
            ConfigurationError: They are too few for the first step.
            ParameterServerLost: ps 0 is gone.

        Cancellation: Safe; they may have been put.
        """
        tokens = messages.BeginGroup(group, config, count)
        present, _ = await ask(self._ps.links[0], tokens, messages.Number)
        return present.value
