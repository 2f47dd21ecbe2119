"""The bytes of what a ps is told of its variables: they are sent for every step."""

from __future__ import annotations

import pytest

from psync.wire import ps_messages
from psync.wire.codec import Message
from psync.wire.ps_messages import (
    AskOptimizer,
    Assign,
    AttachPs,
    AverageShards,
    CountsHeard,
    CreateShards,
    DefineOptimizer,
    Fence,
    FinalBelow,
    Measured,
    MeasurePush,
    OptimizerState,
    PsAttached,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    RowsPulled,
    SetOptimizer,
    SetSlots,
    TellCounts,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (Pull(1, [(0, 1)], -1, ""), "9522019192" + "0001ffa0"),
    (Pull(1, None, -1, ""), "952201c0ffa0"),
    (Pulled([]), "922390"),
    (Pulled([(4, 7)]), "9223919204" + "07"),
    (Push(1, 1, -1, 0, 2, None, 3, None, 9), "dc0011240101ff0002c003c009c0c0c0ffc0c000"),
    (
        Push(1, 1, -1, 0, 2, None, 3, None, 9, [-1, 5]),
        "dc0011240101ff0002c003c00992ff05c0c0ffc0c000",
    ),
    (
        Push(1, 1, -1, 0, 2, None, 3, None, 9, None, [0.5]),
        "dc0011240101ff0002c003c009c091cb3fe0000000000000c0ffc0c000",
    ),
    (
        Push(1, 1, -1, 0, 2, None, 3, None, 9, None, None, None, 5, [(0, 1)], (7, 0), 2),
        "dc0011240101ff0002c003c009c0c0c005919200" + "01" + "92070002",
    ),
    (Assign(1, 1, 4, 0, 2, [(3, 0)], "sub"), "9a25010104000291920300a3737562c0c0"),
    (
        Assign(1, 1, 4, 0, 2, None, "sub", None, [(1, 6)]),
        "9a250101040002c0a3737562c0919201" + "06",
    ),
    (AverageShards(1, 1, -1, 0, [(3, 0, 1)], 0.5), "983d0101ff009193030001cb3fe0000000000000c0"),
    (Pushed("accepted", 10), "9526a861636365707465640ac000"),
    (Pushed("accepted", 10, [(4, 7)]), "9526a861636365707465640a9192040700"),
    (PullRows([(3, 0, 7, 0, 0, 0)], -1, ""), "94489196030007000000ffa0"),
    (RowsPulled([(4, 7)]), "9249919204" + "07"),
    (AttachPs(1, ["a"], 1.5, moves=3), "96200191a161cb3ff8000000000000c203"),
    (PsAttached([("rule", "a", 3)]), "92cc899193a472756c65a16103"),
    (
        CreateShards([("v", 0, 1, 2, [3], "float32")], [None, b"0", (0, 1)]),
        "93219196a1760001029103a7666c6f6174333293c0c40130920001",
    ),
    (Fence("w", 7), "9327a17707"),
    (FinalBelow(5), "93280500"),
    (FinalBelow(5, 2), "93280502"),
    (MeasurePush(2, None, 3, {}, 9), "965002c0038009"),
    (Measured([(0.5, 1.0)]), "92519192cb3fe0000000000000cb3ff0000000000000"),
    (DefineOptimizer(3, {"a": 1}), "93290381a16101"),
    (AskOptimizer(3, {}), "937f0380"),
    (OptimizerState(9, 5, 4), "947c090504"),
    (TellCounts([(3, {}, 5, [(1, 4)])]), "92cc989194038005" + "91920104"),
    (CountsHeard(True), "92cc99c3"),
    (SetSlots(3, {}, [(0, 1, "m")]), "947d038091930001a16d"),
    (SetOptimizer(3, {}, -1, None), "957e0380ffc0"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_ps_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_ps_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(ps_messages)
