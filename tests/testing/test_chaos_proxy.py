"""The proxy that tests put between tasks: it does what it says, at the byte it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from memory_cluster import until
from psync.testing.chaos_proxy import ChaosProxy, Link


@dataclass
class Sink:
    """A server that keeps what comes, and how it ended; it can be made to answer."""

    got: bytearray = field(default_factory=bytearray)
    ended: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    answer: bytes = b""
    address: str = ""  # once it is behind a proxy

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.answer)
        how = "eof"
        try:
            while data := await reader.read(1 << 16):
                self.got += data
        except ConnectionResetError:
            how = "reset"
        if not self.ended.done():
            self.ended.set_result(how)
        writer.close()


@contextlib.asynccontextmanager
async def behind(sink: Sink, seed: int = 0) -> AsyncIterator[ChaosProxy]:
    server = await asyncio.start_server(sink.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        sink.address = f"127.0.0.1:{port}"
        async with ChaosProxy(sink.address, seed) as proxy:
            yield proxy
    finally:
        server.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(proxy: ChaosProxy) -> Streams:
    host, port = proxy.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def the_link(proxy: ChaosProxy) -> Link:
    await until(lambda: proxy.links)
    return proxy.links[0]


async def test_all_bytes_come_through_both_ways_and_so_does_the_end() -> None:
    sink = Sink(answer=b"down" * 50_000)
    async with behind(sink) as proxy:
        proxy.jitter_s = 0.002
        reader, writer = await connect(proxy)
        writer.write(b"up" * 100_000)
        writer.write_eof()
        assert await reader.readexactly(200_000) == sink.answer
        assert await sink.ended == "eof"
        assert bytes(sink.got) == b"up" * 100_000
        writer.close()


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, 4096, 70_001])
async def test_a_connection_is_reset_after_the_byte_that_was_said(nbytes: int) -> None:
    sink = Sink()
    async with behind(sink) as proxy:
        _, writer = await connect(proxy)
        link = await the_link(proxy)
        link.cut_after(nbytes)
        with contextlib.suppress(ConnectionError):  # it is cut while we write
            writer.write(bytes(100_000))
            await writer.drain()
        if nbytes:
            assert await sink.ended in ("reset", "eof")
        assert len(sink.got) == nbytes
        assert link.is_cut
        writer.close()


async def test_a_stalled_direction_fills_up_and_goes_on_with_nothing_lost() -> None:
    sink = Sink(answer=b"still here")
    async with behind(sink) as proxy:
        reader, writer = await connect(proxy)
        link = await the_link(proxy)
        assert await reader.readexactly(10)
        link.stall("up")
        writer.transport.set_write_buffer_limits(high=1 << 16)
        writer.write(bytes(8 << 20))  # more than all kernels on the way hold
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await writer.drain()
        assert len(sink.got) <= 1 << 16
        link.go_on()
        writer.write_eof()
        assert await sink.ended == "eof"
        assert len(sink.got) == 8 << 20
        writer.close()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_black_hole_tells_nobody_and_then_heals_or_resets(reset: bool) -> None:
    sink = Sink()
    async with behind(sink) as proxy:
        reader, writer = await connect(proxy)
        await the_link(proxy)
        proxy.black_hole()
        writer.write(b"nobody hears")
        await writer.drain()  # we are told nothing
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read()
        assert not sink.got
        proxy.heal(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            writer.write_eof()
            assert await sink.ended == "eof"
            assert bytes(sink.got) == b"nobody hears"
        writer.close()


async def test_who_cannot_be_reached_looks_like_a_reset() -> None:
    sink = Sink()
    async with behind(sink) as proxy:
        pass
    async with ChaosProxy(sink.address) as proxy:
        reader, writer = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_torment_comes_to_an_end_with_everything_healed() -> None:
    sink = Sink()
    async with behind(sink, seed=5) as proxy:
        tormenting = asyncio.create_task(proxy.torment(0.001))
        while not (proxy.cuts and proxy.stalls and proxy.holes):
            reader, writer = await connect(proxy)
            with contextlib.suppress(ConnectionError, TimeoutError):
                writer.write(bytes(50_000))
                async with asyncio.timeout(0.02):
                    await reader.read()
            await asyncio.sleep(0)
            writer.close()
        tormenting.cancel()
        await asyncio.gather(tormenting, return_exceptions=True)
        assert proxy.healed.is_set()
