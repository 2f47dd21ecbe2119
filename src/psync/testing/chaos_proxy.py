"""A TCP proxy between two tasks that delays, stalls, swallows and cuts, on command or from a seed.

It knows nothing of what it carries: a cut may fall after any byte. Directions are "up", from who
connects to who listens, and "down".

    delay, jitter   every piece is passed on so much later, in order
    cut_after       the connection is reset when so many bytes of a direction have gone through
    stall           nothing of a direction is read any more: the sender's buffers fill up
    black_hole      nothing goes through and nobody is told, until it heals: then everything comes,
                    late, or the connections are reset
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Sequence
from typing import Literal, Self

from psync.cluster import split_address

Direction = Literal["up", "down"]

PIECE_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, and no time for it


class Link:
    """One connection through a proxy.

    Attributes:
        passed: Bytes that have gone through, by direction.
    """

    def __init__(self, proxy: ChaosProxy, number: int) -> None:
        self.number = number
        self.passed: dict[str, int] = {"up": 0, "down": 0}
        self.is_cut = False
        self._proxy = proxy
        self._limits: dict[str, int] = {}
        self._open: dict[str, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        for gate in self._open.values():
            gate.set()
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Reset the connection now, on both sides; what is on its way is lost."""
        self.is_cut = True
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, ValueError):  # it may be gone already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        for gate in self._open.values():
            gate.set()

    def cut_after(self, nbytes: int, direction: Direction = "up") -> None:
        """Reset the connection when that many further bytes of a direction have gone through."""
        self._limits[direction] = self.passed[direction] + nbytes
        if not nbytes:
            self.cut()

    def stall(self, direction: Direction) -> None:
        """Let nothing of a direction through until ``go_on``."""
        self._open[direction].clear()

    def go_on(self, direction: Direction | None = None) -> None:
        """Let it through again; None: both."""
        for each in (direction,) if direction else ("up", "down"):
            self._open[each].set()

    async def carry(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Pass on what comes, until the end or the cut."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def read() -> None:
            while True:
                await self._open[direction].wait()
                data = await reader.read(PIECE_BYTES)
                await queue.put((loop.time() + self._proxy.lateness(), data))
                if not data:
                    return

        reading = loop.create_task(read())
        try:
            while not self.is_cut:
                due, data = await queue.get()
                if (late := due - loop.time()) > 0:
                    await asyncio.sleep(late)
                await self._open[direction].wait()
                await self._proxy.healed.wait()
                if self.is_cut:
                    return
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                room = self._limits.get(direction, 1 << 62) - self.passed[direction]
                writer.write(data[:room])
                self.passed[direction] += len(data[:room])
                await writer.drain()
                if len(data) >= room:
                    await _sent(writer)
                    self.cut()
        except (ConnectionError, OSError):
            self.cut()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def add_writers(self, *writers: asyncio.StreamWriter) -> None:
        """The two ends are known."""
        self._writers += writers


async def _sent(writer: asyncio.StreamWriter) -> None:
    """Wait until the kernel has taken all: a reset throws away what it has not."""
    writer.transport.set_write_buffer_limits(high=0)
    await writer.drain()
    await asyncio.sleep(0.005)  # for the other side to take it before the reset does


class ChaosProxy:
    """Listens at an address of its own and passes on to a task's.

    An async context manager.

    Args:
        target: Address of the task: ``host:port``.
        seed: Of jitter, and of what ``torment`` does.

    Attributes:
        address: Where to connect instead.
        delay_s: By which every piece is late.
        jitter_s: At most so much later still.
        links: Connections that are open.
        cuts: How many were cut.
        healed: Whether there is no black hole.
    """

    def __init__(self, target: str, seed: int | str = 0) -> None:
        self.address = ""
        self.delay_s = self.jitter_s = 0.0
        self.links: list[Link] = []
        self.cuts = self.stalls = self.holes = 0
        self.healed = asyncio.Event()
        self.healed.set()
        self._target = target
        self._rng = random.Random(f"{seed}/{target if seed == 0 else ''}")
        self._numbers = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.close()
        self.healed.set()
        for link in list(self.links):
            link.cut()
        serving = [task for task in self._serving if task is not asyncio.current_task()]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def lateness(self) -> float:
        """Return by how many seconds the next piece is late."""
        return self.delay_s + (self._rng.random() * self.jitter_s if self.jitter_s else 0.0)

    def cut_all(self) -> None:
        """Reset every connection."""
        for link in list(self.links):
            self.cuts += 1
            link.cut()

    def black_hole(self) -> None:
        """Let nothing through, and tell nobody, until ``heal``."""
        self.healed.clear()

    def heal(self, *, reset: bool = False) -> None:
        """Let everything through that has waited; or, with ``reset``, reset the connections."""
        if reset:
            self.cut_all()
        self.healed.set()

    async def torment(
        self, pause_s: float, kinds: Sequence[str] = ("cut", "cut", "cut", "stall", "hole")
    ) -> None:
        """Do something to some connection now and then, drawn from the seed.

        Args:
            pause_s: Mean seconds between two.
            kinds: Of "cut", after up to 20 kB more; "stall" of one direction, and "hole", which
                heals or resets, for up to 2 s.

        Cancellation: Everything heals.
        """
        rng = self._rng
        try:
            while True:
                await asyncio.sleep(rng.expovariate(1 / pause_s))
                kind, direction = rng.choice(kinds), rng.choice(("up", "down"))
                nbytes, seconds, reset = rng.randrange(20_000), 2 * rng.random(), rng.random() < 0.5
                chosen = rng.random()
                if not self.links:
                    continue
                link = self.links[int(chosen * len(self.links))]
                if kind == "cut":
                    self.cuts += 1
                    link.cut_after(nbytes, "up" if direction == "up" else "down")
                elif kind == "stall":
                    self.stalls += 1
                    link.stall("up" if direction == "up" else "down")
                    await asyncio.sleep(seconds)
                    link.go_on()
                else:
                    self.holes += 1
                    self.black_hole()
                    await asyncio.sleep(seconds)
                    self.heal(reset=reset)
        finally:
            self.heal()
            for link in self.links:
                link.go_on()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._numbers += 1
        link = Link(self, self._numbers)
        link.add_writers(writer)
        self.links.append(link)
        try:
            await self._carry(link, reader, writer)
        except asyncio.CancelledError:
            pass  # the proxy is closed: asyncio would log a task of a server that was cancelled
        finally:
            self.links.remove(link)
            self._serving.discard(task)
            for each in link._writers:
                each.close()

    async def _carry(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, port = split_address(self._target)
        await self.healed.wait()
        try:
            back, forth = await asyncio.open_connection(host, port)
        except OSError:
            link.cut()  # nobody listens there: so says a reset, here
            return
        link.add_writers(forth)
        if link.is_cut:
            link.cut()
        async with asyncio.TaskGroup() as both:
            both.create_task(link.carry("up", reader, forth))
            both.create_task(link.carry("down", back, writer))
