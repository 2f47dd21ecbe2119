"""What one task did lately: messages that passed, what its worker did, counters; in a ring.

Nothing is recorded until somebody asks (``AskSpans``), and nothing any more when the last one who
has asked says so, or does not come back within ``LEASE_S``. Until then each message costs a look at
an attribute of its connection (``Connection.tap``). An entry is what is there anyway, a header and
numbers; it is understood by ``readings``, in the process that writes the trace.

Readings are msgpack: ``{"origin", "at", "lost", "connections", "chunks", "facts"}``. A chunk is
msgpack as well, of a list of entries; an entry is

    (time, connection, kind, request, header, bytes of the body)    a frame; sent ones: kind | SENT
    (time, name, …)                                                 a note
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from psync.net.connection import Connection, Request, Tap
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform, random_hex
from psync.wire.messages import AskSpans, Statistics

RING_BYTES = 8 << 20
"""Some 130,000 messages. Who asks four times a second misses nothing below 500,000 a second."""

LEASE_S = 10.0
"""Who has not asked again by then is gone: the chief may be, with the program."""

TICK_S = 0.02
"""Between two looks at counters; what is recorded meanwhile is packed, and goes into the ring."""

GRACE_S = 1.0
"""A loop that was kept busy for longer than the lease finds it over, and the question unread."""

Entry = tuple[Any, ...]

Watched = Callable[["SpanRecorder | None"], None]
"""Told to begin to tell a recorder what it does; None: to stop."""


class _Chunk(NamedTuple):
    first: int  # number of its first entry
    body: bytes


@dataclass(slots=True)
class _Reader:
    next: int  # number of the entry that it gets next
    connections: int = 0  # how many it knows
    lease: asyncio.TimerHandle | None = None


class SpanRecorder:
    """The ring of one task.

    Args:
        platform: Has the clock, which need not agree with those of other tasks.
        task: Its name.
        facts: Returns what a reader has to know besides, when it begins and when it ends.
        counters: Returns what is looked at again and again, by name; None: nothing is.

    Attributes:
        now: The clock.
    """

    def __init__(
        self,
        platform: Platform,
        task: str,
        facts: Callable[[], Mapping[str, Any]] = dict,
        counters: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.task = task
        self._facts = facts
        self._counters = counters
        self.now = platform.now
        self._origin = ""  # tells this process's clock from that of its successor; once it records
        self._fresh: list[Entry] = []  # that are not packed yet
        self._chunks: deque[_Chunk] = deque()
        self._count = 0  # of all entries that were ever packed
        self._bytes = 0  # of all chunks
        self._readers: dict[str, _Reader] = {}
        self._watched: list[Watched] = []
        self._numbers = itertools.count()  # of connections
        self._connections: dict[int, tuple[str, int, str, int, str]] = {}  # in this order
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def is_recording(self) -> bool:
        """Whether anybody reads."""
        return bool(self._readers)

    def watch(self, watched: Watched) -> Callable[[], None]:
        """Let something tell what it does whenever there is somebody who reads.

        Returns:
            What ends that.
        """
        self._watched.append(watched)
        if self._readers:
            watched(self)
        return lambda: self._forget(watched)

    def watch_endpoint(self, endpoint: Endpoint) -> Callable[[], None]:
        """Record the messages of all connections of an endpoint. Returns what ends that."""

        def record(recorder: SpanRecorder | None) -> None:
            endpoint.tap(None if recorder is None else tap_of)

        def tap_of(peer: Connection) -> Tap:
            return self._tap(endpoint, peer)

        return self.watch(record)

    def note(self, *note: Any) -> None:
        """Record something: a name, and what msgpack can carry."""
        self._fresh.append((self.now(), *note))

    def answer(self, request: Request[AskSpans]) -> None:
        """Serve ``AskSpans``."""
        message = request.message
        request.answer(Statistics({}), [self.read(message.reader, last=message.last)])

    def read(self, name: str, *, last: bool = False) -> bytes:
        """Return what was recorded since this reader has asked last; at first nothing is.

        Args:
            name: Of the reader.
            last: Whether it does not come back.
        """
        self._pack()
        reader = self._readers.get(name)
        is_new = reader is None
        if reader is None:
            reader = self._enter(name)
        self._renew(reader, name, LEASE_S, self._expire)
        oldest = self._chunks[0].first if self._chunks else self._count
        lost = max(0, oldest - reader.next)
        reading = {
            "origin": self._origin,
            "at": self.now(),
            "lost": lost,
            "chunks": [chunk.body for chunk in self._chunks if chunk.first >= reader.next],
            "connections": list(self._connections.items())[reader.connections :],
            "facts": self._facts() if is_new or last else {},
        }
        reader.next = self._count
        reader.connections = len(self._connections)
        if last:
            self._leave(name)
        return msgpack.packb(reading)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Record nothing any more, for nobody."""
        for name in list(self._readers):
            self._leave(name)

    def _enter(self, name: str) -> _Reader:
        is_first = not self._readers
        self._origin = self._origin or random_hex(4)
        reader = self._readers[name] = _Reader(self._count)
        if is_first:
            for watched in self._watched:
                watched(self)
            self._tick()
        return reader

    def _renew(
        self, reader: _Reader, name: str, seconds: float, then: Callable[[str], None]
    ) -> None:
        if reader.lease is not None:
            reader.lease.cancel()
        reader.lease = asyncio.get_running_loop().call_later(seconds, then, name)

    def _expire(self, name: str) -> None:
        self._renew(self._readers[name], name, GRACE_S, self._leave)

    def _leave(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is None:
            return
        if reader.lease is not None:
            reader.lease.cancel()
        if self._readers:
            return
        for watched in self._watched:
            watched(None)
        if self._ticking is not None:
            self._ticking.cancel()
        self._fresh.clear()
        self._chunks.clear()
        self._bytes = 0
        self._connections.clear()

    def _forget(self, watched: Watched) -> None:
        self._watched.remove(watched)
        if self._readers:
            watched(None)

    def _tap(self, endpoint: Endpoint, peer: Connection) -> Tap:
        number, now, append = next(self._numbers), self.now, self._fresh.append

        def tap(kind: int, request: int, header: bytes, nbytes: int) -> None:
            append((now(), number, kind, request, header, nbytes))

        def first(kind: int, request: int, header: bytes, nbytes: int) -> None:
            # Not before: whose connection it is, its handshake tells.
            self._connections[number] = (
                endpoint.task, endpoint.incarnation, peer.task, peer.incarnation, peer.lane,
            )  # fmt: skip
            peer.tap = tap
            tap(kind, request, header, nbytes)

        return first

    def _tick(self) -> None:
        if self._counters is not None:
            self.note("counters", dict(self._counters()))
        self._pack()
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _pack(self) -> None:
        """Move what is fresh into the ring, and the oldest out of it where it is full."""
        if not self._fresh:
            return
        chunk = _Chunk(self._count, msgpack.packb(self._fresh))
        self._count += len(self._fresh)
        self._fresh.clear()
        self._chunks.append(chunk)
        self._bytes += len(chunk.body)
        while self._bytes > RING_BYTES:
            self._bytes -= len(self._chunks.popleft().body)
