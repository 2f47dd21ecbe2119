"""Traces: what tasks did in a stretch of a run.

A ``SpanRecorder`` keeps the recent activity of one task for each reader: messages, the worker's
steps, counters. A coordinator's ``SpanCollector`` asks all tasks. A ``Trace`` covers one stretch of
a run; ``net.trace_file`` turns the answers of the tasks into a file of Chrome's Trace Event format.

Recording starts with the first request (``AskSpans``). It ends when the last reader says so, or
does not return within ``LEASE_S``. While nothing is recorded, each message costs one look at an
attribute of its connection (``Connection.tap``). An entry is a message's header and a few numbers;
the process that writes the trace decodes it.

Readings are msgpack: ``{"origin", "at", "lost", "connections", "chunks", "facts"}``. A chunk is
msgpack as well, of a list of entries; an entry is

    (time, connection, kind, request, header, bytes of the body)    a frame; sent ones: kind | SENT
    (time, name, …)                                                 a note
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import msgpack

from psync.errors import PsyncError, os_errors
from psync.net.connection import Connection, Request, Tap
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform, random_hex
from psync.net.shielding import at_most
from psync.net.trace_file import Reading, Summary, write_trace
from psync.wire.messages import AskSpans, Statistics

RING_BYTES = 8 << 20
"""Kept for one reader: about 130,000 messages, enough for 500,000 a second at four requests a
second."""

TICK_S = 0.02
"""Between two samples of the counters, and two packings of new entries into the ring."""

LEASE_S = 10.0
"""A reader that has not asked again by then is forgotten: its program may have died. Counted in
ticks: while the loop is busy no question is read."""

ANSWERS_WITHIN_S = 0.1
"""Later answers are in a later reading: a step may compute on the loop of its worker."""

LAST_WITHIN_S = 2.0
"""The same, for the last reading."""

ASKED_AT_ONCE = 100
"""With more tasks, each reading asks the next 100 of them."""

Watched = Callable[["SpanRecorder | None"], None]
"""Called with the recorder when recording starts, and with None when it ends."""


@dataclass(slots=True, eq=False)
class _Reader:
    ticks_left: int = 0  # until it is forgotten
    connections: int = 0  # how many it knows
    is_new: bool = True
    chunks: deque[tuple[int, bytes]] = field(default_factory=deque)  # number of entries, entries
    lost: int = 0  # entries that were dropped before it asked
    # Of one that reads all tasks.
    asked: dict[Connection, asyncio.Task[None]] = field(default_factory=dict)  # not answered yet
    turns: dict[Connection, None] = field(default_factory=dict)  # asked before, the latest last
    came: list[Reading] = field(default_factory=list)  # not handed out yet


@dataclass(eq=False, repr=False)
class SpanRecorder:
    """Records what one task does, for each reader until it asks.

    Args:
        platform: Has the clock, which need not agree with those of other tasks.
        task: Its name.
        facts: Returns further facts, which a reader gets with its first and last reading.
        counters: Returns the counters that are sampled, by name; None: there are none.

    Attributes:
        now: The clock.
    """

    platform: Platform
    task: str
    facts: Callable[[], Mapping[str, Any]] = dict
    counters: Callable[[], Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        self.now = self.platform.now
        self._origin = ""  # tells this process's clock from that of its successor; once it records
        self._fresh: list[tuple[Any, ...]] = []  # entries that are not packed yet
        self._readers: dict[str, _Reader] = {}
        self._watched: list[Watched] = []
        self._numbers = itertools.count()  # of connections
        self._connections: dict[int, tuple[str, int, str, int, str]] = {}  # in this order
        self._ticking: asyncio.TimerHandle | None = None

    def watch(self, watched: Watched) -> Callable[[], None]:
        """Tell ``watched`` when recording starts and ends. Return a function that ends that."""

        def forget() -> None:
            self._watched.remove(watched)
            if self._readers:
                watched(None)

        self._watched.append(watched)
        if self._readers:
            watched(self)
        return forget

    def watch_endpoint(self, endpoint: Endpoint) -> Callable[[], None]:
        """Record the messages of an endpoint's connections. Return a function that ends that."""

        def tap_of(peer: Connection) -> Tap:
            number, now, append = next(self._numbers), self.now, self._fresh.append
            self._connections[number] = (
                endpoint.task, endpoint.incarnation, peer.task, peer.incarnation, peer.lane,
            )  # fmt: skip

            def tap(kind: int, request: int, header: bytes, nbytes: int) -> None:
                append((now(), number, kind, request, header, nbytes))

            return tap

        return self.watch(lambda recorder: endpoint.tap(None if recorder is None else tap_of))

    def note(self, *note: Any) -> None:
        """Record a note: a name and values that msgpack can carry."""
        self._fresh.append((self.now(), *note))

    def answer(self, request: Request[AskSpans]) -> None:
        """Serve ``AskSpans``."""
        message = request.message
        request.answer(Statistics({}), [self.read(message.reader, last=message.last)])

    def read(self, name: str, *, last: bool = False) -> bytes:
        """Return the entries since this reader's previous reading; at first there are none.

        Args:
            name: The reader.
            last: Whether this is its last reading.
        """
        reader = self._reader(name)
        reading = {
            "origin": self._origin,
            "at": self.now(),
            "lost": reader.lost,
            "chunks": [body for _, body in reader.chunks],
            "connections": list(self._connections.items())[reader.connections :],
            "facts": self.facts() if reader.is_new or last else {},
        }
        reader.is_new, reader.lost, reader.connections = False, 0, len(self._connections)
        reader.chunks.clear()
        if last:
            self._leave(name)
        return msgpack.encode(reading)

    def close(self) -> None:
        """Forget all readers, and stop recording."""
        for name in list(self._readers):
            self._leave(name)

    def _reader(self, name: str) -> _Reader:
        """Return a reader, which is known from now on; with the first one recording starts."""
        self._pack()
        reader = self._readers.setdefault(name, _Reader())
        reader.ticks_left = int(LEASE_S / TICK_S)
        if self._ticking is None:
            self._origin = self._origin or random_hex(4)
            for watched in self._watched:
                watched(self)
            self._tick()
        return reader

    def _leave(self, name: str) -> None:
        for task in self._readers.pop(name).asked.values():
            task.cancel()
        if self._readers:
            return
        for watched in self._watched:
            watched(None)
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        self._fresh.clear()
        self._connections.clear()

    def _tick(self) -> None:
        if self.counters is not None:
            self.note("counters", dict(self.counters()))
        self._pack()
        for name, reader in list(self._readers.items()):
            reader.ticks_left -= 1
            if reader.ticks_left == 0:
                self._leave(name)
        if self._readers:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _pack(self) -> None:
        """Keep new entries for each reader, and drop the oldest ones of those who are too slow."""
        if not self._fresh:
            return
        chunk = len(self._fresh), msgpack.encode(self._fresh)
        self._fresh.clear()
        for reader in self._readers.values():
            reader.chunks.append(chunk)
            while sum(len(body) for _, body in reader.chunks) > RING_BYTES:
                reader.lost += reader.chunks.popleft()[0]


