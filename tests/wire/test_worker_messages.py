"""The bytes of what the coordinator and its workers say to each other."""

from __future__ import annotations

import pytest

from psync.wire import worker_messages
from psync.wire.codec import Message
from psync.wire.worker_messages import (
    Arguments,
    AskPosition,
    AttachWorker,
    CancelClosures,
    ClosureResults,
    FetchArguments,
    FetchFunction,
    Function,
    GiveBack,
    GivenBack,
    IteratorPosition,
    Merged,
    ReachCollective,
    ReleaseIterators,
    RunClosures,
    RunReplica,
)
from wire_tools import check_bytes, kinds_of

GOLDEN: list[tuple[Message, str]] = [
    (RunClosures([(5, b"key", 1, [2])]), "93119194" + "05c4036b6579019102c0"),
    (RunClosures([], [(5, 3)]), "931190" + "91920503"),
    (
        ClosureResults([(5, "ok", 1, None), (6, "error", 0, ("E", "m", "t"))], 0.5),
        "96159294"
        + "05a26f6b01c0"
        + "9406a56572726f720093a145a16da174"
        + "cb3fe0000000000000c0c0c0",
    ),
    (
        ClosureResults([], 0.0, None, [("step", "pull", 2)]),
        "961590cb0000000000000000c0" + "9193a473746570a470756c6c02c0",
    ),
    (
        ClosureResults([], 0.0, stop=(5, "NaN")),
        "961590cb0000000000000000c0c0" + "9205a34e614e",
    ),
    (
        AttachWorker(0, 2, 3, 1, "o", "p", ["a"], 1.5),
        "991000020301a16fa17091a161cb3ff8000000000000",
    ),
    (GiveBack([5]), "92129105"),
    (GivenBack([5]), "92139105"),
    (CancelClosures([5]), "92149105"),
    (FetchFunction(b"key"), "9216c4036b6579"),
    (Function("f"), "9217a166"),
    (FetchArguments(5), "921805"),
    (Arguments(1, [2]), "9319019102"),
    (ReleaseIterators(["u"]), "921a91a175"),
    (AskPosition("u"), "9264a175"),
    (IteratorPosition(-1), "9265ff"),
    (RunReplica((5, b"key", 1, [2]), 0, 2), "94699405c4036b65790191020002"),
    (ReachCollective(5, "w"), "936a05a177"),
    (Merged(None), "926bc0"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_worker_messages_have_these_bytes_and_come_back(sent: Message, expected: str) -> None:
    check_bytes(sent, expected)


def test_all_worker_messages_are_listed_above() -> None:
    assert {type(message) for message, _ in GOLDEN} == kinds_of(worker_messages)
