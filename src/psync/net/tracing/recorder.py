"""What one task did lately: messages that passed, what its worker did, counters; in a ring.

Nothing is recorded until somebody asks (``AskSpans``), and nothing any more when the last one who
has asked says so, or does not come back within ``LEASE_S``. Until then each message costs a look at
an attribute of its connection (``Connection.tap``). An entry is what is there anyway, a header and
numbers; it is understood by ``readings``, in the process that writes the trace.

Readings are msgpack: ``{"origin", "at", "lost", "connections", "entries", "facts"}``. An entry is

    (time, connection, kind, request, header, bytes of the body)    a frame; sent ones: kind | SENT
    (time, name, …)                                                 a note
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from psync.net.connection import Tap
from psync.net.endpoint import Endpoint
from psync.net.peer import Peer, Reply
from psync.net.platform import Platform, random_hex
from psync.wire.messages import AskSpans, Statistics

RING_ENTRIES = 1 << 16
RING_BYTES = 8 << 20
"""Of headers. Who asks four times a second misses nothing below 250,000 messages a second."""

LEASE_S = 10.0
"""Who has not asked again by then is gone: the chief may be, with the program."""

SAMPLE_S = 0.02
"""Between two looks at counters."""

GRACE_S = 1.0
"""A loop that was kept busy for longer than the lease finds it over, and the question unread."""

Entry = tuple[Any, ...]

Watched = Callable[["SpanRecorder | None"], None]
"""Told to begin to tell a recorder what it does; None: to stop."""


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
        self._entries: deque[Entry] = deque()
        self._first = 0  # number of the oldest entry in the ring
        self._bytes = 0
        self._readers: dict[str, _Reader] = {}
        self._watched: list[Watched] = []
        self._numbers = itertools.count()  # of connections
        self._connections: dict[int, tuple[str, int, str, int, str]] = {}  # in this order
        self._sampling: asyncio.TimerHandle | None = None

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

        def tap_of(peer: Peer) -> Tap:
            return self._tap(endpoint, peer)

        return self.watch(record)

    def note(self, *note: Any) -> None:
        """Record something: a name, and what msgpack can carry."""
        self._add((self.now(), *note), 0)

    def answer(self, peer: Peer, message: AskSpans, _: list[memoryview]) -> Reply:
        """Serve ``AskSpans``."""
        return Reply(Statistics({}), [self.read(message.reader, last=message.last)])

    def read(self, name: str, *, last: bool = False) -> bytes:
        """Return what was recorded since this reader has asked last; at first nothing is.

        Args:
            name: Of the reader.
            last: Whether it does not come back.
        """
        reader = self._readers.get(name)
        is_new = reader is None
        if reader is None:
            reader = self._enter(name)
        self._renew(reader, name, LEASE_S, self._expire)
        lost = max(0, self._first - reader.next)
        at = reader.next + lost - self._first
        reading = {
            "origin": self._origin,
            "at": self.now(),
            "lost": lost,
            "entries": list(itertools.islice(self._entries, at, None)),
            "connections": list(self._connections.items())[reader.connections :],
            "facts": self._facts() if is_new or last else {},
        }
        reader.next = self._first + len(self._entries)
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
        reader = self._readers[name] = _Reader(self._first + len(self._entries))
        if is_first:
            for watched in self._watched:
                watched(self)
            if self._counters is not None:
                self._sample()
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
        if self._sampling is not None:
            self._sampling.cancel()
        self._first += len(self._entries)
        self._entries.clear()
        self._connections.clear()
        self._bytes = 0

    def _forget(self, watched: Watched) -> None:
        self._watched.remove(watched)
        if self._readers:
            watched(None)

    def _tap(self, endpoint: Endpoint, peer: Peer) -> Tap:
        number, now, add = next(self._numbers), self.now, self._add
        connections = self._connections

        def tap(kind: int, request: int, header: bytes, nbytes: int) -> None:
            if number not in connections:
                connections[number] = (
                    endpoint.task, endpoint.incarnation, peer.task, peer.incarnation, peer.lane,
                )  # fmt: skip
            add((now(), number, kind, request, header, nbytes), len(header))

        return tap

    def _add(self, entry: Entry, nbytes: int) -> None:
        entries = self._entries
        entries.append(entry)
        self._bytes += nbytes
        while len(entries) > RING_ENTRIES or self._bytes > RING_BYTES:
            oldest = entries.popleft()
            self._first += 1
            if type(oldest[1]) is int:
                self._bytes -= len(oldest[4])

    def _sample(self) -> None:
        assert self._counters is not None, "else nothing is looked at"
        self.note("counters", dict(self._counters()))
        self._sampling = asyncio.get_running_loop().call_later(SAMPLE_S, self._sample)
