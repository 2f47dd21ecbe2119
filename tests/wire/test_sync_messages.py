"""The bytes of what is said in synchronous training."""

from __future__ import annotations

import pytest

from psync.wire import sync_messages
from psync.wire.codec import Message
from psync.wire.sync_messages import (
    AskStep,
    AwaitWaiters,
    ClockTicked,
    CloseStep,
    Contribute,
    Contributed,
    DescribeSet,
    FinishSteps,
    InitTokens,
    MeasureStep,
    ReportSchedule,
    SetSizes,
    Staged,
    StagePush,
    StepMeasured,
    SyncStep,
    TickClock,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (StagePush(9, None, 1, -1, 6, [(0, 1)]), "982a09c001ff0691920001c0"),
    (Staged(True), "922bc3"),
    (
        Contribute(9, None, 1, 0, -1, 0, b"d", -1, 1.0, 6, [(0, 0, 1)], 0, None),
        "dc00102c09c00100ff00c40164ffcb3ff000000000000006919300000100c0c0c2",
    ),
    (Contributed("accepted", 0, 4, False, 2), "962da861636365707465640004c202"),
    (AskStep(9), "922e09"),
    (SyncStep(4, 0), "932f0400"),
    (InitTokens(9, {}, -1), "94320980ff"),
    (DescribeSet(6, [(0, 1)], -1, None), "955a0691920001ffc0"),
    (SetSizes([8]), "925b9108"),
    (
        CloseStep(9, None, 4, [("w", 7, 1, 0.5)], [-1], [(6, [(0, 1)])], [6], [(0, 0.5)]),
        "9a3009c0049194a1770701cb3fe000000000000091ff919206919200019106919200cb3fe0000000000000c0",
    ),
    (MeasureStep(9, None, 4, [], what="updates"), "9b5209c00490909090c0c0a775706461746573"),
    (StepMeasured([(0, 1, 0.5, 1.0)]), "925391940001cb3fe0000000000000cb3ff0000000000000"),
    (AwaitWaiters(), "910f"),
    (ReportSchedule(1, [(0, 7)], ["w"], False, [(5, 0)]), "9631019192000791a177c291920500"),
    (FinishSteps(), "9147"),
    (TickClock(1, 2, 3), "9438010203"),
    (ClockTicked(1), "923901"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_sync_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_sync_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(sync_messages)
