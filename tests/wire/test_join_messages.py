"""Messages of workers that join: their numbers and their bytes do not change by accident."""

from __future__ import annotations

import pytest

from psync.wire import join_messages
from psync.wire.codec import Message
from psync.wire.join_messages import JoinCluster, Joined
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (JoinCluster("b:1", -1, "3.11"), "94cc96a3623a31ffa4332e3131"),
    (Joined(10_000), "92cc97cd2710"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(join_messages)
