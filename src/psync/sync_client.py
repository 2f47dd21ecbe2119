"""Synchronous pushes as a worker makes them: parts to every ps, then a word to ps 0.

Layer: L3. Imports: errors, plans, ps_client, rpc, wire.

    StagePush to each ps   keeps its part; no trace of it if what follows never happens
    Contribute to ps 0     decides; answers with the outcome and a token, as soon as there is one;
                           carries ps 0's own part, if it is small

Every request may be repeated after a lost connection: a push has a number, which its client
draws anew in each group, and by which ps 0 answers a repetition from memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from psync.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLost,
    RemoteProtocolError,
)
from psync.plans import BODY_PER_REQUEST, MEMBERS_PER_REQUEST, Plan, Request
from psync.ps_client import PsClient, members_for
from psync.rpc import Peer, Received
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import (
    AskStep,
    AwaitEnd,
    Contribute,
    Contributed,
    InitTokens,
    Message,
    Staged,
    StagePush,
    SyncStep,
    TrainingOver,
)
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class _Group:
    """What this task knows of one group."""

    next_push: int = 1
    outstanding: dict[int, None] = field(default_factory=dict)  # pushes without answers, in order
    token: int | None = None  # the last one

    @property
    def acked_below(self) -> int:
        """All smaller numbers have their answers, or nobody wants them any more."""
        return next(iter(self.outstanding), self.next_push)


class SyncClient:
    """All synchronous groups as one task sees them.

    Args:
        ps: Links to all ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        self._groups: dict[int, _Group] = {}
        self._staging: set[tuple[int, int]] = set()  # (ps, group): where its config is known
        self._deciding: set[int] = set()  # groups whose config the rule at ps 0 knows

    def token(self, group: int) -> int | None:
        """Return the last token that this task got, or None before the first."""
        known = self._groups.get(group)
        return None if known is None else known.token

    async def contribute(
        self,
        plan: Plan,
        gradients: Sequence[np.ndarray],
        *,
        group: int,
        config: dict[str, Any],
        local_step: int,
        closure: int,
        ordinal: int,
        weight: float,
    ) -> Contributed:
        """Contribute a gradient for each of a plan's variables to the group's step.

        Args:
            plan: Of the variables.
            gradients: Of the variables' shapes and dtypes, C-contiguous. Not copied.
            group: Number of the synchronous optimizer.
            config: ``SyncConfig.to_config()``, for a ps that does not know the group yet.
            local_step: Of the values that the gradients were computed from; -1: of before
                the group's first step.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.
            weight: Of these gradients in the mean.

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
        for request in plan.requests:
            if request.part:
                raise ConfigurationError(
                    f"a synchronous push to /job:ps/task:{request.ps} carries at most "
                    f"{MEMBERS_PER_REQUEST} shards and {BODY_PER_REQUEST >> 30} GiB",
                    hint="spread the variables over more ps tasks",
                )
        self._ps.failpoints.hit("worker.push.begun")
        known = self._groups.setdefault(group, _Group())
        number, known.next_push = known.next_push, known.next_push + 1
        known.outstanding[number] = None

        views = [to_bytes_view(array) for array in gradients]
        along: Request | None = None  # what need not be staged

        def build(peer: Peer) -> Contribute:
            defines = None if group in self._deciding else config
            return Contribute(
                group, defines, number, known.acked_below, closure, ordinal, plan.digest,
                local_step, weight, along.set_id if along else -1,
                members_for(peer, along) if along else None,
            )  # fmt: skip

        try:
            if not await self._is_over(plan, group, local_step):
                along = _small_part_of_ps_0(plan)
                staged = [request for request in plan.requests if request is not along]
                await self._stage(staged, views, group, config, number, local_step)
                if along and staged:
                    self._ps.failpoints.hit("worker.push.between_ps")
            self._ps.failpoints.hit("worker.push.staged")
            received = await self._ps.links[0].call(
                build,
                _cut(views, along) if along else (),
                set_id=along.set_id if along else None,
            )
        finally:
            known.outstanding.pop(number)
        self._deciding.add(group)
        answer = _expect(received, Contributed, "a push")
        known.token = answer.token
        self._ps.failpoints.hit("worker.push.answered")
        return answer

    async def init_tokens(self, group: int, config: dict[str, Any], count: int) -> int:
        """Put the initial tokens of a group, if nobody has yet; return the group's step.

        Raises:
            ConfigurationError: They are too few for the first step.
            ParameterServerLost: ps 0 is gone.

        Cancellation: Safe; they may have been put.
        """
        received = await self._ps.links[0].call(lambda peer: InitTokens(group, config, count))
        self._deciding.add(group)
        return _expect(received, SyncStep, "initial tokens").step

    async def wait_ended(self) -> None:
        """Wait until training has ended, or this task has closed its links. Cancellation: safe."""
        while True:
            try:
                received = await self._ps.links[0].call(lambda peer: AwaitEnd())
            except ConnectionLost as exc:
                # It may wait for days, and outlive more connections than a request is allowed.
                logger.info("waiting on for the end of training: %s", exc.message)
            except ClosedError:
                return
            else:
                _expect(received, TrainingOver, "a question for the end")
                return

    async def _is_over(self, plan: Plan, group: int, local_step: int) -> bool:
        """Ask ps 0, before many bytes travel, whether the push would be stale."""
        if sum(request.nbytes for request in plan.requests) <= SMALL_BODY_BYTES:
            return False
        received = await self._ps.links[0].call(lambda peer: AskStep(group))
        present = _expect(received, SyncStep, "a question for the step")
        return (local_step if local_step >= 0 else present.first) < present.step

    async def _stage(
        self,
        requests: Sequence[Request],
        views: Sequence[memoryview],
        group: int,
        config: dict[str, Any],
        number: int,
        local_step: int,
    ) -> None:
        """Send each ps its part.

        Whether one says "stale" makes no difference: ps 0 decides before any ps can know, so it
        will say the same of the whole push.
        """
        if not requests:
            return

        async def send(request: Request) -> None:
            ps = request.ps

            def build(peer: Peer) -> StagePush:
                defines = None if (ps, group) in self._staging else config
                members = members_for(peer, request)
                return StagePush(group, defines, number, local_step, request.set_id, members)

            received = await self._ps.links[ps].call(
                build,
                _cut(views, request),
                bulk=request.nbytes > SMALL_BODY_BYTES,
                set_id=request.set_id,
            )
            _expect(received, Staged, "a part of a push")
            self._staging.add((ps, group))

        await self._ps.together([send(request) for request in requests])


def _small_part_of_ps_0(plan: Plan) -> Request | None:
    """Return what goes to ps 0 together with the word that decides: one message instead of two."""
    for request in plan.requests:
        if request.ps == 0 and request.nbytes <= SMALL_BODY_BYTES:
            return request
    return None


def _cut(views: Sequence[memoryview], request: Request) -> list[memoryview]:
    return [views[index][start:end] for index, start, end in request.cuts]


def _expect(received: Received, kind: type[M], question: str) -> M:
    message = received.message
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"a ps answered {question} with {type(message).__name__}")
    return message
