from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from psync.errors import CheckpointCorrupt, CheckpointError
from psync.store.untrusted_json import Hex, Signed, Text, Whole, read_json, to_json


class Pair(NamedTuple):
    number: Whole
    name: Text


@dataclass(frozen=True)
class Thing:
    kind: Text
    pairs: tuple[Pair, ...]
    digest: Hex | None = None
    sizes: dict[str, Whole] = field(default_factory=dict)


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
        (Whole, 0, 0),
        (Whole, 2**63 - 1, 2**63 - 1),
        (Signed, -(2**63), -(2**63)),
        (bool, True, True),
        (Text, "a", "a"),
        (Hex, "00ff", b"\0\xff"),
        (tuple[Whole, ...], [1, 2], (1, 2)),
        (tuple[Whole, Text], [1, "a"], (1, "a")),
        (dict[str, Whole], {"": 1}, {"": 1}),
        (dict[str, Any], {"a": [None]}, {"a": [None]}),
    ],
)
def test_values_that_are_what_they_must_be_are_returned(kind: Any, value: Any, made: Any) -> None:
    assert read_json(json.dumps(value).encode(), kind, "it") == made


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="ckpt/file: damaged: it is not JSON"):
        read_json(data, list[int], "ckpt/file")


THING = {"kind": "a", "pairs": [[1, "x"]]}


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (list[Whole], {}, "it: expected `array`, got {}"),
        (Whole, -1, "it: expected `int` >= 0, got -1"),
        (Whole, 2**63, f"it: expected `int` <= {2**63 - 1}, got 9223372036854775808"),
        (Whole, True, "it: expected `int`, got True"),
        (Whole, 1.5, "it: expected `int`, got 1.5"),
        (Whole, "\ud800", "it: 'utf-8' codec can't encode"),
        (Signed, -(2**63) - 1, f"it: expected `int` >= {-(2**63)}, got -9223372036854775809"),
        (bool, 1, "it: expected `bool`, got 1"),
        (float, 10**400, "it: number out of range, got 1000"),
        (Text, "", "it: expected `str` of length >= 1, got ''"),
        (Hex, "0g", "it: expected bytes as hexadecimal digits, got '0g'"),
        (Hex, "00 ", "it: expected bytes as hexadecimal digits, got '00 '"),
        (list[Pair], [[1, "a"], [1]], "[1]: expected `array` of length 2, got [1]"),
        (list[Pair], [[1, "a"], [1, 2]], "[1][1]: expected `str`, got 2"),
        (dict[str, list[Whole]], {"a": [1], "b": [None]}, "['b'][0]: expected `int`, got None"),
        (Thing, [], "it: expected `object`, got []"),
        (Thing, {"pairs": []}, "it: object missing required field `kind`, got {'pairs': []}"),
        (list[Thing], [{**THING, "digest": 3}], "[0].digest: expected bytes as hexadecimal"),
        (Thing, {**THING, "sizes": {"f": "1", "g": 1}}, "sizes['f']: expected `int`, got '1'"),
    ],
)
def test_others_are_named(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(CheckpointCorrupt) as caught:
        read_json(json.dumps(value).encode(), kind, "ckpt/file")
    assert caught.value.message.startswith(f"ckpt/file: damaged: {said}")


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"`array` of length 2, got \[0, 0.*\.\.\.\n"):
        read_json(b"[" + b"0, " * 99 + b"0]", tuple[int, int], "x")


def test_a_newer_version_is_said_whatever_else_is_there() -> None:
    with pytest.raises(CheckpointError, match="it: format version 2, this psync reads 1") as caught:
        read_json(b'{"format": "f", "version": 2}', Thing, "it", ("f", 1))
    assert not isinstance(caught.value, CheckpointCorrupt)
    with pytest.raises(CheckpointCorrupt, match="format: expected 'f', got 'g'"):
        read_json(b'{"format": "g", "version": 2}', Thing, "it", ("f", 1))
