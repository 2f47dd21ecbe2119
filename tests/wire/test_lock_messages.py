"""The bytes of what is said about locks."""

from __future__ import annotations

import pytest

from psync.wire import lock_messages
from psync.wire.codec import Message
from psync.wire.lock_messages import AssignLocked, LockShards, PullLocked, RenewLock, UnlockShards
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (LockShards(1, [(0, 1)], 5.0), "94730191920001cb4014000000000000"),
    (UnlockShards(1), "927401"),
    (RenewLock(1), "927501"),
    (PullLocked(1, None, -1, "", 4), "967601c0ffa004"),
    (AssignLocked(1, 1, 4, 0, 2, None, "sub", None, None, 4), "9b770101040002c0a3737562c0c004"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_lock_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_lock_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(lock_messages)
