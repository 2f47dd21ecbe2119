"""The bytes of what is said of accumulators."""

from __future__ import annotations

import pytest

from psync.wire import accumulator_messages
from psync.wire.accumulator_messages import (
    AccumulatorState,
    ApplyGradient,
    AskAccumulator,
    DefineAccumulator,
    ForgetTakes,
    GradientApplied,
    GradientTaken,
    SetAccumulatorStep,
    TakeGradient,
)
from psync.wire.codec import Message
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (
        ApplyGradient(1, 1, -1, 0, "a", [2, 3], None, 4, 0.5),
        "9a3f0101ff00a161920203c004cb3fe0000000000000",
    ),
    (GradientApplied("stale", 2, 4), "9441a57374616c650204"),
    (TakeGradient("a", 1, 1, 3), "9542a161010103"),
    (GradientTaken(3, 5, [2, 3], [-1, 3]), "95430305920203" + "92ff03"),
    (
        DefineAccumulator("a", "dense", "float32", [None, 2], "MEAN", "", False, 0),
        "993ea161a564656e7365a7666c6f6174333292c002a44d45414ea0c200",
    ),
    (SetAccumulatorStep(1, 1, -1, 0, "a", 4), "97400101ff00a16104"),
    (ForgetTakes("a", 3), "9344a16103"),
    (AskAccumulator("a"), "9245a161"),
    (AccumulatorState(2, 4), "93460204"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_accumulator_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_accumulator_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(accumulator_messages)
