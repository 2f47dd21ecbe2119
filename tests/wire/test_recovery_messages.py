"""Messages about cuts and snapshots: their numbers and their bytes do not change by accident."""

from __future__ import annotations

import pytest

from psync.wire import recovery_messages
from psync.wire.codec import Message
from psync.wire.recovery_messages import (
    Admit,
    AdoptShards,
    AskServed,
    BackUp,
    BackupBegun,
    BeginBackup,
    CoordinatorGranted,
    DescribeShards,
    DropFrozen,
    EndFormer,
    EndSession,
    FillBackup,
    FillSnapshot,
    Freeze,
    Frozen,
    FrozenBytes,
    Gate,
    Gated,
    GrantCoordinator,
    LeaveCluster,
    LogEntries,
    LogTaken,
    OpenGate,
    PrepareSnapshot,
    Promote,
    Promoted,
    ReadFrozen,
    RestoreSnapshot,
    ServedHere,
    ShardsDescribed,
    WriteFrozen,
    Written,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (Gate(1), "924a01"),
    (Gated([(1, "w", 7, 3)]), "924b919401a1770703"),
    (Admit(1, [("w", 7, 3)]), "934c019193a1770703"),
    (Freeze(1), "924d01"),
    (Frozen([5]), "924e9105"),
    (OpenGate(1), "924f01"),
    (DropFrozen(1), "925401"),
    (WriteFrozen(1, "p", "n"), "945701a170a16e"),
    (Written(9), "925809"),
    (ReadFrozen(1, 2, 0, 8), "955901020008"),
    (FrozenBytes(), "915c"),
    (PrepareSnapshot(1, ""), "935d01a0"),
    (FillSnapshot(1, 2, 8), "945e010208"),
    (RestoreSnapshot(1, 2, [("w", 8)]), "945f01029192a17708"),
    (BackUp(1, "t", "a", True), "956101a174a161c3"),
    (
        BeginBackup(0, 1, 7, ["a"], 1.5, 0, 4, 6, "v"),
        "9a6200010791a161cb3ff8000000000000000406a176",
    ),
    (BackupBegun("n"), "92cc88a16e"),
    (FillBackup(0, 1, 2, 8), "956300010208"),
    (LogEntries(0, 1, 4, [("w", 7, b"m", 1)]), "95660001049194a17707c4016d01"),
    (LogTaken(4), "926704"),
    (Promote(0, 2, 7, [("w", 8)]), "95680002079192a17708"),
    (Promoted("a"), "9272a161"),
    (LeaveCluster("r"), "9270a172"),
    (EndSession("r", True), "9371a172c3"),
    (GrantCoordinator(1, 2), "936c0102"),
    (CoordinatorGranted(3), "926d03"),
    (AskServed(), "9106"),
    (ServedHere([(0, "a", 7, 1, 2, -1, 0)], [(1, 7, 3)]), "9307919700a161070102ff009193010703"),
    (EndFormer(), "910e"),
    (DescribeShards(), "916e"),
    (ShardsDescribed(), "916f"),
    (AdoptShards(4, True), "937804c3"),
]


@pytest.mark.parametrize(("message", "header"), GOLDEN, ids=lambda value: type(value).__name__)
def test_a_message_has_these_bytes_and_comes_back(message: Message, header: str) -> None:
    check_bytes(message, header)


def test_all_recovery_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(recovery_messages)
