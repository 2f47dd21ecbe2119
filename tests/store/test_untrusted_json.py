from __future__ import annotations

from typing import Any

import pytest

from psync.errors import CheckpointCorrupt
from psync.store.untrusted_json import UntrustedJson

TAKE = UntrustedJson("ckpt/file")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"[1]", b"3"])
def test_what_is_no_object_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="ckpt/file: damaged: it"):
        TAKE.parse(data)


@pytest.mark.parametrize("data", [b"", b"{}"])
def test_what_is_no_list_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="ckpt/file: damaged: it"):
        TAKE.parse_list(data)


def test_values_that_are_what_they_must_be_are_returned() -> None:
    assert TAKE.parse(b'{"a": 1}') == {"a": 1}
    assert TAKE.parse_list(b"[1]") == [1]
    assert TAKE.mapping({}, "x") == {}
    assert TAKE.sequence([1], "x") == TAKE.sequence([1], "x", 1) == [1]
    assert TAKE.number(0, "x") == 0
    assert TAKE.number(2**63 - 1, "x") == 2**63 - 1
    assert TAKE.integer(-(2**63), "x") == -(2**63)
    assert TAKE.text("a", "x") == "a"
    assert TAKE.hex("00ff", "x") == b"\0\xff"


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("mapping", [], "an object, got []"),
        ("sequence", {}, "a list, got {}"),
        ("number", -1, "a whole number from 0, got -1"),
        ("number", 2**63, "a whole number, got 9223372036854775808"),
        ("integer", True, "a whole number, got True"),
        ("integer", 1.5, "a whole number, got 1.5"),
        ("integer", -(2**63) - 1, "a whole number, got -9223372036854775809"),
        ("text", "", "text, got ''"),
        ("text", 7, "text, got 7"),
        ("hex", "0g", "bytes as hexadecimal digits, got '0g'"),
    ],
)
def test_others_are_named(method: str, value: Any, expected: str) -> None:
    with pytest.raises(CheckpointCorrupt) as caught:
        getattr(TAKE, method)(value, "the thing")
    assert caught.value.message == f"ckpt/file: damaged: the thing: expected {expected}"


def test_a_list_of_another_length_and_a_long_value_shortened() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"a list of 2 entries, got \[0, 0.*\.\.\.\n"):
        TAKE.sequence([0] * 100, "x", 2)