@dataclass(eq=False, repr=False, kw_only=True)
class SpanCollector(SpanRecorder):
    """Records what a coordinator's own task does, and asks the other tasks as well.

    Args:
        peers: Returns a connection to each of the others.
    """

    peers: Callable[[], Iterable[Connection]]

    async def read_all(self, name: str, *, last: bool = False) -> list[Reading]:
        """Return all readings since this reader's previous call; its first call starts recording.

        Args:
            name: The reader, which is forgotten if it does not ask again within ten seconds.
            last: Whether this is its last call, which waits longer for tasks that compute.

        Cancellation: Safe; the next call returns the readings.
        """
        reader = self._reader(name)
        self._ask(reader, AskSpans(name, last))
        if reader.asked:
            within_s = LAST_WITHIN_S if last else ANSWERS_WITHIN_S
            await asyncio.wait(list(reader.asked.values()), timeout=within_s)
        came, reader.came = reader.came, []
        now = self.now()
        return [Reading(self.task, self.read(name, last=last), now, now), *came]

    def _ask(self, reader: _Reader, message: AskSpans) -> None:
        """Ask the tasks whose turn it is and new ones; at the end, ask all."""
        peers = dict.fromkeys(self.peers())
        known = [peer for peer in reader.turns if peer in peers]
        order = [*(peer for peer in peers if peer not in reader.turns), *known]
        count = len(order) if message.last else len(order) - len(known) + ASKED_AT_ONCE
        reader.turns = dict.fromkeys([*order[count:], *order[:count]])
        for peer in order[:count]:
            if peer not in reader.asked:
                asking = self._ask_one(reader, peer, message)
                reader.asked[peer] = asyncio.get_running_loop().create_task(asking)

    async def _ask_one(self, reader: _Reader, peer: Connection, message: AskSpans) -> None:
        try:
            asked = self.now()
            received = await peer.call(message)
            got = self.now()
            for segment in received.segments:
                reader.came.append(Reading(peer.task, bytes(segment), asked, got))
        except PsyncError:
            pass  # it has died; its earlier readings are kept
        finally:
            del reader.asked[peer]


