"""Frames: their bytes, their pieces, their limits, and where their bodies go."""

from __future__ import annotations

import itertools
import re
import struct
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import (
    FrameTooLarge,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    VersionMismatch,
)
from psync.wire import frames as module
from psync.wire.frames import (
    EXTENT,
    MAX_EXTENTS,
    PREFIX,
    PREFIX_BYTES,
    SCRATCH_BYTES,
    Extent,
    Frame,
    FrameDecoder,
    Kind,
    Segment,
    encode_head,
)
from psync.wire.limits import DEFAULT_LIMITS, HANDSHAKE_LIMITS, Limits
from psync.wire.tensors import Joined, to_bytes_view
from wire_tools import Anywhere, Lender, encode_frame, joined, pour, splits

SMALL = Limits(header_bytes=50, segments=4, segment_bytes=100, body_bytes=150)


def frame_bytes(*args: object, **kwargs: object) -> bytes:
    return joined(encode_frame(*args, **kwargs))  # type: ignore[arg-type]


def prefix(
    *,
    magic: bytes = b"PSYN",
    version: int = 2,
    kind: int = 16,
    flags: int = 0,
    header: int = 0,
    count: int = 0,
    body: int = 0,
) -> bytes:
    return PREFIX.pack(magic, version, kind, flags, 7, header, count, body)


def refuse(frame: Frame) -> Sequence[memoryview] | None:
    raise AssertionError("the sink must not be asked")


def body_of(frame: Frame) -> list[bytes]:
    return [bytes(segment) for segment in frame.segments]


# --- the bytes -------------------------------------------------------------------------------


def test_golden_bytes_of_a_frame_without_a_body() -> None:
    assert frame_bytes(Kind.REQUEST, 0x0102, b"\x91\x1c").hex(" ") == (
        "50 53 59 4e 02 10 00 00 02 01 00 00 00 00 00 00 "
        "02 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 91 1c"
    )


def test_golden_bytes_of_a_frame_with_segments() -> None:
    assert frame_bytes(Kind.REPLY, 1, b"\x91\x23", [b"abc", b"", b"d"]).hex(" ") == (
        "50 53 59 4e 02 11 00 00 01 00 00 00 00 00 00 00 "
        "02 00 00 00 03 00 00 00 04 00 00 00 00 00 00 00 "
        "03 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 "
        "91 23 61 62 63 64"
    )


def test_the_numbers_of_the_kinds_never_change() -> None:
    assert {kind.name: int(kind) for kind in Kind} == {
        "HELLO": 1, "CHALLENGE": 2, "PROOF": 3, "WELCOME": 4, "REFUSED": 5,
        "REQUEST": 16, "REPLY": 17, "ERROR": 18, "NOTIFY": 19, "CANCEL": 20,
        "PING": 21, "PONG": 22, "RETURN": 23, "FORGET": 24,
    }  # fmt: skip


def test_segments_are_not_copied() -> None:
    array = np.zeros(100, np.float32)
    buffers = encode_frame(Kind.REPLY, 1, b"", [to_bytes_view(array)])
    array[:] = 1
    assert joined(buffers)[-400:] == array.tobytes()


def test_a_segment_may_be_gathered_from_several_views() -> None:
    views = [memoryview(b"ab"), memoryview(b""), memoryview(b"cde")]
    data = frame_bytes(Kind.REPLY, 1, b"h", [views, b"xy", []])
    assert len(encode_frame(Kind.REPLY, 1, b"h", [views, b"xy", []])) == 4, "no empty buffers"
    (frame,) = pour(FrameDecoder(DEFAULT_LIMITS, Anywhere()), data)
    assert frame.lengths == (5, 2, 0)
    assert body_of(frame) == [b"abcde", b"xy", b""]


