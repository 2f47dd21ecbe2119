"""Messages to headers and back: what a peer may send, and what it cannot make us believe."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from psync.errors import LocalProtocolError, RemoteProtocolError
from psync.wire.codec import Message, check, decode, encode


class Everything(Message, code=10):
    """One field of every type that messages use."""

    whole: int
    real: float
    text: str
    raw: bytes
    flag: bool
    maybe: int | None
    numbers: list[int]
    pair: tuple[int, str]
    pairs: list[tuple[int, list[bytes]]]
    table: dict[str, float]
    anything: Any


class Nothing(Message, code=11):
    """No field."""


class One(Message, code=12):
    """A single field."""

    value: int


FULL = Everything(
    1, 2.5, "t", b"r", True, None, [1, 2], (3, "x"), [(4, [b"y"])], {"a": 1.0}, [None, {"b": 2}]
)


def values(**changed: object) -> bytes:
    fields = {name: getattr(FULL, name) for name in FULL.__struct_fields__}
    assert set(changed) <= set(fields)
    packed: bytes = msgpack.encode([10, *{**fields, **changed}.values()])
    return packed


def test_golden_bytes() -> None:
    assert encode(One(5)).hex(" ") == "92 0c 05"
    assert encode(Nothing()).hex(" ") == "91 0b"
    assert values().hex() == (
        "9c0a01cb4004000000000000a174c40172c3c092010292"
        "03a178919204"
        "91c40179"
        "81a161cb3ff0000000000000"
        "92c081a16202"
    )
    assert encode(FULL) == values()


def test_a_message_without_fields_comes_back() -> None:
    assert decode(b"\x91\x0b") == Nothing()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("whole", 1.0, "expected int, got 1.0"),
        ("whole", True, "expected int, got True"),
        ("whole", None, "expected int, got None"),
        ("real", "1", "expected float, got '1'"),
        ("text", b"t", "expected str, got b't'"),
        ("raw", "r", "expected bytes, got 'r'"),
        ("flag", 1, "expected bool, got 1"),
        ("maybe", "x", "expected int | None, got 'x'"),
        ("numbers", 1, "expected list[int], got 1"),
        ("numbers", [1, "2"], "expected list[int], got [1, '2']"),
        ("pair", [], "expected tuple[int, str], got []"),
        ("pair", [1], "expected tuple[int, str], got [1]"),
        ("pair", [1, 2], "expected tuple[int, str], got [1, 2]"),
        ("pair", {"a": 1}, "expected tuple[int, str], got {'a': 1}"),
        ("pairs", 3, "expected list[tuple[int, list[bytes]]], got 3"),
        ("pairs", [[1]], "expected list[tuple[int, list[bytes]]], got [[1]]"),
        ("pairs", [3], "expected list[tuple[int, list[bytes]]], got [3]"),
        ("pairs", [["1", []]], "expected list[tuple[int, list[bytes]]], got [['1', []]]"),
        ("pairs", [[1, ["x"]]], "expected list[tuple[int, list[bytes]]], got [[1, ['x']]]"),
        ("table", [], "expected dict[str, float], got []"),
        ("table", {b"a": 1}, "expected dict[str, float], got {b'a': 1}"),
        ("table", {"a": "b"}, "expected dict[str, float], got {'a': 'b'}"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(field: str, value: object, told: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(values(**{field: value}))
    assert caught.value.message == f"Everything.{field}: {told}"


class Rows(Message, code=13):
    """Results of closures look like this."""

    rows: list[tuple[int, tuple[str, str] | None, list[int]]]


@pytest.mark.parametrize(
    "rows", [[], [[1, None, []]], [[1, ["a", "b"], [2]], [3, None, [4, 5]]], [[0, None, []]] * 100]
)
def test_rows_come_back(rows: list[Any]) -> None:
    expected = [(number, pair and tuple(pair), few) for number, pair, few in rows]
    assert decode(msgpack.encode([13, rows])) == Rows(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        [1, ["a"], []],
        [1, ["a", 2], []],
        [1, "ab", []],
        [1, None, 5],
        [1, None, ["x"]],
        ["1", None, []],
        [1, None],
        [1, None, [], 0],
        [],
        {},
        None,
    ],
)
@pytest.mark.parametrize("place", [0, 1, 50])
def test_one_wrong_row_is_found_anywhere(wrong: object, place: int) -> None:
    rows: list[Any] = [[1, ["a", "b"], [2]], [3, None, []]] * 25
    rows.insert(place, wrong)
    with pytest.raises(RemoteProtocolError, match=r"^Rows.rows: expected list\[tuple\[int, "):
        decode(msgpack.encode([13, rows]))


def test_a_long_value_is_told_in_short() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(values(whole="x" * 100_000))
    assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"", "header is not valid msgpack: DecodeError"),
        (b"\xc1", "header is not valid msgpack: DecodeError"),
        (b"\x91", "header is not valid msgpack: DecodeError"),
        (b"\x91\x0b\x00", "header is not valid msgpack: DecodeError"),
        (b"\x92\x01\xa1\xff", "header is not valid msgpack: DecodeError"),
        (b"\x92\x01\xd4\x01\x00", "header is not valid msgpack: ValueError"),
        (b"\x92\x0c\x81\x01\x00", "One.value: expected int, got {1: 0}"),
        (b"\x05", "header: expected an array, got int"),
        (b"\x80", "header: expected an array, got dict"),
        (b"\x90", "unknown message []"),
        (b"\x91\x00", "unknown message [0]"),
        (b"\x91\xa1x", "unknown message ['x']"),
        (b"\x91\xc3", "unknown message [True]"),
        (b"\x92\x0b\x00", "Nothing: expected 0 fields, got 1"),
        (b"\x91\x0c", "One: expected 1 fields, got 0"),
        (b"\x93\x0c\x00\x00", "One: expected 1 fields, got 2"),
    ],
)
def test_what_is_no_message_is_refused(header: bytes, told: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(header)
    assert caught.value.message == told


@pytest.mark.parametrize("depth", [100, 500, 900, 1500, 4000])
def test_depth_is_an_error_and_not_an_end_of_the_stack(depth: int) -> None:
    nested = b"\x91" * depth + b"\xc0"
    with pytest.raises(RemoteProtocolError):
        decode(nested)
    deep = values()[: -len(msgpack.encode(FULL.anything))] + nested
    with contextlib.suppress(RemoteProtocolError):
        decode(deep)
    with contextlib.suppress(RemoteProtocolError):
        decode(b"\x92\x0c" + nested)


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_a_header_cannot_ask_for_much_more_memory_than_it_has(size: int) -> None:
    nested = b"\xdd\x00\x00\xff\xff" * (size // 5)  # each an array of 65,535 items
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(nested[:size])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1 << 20 if size == 4096 else 1 << 30)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Everything,
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
        st.booleans(),
        st.none() | st.integers(0, 9),
        st.lists(st.integers(0, 9)),
        st.tuples(st.integers(0, 9), st.text()),
        st.lists(st.tuples(st.integers(0, 9), st.lists(st.binary()))),
        st.dictionaries(st.text(), st.floats(allow_nan=False)),
        JSON,
    )
)  # fmt: skip
def test_any_message_comes_back(sent: Everything) -> None:
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, "\ud800", object(), np.int64(1), [object()]]
)
def test_what_msgpack_cannot_carry_is_our_own_error(value: object) -> None:
    with pytest.raises(LocalProtocolError, match=r"^One cannot be encoded: "):
        encode(One(value))  # type: ignore[arg-type]
    assert encode(One(5)).hex(" ") == "92 0c 05", "the failed one has left nothing behind"


def test_texts_and_numbers_of_numpy_are_sent_as_those_of_python() -> None:
    sent = Everything(1, np.float64(0.5), np.str_("t"), b"", True, 3, [], (4, "x"), [], {}, None)
    got = decode(encode(sent))
    assert isinstance(got, Everything)
    assert (type(got.real), type(got.text)) == (float, str)
    assert got == sent


def test_a_value_that_contains_itself_is_our_own_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(LocalProtocolError, match=r"^One cannot be encoded: "):
        encode(One(endless))  # type: ignore[arg-type]


def test_a_code_is_given_once() -> None:
    with pytest.raises(TypeError, match="message code 11 is taken by Nothing"):

        class Another(Message, code=11):
            """Has the number of another one."""


def test_a_message_that_its_receiver_would_refuse_can_be_told_before_it_is_sent() -> None:
    check(FULL)
    check(Nothing())
    with pytest.raises(LocalProtocolError, match=r"the message itself is wrong: One\.value: exp"):
        check(One("five"))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        check(One(object()))  # type: ignore[arg-type]


class Nested(Message, code=302):
    """A row in a field, and a list in that."""

    row: tuple[int, list[int]]


def test_what_is_in_a_row_is_checked_also_where_its_types_have_fitted_before() -> None:
    decode(encode(Nested((1, [2]))))
    for inner in ([3], [], ["x"]):
        refused = pytest.raises(RemoteProtocolError, match=r"Nested\.row")
        with refused if inner == ["x"] else contextlib.nullcontext():
            decode(encode(Nested((1, inner))))  # type: ignore[arg-type]
