"""Faults of one connection, and what each side gets to know of them."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np
import pytest

from psync.testing import BufferChanged, MemoryNetwork, run_virtual
from psync.testing.link import Segment, check_buffer
from recorder import Recorder, end, pair
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


def test_the_report_names_the_lines_that_wrote() -> None:
    def inner() -> Segment:
        return Segment(bytearray(1), start=0, due=0.0, check=True)

    def outer() -> Segment:
        return inner()

    first, second, *_ = outer().writer.split(", called from ")
    line = inner.__code__.co_firstlineno + 1
    assert first == f"{__file__}:{line}"
    assert second == f"{__file__}:{line + 3}"


class Failing(Recorder):
    """Fails in one method."""

    def __init__(self, method: str, result: object = None) -> None:
        super().__init__()
        self._result = result
        setattr(self, method, self.fail)

    def fail(self, *args: object) -> object:
        if self._result is None:
            raise ZeroDivisionError("a bug in the protocol")
        return self._result


@pytest.mark.parametrize("method", ["get_buffer", "buffer_updated", "eof_received"])
def test_an_error_of_the_protocol_ends_the_connection(turns: Turns, method: str) -> None:
    client, server, _ = linked(server=lambda: Failing(method))
    client.transport.write(b"x")
    client.transport.close()
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert isinstance(server.lost, ZeroDivisionError)
    assert [report["message"] for report in turns.reports] == [f"protocol.{method}() failed"]
    assert turns.reports[0]["transport"] is server.transport
    assert turns.reports[0]["protocol"] is server


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytearray(), r"get_buffer\(\) returned an empty buffer"),
        (b"read-only", r"get_buffer\(\) returned a read-only buffer"),
    ],
)
def test_memory_that_cannot_be_read_into_ends_the_connection(
    turns: Turns, buffer: object, message: str
) -> None:
    client, server, _ = linked(server=lambda: Failing("get_buffer", buffer))
    client.transport.write(b"x")
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert server.lost is not None
    with pytest.raises((RuntimeError, TypeError), match=message):
        raise server.lost
    assert len(turns.reports) == 1


@pytest.mark.parametrize("method", ["pause_writing", "resume_writing"])
def test_an_error_of_flow_control_is_reported_and_no_more(turns: Turns, method: str) -> None:
    client, server, _ = linked(lambda: Failing(method))
    client.transport.write(bytes(100_000))
    turns.settle()
    assert len(server.received) == 100_000
    assert [report["message"] for report in turns.reports] == [f"protocol.{method}() failed"]


@pytest.mark.parametrize("num_bytes", [1, 999, 1000])
def test_cut_after_delivers_exactly_so_many_bytes(turns: Turns, num_bytes: int) -> None:
    client, server, link = linked()
    data = random.Random(1).randbytes(1000)
    link.to_server.cut_after(num_bytes)
    client.transport.write(data)
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert server.received == data[:num_bytes]
    assert isinstance(client.lost, ConnectionResetError)


def test_a_stalled_direction_builds_up_back_pressure(turns: Turns) -> None:
    client, server, link = linked(kernel_bytes=1000)
    link.to_server.stall()
    client.transport.write(bytes(600))
    client.transport.write(bytes(600))
    turns.settle()
    assert client.transport.get_write_buffer_size() == 600  # the kernel has the other 600
    client.transport.write(bytes(65_000))
    assert client.events == ["made", "pause"]
    server.transport.write(b"the other direction flows")
    turns.settle()
    assert len(client.received) == 25
    assert server.received == b""
    link.to_server.flow()
    turns.settle()
    assert len(server.received) == 66_200
    assert client.events == ["made", "pause", "data", "resume"]


def test_a_partition_is_silent_and_heals_without_loss(turns: Turns) -> None:
    client, server, link = linked()
    link.partition()
    assert link.is_partitioned
    client.transport.write(b"ping")
    server.transport.write(b"pong")
    turns.settle()
    assert client.received == server.received == b""
    assert client.transport.get_write_buffer_size() == 0  # as far as the client knows it was sent
    link.heal()
    turns.settle()
    assert (client.received, server.received) == (b"pong", b"ping")
    assert client.events == server.events == ["made", "data"]


def test_behind_a_partition_nobody_learns_that_the_other_side_is_gone(turns: Turns) -> None:
    client, server, link = linked()
    link.partition()
    client.transport.abort()
    turns.settle()
    assert client.events[-1] == "lost"
    server.transport.write(b"are you there?")
    turns.settle()
    assert server.events == ["made"]
    assert link.is_live
    link.heal()
    turns.settle()
    assert server.events[-1] == "lost"
    assert not link.is_live


def test_an_abort_shows_as_an_end_or_as_a_reset(turns: Turns) -> None:
    def ending(seed: int) -> tuple[bool, bytes]:
        client, server, link = linked(seed=seed)
        link.to_server.stall()
        client.transport.write(b"in the kernel")
        turns.settle()
        client.transport.abort()
        link.to_server.flow()
        turns.settle()
        assert server.events[-1] == "lost"
        return server.lost is None, bytes(server.received)

    endings = {ending(seed) for seed in range(20)}
    assert endings == {(True, b"in the kernel"), (False, b"")}


def test_bytes_for_a_closed_socket_are_answered_with_a_reset(turns: Turns) -> None:
    client, server, link = linked()
    link.to_client.stall()
    server.transport.write(b"never read")
    client.transport.close()
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert isinstance(server.lost, ConnectionResetError)
    assert str(server.lost) == "[Errno 104] the peer has closed the connection"
    assert client.received == b""


@pytest.mark.parametrize("chunk", [(1, 1), (7, 7), (3, 50)])
def test_pieces_have_the_sizes_that_were_asked_for(turns: Turns, chunk: tuple[int, int]) -> None:
    client, server, _ = linked(chunk=chunk)
    client.transport.write(bytes(500))
    turns.settle()
    assert len(server.received) == 500
    *sizes, last = server.sizes
    assert min(sizes) >= chunk[0]
    assert max(sizes) <= chunk[1]
    assert last <= chunk[1]


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_each_side_gets_a_prefix_of_what_the_other_wrote(seed: int) -> None:
    draw = random.Random(seed)
    reports: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        network = MemoryNetwork(
            seed,
            latency=draw.choice([(0.0, 0.0), (0.0, 0.1)]),
            chunk=draw.choice([(1, 65_536), (1, 100)]),
            kernel_bytes=draw.choice([0, 1000, 65_536]),
        )
        half_open = lambda: Recorder(keep_open=draw.random() < 0.5)  # noqa: E731
        client, server, _ = await pair(network, server=half_open, client=half_open)
        (link,) = network.links()
        sides, directions = (client, server), (link.to_server, link.to_client)
        sent = {client: b"", server: b""}
        ended = False

        def write(side: Recorder) -> None:
            data = bytearray(draw.randbytes(draw.choice([1, 100, 30_000])))
            out = side.transport._out
            before = out.written_bytes
            with contextlib.suppress(RuntimeError):  # after write_eof()
                side.transport.write(data)
            if out.written_bytes > before:
                sent[side] += data

        harmless = [
            lambda: write(draw.choice(sides)),
            lambda: write(draw.choice(sides)),
            lambda: draw.choice(sides).transport.pause_reading(),
            lambda: draw.choice(sides).transport.resume_reading(),
            lambda: draw.choice(directions).stall(),
            lambda: draw.choice(directions).flow(),
            link.partition,
            link.heal,
        ]
        ending = [
            link.cut,
            lambda: draw.choice(sides).transport.close(),
            lambda: draw.choice(sides).transport.abort(),
            lambda: draw.choice(sides).transport.write_eof(),
            lambda: draw.choice(directions).cut_after(draw.randrange(2000)),
        ]
        for _ in range(draw.randrange(60)):
            draw.choice(harmless)()
            if draw.random() < 0.05:
                ended = True
                draw.choice(ending)()
            if draw.random() < 0.5:
                await asyncio.sleep(draw.choice([0.0, 0.05]))

        link.heal()
        for side, direction in zip(sides, directions, strict=True):
            side.transport.resume_reading()
            direction.flow()
        await asyncio.sleep(10.0)
        network.check()
        for side, other in ((client, server), (server, client)):
            assert sent[other].startswith(side.received)
            assert ended or sent[other] == side.received
            assert side.events.count("lost") == side.transport.is_lost
            assert "lost" not in side.events[:-1]
            flow = [event for event in side.events if event in ("pause", "resume")]
            assert flow[::2] == ["pause"] * len(flow[::2])
            assert flow[1::2] == ["resume"] * len(flow[1::2])
            if not (client.transport.is_closing() and server.transport.is_closing()):
                assert side.transport.get_write_buffer_size() == 0  # see test_network.py
        await end(client, server)
        await asyncio.sleep(1.0)
        assert network.links() == []

    run_virtual(main, seed=seed)
    assert reports == []