def test_buffers_may_end_elsewhere_than_segments() -> None:
    joint = Joined([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")])
    joint.lengths = (1, 0, 6)
    assert len(encode_frame(Kind.REPLY, 1, b"h", joint)) == 3, "no empty buffers"
    (frame,) = pour(
        FrameDecoder(DEFAULT_LIMITS, Anywhere()), frame_bytes(Kind.REPLY, 1, b"h", joint)
    )
    assert frame.lengths == (1, 0, 6)
    assert body_of(frame) == [b"a", b"", b"bcdefg"]


@pytest.mark.parametrize(
    ("header", "segments", "message"),
    [
        (51, [], "header of 51 bytes, at most 50 are allowed"),
        (51, [1], "header of 51 bytes, at most 50 are allowed"),
        (0, [1] * 5, "5 segments, at most 4 are allowed"),
        (0, [101], "segment of 101 bytes, at most 100 are allowed"),
        (0, [100, 51], "body of 151 bytes, at most 150 are allowed"),
    ],
)
def test_what_the_peer_would_refuse_is_not_sent(
    header: int, segments: list[int], message: str
) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode_frame(Kind.REQUEST, 1, bytes(header), [bytes(size) for size in segments], SMALL)
    assert caught.value.message == message
    assert re.search(r"PSYNC_LIMIT_[A-Z_]+ sets the limit, on all tasks", str(caught.value))
    if "segment of" in message:
        split = "split the variable into more shards, see variable_partitioner; or "
        assert caught.value.hint == f"{split}PSYNC_LIMIT_SEGMENT_BYTES sets the limit, on all tasks"


# --- pieces ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from(list(Kind)),
            st.integers(0, 2**64 - 1),
            st.binary(max_size=40),
            st.lists(st.binary(max_size=40), max_size=4),
        ),
        max_size=5,
    ),
    sizes=st.lists(st.integers(1, 60), max_size=30),
)
def test_any_frames_come_back_in_any_pieces(
    frames: list[tuple[Kind, int, bytes, list[bytes]]], sizes: list[int]
) -> None:
    data = b"".join(frame_bytes(*frame) for frame in frames)
    decoder = FrameDecoder(DEFAULT_LIMITS, Anywhere())
    got = [
        (frame.kind, frame.request_id, frame.header, body_of(frame))
        for frame in pour(decoder, data, sizes)
    ]
    assert got == frames


def test_frames_that_fill_the_scratch_buffer_wrap_around() -> None:
    header = bytes(range(256)) * 100
    data = frame_bytes(Kind.REQUEST, 1, header) * 20
    assert len(data) > 3 * SCRATCH_BYTES
    for sizes in ([], [1000] * 1000, [PREFIX_BYTES + len(header) - 1] * 100, [SCRATCH_BYTES - 9]):
        frames = pour(FrameDecoder(DEFAULT_LIMITS, Anywhere()), data, sizes)
        assert [frame.header for frame in frames] == [header] * 20


def test_a_prefix_cut_by_the_end_of_the_scratch_buffer_is_put_together() -> None:
    filling = frame_bytes(Kind.NOTIFY, 0, bytes(SCRATCH_BYTES - PREFIX_BYTES - 10))
    data = filling + frame_bytes(Kind.PING, 3, b"")
    frames = pour(FrameDecoder(DEFAULT_LIMITS, Anywhere()), data)
    assert [frame.kind for frame in frames] == [Kind.NOTIFY, Kind.PING]


def test_a_header_larger_than_the_scratch_buffer_gets_a_larger_one() -> None:
    header = bytes(range(256)) * 4096
    decoder = FrameDecoder(DEFAULT_LIMITS, Anywhere())
    ping = frame_bytes(Kind.PING, 0, b"")
    frames = pour(decoder, ping + frame_bytes(Kind.REQUEST, 1, header, [b"x"]) + ping)
    assert [frame.header for frame in frames] == [b"", header, b""]
    assert body_of(frames[1]) == [b"x"]


def test_small_frames_are_read_to_the_front_of_the_scratch_buffer() -> None:
    decoder = FrameDecoder(DEFAULT_LIMITS, Anywhere())
    for _ in range(3):
        assert len(decoder.room) == SCRATCH_BYTES
        pour(decoder, frame_bytes(Kind.PING, 0, b""))


# --- where bodies go -------------------------------------------------------------------------


