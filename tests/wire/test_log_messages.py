"""The bytes of what is in the logs of ps tasks alone."""

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
    (BeginGroup(9, {}, 4), "941e098004"),
    (
        CountPush(9, 1, 0, -1, 0, b"d", -1, 1.0, 6, [(0, 0, 1)], [4], None, True),
        "9e1f090100ff00c40164ffcb3ff00000000000000691930000019104c0c3",
    ),
    (ForgetPush(9, 1), "93cc800901"),
    (
        SetMembers(1.5, [("w", 7)], ["x"], False, [5]),
        "96cc81cb3ff80000000000009192a1770791a178c29105",
    ),
    (Tick(1.5), "92cc82cb3ff8000000000000"),
    (NormsMeasured(9, 4, [(0, 0.5)], None), "95cc830904919200cb3fe0000000000000c0"),
    (StepApplied(9, 4, b""), "94cc840904c400"),
    (EndSteps("r"), "92cc85a172"),
    (SetGroups([(9, {}, 4)], [9]), "936091930980049109"),
    (HoldPush(9, 1, 4, 6, [(0, 0, 1)], True, [4], None), "99cc86090104069193000001c39104c0"),
    (EndTakes([("a", 1)]), "92799192a16101"),
    (
        HoldGradients("a", 2, 1.5, [3], 0, [("w", 7, 1)], [("w", 7, 2, 4)]),
        "987aa16102cb3ff80000000000009103009193a17707019194a177070204",
    ),
    (
        KeepAnswers([("w", 7, 3, 5, 1, b"g")], [(5, 1, b"A a", "a")], [("w", 7, "a", 1, b"t", 1)]),
        "947b9196a17707030501c4016791940501c403412061a1619196a17707a16101c4017401",
    ),
    (CheckState(1, b"d"), "93cc8701c40164"),
]


@pytest.mark.parametrize(("message", "header"), GOLDEN, ids=lambda value: type(value).__name__)
def test_an_entry_has_these_bytes_and_comes_back(message: Message, header: str) -> None:
    check_bytes(message, header)


def test_all_log_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(log_messages)
