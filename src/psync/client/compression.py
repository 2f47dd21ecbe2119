"""Compressed pushes and pulls: float32 in 16 bits between a task and the ps tasks.

Compressed, a variable is laid out as one of the narrow dtype: a plan of its own, whose sets say so
to the ps tasks (``numerics.compression``). All that knows plans goes on as ever, and a message that
is sent again has the same bytes. Small sets are compressed, too, but for pulls: see
``pull_compressed``.

Error feedback: what a gradient is *owed* is what the pushes before it, of the same variable through
the same optimizer, have been rounded by. Each task keeps that of its own pushes:

    the push                              what is owed then
    accepted                              what is left of this gradient and what was owed before
    stale, duplicate, failed              what was owed before: this gradient was not applied
    cancelled, asynchronous               as above: it goes on in the background, and its end counts
    cancelled, synchronous                what was owed before: nobody knows whether it was counted
    under way while another one begins    the other finds nothing, and what both are owed is added
    before a rollback to a checkpoint     nothing: what it would correct is undone
    a worker's session ends, another      nothing: one rounding error of each element is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from psync.client.plans import Plan
from psync.numerics.compression import WIDE, Compression, compensate, narrow_dtype, widen_into
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import PIECE_BYTES
from psync.wire.messages import Contributed, Pushed

if TYPE_CHECKING:
    from psync.client.ps_client import PsClient
    from psync.client.pulled_steps import PulledSteps

Gradient = np.ndarray | IndexedSlices

A = TypeVar("A", bound=list[Pushed] | Contributed)

Send = Callable[[Plan, Sequence[Gradient]], Awaitable[A]]
"""Pushes gradients for the variables of a plan, and returns the answer, or that of each ps."""

Stream = tuple[int, int, int, int]
"""An optimizer, and a variable or shard that is pushed through it."""


class ErrorFeedback:
    """What the gradients of one task are owed. Single owner.

    Args:
        ps: All ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        self._owed: dict[Stream, np.ndarray] = {}
        self._timeline = ps.timeline

    async def push(
        self,
        plan: Plan,
        gradients: Sequence[Gradient],
        send: Send[A],
        *,
        kind: Compression,
        optimizer: int,
    ) -> A:
        """Push gradients compressed.

        Args:
            plan: Of the variables, as they are.
            gradients: For each. Those of some rows, and of other dtypes, travel as they are.
            send: Pushes them.
            kind: How they travel.
            optimizer: Number of the optimizer.

        Raises:
            Exception: What ``send`` raises.

        Cancellation: As ``send``. A push that is to go on has to be shielded.
        """
        ps = self._ps
        sent = list(gradients)
        owed: dict[Stream, np.ndarray] = {}
        rest: dict[Stream, np.ndarray] = {}

        def rounding() -> Iterator[int]:
            for at, (spec, gradient) in enumerate(zip(plan.variables, gradients, strict=True)):
                if isinstance(gradient, IndexedSlices) or spec.dtype != WIDE:
                    continue
                stream = (optimizer, spec.variable_id, spec.shards[0].index, len(spec.shards))
                before = self._owed.pop(stream, None)
                if before is not None:
                    owed[stream] = before
                sent[at] = out = ps.empty(spec.shape, narrow_dtype(kind))
                rest[stream] = ps.empty(spec.shape, gradient.dtype)
                yield from compensate(gradient, before, out, rest[stream])

        self._begin_timeline()
        timeline = self._timeline
        try:
            with ps.work.push:
                await _in_turns(rounding())
            answer = await send(ps.plan(plan.variables, kind), sent)
            each = answer if isinstance(answer, list) else [answer]
            if all(one.outcome == "accepted" for one in each):
                owed = rest
        finally:
            self._begin_timeline()
            if self._timeline == timeline:
                self._keep(owed)
        return answer

    def _begin_timeline(self) -> None:
        if self._timeline != self._ps.timeline:
            self._timeline = self._ps.timeline
            self._owed.clear()

    def _keep(self, owed: dict[Stream, np.ndarray]) -> None:
        for stream, array in owed.items():
            other = self._owed.setdefault(stream, array)
            if other is not array:  # of a push that was under way at the same time
                np.add(other, array, out=other)


async def pull_compressed(
    ps: PsClient,
    plan: Plan,
    kind: Compression,
    *,
    writable: bool = False,
    out: Sequence[np.ndarray | None] | None = None,
    seen: PulledSteps | None = None,
) -> list[np.ndarray]:
    """Do ``PsClient.pull`` with float32 values that travel compressed: they are rounded.

    Args:
        ps: All ps tasks.
        plan: Of the variables, as they are.
        kind: How they travel.
        writable: As for ``PsClient.pull``.
        out: As for ``PsClient.pull``.
        seen: As for ``PsClient.pull``.

    Raises:
        ParameterServerLost: A ps is gone.

    Cancellation: Safe; ``out`` then holds anything.
    """
    given = list(out or [None] * len(plan.variables))
    is_wide = [spec.dtype == WIDE for spec in plan.variables]
    others = [None if wide else target for wide, target in zip(is_wide, given, strict=True)]
    narrow = ps.plan(plan.variables, kind)
    arrays = await ps.pull(narrow, writable=writable, out=others, seen=seen)

    def widening() -> Iterator[int]:
        for at, spec in enumerate(plan.variables):
            if is_wide[at]:
                target = given[at]
                wide = ps.empty(spec.shape, np.dtype(WIDE)) if target is None else target
                yield from widen_into(arrays[at], wide)
                if target is None:
                    wide.setflags(write=writable)
                arrays[at] = wide

    with ps.work.pull:
        await _in_turns(widening())
    return arrays


async def _in_turns(work: Iterable[int]) -> None:
    """Do work that says how many bytes each piece was, with the loop running now and then."""
    done = 0
    for nbytes in work:
        done += nbytes
        if done >= PIECE_BYTES:
            done = 0
            await asyncio.sleep(0)