class Into:
    """A sink that names fixed memory."""

    def __init__(self, *targets: memoryview) -> None:
        self.targets = targets

    def __call__(self, frame: Frame) -> Sequence[memoryview]:
        return self.targets


def test_a_body_is_read_straight_into_its_destination() -> None:
    destination = np.zeros(300_000, np.uint8)
    decoder = FrameDecoder(DEFAULT_LIMITS, Into(destination.data))
    body = np.random.default_rng(1).integers(0, 256, destination.size, np.uint8)
    data = frame_bytes(Kind.REPLY, 1, b"h", [body.data])
    head = len(data) - len(body)
    assert pour(decoder, data[: head + 10]) == []
    room = decoder.room
    assert len(room) == len(body) - 10, "all that is missing, and nothing else"
    assert np.shares_memory(np.frombuffer(room, np.uint8), destination)
    frame = pour(decoder, data[head + 10 :])
    assert len(frame) == 1
    np.testing.assert_array_equal(destination, body)


@pytest.mark.parametrize(
    "borders", [[0, 10], [0, 3, 10], [0, 0, 4, 4, 4, 9, 10, 10], list(range(11))]
)
def test_targets_may_have_other_borders_than_the_segments(borders: list[int]) -> None:
    data = frame_bytes(Kind.REPLY, 1, b"h", [b"01234", b"", b"56", b"789"])
    for sizes in splits(data):
        memory = bytearray(10)
        whole = memoryview(memory)
        targets = [whole[a:b] for a, b in itertools.pairwise(borders)]
        (frame,) = pour(FrameDecoder(DEFAULT_LIMITS, Into(*targets)), data, sizes)
        assert memory == b"0123456789"
        assert not frame.segments, "they are the sink's to fill"


@pytest.mark.parametrize("targets", [[], [b""], [b"", b""]])
def test_an_empty_body_may_go_nowhere(targets: list[bytes]) -> None:
    sink = Into(*(memoryview(bytearray(target)) for target in targets))
    data = frame_bytes(Kind.REQUEST, 1, b"", [b"", b""]) + frame_bytes(Kind.PING, 0, b"")
    assert len(pour(FrameDecoder(DEFAULT_LIMITS, sink), data)) == 2


@pytest.mark.parametrize("body", [0, 1, 10, 300_000])
def test_a_body_that_nobody_wants_is_thrown_away(body: int) -> None:
    data = frame_bytes(Kind.REPLY, 1, b"h", [bytes(body)]) + frame_bytes(Kind.PING, 0, b"")
    for sizes in ([], [1] * min(len(data), 200), [41, 5, 1000]):
        frames = pour(FrameDecoder(DEFAULT_LIMITS, lambda frame: None), data, sizes)
        assert [frame.kind for frame in frames] == [Kind.REPLY, Kind.PING]


def test_a_receiver_that_gives_up_midway_is_not_written_to_any_more() -> None:
    token = object()
    memory = bytearray(20)

    def sink(frame: Frame) -> Sequence[memoryview]:
        frame.token = token
        view = memoryview(memory)
        return [view[:4], view[4:4], view[4:]]

    data = frame_bytes(Kind.REPLY, 1, b"h", [b"A" * 20]) + frame_bytes(Kind.PING, 0, b"")
    head = PREFIX_BYTES + 8 + 1
    for arrived in range(20):
        memory[:] = bytes(20)
        decoder = FrameDecoder(DEFAULT_LIMITS, sink)
        decoder.redirect(token)  # nothing is coming in: no effect
        assert pour(decoder, data[: head + arrived]) == []
        decoder.redirect(object())  # of another call: no effect
        decoder.redirect(token)
        decoder.redirect(token)
        assert decoder.receiving
        frames = pour(decoder, data[head + arrived :])
        assert [frame.kind for frame in frames] == [Kind.REPLY, Kind.PING]
        assert memory == b"A" * arrived + bytes(20 - arrived)


