"""Messages of conditional accumulators: programs add gradients by hand and take their mean.

Accumulators are known by their names.
"""

from __future__ import annotations

from psync.wire.codec import Message, message


@message(62)
class DefineAccumulator(Message):
    """Make an accumulator known; idempotent, and refused if it is another than at first.

    Answered by Done.
    """

    name: str
    kind: str  # "dense" or "sparse"
    dtype: str
    shape: list[int | None] | None  # None: not known, as a whole or a dimension
    reduction: str  # "MEAN" or "SUM"
    divisor: str  # of sparse means: "per_index" or "total"
    forbid_nonfinite: bool
    max_staleness: int


@message(63)
class ApplyGradient(Message):
    """Add a gradient to an accumulator. Answered by GradientApplied.

    Segments: the values; of a sparse gradient the indices (int64) before them.
    """

    sequence: int  # shared with pushes and assigns, as are the next three
    acked_below: int
    closure: int
    ordinal: int
    accumulator: str
    shape: list[int]  # of the values
    dense_shape: list[int] | None  # of the array that the rows are of, if it is known
    local_step: int
    weight: float


@message(64)
class SetAccumulatorStep(Message):
    """Set the step of an accumulator. Answered by GradientApplied."""

    sequence: int
    acked_below: int
    closure: int
    ordinal: int
    accumulator: str
    step: int


@message(65)
class GradientApplied(Message):
    """What became of a gradient, or of a new step."""

    outcome: str  # "accepted", "stale" or "duplicate"
    count: int  # gradients held now
    step: int  # of the accumulator now


@message(66)
class TakeGradient(Message):
    """Wait for gradients and take what they amount to. Answered by GradientTaken.

    The same take again, after a lost connection, gets the same answer.
    """

    accumulator: str
    take: int  # of this client, from 1, anew for each accumulator
    acked_below: int  # the client has the answers to all smaller numbers, or wants them no more
    num_required: int


@message(67)
class GradientTaken(Message):
    """Segments: the values; of a sparse gradient the indices (int64) before them."""

    count: int  # gradients that were taken
    step: int  # of the accumulator after it
    shape: list[int]  # of the values
    dense_shape: list[int] | None  # of the array that the rows are of; -1: not known


@message(68)
class ForgetTakes(Message):
    """This client has the answers to all takes with smaller numbers, or wants them no more."""

    accumulator: str
    acked_below: int


@message(69)
class AskAccumulator(Message):
    """How far is an accumulator? Answered by AccumulatorState."""

    accumulator: str


@message(70)
class AccumulatorState(Message):
    """As of now."""

    count: int  # gradients held
    step: int
