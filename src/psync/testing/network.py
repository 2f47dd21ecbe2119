"""A network in memory, with the faults of a real one.

It has the interface of the networks in ``psync.net.transport``. It runs on any event loop, because
it uses only the running loop's ``call_soon``, ``call_at`` and ``time``. On a ``VirtualClockLoop``
the same seed gives the same run, piece by piece.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
import weakref
from collections import Counter
from collections.abc import Callable

from psync.errors import ConfigurationError, UsageError
from psync.testing.link import BufferChanged, Ends, Fabric, Link, reset_error
from psync.testing.memory_sharing import MemoryChannel, channels

Factory = Callable[[], asyncio.BufferedProtocol]

_FIRST_FREE_PORT = 20_000

KEEPALIVE_S = 25.0
"""Time after which a kernel ends a connection to a machine that has died."""

PING_S = 5.0
"""Time within which it sends a probe on a connection; a restarted machine rejects it."""


class MemoryHost:
    """A network as seen by one host, whose connections and listeners carry its name.

    Faults can then name the host: ``network.partition("worker0")`` affects the connections that
    worker0 has made and those made to it.
    """

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self.name = name

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.Transport, asyncio.BufferedProtocol]:
        """Open a connection; see ``MemoryNetwork.connect``, including for cancellation."""
        return await self._network._connect(self.name, address, factory)

    async def listen(self, address: str, factory: Factory) -> MemoryListener:
        """Listen; see ``MemoryNetwork.listen``, including for cancellation."""
        return self._network._listen(self.name, address, factory)


class MemoryListener:
    """A listener on one address.

    Attributes:
        address: Bound address, with port 0 replaced by a free port.
    """

    def __init__(
        self,
        address: str,
        host: str,
        factory: Factory,
        listeners: dict[str, MemoryListener],
    ) -> None:
        self.address = address
        self.host = host
        self.context = contextvars.copy_context()
        self._factory = factory
        self._listeners = listeners

    def close(self) -> None:
        """Stop listening; open connections stay."""
        if self._listeners.get(self.address) is self:
            del self._listeners[self.address]

    async def wait_closed(self) -> None:
        """Wait until the address is free again. Cancellation: safe."""
        await asyncio.sleep(0)

    def accept(self, link: Link) -> None:
        """Start the server's side of a new link."""
        if link.server.is_lost:
            link.end_channel(1)
            return  # cut meanwhile
        try:
            protocol = self._factory()
            link.share(protocol, 1)
        except Exception as exc:
            link.loop.call_exception_handler(
                {"message": f"the factory of {self.address} failed", "exception": exc}
            )
            link.cut()
            return
        link.server.start(protocol)