READ_EVERY_S = 0.25
"""A task that is killed loses its entries since the last reading."""

MAX_BYTES = 256 << 20
"""Limit of the readings, which stay in memory until the file is written."""

ReadSpans = Callable[..., Awaitable[list[Reading]]]
"""``SpanCollector.read_all``; a PsyncError: the run has ended."""


class Trace:
    """A stretch of a run that is being traced.

    Args:
        read: Asks the coordinator.
        program: Name of the program, for the file.

    Attributes:
        ended: Ends recording when it is set; set when that has ended.
        cut_short: Why it ended early; "" if it did not.
        summary: Contents of the file; None before it is written.
    """

    def __init__(self, read: ReadSpans, program: str) -> None:
        self.ended = asyncio.Event()
        self.cut_short = ""
        self.summary: Summary | None = None
        self._read = read
        self._program = program
        self._name = random_hex(8)
        self._readings: list[Reading] = []
        self._nbytes = 0

    async def read(self, *, last: bool = False) -> None:
        """Read what was recorded since the last time; the first time, let all tasks record.

        Raises:
            PsyncError: The run has ended.

        Cancellation: Safe; tasks stop recording automatically.
        """
        readings = await self._read(self._name, last=last)
        self._readings += readings
        self._nbytes += sum(len(reading.body) for reading in readings)
        if self._nbytes > MAX_BYTES:
            self.cut_short = f"more than {MAX_BYTES >> 20} MiB were recorded"

    async def record(self) -> None:
        """Read until ``ended`` is set, or until the run ends. Cancellation: as that of ``read``."""
        try:
            while not self.ended.is_set() and not self.cut_short:
                await at_most(READ_EVERY_S, self.ended.wait())
                await self.read()
            await self.read(last=True)
        except PsyncError as exc:
            self.cut_short = exc.message
        finally:
            self.ended.set()

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        about = {"program": self._program, **({"ended": self.cut_short} if self.cut_short else {})}
        with path.open("w", encoding="utf-8") as file:
            self.summary = write_trace(self._readings, file, **about)
        self._readings.clear()


@contextlib.asynccontextmanager
async def tracing(
    read: ReadSpans, program: str, path: str | os.PathLike[str]
) -> AsyncIterator[Trace]:
    """Return a context in which all tasks are traced, into a file.

    Args:
        read: Asks the coordinator.
        program: Name of the program.
        path: Path of the file; an existing file is replaced.

    Raises:
        ConfigurationError: The file cannot be written.
        PsyncError: The run has ended.

    Cancellation: The file is written.
    """
    draft = _draft(Path(path))
    try:
        trace = Trace(read, program)
        await trace.read()
        recording = asyncio.create_task(trace.record())
        try:
            yield trace
        finally:
            trace.ended.set()
            await recording
            await asyncio.to_thread(trace.write, draft)
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    """Create an empty file, mode 600, beside ``path``. Raises ConfigurationError."""
    with os_errors(f"{path}: a trace cannot be written there"):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        fd, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
        os.close(fd)
    return Path(draft)
