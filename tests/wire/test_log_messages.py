"""Messages that only logs have: their numbers and their bytes do not change by accident."""

from __future__ import annotations

import pytest

from psync.wire import log_messages
from psync.wire.codec import Message
from psync.wire.log_messages import (
    BeginGroup,
    CheckState,
    CountPush,
    EndSteps,
    EndTakes,
    ForgetPush,
    HoldGradients,
    HoldPush,
    KeepAnswers,
    NormsMeasured,
    SetGroups,
    SetMembers,
    StepApplied,
    Tick,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (CheckState(3, b"d", 7), "94cc8703c4016407"),
    (BeginGroup(9, {"name": "g"}, 3), "941e0981a46e616d65a16703"),
    (
        CountPush(9, 3, 2, 5, 1, b"s", 2, 1.5, 0, [(1, 0, 0)], [8], None, True),
        "9e1f0903020501c4017302cb3ff80000000000000091930100009108c0c3",
    ),
    (ForgetPush(9, 3), "93cc800903"),
    (
        SetMembers(1.5, [("w", 7)], ["v"], True, [5]),
        "96cc81cb3ff80000000000009192a1770791a176c39105",
    ),
    (Tick(1.5), "92cc82cb3ff8000000000000"),
    (NormsMeasured(9, 4, [(0, 0.5)], None), "95cc830904919200cb3fe0000000000000c0"),
    (StepApplied(9, 4, b"f"), "94cc840904c40166"),
    (EndSteps("r"), "92cc85a172"),
    (SetGroups([(9, {"name": "g"}, -1)], [9]), "936091930981a46e616d65a167ff9109"),
    (HoldPush(9, 3, 2, 6, [(1, 0, 0)], True, [8], None), "99cc86090302069193010000c39108c0"),
    (EndTakes([("a", 1)]), "92799192a16101"),
    (
        HoldGradients("a", 2, 1.5, [3], 0, [("w", 7, 1)], [("w", 7, 2, 4)]),
        "987aa16102cb3ff80000000000009103009193a17707019194a177070204",
    ),
    (
        KeepAnswers([("w", 7, 3, 5, 1, b"g")], [(5, 1, b"A a", "a")], [("w", 7, "a", 1, b"t", 1)]),
        "947b9196a17707030501c4016791940501c403412061a1619196a17707a16101c4017401",
    ),
]


@pytest.mark.parametrize(("message", "header"), GOLDEN, ids=lambda value: type(value).__name__)
def test_a_message_has_these_bytes_and_comes_back(message: Message, header: str) -> None:
    check_bytes(message, header)


def test_all_log_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(log_messages)
