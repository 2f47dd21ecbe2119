"""Memory that is changed while it may be in flight is found out, on every loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from psync.testing import BufferChanged, MemoryNetwork
from psync.testing.link import Segment, check_buffer
from recorder import pair
from turns import Turns, linked


async def test_changing_a_buffer_after_writing_it_ends_the_connection() -> None:
    network = MemoryNetwork()
    client, server, _ = await pair(network)
    data = bytearray(200_000)
    client.transport.write(data)
    data[150_000] = 1
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    (problem,) = network.problems
    assert client.lost is server.lost is problem
    assert "asyncio" not in str(problem), "the report ends where the loop begins"
    assert str(problem).startswith(
        "200000 bytes, written at position 0 to_server of <link 0 from client to 127.0.0.1:20000>, "
        f"were changed before they were sent; written at {__file__}:"
    )
    with pytest.raises(BufferChanged, match="were changed before they were sent"):
        network.check()


def test_a_buffer_may_be_changed_once_the_write_buffer_is_empty(turns: Turns) -> None:
    client, server, link = linked()
    server.transport.pause_reading()
    data = bytearray(b"abc")
    client.transport.write(data)
    assert client.transport.get_write_buffer_size() == 3
    turns.settle()
    assert client.transport.get_write_buffer_size() == 0
    data[:] = b"xyz"
    server.transport.resume_reading()
    turns.settle()
    assert server.received == b"abc"
    assert not link.fabric.problems


def test_a_change_is_found_when_the_kernel_takes_the_buffer(turns: Turns) -> None:
    client, server, link = linked()
    server.transport.pause_reading()
    data = bytearray(b"abc")
    client.transport.write(data)
    data[0] = 0
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert len(link.fabric.problems) == 1
    assert server.received == b""


def test_a_buffer_may_be_changed_after_an_abort(turns: Turns) -> None:
    client, server, link = linked()
    data = bytearray(100_000)
    client.transport.write(data)
    client.transport.abort()
    data[:] = bytes(range(100)) * 1000
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert not link.fabric.problems


def test_a_change_that_is_taken_back_is_found_where_it_went_out() -> None:
    data = bytearray(b"abcdef")
    segment = Segment(data, start=0, due=0.0, check=True)
    assert segment.hand_over(2) == b"ab"
    data[2] = 0
    segment.hand_over(2)
    data[2] = ord("c")
    assert segment.is_intact()  # so far nobody can tell
    assert segment.hand_over(10) == b"ef"
    assert segment.left_bytes == 0
    assert not segment.is_intact()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("text", "expected bytes, bytearray or memoryview, got a str"),
        (np.zeros(2, np.uint8), "expected bytes, bytearray or memoryview, got a ndarray"),
        (
            memoryview(np.zeros(2, np.float32)),
            r"memoryview of bytes, got format 'f', shape \(2,\), strides \(4,\)",
        ),
        (
            memoryview(np.zeros((2, 3), np.uint8)),
            r"one-dimensional memoryview of bytes, got format 'B', shape \(2, 3\)",
        ),
        (memoryview(bytes(4))[::2], r"contiguous .* got format 'B', shape \(2,\), strides \(2,\)"),
    ],
)
def test_what_a_loop_would_refuse_or_send_wrongly_is_refused(data, message) -> None:
    with pytest.raises(TypeError, match=message):
        check_buffer(data)


def test_a_refused_buffer_leaves_nothing_half_written(turns: Turns) -> None:
    client, _, _ = linked()
    with pytest.raises(TypeError):
        client.transport.writelines([b"good", "bad"])  # type: ignore[list-item]
    assert client.transport.get_write_buffer_size() == 0


def test_the_report_names_the_lines_that_wrote() -> None:
    def inner() -> Segment:
        return Segment(bytearray(1), start=0, due=0.0, check=True)

    def outer() -> Segment:
        return inner()

    first, second, *_ = outer().writer.split(", called from ")
    line = inner.__code__.co_firstlineno + 1
    assert first == f"{__file__}:{line}"
    assert second == f"{__file__}:{line + 3}"
