"""The messages that exist: their numbers, their bytes, and that none changes by accident."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from psync.wire import messages
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    ApplyGradient,
    Assign,
    AverageShards,
    Challenge,
    ClosureResults,
    Done,
    Failure,
    GradientApplied,
    GradientTaken,
    Hello,
    Proof,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    Refused,
    RowsPulled,
    RunClosures,
    TakeGradient,
    Welcome,
)

ALL = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]

GOLDEN: list[tuple[Message, str]] = [
    # The handshake never changes: it is how versions that differ find out.
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
    # What is sent for every step.
    (Done(), "9108"),
    (Failure("", "E", "", "m", None, "t"), "9709a0a145a0a16dc0a174"),
    (RunClosures([(5, b"key", 1, [2])]), "92119194" + "05c4036b6579019102"),
    (
        ClosureResults([(5, "ok", 1, None), (6, "error", 0, ("E", "m", "t"))], 0.5),
        "94159294" + "05a26f6b01c0" + "9406a56572726f720093a145a16da174" + "cb3fe0000000000000c0",
    ),
    (Pull(1, [(0, 1)], -1, ""), "9522019192" + "0001ffa0"),
    (Pull(1, None, -1, ""), "952201c0ffa0"),
    (Pulled([]), "922390"),
    (Pulled([(4, 7)]), "9223919204" + "07"),
    (Push(1, 1, -1, 0, 2, None, 3, None, 9), "9d240101ff0002c003c009c0c0c0"),
    (Push(1, 1, -1, 0, 2, None, 3, None, 9, [-1, 5]), "9d240101ff0002c003c00992ff05c0c0"),
    (
        Push(1, 1, -1, 0, 2, None, 3, None, 9, None, [0.5]),
        "9d240101ff0002c003c009c091cb3fe0000000000000c0",
    ),
    (Assign(1, 1, 4, 0, 2, [(3, 0)], "sub"), "9a25010104000291920300a3737562c0c0"),
    (
        Assign(1, 1, 4, 0, 2, None, "sub", None, [(1, 6)]),
        "9a250101040002c0a3737562c0919201" + "06",
    ),
    (AverageShards(1, 1, -1, 0, [(3, 0, 1)], 0.5), "983d0101ff009193030001cb3fe0000000000000c0"),
    (Pushed("accepted", 10), "9326a861636365707465640a"),
    (
        ApplyGradient(1, 1, -1, 0, "a", [2, 3], None, 4, 0.5),
        "9a3f0101ff00a161920203c004cb3fe0000000000000",
    ),
    (GradientApplied("stale", 2, 4), "9441a57374616c650204"),
    (TakeGradient("a", 1, 1, 3), "9542a161010103"),
    (GradientTaken(3, 5, [2, 3], [-1, 3]), "95430305920203" + "92ff03"),
    (PullRows([(3, 0, 7, 0, 0, 0)], -1, ""), "94489196030007000000ffa0"),
    (RowsPulled([(4, 7)]), "9249919204" + "07"),
]


@pytest.mark.parametrize(("sent", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(sent: Message, expected: str) -> None:
    assert encode(sent).hex() == expected
    got = decode(bytes.fromhex(expected))
    assert type(got) is type(sent)
    assert encode(got) == encode(sent)


def sample(annotation: typing.Any) -> typing.Any:
    """A value of the annotated type, not empty where that is possible."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return [sample(args[0])]
    if origin is tuple:
        return [sample(arg) for arg in args]
    if origin is dict:
        return {"key": sample(args[1])}
    if args:  # a union
        return sample(args[0])
    return {int: 3, float: 0.5, str: "text", bytes: b"raw", bool: True}.get(annotation, [1, None])


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_comes_back(kind: type[Message]) -> None:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    message = kind(*(sample(hints[field.name]) for field in fields))
    assert decode(encode(message)) == message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_explained_and_has_a_number_below_128(kind: type[Message]) -> None:
    assert kind.__doc__
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert 0 < kind.code < 128
    assert not hasattr(kind(*[0] * len(dataclasses.fields(kind))), "__dict__")  # type: ignore[arg-type]
