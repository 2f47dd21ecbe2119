"""What the transport in memory does by itself; what it shares with sockets: test_network.py."""

from __future__ import annotations

import asyncio

import pytest

from psync.testing import MemoryNetwork, settle
from recorder import Recorder, end, pair


async def connected(**kwargs):
    client, server, _ = await pair(MemoryNetwork(), **kwargs)
    return client, server


async def catch_reports() -> list[dict[str, object]]:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    return reports


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
async def test_water_marks_follow_asyncio(given, expected) -> None:
    client, server = await connected()
    client.transport.set_write_buffer_limits(**given)
    assert client.transport.get_write_buffer_limits() == expected
    await end(client, server)


async def test_impossible_water_marks_are_refused() -> None:
    client, server = await connected()
    with pytest.raises(ValueError, match="expected high >= low >= 0, got high=1, low=2"):
        client.transport.set_write_buffer_limits(high=1, low=2)
    await end(client, server)


async def test_with_a_mark_of_zero_resuming_means_that_nothing_is_left() -> None:
    client, server = await connected()
    client.transport.set_write_buffer_limits(high=0)
    client.transport.write(b"x" * 10)
    assert client.events == ["made", "pause"]
    await client.until_event("resume")
    assert client.transport.get_write_buffer_size() == 0
    await end(client, server)


async def test_lowering_the_mark_below_what_is_buffered_pauses() -> None:
    client, server = await connected()
    client.transport.write(bytes(1000))
    client.transport.set_write_buffer_limits(high=999)
    assert client.events == ["made", "pause"]
    await end(client, server)


async def test_a_transport_that_is_lost_is_not_resumed() -> None:
    client, server = await connected()
    server.transport.pause_reading()
    client.transport.write(bytes(100_000))
    client.transport.abort()
    await end(client, server)
    await settle()
    assert client.events == ["made", "pause", "lost"]


async def test_nothing_is_sent_at_once() -> None:
    client, server = await connected()
    client.transport.write(b"late")
    assert client.transport.get_write_buffer_size() == 4
    assert server.received == b""
    await server.until_received(4)
    await end(client, server)


async def test_another_protocol_can_go_on() -> None:
    client, server = await connected()
    successor = Recorder()
    successor.record("took over")
    assert server.transport.get_protocol() is server
    server.transport.set_protocol(successor)
    assert server.transport.get_protocol() is successor
    client.transport.write(b"hello")
    await successor.until_received(5)
    with pytest.raises(TypeError, match="expected a BufferedProtocol, got a Protocol"):
        server.transport.set_protocol(asyncio.Protocol())
    client.transport.abort()
    await client.until_event("lost")
    await successor.until_event("lost")
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
async def test_an_error_of_the_protocol_ends_the_connection(method: str) -> None:
    reports = await catch_reports()
    client, server = await connected(server=lambda: Failing(method))
    client.transport.write(b"x")
    client.transport.close()
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    assert isinstance(server.lost, ZeroDivisionError)
    assert [report["message"] for report in reports] == [f"protocol.{method}() failed"]
    assert reports[0]["transport"] is server.transport
    assert reports[0]["protocol"] is server


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytearray(), r"get_buffer\(\) returned an empty buffer"),
        (b"read-only", r"get_buffer\(\) returned a read-only buffer"),
    ],
)
async def test_memory_that_cannot_be_read_into_ends_the_connection(buffer, message) -> None:
    reports = await catch_reports()
    client, server = await connected(server=lambda: Failing("get_buffer", buffer))
    client.transport.write(b"x")
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    with pytest.raises((RuntimeError, TypeError), match=message):
        raise server.lost
    assert len(reports) == 1


@pytest.mark.parametrize("method", ["pause_writing", "resume_writing"])
async def test_an_error_of_flow_control_is_reported_and_no_more(method: str) -> None:
    reports = await catch_reports()
    client, server = await connected(client=lambda: Failing(method))
    client.transport.write(bytes(100_000))
    await server.until_received(100_000)
    await settle()
    assert [report["message"] for report in reports] == [f"protocol.{method}() failed"]
    await end(client, server)


async def test_an_error_of_connection_made_is_reported_and_no_more() -> None:
    reports = await catch_reports()

    class Rash(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            raise ZeroDivisionError

    client, server = await connected(server=Rash)
    client.transport.write(b"hello")
    await server.until_received(5)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]
    await end(client, server)


async def test_a_protocol_may_resize_its_memory_when_it_is_told_of_bytes() -> None:
    class Growing(Recorder):
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.memory.extend(bytes(10))  # a BufferError if a view of it were left

    client, server = await connected(server=Growing)
    client.transport.write(bytes(100_000))
    await server.until_received(100_000)
    await end(client, server)


async def test_the_memory_may_be_a_view_of_larger_items() -> None:
    class Wide(Recorder):
        def get_buffer(self, sizehint: int) -> memoryview:
            return memoryview(self.memory).cast("d")

    client, server = await connected(server=Wide)
    client.transport.write(b"12345678")
    await server.until_received(8)
    assert server.received == b"12345678"
    await end(client, server)


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


async def test_a_closing_transport_reads_nothing_more() -> None:
    client, server = await connected()
    server.transport.pause_reading()
    client.transport.write(bytes(200_000))
    client.transport.close()
    assert client.transport.is_closing()
    assert not client.transport.is_reading()
    server.transport.write(b"too late")
    await settle()
    assert client.received == b""
    server.transport.resume_reading()
    await asyncio.gather(client.until_event("lost"), server.until_event("lost"))
    assert client.received == b""