# --- faults and limits -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            RemoteProtocolError,
            "expected a psync frame, which starts with b'PSYN', got b'GET '",
        ),
        (
            bytes.fromhex("1603010200010001fc0303") + bytes(32),
            RemoteProtocolError,
            "the peer uses TLS, but this task does not",
        ),
        (
            prefix(version=1),
            VersionMismatch,
            "the peer speaks version 1 of the wire protocol, this task speaks 2",
        ),
        (prefix(kind=0), RemoteProtocolError, "unknown frame of kind 0 with flags 0x0000"),
        (prefix(kind=25), RemoteProtocolError, "unknown frame of kind 25 with flags 0x0000"),
        (prefix(flags=1), RemoteProtocolError, "unknown frame of kind 16 with flags 0x0001"),
        (prefix(header=51), FrameTooLarge, "header of 51 bytes, at most 50 are allowed"),
        (prefix(count=5), FrameTooLarge, "5 segments, at most 4 are allowed"),
        (
            prefix(count=2**32 - 1, body=2**64 - 1),
            FrameTooLarge,
            "4294967295 segments, at most 4 are allowed",
        ),
        (
            prefix(count=1, body=2**64 - 1) + struct.pack("<Q", 2**64 - 1),
            FrameTooLarge,
            "body of 18446744073709551615 bytes, at most 150 are allowed",
        ),
        (
            prefix(count=2, body=102) + struct.pack("<2Q", 101, 1),
            FrameTooLarge,
            "segment of 101 bytes, at most 100 are allowed",
        ),
        (
            prefix(count=2, body=3) + struct.pack("<2Q", 1, 1),
            RemoteProtocolError,
            "segments add up to 2 bytes, the prefix says 3",
        ),
        (
            prefix(body=3) + b"abc",
            RemoteProtocolError,
            "segments add up to 0 bytes, the prefix says 3",
        ),
    ],
)
def test_what_is_no_frame_is_refused_before_memory_is_taken(
    data: bytes, error: type[ProtocolError], message: str
) -> None:
    for sizes in ([], [1] * len(data)):
        decoder = FrameDecoder(SMALL, refuse)
        with pytest.raises(error) as caught:
            pour(decoder, data, sizes)
        assert type(caught.value) is error
        assert caught.value.message == message


def test_the_faults_of_strangers_come_with_a_hint() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        pour(FrameDecoder(DEFAULT_LIMITS, refuse), bytes(32))
    assert caught.value.hint == "something that is not psync is talking to this port"
    with pytest.raises(VersionMismatch) as mismatch:
        pour(FrameDecoder(DEFAULT_LIMITS, refuse), prefix(version=9))
    assert mismatch.value.hint == "install the same version of psync for all tasks"


@pytest.mark.parametrize("header", [4096, 4097])
def test_before_the_handshake_a_header_may_have_4_kib(header: int) -> None:
    decoder = FrameDecoder(HANDSHAKE_LIMITS, refuse)
    data = frame_bytes(Kind.HELLO, 0, bytes(header))
    if header == 4096:
        assert len(pour(decoder, data)) == 1
        return
    with pytest.raises(FrameTooLarge, match="header of 4097 bytes, at most 4096 are allowed"):
        pour(decoder, data)


def test_before_the_handshake_nobody_sends_a_body() -> None:
    for data in (prefix(count=1), prefix(count=1, body=1), prefix(body=1)):
        with pytest.raises(FrameTooLarge):
            pour(FrameDecoder(HANDSHAKE_LIMITS, refuse), data)


def test_what_is_at_its_limits_passes() -> None:
    segments: list[Segment] = [bytes(100), bytes(50), b"", b""]
    data = frame_bytes(Kind.REQUEST, 1, bytes(50), segments, SMALL)
    (frame,) = pour(FrameDecoder(SMALL, Anywhere()), data)
    assert frame.lengths == (100, 50, 0, 0)


def test_frames_before_a_fault_are_handed_out() -> None:
    decoder = FrameDecoder(DEFAULT_LIMITS, Anywhere())
    data = frame_bytes(Kind.PING, 0, b"") + bytes(32)
    decoder.room[: len(data)] = data
    frame = decoder.received(len(data))
    assert frame is not None
    with pytest.raises(RemoteProtocolError):
        decoder.next_frame()


