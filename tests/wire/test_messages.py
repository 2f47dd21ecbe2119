"""What every task says and hears; the handshake above all never changes."""

from __future__ import annotations

import pytest

from psync.wire import messages
from psync.wire.codec import Message
from psync.wire.messages import (
    AskSpans,
    AskStatistics,
    Challenge,
    Done,
    Failure,
    Hello,
    Proof,
    Refused,
    Shutdown,
    Statistics,
    Welcome,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (
        Hello(1, 1, "/job:ps/task:0", 7, "bulk", bytes(32), True),
        "98010101ae2f6a6f623a70732f7461736b3a3007a462756c6bc420" + "00" * 32 + "c3",
    ),
    (
        Challenge(1, "/job:ps/task:0", 2**63, bytes(32), False, b"m"),
        "970201ae2f6a6f623a70732f7461736b3a30cf8000000000000000c420" + "00" * 32 + "c2c4016d",
    ),
    (Proof(b"\1" * 32), "9203c420" + "01" * 32),
    (Welcome(), "9104"),
    (Refused("full", "no room"), "9305a466756c6ca76e6f20726f6f6d"),
    (Done(), "9108"),
    (Failure("", "E", "", "m", None, "t"), "9709a0a145a0a16dc0a174"),
    (Shutdown("r"), "921ba172"),
    (AskStatistics(), "911c"),
    (AskSpans("r", True), "93cc8aa172c3"),
    (Statistics({"a": 1}), "921d81a16101"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(messages)
