"""A protocol that writes down what happens to it, for the tests of the network in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Recorder(asyncio.BufferedProtocol):
    """Says ``words``, and records every call; ``until`` waits for something to be true.

    ``events`` holds "made", "data" (once for bytes that come in succession), "eof", "pause",
    "resume" and "lost"; ``sizes`` the length of every piece.
    """

    def __init__(
        self,
        words: bytes = b"",
        *,
        echo: bool = False,
        keep_open: bool = False,
        room: int = 4096,
    ) -> None:
        self.words = words
        self.echo = echo
        self.keep_open = keep_open
        self.memory = bytearray(room)
        self.received = bytearray()
        self.sizes: list[int] = []
        self.events: list[str] = []
        self.lost: Exception | None = None
        self.transport: asyncio.Transport
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.record("made")
        if self.words:
            self.transport.write(self.words)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.memory

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self.memory[:nbytes])
        self.received += data
        self.sizes.append(nbytes)
        if self.events[-1] != "data":
            self.record("data")
        self._changed.set()
        if self.echo:
            self.transport.write(data)

    def eof_received(self) -> bool:
        self.record("eof")
        return self.keep_open

    def pause_writing(self) -> None:
        self.record("pause")

    def resume_writing(self) -> None:
        self.record("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc
        self.record("lost")

    def record(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, condition: Callable[[Recorder], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_received(self, num_bytes: int) -> None:
        await self.until(lambda self: len(self.received) >= num_bytes)

    async def until_event(self, event: str) -> None:
        await self.until(lambda self: event in self.events)


class Accepting:
    """A listener and the recorders of the connections that it has accepted."""

    def __init__(self, server: Callable[[], Recorder] = Recorder) -> None:
        self.servers: list[Recorder] = []
        self._server = server
        self._accepted: asyncio.Queue[Recorder] = asyncio.Queue()
        self.listener: Any = None

    def __call__(self) -> Recorder:
        server = self._server()
        self.servers.append(server)
        self._accepted.put_nowait(server)
        return server

    async def listen(self, network, address="127.0.0.1:0") -> Accepting:
        self.listener = await network.listen(address, self)
        return self

    async def wait_lost(self) -> None:
        for server in self.servers:
            await server.until_event("lost")

    async def connect(self, network, client: Callable[[], Recorder] = Recorder):
        """Return the recorders of both sides, the client's first."""
        _, protocol = await network.connect(self.listener.address, client)
        async with asyncio.timeout(10):
            server = await self._accepted.get()
        await server.until_event("made")
        return protocol, server


async def pair(network, address="127.0.0.1:0", server=Recorder, client=Recorder):
    """Connect two recorders; return the client's and the server's, and the listener."""
    accepting = await Accepting(server).listen(network, address)
    return *await accepting.connect(network, client), accepting.listener


async def end(*recorders: Recorder) -> None:
    """Abort what is still open and wait until all have seen it."""
    for recorder in recorders:
        recorder.transport.abort()
    for recorder in recorders:
        await recorder.until_event("lost")