def test_a_stream_that_ends_inside_a_frame_is_known_to() -> None:
    data = frame_bytes(Kind.REPLY, 1, b"header", [b"abc", b"de"])
    for sink in (Anywhere(), lambda frame: None):
        for end in range(len(data) + 1):
            decoder = FrameDecoder(DEFAULT_LIMITS, sink)
            frames = pour(decoder, data[:end])
            assert decoder.receiving is (0 < end < len(data))
            assert len(frames) == (end == len(data))


@pytest.mark.promise("input.no-memory-for-claims")
def test_what_is_only_declared_costs_no_memory() -> None:
    largest = prefix(header=1 << 20, count=65_536, body=4 << 30)
    decoder = FrameDecoder(DEFAULT_LIMITS, refuse)
    tracemalloc.start()
    try:
        pour(decoder, largest)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20  # room for all of the header
    finally:
        tracemalloc.stop()


# --- bodies that are lent --------------------------------------------------------------------

REGIONS: dict[int, bytes | bytearray] = {1: bytes(range(100)), 9: b"x" * 50}


def lent_bytes(
    extents: Sequence[tuple[int, int, int]],
    lengths: Sequence[int] | None = None,
    kind: Kind = Kind.REQUEST,
) -> bytes:
    lengths = [sum(each[2] for each in extents)] if lengths is None else lengths
    return encode_head(kind, 7, b"hd", lengths, [Extent(*each) for each in extents])


def borrowing(sink: object = None, limits: Limits = DEFAULT_LIMITS) -> tuple[FrameDecoder, Lender]:
    decoder = FrameDecoder(limits, Anywhere() if sink is None else sink)  # type: ignore[arg-type]
    decoder.borrow = lender = Lender(REGIONS)
    return decoder, lender