class MemoryNetwork:
    """A network in memory.

    Addresses are arbitrary names; the port of ``"host:0"`` is replaced by a free one. Writes are
    kept by reference and delivered later, in pieces of random sizes.

    With ``check_buffers``, each write is compared on delivery with its checksum at the time of the
    write. A buffer that has changed ends the connection on both sides with ``BufferChanged``. The
    error is also added to ``problems``, because a program that survives lost connections would hide
    it. End every test with ``check()``.

    Args:
        seed: Seed of all random choices.
        latency: Range, in seconds, of the time that a write takes to the other side.
        chunk: Range of the sizes of delivered pieces, in bytes.
        check_buffers: Whether to check for changed buffers, at the cost of two checksums per write.
        kernel_bytes: Capacity of the kernels per direction while the receiver reads nothing; only
            the rest counts in ``get_write_buffer_size()``.
        spread: Inequality of links. The latencies of each direction are multiplied by a factor of
            up to ``10 ** spread``, and connections are accepted late, possibly in another order
            than they were made. 0: all links are equal.
        shares_memory: Whether all tasks are on one host and lend each other large messages; see
            ``psync.net.shared``.

    Attributes:
        problems: Every ``BufferChanged`` so far.
        lent: Counts of events in the memory that tasks share.

    Raises:
        ConfigurationError: A range is empty or negative.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: tuple[float, float] = (0.0, 0.0),
        chunk: tuple[int, int] = (1, 65_536),
        check_buffers: bool = True,
        kernel_bytes: int = 65_536,
        spread: float = 0.0,
        shares_memory: bool = False,
    ) -> None:
        if not 0 <= latency[0] <= latency[1]:
            raise ConfigurationError(f"expected 0 <= latency[0] <= latency[1], got {latency}")
        if not 1 <= chunk[0] <= chunk[1]:
            raise ConfigurationError(f"expected 1 <= chunk[0] <= chunk[1], got {chunk}")
        if kernel_bytes < 0:
            raise ConfigurationError(f"expected kernel_bytes >= 0, got {kernel_bytes}")
        if spread < 0:
            raise ConfigurationError(f"expected spread >= 0, got {spread}")
        self._fabric = Fabric(seed, latency, chunk, check_buffers, kernel_bytes, spread)
        self._random = self._fabric.stream("connect")
        self.lent: Counter[str] = Counter()
        self._lending = self._fabric.stream("lending") if shares_memory else None
        self._channels: weakref.WeakKeyDictionary[MemoryChannel, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._ports = itertools.count(_FIRST_FREE_PORT)
        self._listeners: dict[str, MemoryListener] = {}
        self._refused: set[str] = set()
        self._unreachable: list[asyncio.Future[None]] = []  # who waits for a partition to heal
        self._dead: dict[str, tuple[list[str], list[Link]]] = {}  # machines: addresses, connections

    # The interface of a network.

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.Transport, asyncio.BufferedProtocol]:
        """Open a connection.

        Raises:
            ConnectionRefusedError: There is no listener, or ``refuse`` is in effect.
            ConnectionResetError: The connection was cut before it was established.

        Cancellation: Safe; no connection stays open. A connection through a partition waits until
            the partition heals.
        """
        return await self._connect("", address, factory)

    async def listen(self, address: str, factory: Factory) -> MemoryListener:
        """Listen on ``address``.

        Raises:
            OSError: EADDRINUSE: there is already a listener.

        Cancellation: Safe.
        """
        return self._listen("", address, factory)

    def host(self, name: str) -> MemoryHost:
        """Return this network as seen by the host ``name``."""
        return MemoryHost(self, name)

    # What a test sees and does. ``where`` is an address or the name of a host.

    @property
    def problems(self) -> list[BufferChanged]:
        """Every ``BufferChanged`` so far."""
        return self._fabric.problems

    def check(self) -> None:
        """Raise the first of ``problems``, if there is one.

        Raises:
            BufferChanged: Memory was changed between ``write()`` and delivery.
        """
        if self.problems:
            raise self.problems[0]

    def links(self, where: str | None = None) -> list[Link]:
        """Return the live links, oldest first; with ``where``, only links that end there."""
        links = list(self._fabric.links.values())
        return [link for link in links if where is None or link.ends.are(where, None)]

    def cut(self, where: str) -> None:
        """Cut the links that end at ``where``; connections are lost on both sides."""
        for link in self.links(where):
            link.cut()

    def partition(self, a: str, b: str | None = None) -> None:
        """Block all traffic between ``a`` and ``b`` (None: all hosts) until ``heal``.

        Neither side is notified: connections stay open and silent, and new ones wait. ``cut`` ends
        a connection for good, as a host sees it after its timeout.
        """
        self._fabric.separations.append((a, b))
        self._look_again()

    def heal(self, a: str, b: str | None = None) -> None:
        """End a ``partition`` with the same arguments; pending data arrive now, in order.

        Raises:
            UsageError: There is no such partition.
        """
        if (a, b) not in self._fabric.separations:
            raise UsageError(f"no partition between {a} and {b or 'everybody'}")
        self._fabric.separations.remove((a, b))
        self._look_again()

    def deafen(self, a: str, b: str) -> None:
        """Block all traffic from host ``a`` to host ``b`` until ``undeafen``.

        Traffic from ``b`` to ``a`` arrives. New connections between them wait.
        """
        self._fabric.deaf.append((a, b))
        self._look_again()

    def undeafen(self, a: str, b: str) -> None:
        """End a ``deafen`` with the same arguments."""
        self._fabric.deaf.remove((a, b))
        self._look_again()

    def refuse(self, where: str) -> None:
        """Refuse new connections to ``where`` until ``admit``."""
        self._refused.add(where)

    def admit(self, where: str) -> None:
        """End ``refuse``."""
        self._refused.discard(where)

    def stop(self, host: str) -> None:
        """Stop a host's process until ``go_on``, as SIGSTOP does.

        Its kernel keeps running: it accepts connections, and takes data while it has room.
        """
        self._fabric.stopped.add(host)
        self._look_again()

    def go_on(self, host: str) -> None:
        """End ``stop``."""
        self._fabric.stopped.discard(host)
        self._look_again()

    def crash(self, host: str, *, silently: bool = False) -> None:
        """End all connections and listeners of a host's process, as its kernel does after a kill.

        Args:
            host: Host of the process.
            silently: Whether the machine dies as well: peers are not notified, data in flight are
                lost, and new connections wait until ``revive``.
        """
        self._fabric.stopped.discard(host)
        for channel, owner in list(self._channels.items()):
            if owner == host:
                channel.end()
        for listener in list(self._listeners.values()):
            if listener.host == host:
                listener.close()
                if silently:
                    self._dead.setdefault(host, ([], []))[0].append(listener.address)
        for link in self.links(host):
            if silently:
                link.partition()
                self._dead.setdefault(host, ([], []))[1].append(link)
                # Keepalive finds it out at last.
                link.loop.call_later(KEEPALIVE_S, link.cut, context=contextvars.Context())
                continue
            if link.ends.client_host == host:
                link.client.abort()
            if link.ends.server_is(host):
                link.server.abort()

    def revive(self, host: str) -> None:
        """Restart a machine that has died silently; its earlier connections are unknown to it."""
        _, links = self._dead.pop(host, ([], []))
        for link in links:  # it answers with a reset when the next ping comes
            after = self._random.uniform(0.0, PING_S)
            link.loop.call_later(after, link.cut, context=contextvars.Context())
        self._look_again()

    def trace_deliveries(self, trace: Callable[[Link, str, int], None] | None) -> None:
        """Call ``trace(link, direction, num_bytes)`` for every delivered piece."""
        self._fabric.on_delivery = trace

    def _look_again(self) -> None:
        for waiter in self._unreachable:
            if not waiter.done():
                waiter.set_result(None)
        for link in self.links():
            link.wake()

    def _ends(self, client_host: str, address: str) -> Ends:
        listener = self._listeners.get(address)
        return Ends(client_host, listener.host if listener else "", address)

    def _cannot_reach(self, host: str, address: str) -> bool:
        """Whether nobody answers who connects there, not even with a refusal."""
        ends = self._ends(host, address)
        return (
            self._fabric.are_separated(ends)
            or any(ends.are(a, b) for a, b in self._fabric.deaf)
            or any(address in addresses for addresses, _ in self._dead.values())
        )

    def _listen(self, host: str, address: str, factory: Factory) -> MemoryListener:
        name, colon, port = address.rpartition(":")
        if colon and port == "0":
            free = (f"{name}:{number}" for number in self._ports)
            address = next(candidate for candidate in free if candidate not in self._listeners)
        if address in self._listeners:
            raise OSError(errno.EADDRINUSE, f"somebody listens on {address} already")
        listener = MemoryListener(address, host, factory, self._listeners)
        self._listeners[address] = listener
        return listener

    async def _connect(
        self, host: str, address: str, factory: Factory
    ) -> tuple[asyncio.Transport, asyncio.BufferedProtocol]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._random.uniform(*self._fabric.latency))
        while self._cannot_reach(host, address):
            waiter = loop.create_future()
            self._unreachable.append(waiter)
            try:
                await waiter
            finally:
                self._unreachable.remove(waiter)
        ends = self._ends(host, address)
        listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"no task listens on {address}")
        if any(ends.server_is(where) for where in self._refused):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{address} refuses connections")
        protocol = factory()
        client_context, server_context = contextvars.copy_context(), listener.context.copy()
        link = Link(next(self._numbers), ends, self._fabric, client_context, server_context)
        if self._lending is not None:
            link.channels = channels(self._lending, self.lent)
            for channel, owner in zip(link.channels, (host, ends.server_host), strict=True):
                self._channels[channel] = owner
        opened = loop.create_future()
        if self._fabric.spread:
            late = self._random.uniform(*self._fabric.latency) * self._random.choice((0, 1, 10))
            loop.call_later(late, listener.accept, link, context=server_context)
        else:
            loop.call_soon(listener.accept, link, context=server_context)
        loop.call_soon(_open_client, link, protocol, opened, context=client_context)
        try:
            is_open = await opened
        except asyncio.CancelledError:
            link.client.abort()
            raise
        if not is_open:
            raise reset_error("the connection was cut before it was there")
        return link.client, protocol


def _open_client(
    link: Link, protocol: asyncio.BufferedProtocol, opened: asyncio.Future[bool]
) -> None:
    """Start the client's side of a new link, unless it was cancelled or cut meanwhile."""
    if opened.done():
        return
    if link.client.is_lost:
        link.end_channel(0)
        opened.set_result(False)
        return
    opened.set_result(True)
    link.share(protocol, 0)
    link.client.start(protocol)
