"""The bytes of what is said in sessions, and at the end of training."""

from __future__ import annotations

import pytest

from psync.wire import session_messages
from psync.wire.codec import Message
from psync.wire.session_messages import (
    AwaitEnd,
    CheckShards,
    Declared,
    EndTraining,
    EnterSession,
    LeaveSession,
    ReplicaFailed,
    SessionEntered,
    TrainingOver,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (Declared(True, 2), "9336c302"),
    (EnterSession(9), "923409"),
    (SessionEntered(10), "92350a"),
    (CheckShards([("v", 0, 1, 2, [3], "float32")]), "923a9196a1760001029103a7666c6f61743332"),
    (LeaveSession(), "9137"),
    (ReplicaFailed("E", "m", "t"), "94cc8ba145a16da174"),
    (EndTraining("r", False), "9333a172c2"),
    (AwaitEnd(), "913b"),
    (TrainingOver("r", True, None), "943ca172c3c0"),
    (TrainingOver("r", True, ("w", "E", "m", "t")), "943ca172c394a177a145a16da174"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_session_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_session_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(session_messages)
