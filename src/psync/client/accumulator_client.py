"""Client of conditional accumulators on ps tasks.

What changes an accumulator is an update of its ps, and bears the identities of a push. A take is
numbered separately for each accumulator. Both are deliveries (``client.outgoing``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from psync.client.numbers import Numbers
from psync.client.ps_client import PsClient
from psync.client.ps_link import Call, ask, expect
from psync.errors import UnknownVariableError
from psync.wire.closure_numbers import PART_BITS
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES, Frame
from psync.wire.messages import (
    AccumulatorState,
    ApplyGradient,
    AskAccumulator,
    DefineAccumulator,
    Done,
    ForgetTakes,
    GradientApplied,
    GradientTaken,
    SetAccumulatorStep,
    TakeGradient,
)

T = TypeVar("T")

Build = Callable[[int, int], Message]
"""Makes a message from its sequence, and from that below which all answers are there."""


@dataclass(frozen=True, slots=True)
class Place:
    """An accumulator, and the ps where it is."""

    definition: DefineAccumulator
    ps: int


@dataclass(slots=True)
class _Known:
    """What this task knows of one accumulator."""

    timeline: int = -1  # in which its ps has it: one that goes back may have been without it
    takes: Numbers = field(default_factory=Numbers)


class AccumulatorClient:
    """All accumulators as one task sees them.

    Every coroutine raises ParameterServerLost if the ps is gone, ConfigurationError if it has
    another accumulator of that name, and FencedError if this task was replaced.

    Args:
        ps: Links to all ps tasks.
    """

    def __init__(self, ps: PsClient) -> None:
        self._ps = ps
        self._known: dict[str, _Known] = {}

    async def apply(
        self,
        place: Place,
        segments: Sequence[memoryview],
        shape: Sequence[int],
        dense_shape: Sequence[int] | None,
        *,
        local_step: int,
        weight: float,
        closure: int,
        ordinal: int,
    ) -> GradientApplied:
        """Add a gradient.

        Args:
            place: Of the accumulator.
            segments: Values; of a sparse gradient the indices before them. Not copied.
            shape: Of the values.
            dense_shape: Of the array that the rows are of, if it is known.
            local_step: Of the values that the gradient was computed from.
            weight: Of the gradient in the mean.
            closure: Id of the closure, or -1.
            ordinal: Of the call within the closure.

        Raises:
            ValueMismatchError: It does not fit.

        Cancellation: Once begun, it ends in the background.
        """
        name = place.definition.name
        return await self._update(
            place,
            lambda sequence, acked_below: ApplyGradient(
                sequence, acked_below, closure, ordinal << PART_BITS, name, list(shape),
                None if dense_shape is None else list(dense_shape), local_step, weight,
            ),
            segments,
        )  # fmt: skip

    async def set_step(
        self, place: Place, step: int, *, closure: int, ordinal: int
    ) -> GradientApplied:
        """Set the step. Cancellation: as ``apply``."""
        name = place.definition.name
        return await self._update(
            place,
            lambda sequence, acked_below: SetAccumulatorStep(
                sequence, acked_below, closure, ordinal << PART_BITS, name, step
            ),
        )

    async def take(self, place: Place, num_required: int) -> Frame:
        """Wait for gradients, and take what they amount to.

        Returns:
            GradientTaken, and its segments: memory that is the caller's.

        Raises:
            ConfigurationError: ``num_required`` is not above 0.

        Cancellation: A take that waits consumes nothing. One whose value is on its way is lost.
        """
        link, name = self._ps.links[place.ps], place.definition.name
        takes = self._known.setdefault(name, _Known()).takes

        async def call() -> Frame:
            with self._ps.work.wait, takes.drawn() as number:
                return await link.call(
                    lambda peer: TakeGradient(name, number, takes.acked_below, num_required),
                    bulk=True,  # the answer may be large
                )

        try:
            received = await self._of_defined(place, call)
        finally:
            # If this is lost, the next take says so.
            link.notify(ForgetTakes(name, takes.acked_below))
        expect(received, GradientTaken, link.task, "a take")
        return received

    async def state(self, place: Place) -> AccumulatorState:
        """Return how far an accumulator is. Cancellation: safe."""
        link, question = self._ps.links[place.ps], AskAccumulator(place.definition.name)
        state, _ = await self._of_defined(place, lambda: ask(link, question, AccumulatorState))
        return state

    async def _of_defined(self, place: Place, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with an accumulator once its ps has it.

        What waits while ps tasks go back to a snapshot of before it was defined is done again.
        """
        known = self._known.setdefault(place.definition.name, _Known())
        while True:
            timeline = self._ps.timeline
            if known.timeline != timeline:
                await ask(self._ps.links[place.ps], place.definition, Done)
                known.timeline = timeline
            try:
                return await work()
            except UnknownVariableError:
                if self._ps.timeline == timeline:
                    raise

    async def _update(
        self, place: Place, build: Build, segments: Sequence[memoryview] = ()
    ) -> GradientApplied:
        link = self._ps.links[place.ps]

        def calls_of(sequences: Sequence[int]) -> list[Call[GradientApplied]]:
            bulk = sum(map(len, segments)) > SMALL_BODY_BYTES
            return [
                Call(
                    link,
                    lambda peer: build(sequences[0], link.updates.acked_below),
                    GradientApplied,
                    "a gradient",
                    segments,
                    bulk,
                )
            ]

        deliver = self._ps.outgoing.deliver
        (answer,) = await self._of_defined(place, lambda: deliver([link.updates], calls_of))
        return answer
