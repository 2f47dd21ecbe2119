"""What the transport in memory does by itself; what it shares with sockets: test_network.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from psync.testing import MemoryNetwork
from recorder import Recorder, end, pair
from turns import Turns, linked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (16 << 10, 64 << 10)),
        ({"high": 100}, (25, 100)),
        ({"low": 100}, (100, 400)),
        ({"high": 0}, (0, 0)),
        ({"high": 9, "low": 3}, (3, 9)),
    ],
)
def test_water_marks_follow_asyncio(turns: Turns, given: Any, expected: Any) -> None:
    client, _, _ = linked()
    client.transport.set_write_buffer_limits(**given)
    assert client.transport.get_write_buffer_limits() == expected


def test_impossible_water_marks_are_refused(turns: Turns) -> None:
    client, _, _ = linked()
    with pytest.raises(ValueError, match="expected high >= low >= 0, got high=1, low=2"):
        client.transport.set_write_buffer_limits(high=1, low=2)


def test_with_a_mark_of_zero_resuming_means_that_nothing_is_left(turns: Turns) -> None:
    client, _, _ = linked()
    client.transport.set_write_buffer_limits(high=0)
    client.transport.write(b"x" * 10)
    assert client.events == ["made", "pause"]
    turns.settle()
    assert client.events == ["made", "pause", "resume"]
    assert client.transport.get_write_buffer_size() == 0


def test_lowering_the_mark_below_what_is_buffered_pauses(turns: Turns) -> None:
    client, _, _ = linked()
    client.transport.write(bytes(1000))
    client.transport.set_write_buffer_limits(high=999)
    assert client.events == ["made", "pause"]


def test_a_transport_that_is_lost_is_not_resumed(turns: Turns) -> None:
    client, server, _ = linked()
    server.transport.pause_reading()
    client.transport.write(bytes(100_000))
    client.transport.abort()
    server.transport.abort()
    turns.settle()
    assert client.events == ["made", "pause", "lost"]


def test_nothing_is_sent_at_once(turns: Turns) -> None:
    client, server, _ = linked()
    client.transport.write(b"late")
    assert client.transport.get_write_buffer_size() == 4
    assert server.received == b""
    turns.settle()
    assert server.received == b"late"


def test_another_protocol_can_go_on(turns: Turns) -> None:
    client, server, _ = linked()
    successor = Recorder()
    successor.record("took over")
    assert server.transport.get_protocol() is server
    server.transport.set_protocol(successor)
    assert server.transport.get_protocol() is successor
    client.transport.write(b"hello")
    turns.settle()
    assert successor.received == b"hello"
    with pytest.raises(TypeError, match="expected a BufferedProtocol, got a Protocol"):
        server.transport.set_protocol(asyncio.Protocol())
    client.transport.abort()
    turns.settle()
    assert client.events[-1] == successor.events[-1] == "lost"
    assert server.events == ["made"]


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


async def test_an_error_of_connection_made_is_reported_and_no_more() -> None:
    """By the loop, which has called it."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))

    class Rash(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            raise ZeroDivisionError

    client, server, _ = await pair(MemoryNetwork(), server=Rash)
    client.transport.write(b"hello")
    await server.until_received(5)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]
    await end(client, server)


def test_a_protocol_may_resize_its_memory_when_it_is_told_of_bytes(turns: Turns) -> None:
    class Growing(Recorder):
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.memory.extend(bytes(10))  # a BufferError if a view of it were left

    client, server, _ = linked(server=Growing)
    client.transport.write(bytes(100_000))
    turns.settle()
    assert len(server.received) == 100_000


def test_the_memory_may_be_a_view_of_larger_items(turns: Turns) -> None:
    class Wide(Recorder):
        def get_buffer(self, sizehint: int) -> Any:
            return memoryview(self.memory).cast("d")

    client, server, _ = linked(server=Wide)
    client.transport.write(b"12345678")
    turns.settle()
    assert server.received == b"12345678"


async def test_a_transport_that_has_not_started_has_no_protocol_to_tell() -> None:
    def look_soon() -> Recorder:  # after the link was made, before its sides are started
        asyncio.get_running_loop().call_soon(look)
        return Recorder()

    def look() -> None:
        (link,) = network.links()
        with pytest.raises(RuntimeError, match=r"<server of <link 0 .*>> has no protocol yet"):
            link.server.get_protocol()
        link.cut()

    network = MemoryNetwork()
    await network.listen("a", Recorder)
    with pytest.raises(ConnectionResetError):
        await network.connect("a", look_soon)
    assert network.links() == []


def test_a_closing_transport_reads_nothing_more(turns: Turns) -> None:
    client, server, _ = linked()
    server.transport.pause_reading()
    client.transport.write(bytes(200_000))
    client.transport.close()
    assert client.transport.is_closing()
    assert not client.transport.is_reading()
    server.transport.write(b"too late")
    turns.settle()
    assert client.received == b""
    server.transport.resume_reading()
    turns.settle()
    assert client.events[-1] == server.events[-1] == "lost"
    assert client.received == b""
