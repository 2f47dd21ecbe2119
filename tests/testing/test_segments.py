"""Memory that is changed while it may be in flight is found out, on every loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from psync.testing import BufferChanged, MemoryNetwork, run_virtual, settle
from psync.testing.segments import Segment, check_buffer
from recorder import end, pair
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


def test_an_array_changed_in_place_is_found_out(turns: Turns) -> None:
    client, server, link = linked()
    parameter = np.ones(10_000, np.float32)
    client.transport.writelines([b"header", memoryview(parameter.view(np.uint8))])
    parameter -= 0.5
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert "40000 bytes, written at position 6 to_server" in str(link.fabric.problems[0])


def test_a_buffer_may_be_changed_once_it_is_delivered(turns: Turns) -> None:
    client, server, link = linked()
    data = bytearray(100_000)
    client.transport.write(data)
    turns.settle()
    assert len(server.received) == 100_000
    data[0] = 1
    turns.settle()
    assert not link.fabric.problems


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


def test_without_checks_the_torn_value_arrives(turns: Turns) -> None:
    client, server, link = linked(check_buffers=False)
    data = bytearray(b"old")
    client.transport.write(data)
    data[:] = b"new"
    turns.settle()
    assert server.received == b"new"
    assert not link.fabric.problems


def test_a_change_some_steps_later_is_found_with_some_seeds() -> None:
    async def is_found(seed: int) -> bool:
        network = MemoryNetwork(seed)
        client, server, _ = await pair(network)
        data = bytearray(10)
        client.transport.write(data)
        for _ in range(3):
            await asyncio.sleep(0)
        data[0] = 1
        await settle()
        await end(client, server)
        return bool(network.problems)

    found = [run_virtual(is_found, seed) for seed in range(40)]
    assert True in found
    assert False in found


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


def test_a_change_of_what_went_out_already_counts_too() -> None:
    # The writer cannot know that this part had gone.
    data = bytearray(b"abcdef")
    segment = Segment(data, start=0, due=0.0, check=True)
    segment.hand_over(2)
    data[0] = 0
    segment.hand_over(4)
    assert not segment.is_intact()


def test_what_was_taken_is_nobody_elses_memory() -> None:
    data = bytearray(b"abcdef")
    segment = Segment(data, start=100, due=0.0, check=True)
    segment.hand_over(2)
    segment.take()
    data[:] = b"------"
    assert (segment.start, segment.left_bytes) == (102, 4)
    assert segment.hand_over(4) == b"cdef"
    assert segment.is_intact()


def test_bytes_objects_need_no_checksum() -> None:
    assert Segment(b"abc", start=0, due=0.0, check=True).checksum is None


@pytest.mark.parametrize("data", [b"ab", bytearray(b"ab"), memoryview(b"ab"), memoryview(b"")])
def test_bytes_in_all_forms_can_be_written(data) -> None:
    check_buffer(data)


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
