from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from psync.errors import CheckpointCorrupt, CheckpointError
from psync.store.untrusted_json import Signed, read_json, to_json


class Pair(NamedTuple):
    number: int
    name: str


@dataclass(frozen=True)
class Thing:
    kind: str
    pairs: tuple[Pair, ...]
    digest: bytes | None = None
    sizes: dict[str, int] = field(default_factory=dict)


def test_what_is_written_is_read() -> None:
    thing = Thing("a", (Pair(1, "x"), Pair(2, "y")), b"\0\xff", {"f": 3})
    assert read_json(to_json(thing), Thing, "it") == thing
    assert read_json(to_json([thing], indent=1), list[Thing], "it") == [thing]


def test_mappings_of_any_kind_are_objects() -> None:
    assert to_json(MappingProxyType({"rate": 0.5})) == b'{"rate":0.5}'


def test_what_has_a_default_may_be_missing_and_what_is_not_known_may_be_there() -> None:
    data = b'{"kind": "a", "pairs": [], "later": 1}'
    assert read_json(data, Thing, "it") == Thing("a", ())


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        (int, 0, 0),
        (int, 2**63 - 1, 2**63 - 1),
        (Signed, -(2**63), -(2**63)),
        (bool, True, True),
        (str, "a", "a"),
        (bytes, "00ff", b"\0\xff"),
        (list[int], [1], [1]),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, int], {"": 1}, {"": 1}),
        (dict[str, Any], {"a": [None]}, {"a": [None]}),
    ],
)
def test_values_that_are_what_they_must_be_are_returned(kind: Any, value: Any, made: Any) -> None:
    assert read_json(json.dumps(value).encode(), kind, "it") == made


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="ckpt/file: damaged: it is not JSON"):
        read_json(data, list[int], "ckpt/file")


WHOLE = "a whole number from 0"
THING = {"kind": "a", "pairs": [[1, "x"]]}


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (dict[str, int], [], "it: expected an object, got []"),
        (list[int], {}, "it: expected a list, got {}"),
        (int, -1, f"it: expected {WHOLE}, got -1"),
        (int, 2**63, f"it: expected {WHOLE}, got 9223372036854775808"),
        (int, True, f"it: expected {WHOLE}, got True"),
        (int, 1.5, f"it: expected {WHOLE}, got 1.5"),
        (Signed, -(2**63) - 1, "it: expected a whole number, got -9223372036854775809"),
        (bool, 1, "it: expected true or false, got 1"),
        (str, "", "it: expected text, got ''"),
        (str, 7, "it: expected text, got 7"),
        (bytes, "0g", "it: expected bytes as hexadecimal digits, got '0g'"),
        (bytes, "00 ", "it: expected bytes as hexadecimal digits, got '00 '"),
        (list[tuple[int, str]], [[1, "a"], [1]], "[1]: expected a list of 2 entries, got [1]"),
        (list[tuple[int, str]], [[1, "a"], [1, 2]], "[1][1]: expected text, got 2"),
        (dict[str, list[int]], {"a": [0, None]}, f"a[1]: expected {WHOLE}, got None"),
        (Thing, [], "it: expected an object, got []"),
        (Thing, {"pairs": []}, "kind: expected text, got None"),
        (list[Thing], [{**THING, "digest": 3}], "[0].digest: expected text, got 3"),
        (Thing, {**THING, "pairs": [[1, "x"], [2, ""]]}, "pairs[1].name: expected text, got ''"),
        (Thing, {**THING, "sizes": {"f": "1"}}, f"sizes.f: expected {WHOLE}, got '1'"),
    ],
)
def test_others_are_named(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(CheckpointCorrupt) as caught:
        read_json(json.dumps(value).encode(), kind, "ckpt/file")
    assert caught.value.message == f"ckpt/file: damaged: {said}"


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"a list of 2 entries, got \[0, 0.*\.\.\.\n"):
        read_json(b"[" + b"0, " * 99 + b"0]", tuple[int, int], "x")


def test_a_newer_version_is_said_whatever_else_is_there() -> None:
    with pytest.raises(CheckpointError, match="it: format version 2, this psync reads 1") as caught:
        read_json(b'{"format": "f", "version": 2}', Thing, "it", ("f", 1))
    assert not isinstance(caught.value, CheckpointCorrupt)
    with pytest.raises(CheckpointCorrupt, match="format: expected 'f', got 'g'"):
        read_json(b'{"format": "g", "version": 2}', Thing, "it", ("f", 1))
