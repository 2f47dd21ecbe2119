"""Client of synchronous steps: parts staged on every ps, then the contribution to ps 0.

    StagePush to each ps   keeps its part; no trace of it if what follows never happens
    Contribute to ps 0     decides; answers with the outcome and a token, as soon as there is one

A push of at most 64 KiB is no more than the second message, which carries it whole; of a larger
one it carries ps 0's own part, if that is small.

A push is one delivery (``client.outgoing``), numbered separately in each group.

A ps of this host keeps a part where it is lent, until the step is applied. Where that is memory of
the caller's own (``psync.empty_like``), which may be written to once the push has returned, it must
not be read any more then. It is not where the token is of a later step than the push counts in, or
the push does not count. Else, or after an error, each ps is sent the same part again, as a copy,
which takes the place of the first one, and the push returns when that has been given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from psync.client.numbers import Numbers
from psync.client.plans import (
    BODY_PER_REQUEST,
    MEMBERS_PER_REQUEST,
    Plan,
    Request,
    Whole,
    body_of,
    given_of,
    whole_of,
)
from psync.client.prefetch import PulledAhead, Wanted
from psync.client.ps_client import PsClient, members_for
from psync.client.ps_link import Call, ask, expect
from psync.errors import ConfigurationError, PsyncError, RemoteProtocolError
from psync.net.connection import Connection
from psync.numerics.memory import BlockPool
from psync.numerics.rows import IndexedSlices
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES, Segment
from psync.wire.messages import (
    AskStep,
    Contribute,
    Contributed,
    InitTokens,
    Staged,
    StagePush,
    SyncStep,
)
from psync.wire.tensors import to_bytes_view

ASK_FROM_SMALLS = 16
"""More than so many small bodies, 1 MiB, are not sent before ps 0 has been asked whether they would
be stale. The question costs a round trip each time; of less, what is sent for nothing costs no
more."""


@dataclass(slots=True)
class _Group:
    """What this task knows of one group."""

    pushes: Numbers = field(default_factory=Numbers)
    token: int | None = None  # the last one


class _Push(NamedTuple):
    """What every message of a push says of it."""

    group: int
    config: dict[str, Any]
    number: int
    local_step: int
    copied: bool  # from the beginning: each replica contributes several times to a step
    read: list[_Part]  # where they lie: in the caller's memory

    def is_applied(self, answer: Contributed) -> bool:
        """Return whether nothing will be computed from it any more, now that it is answered."""
        if answer.outcome != "accepted":
            return True
        # It counts in a step up to its local step, and later tokens come when that is applied.
        return answer.token > self.local_step >= 0


class _Part(NamedTuple):
    """What a push has for one ps."""

    request: Request
    segments: Sequence[Segment]
    rows: list[int] | None  # as the wire has it
    nbytes: int

    def views(self) -> Iterator[memoryview]:
        """Return what is lent of it: segments of whole shards."""
        return (each for each in self.segments if isinstance(each, memoryview) and len(each))


class SyncClient:
    """All synchronous groups as one task sees them.

    Args:
        ps: Links to all ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        self._groups: dict[int, _Group] = {}
        self._staging: set[tuple[int, int]] = set()  # (ps, group): where its config is known
        self._pool = BlockPool()  # of values that come with tokens
        self._deciding: set[int] = set()  # groups whose config the rule at ps 0 knows

    def token(self, group: int) -> int | None:
        """Return the last token that this task got, or None before the first."""
        known = self._groups.get(group)
        return None if known is None else known.token

    async def contribute(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray | IndexedSlices],
        *,
        group: int,
        config: dict[str, Any],
        local_step: int,
        closure: int,
        ordinal: int,
        weight: float,
        ahead: PulledAhead | None = None,
        announced: Plan | None = None,
    ) -> Contributed:
        """Contribute a gradient for each of a plan's variables to the group's step.

        Args:
            plan: Of the variables.
            gradients: As for ``PsClient.push``.
            group: Number of the synchronous optimizer.
            config: ``SyncConfig.to_config()``, for a ps that does not know the group yet.
            local_step: Of the values that the gradients were computed from; -1: of before
                the group's first step.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.
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
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group()
        pushes = known.pushes
        wanted: Wanted | None = None

        with pushes.drawn() as number:
            several = config["replicas_to_aggregate"] > config["total_num_replicas"]
            push = _Push(group, config, number, local_step, several, [])
            with self._ps.work.push:
                along, segments, rows = await self._stage_large(plan, gradients, push)
            next_set = None
            if ahead is not None and (wanted := ahead.want(announced)) is not None:
                next_set = wanted.plan.whole
                asyncio.get_running_loop().call_soon(wanted.make_room, self._pool)  # meanwhile

            def build(peer: Connection) -> Contribute:
                if wanted is not None:
                    wanted.arrays = None  # of an answer that did not come in whole
                return Contribute(
                    group, None if group in self._deciding else config, push.number,
                    pushes.acked_below, closure, ordinal, plan.digest, local_step, weight,
                    *_named(peer, along), *_named(peer, next_set), rows, plan.spread,
                )  # fmt: skip

            with self._ps.work.wait:
                try:
                    received = await self._ps.links[0].call(
                        build,
                        segments,
                        into=functools.partial(self._receive, wanted),
                        set_ids=[-each.set_id for each in (along, next_set) if each],
                    )
                    answer = expect(received, Contributed, self._ps.links[0].task, "a push")
                except PsyncError:
                    with contextlib.suppress(PsyncError):
                        await self._own(push)
                    raise
            if push.read and not push.is_applied(answer):
                await self._own(push)

        self._deciding.add(group)
        known.token = answer.token
        if ahead is not None:
            if wanted is not None:
                wanted.steps = [[(group, answer.token)]]
            ahead.put(wanted)
        return answer

    def _receive(
        self, wanted: Wanted | None, message: Message, lengths: tuple[int, ...], lent: object
    ) -> list[memoryview]:
        """Return where values belong that come with a token: as ``Into``."""
        if wanted is None or lengths != wanted.plan.whole.lengths:
            raise RemoteProtocolError("ps 0 sent unexpected values with a token")
        return wanted.receive(self._pool)

    async def init_tokens(self, group: int, config: dict[str, Any], count: int) -> int:
        """Put the initial tokens of a group, if nobody has yet; return the group's step.

        Raises:
            ConfigurationError: They are too few for the first step.
            ParameterServerLost: ps 0 is gone.

        Cancellation: Safe; they may have been put.
        """
        tokens = InitTokens(group, config, count)
        present, _ = await ask(self._ps.links[0], tokens, SyncStep)
        self._deciding.add(group)
        return present.step

    async def _stage_large(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray | IndexedSlices],
        push: _Push,
    ) -> tuple[Whole | None, Sequence[Segment], list[int] | None]:
        """Stage what is too large to go along with the word that decides.

        Returns:
            What goes along with it, or None; its segments; its rows.
        """
        arrays = [each for each in gradients if isinstance(each, np.ndarray)]
        if plan.whole.nbytes <= SMALL_BODY_BYTES and len(arrays) == len(gradients):
            views = list(map(to_bytes_view, arrays))
            return plan.whole, [views[i][start:end] for i, start, end in plan.whole.cuts], None
        parts = self._parts(plan, gradients)
        if await self._is_over(parts, push):
            return None, (), None
        small = [each for each in parts if each.nbytes <= SMALL_BODY_BYTES]
        own = next((each for each in small if each.request.ps == 0), None)
        await self._stage([part for part in parts if part is not own], push, push.copied)
        if own is None:
            return None, (), None
        return whole_of([own.request]), own.segments, own.rows

    def _parts(self, plan: Plan, gradients: Sequence[np.ndarray | IndexedSlices]) -> list[_Part]:
        """Return what goes to each ps."""
        given = given_of(self._ps.in_order(gradients))
        return [_Part(request, *body_of(request, given)) for request in plan.requests]

    async def _is_over(self, parts: Sequence[_Part], push: _Push) -> bool:
        """Ask ps 0, before many bytes travel, whether the push would be stale."""
        travel = sum(part.nbytes for part in parts if not self._ps.links[part.request.ps].lends)
        if travel <= ASK_FROM_SMALLS * SMALL_BODY_BYTES:
            return False
        present, _ = await ask(self._ps.links[0], AskStep(push.group), SyncStep)
        return (push.local_step if push.local_step >= 0 else present.first) < present.step

    async def _stage(self, parts: Sequence[_Part], push: _Push, copied: bool) -> None:
        """Send each ps its part, or a copy of it.

        Whether one says "stale" makes no difference: ps 0 decides before any ps can know, so it
        will say the same of the whole push.
        """
        if not parts:
            return
        calls = [self._stage_part(part, push, copied) for part in parts]
        if not copied:
            push.read.extend(part for part in parts if any(map(self._is_own, part.views())))
        await self._ps.outgoing.ask(calls).all()
        self._staging.update((call.link.index, push.group) for call in calls)

    def _is_own(self, view: memoryview) -> bool:
        return self._ps.memory.own_region_of(view) is not None

    async def _own(self, push: _Push) -> None:
        """Let nobody read any more where the caller has the gradients of a push.

        Raises:
            PsyncError: As for any part of a push.

        Cancellation: As for the push.
        """
        if push.read:
            await self._stage(push.read, push, True)
            await self._ps.memory.returned(view for part in push.read for view in part.views())

    def _stage_part(self, part: _Part, push: _Push, copied: bool) -> Call[Staged]:
        request = part.request
        place = request.ps, push.group

        def build(peer: Connection) -> StagePush:
            return StagePush(
                push.group, None if place in self._staging else push.config, push.number,
                push.local_step, request.set_id, members_for(peer, request), part.rows,
            )  # fmt: skip

        return Call(
            self._ps.links[request.ps], build, Staged, "a part of a push", part.segments,
 part.nbytes > SMALL_BODY_BYTES,
            set_ids=(request.set_id,), copied=copied,
        )  # fmt: skip


def _named(peer: Connection, known: Whole | None) -> tuple[int, list[tuple[int, int, int]] | None]:
    """Return what a message says of a set: its number, and its shards unless they are known.

    ps 0 numbers such sets apart; among those of the link they have negative numbers.
    """
    if known is None:
        return -1, None
    return known.set_id, None if -known.set_id in peer.state["sets"] else known.members