def test_golden_bytes_of_a_frame_whose_body_is_lent() -> None:
    assert lent_bytes([(1, 2, 3), (4, 5, 6)], [8, 1]).hex(" ", -8) == (
        "5053594e02100200 0700000000000000 0200000002000000 0900000000000000 "
        "0800000000000000 0100000000000000 "
        "0100000000000000 0200000000000000 0300000000000000 "
        "0400000000000000 0500000000000000 0600000000000000 6864"
    )


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=6),
    st.lists(st.integers(0, 300), max_size=4),
    st.integers(1, 64),
    st.lists(st.integers(1, 60), max_size=20),
)
def test_any_extents_come_as_their_bytes(
    places: list[tuple[int, int]], points: list[int], at_once: int, pieces: list[int]
) -> None:
    extents = [(1, offset, nbytes) for offset, nbytes in places]
    body = b"".join(bytes(range(offset, offset + nbytes)) for offset, nbytes in places)
    edges = [0, *sorted(min(point, len(body)) for point in points), len(body)]
    lengths = [stop - start for start, stop in itertools.pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COPY_BYTES", at_once)
        decoder, lender = borrowing()
        (frame,) = pour(decoder, lent_bytes(extents, lengths), pieces)
    assert b"".join(body_of(frame)) == body
    assert frame.lengths == tuple(lengths)
    assert lender.lent[0].num_returns == 1


def test_a_lent_body_may_be_kept_where_it_is() -> None:
    def keep(frame: Frame) -> Sequence[memoryview]:
        assert frame.borrowed is not None
        frame.segments = frame.borrowed.keep()
        return frame.segments

    decoder, lender = borrowing(keep)
    (frame,) = pour(decoder, lent_bytes([(1, 2, 3)]))
    assert frame.segments[0].obj is REGIONS[1]
    assert lender.lent[0].num_returns == 0
    assert not decoder.receiving


def test_a_lent_body_that_nobody_wants_is_given_back() -> None:
    decoder, lender = borrowing(lambda frame: None)
    (frame,) = pour(decoder, lent_bytes([(1, 2, 3)]))
    assert not frame.segments
    assert lender.lent[0].num_returns == 1


def test_a_large_one_is_copied_piece_by_piece_and_nothing_is_looked_at_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COPY_BYTES", 40)
    decoder, lender = borrowing()
    data = lent_bytes([(1, 0, 100)]) + frame_bytes(Kind.PING, 0, b"")
    decoder.room[: len(data)] = data
    assert decoder.received(len(data)) is None
    assert decoder.copying is not None
    assert decoder.receiving
    assert decoder.next_frame() is None
    assert decoder.received(0) is None
    assert decoder.copying is not None
    frame = decoder.received(0)
    assert frame is not None
    assert body_of(frame) == [REGIONS[1]]
    assert not decoder.copying is not None
    assert lender.lent[0].num_returns == 1
    ping = decoder.next_frame()
    assert ping is not None
    assert ping.kind == Kind.PING


def test_a_receiver_that_gives_up_a_lent_body_is_not_written_to_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COPY_BYTES", 40)
    memory, token = bytearray(100), object()

    def sink(frame: Frame) -> Sequence[memoryview]:
        frame.token = token
        return [memoryview(memory)]

    decoder, lender = borrowing(sink)
    assert pour_head(decoder, lent_bytes([(1, 0, 100)])) is None
    decoder.redirect(object())
    decoder.redirect(token)
    frame = decoder.received(0)
    assert frame is not None
    assert frame.token is token
    assert memory == bytes(range(40)) + bytes(60)
    assert lender.lent[0].num_returns == 1


def pour_head(decoder: FrameDecoder, data: bytes) -> Frame | None:
    decoder.room[: len(data)] = data
    return decoder.received(len(data))


def test_as_many_extents_as_there_can_be_arrive() -> None:
    extents = [(1, number % 99, 1) for number in range(MAX_EXTENTS)]
    decoder, _ = borrowing()
    (frame,) = pour(decoder, lent_bytes(extents))
    assert frame.nbytes == MAX_EXTENTS
    assert bytes(frame.segments[0][:3]) == b"\x00\x01\x02"


@pytest.mark.parametrize(
    ("extents", "lengths", "told"),
    [
        ([(1, 0, 10)], [11], "extents add up to other than 11 bytes"),
        ([(1, 0, 10)], [9], "extents add up to other than 9 bytes"),
        ([(1, 0, 10), (1, 0, 2**64 - 1)], [9], "extents add up to other than 9 bytes"),
        ([(1, 0, 2**64 - 1)], None, "body of 18446744073709551615 bytes"),
        ([(2, 0, 10)], None, "no such memory"),
        ([(1, 91, 10)], None, "no such memory"),
        ([(1, 2**64 - 1, 10)], None, "no such memory"),
        ([(1, 0, 10), (1, 2**64 - 1, 1)], None, "no such memory"),
    ],
)
def test_extents_that_lie_nowhere_are_refused(
    extents: list[tuple[int, int, int]], lengths: list[int] | None, told: str
) -> None:
    lengths = [sum(each[2] for each in extents)] if lengths is None else lengths
    head = prefix(flags=len(extents), count=1, body=lengths[0])
    data = head + struct.pack("<Q", *lengths) + b"".join(EXTENT.pack(*each) for each in extents)
    decoder, _ = borrowing()
    with pytest.raises(RemoteProtocolError, match=told):
        pour_head(decoder, data)


def test_limits_hold_for_what_is_lent() -> None:
    decoder, lender = borrowing(limits=SMALL)
    with pytest.raises(FrameTooLarge, match="segment of 101 bytes, at most 100"):
        pour_head(decoder, lent_bytes([(1, 0, 51), (9, 0, 50)]))
    assert not lender.lent


def test_who_shares_no_memory_gets_no_extents() -> None:
    with pytest.raises(RemoteProtocolError, match="of kind 16 with flags 0x0001"):
        pour(FrameDecoder(DEFAULT_LIMITS, Anywhere()), lent_bytes([(1, 0, 1)]))


def test_extents_without_a_body_are_refused() -> None:
    decoder, lender = borrowing(refuse)
    with pytest.raises(RemoteProtocolError, match="unknown frame of kind 16 with flags 0x0002"):
        pour(decoder, prefix(flags=2) + bytes(48))
    assert not lender.lent
