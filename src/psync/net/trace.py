"""Traces: what tasks did in a stretch of a run, as a file of Chrome's Trace Event format.

A ``SpanRecorder`` keeps in a ring what one task did lately: messages that passed, what its worker
did, counters. A ``SpanCollector`` asks all tasks of a coordinator. ``Trace`` is one stretch, from
its beginning to its file, where ``net.trace_file`` understands what the tasks have answered.

Nothing is recorded until somebody asks (``AskSpans``), and nothing any more when the last one who
has asked says so, or does not come back within ``LEASE_S``. Until then each message costs a look at
an attribute of its connection (``Connection.tap``). An entry is what is there anyway, a header and
numbers; it is understood in the process that writes the trace.

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

import msgpack

from psync.errors import ConfigurationError, PsyncError
from psync.net.connection import Tap
from psync.net.endpoint import Endpoint
from psync.net.peer import Peer, Reply
from psync.net.platform import Platform, random_hex
from psync.net.trace_file import Reading, Summary, write_trace
from psync.wire.messages import AskSpans, Statistics

RING_BYTES = 8 << 20
"""Some 130,000 messages. Who asks four times a second misses nothing below 500,000 a second."""

LEASE_S = 10.0
"""Who has not asked again by then is gone: the chief may be, with the program."""

TICK_S = 0.02
"""Between two looks at counters; what is recorded meanwhile is packed, and goes into the ring."""

GRACE_S = 1.0
"""A loop that was kept busy for longer than the lease finds it over, and the question unread."""

ANSWERS_WITHIN_S = 0.1
"""Whoever has not answered by then does so later: a step may compute on the loop of its worker."""

LAST_WITHIN_S = 2.0
"""For the last answer."""

ASKED_AT_ONCE = 100
"""Tasks are asked by turns: many of them cost no more than so many."""

READ_EVERY_S = 0.25
"""What a task has recorded since is lost with it, if it is killed."""

MAX_BYTES = 256 << 20
"""Of readings: they are in memory until the file is written."""

Watched = Callable[["SpanRecorder | None"], None]
"""Told to begin to tell a recorder what it does; None: to stop."""


@dataclass(slots=True, eq=False)
class _Reader:
    """Somebody who asks again and again, and is forgotten if not."""

    lease: asyncio.TimerHandle | None = None

    def renew(self, seconds: float, then: Callable[[str], None], name: str) -> None:
        self.end_lease()
        self.lease = asyncio.get_running_loop().call_later(seconds, then, name)

    def end_lease(self) -> None:
        if self.lease is not None:
            self.lease.cancel()


@dataclass(slots=True, eq=False)
class _ReaderOfTask(_Reader):
    next: int = 0  # number of the entry that it gets next
    connections: int = 0  # how many it knows


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
        self._fresh: list[tuple[Any, ...]] = []  # entries that are not packed yet
        self._chunks: deque[tuple[int, bytes]] = deque()  # number of the first entry, entries
        self._count = 0  # of all entries that were ever packed
        self._bytes = 0  # of all chunks
        self._readers: dict[str, _ReaderOfTask] = {}
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

        def forget() -> None:
            self._watched.remove(watched)
            if self._readers:
                watched(None)

        self._watched.append(watched)
        if self._readers:
            watched(self)
        return forget

    def watch_endpoint(self, endpoint: Endpoint) -> Callable[[], None]:
        """Record the messages of all connections of an endpoint. Returns what ends that."""

        def tap_of(peer: Peer) -> Tap:
            number, now, append = next(self._numbers), self.now, self._fresh.append

            def tap(kind: int, request: int, header: bytes, nbytes: int) -> None:
                append((now(), number, kind, request, header, nbytes))

            def first(kind: int, request: int, header: bytes, nbytes: int) -> None:
                # Not before: whose connection it is, its handshake tells.
                self._connections[number] = (
                    endpoint.task, endpoint.incarnation, peer.task, peer.incarnation, peer.lane,
                )  # fmt: skip
                peer.connection.tap = tap
                tap(kind, request, header, nbytes)

            return first

        return self.watch(lambda recorder: endpoint.tap(None if recorder is None else tap_of))

    def note(self, *note: Any) -> None:
        """Record something: a name, and what msgpack can carry."""
        self._fresh.append((self.now(), *note))

    def answer(self, peer: Peer, message: AskSpans, _: list[memoryview]) -> Reply:
        """Serve ``AskSpans``."""
        return Reply(Statistics({}), [self.read(message.reader, last=message.last)])

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
            reader = _ReaderOfTask(next=self._count)
            self._readers[name] = reader
            if len(self._readers) == 1:
                self._begin()
        reader.renew(LEASE_S, self._expire, name)
        oldest = self._chunks[0][0] if self._chunks else self._count
        reading = {
            "origin": self._origin,
            "at": self.now(),
            "lost": max(0, oldest - reader.next),
            "chunks": [body for first, body in self._chunks if first >= reader.next],
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

    def _begin(self) -> None:
        self._origin = self._origin or random_hex(4)
        for watched in self._watched:
            watched(self)
        self._tick()

    def _expire(self, name: str) -> None:
        self._readers[name].renew(GRACE_S, self._leave, name)

    def _leave(self, name: str) -> None:
        self._readers.pop(name).end_lease()
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

    def _tick(self) -> None:
        if self._counters is not None:
            self.note("counters", dict(self._counters()))
        self._pack()
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _pack(self) -> None:
        """Move what is fresh into the ring, and the oldest out of it where it is full."""
        if not self._fresh:
            return
        body = msgpack.packb(self._fresh)
        self._chunks.append((self._count, body))
        self._count += len(self._fresh)
        self._fresh.clear()
        self._bytes += len(body)
        while self._bytes > RING_BYTES:
            self._bytes -= len(self._chunks.popleft()[1])


@dataclass(slots=True, eq=False)
class _ReaderOfAll(_Reader):
    asked: dict[Peer, asyncio.Task[None]] = field(default_factory=dict)  # that have not answered
    known: set[Peer] = field(default_factory=set)  # asked before
    came: list[Reading] = field(default_factory=list)  # not handed out yet
    turn: int = 0  # place of the task that is asked next


class SpanCollector:
    """Asks the tasks of one coordinator.

    Args:
        recorder: Of the coordinator's own task.
        peers: Returns a connection to each of the others.
    """

    def __init__(self, recorder: SpanRecorder, peers: Callable[[], Iterable[Peer]]) -> None:
        self._recorder = recorder
        self._peers = peers
        self._readers: dict[str, _ReaderOfAll] = {}

    async def read(self, name: str, *, last: bool = False) -> list[Reading]:
        """Return what has come since this reader has asked last; the first time they begin.

        Args:
            name: Of the reader, who is forgotten if it does not ask again for ten seconds.
            last: Whether it does not ask again: then tasks that compute are waited for, a while.

        Cancellation: Safe; what has come is handed out the next time.
        """
        reader = self._readers.setdefault(name, _ReaderOfAll())
        reader.renew(LEASE_S, self._forget, name)
        self._ask(reader, AskSpans(name, last))
        now, body = self._recorder.now(), self._recorder.read(name, last=last)
        reader.came.append(Reading(self._recorder.task, body, now, now))
        if reader.asked:
            within_s = LAST_WITHIN_S if last else ANSWERS_WITHIN_S
            await asyncio.wait(list(reader.asked.values()), timeout=within_s)
        came, reader.came = reader.came, []
        if last:
            self._forget(name)
        return came

    def close(self) -> None:
        """Forget all readers."""
        for name in list(self._readers):
            self._forget(name)
        self._recorder.close()

    def _forget(self, name: str) -> None:
        if (reader := self._readers.pop(name, None)) is not None:
            for task in reader.asked.values():
                task.cancel()
            reader.end_lease()

    def _ask(self, reader: _ReaderOfAll, message: AskSpans) -> None:
        """Ask those whose turn it is, those who are new, and in the end all."""
        peers = list(self._peers())
        new = [peer for peer in peers if peer not in reader.known]
        count = len(peers) if message.last else min(len(peers), ASKED_AT_ONCE)
        turn = [peers[(reader.turn + place) % len(peers)] for place in range(count)]
        reader.turn = (reader.turn + count) % max(1, len(peers))
        reader.known.intersection_update(peers)
        for peer in dict.fromkeys([*new, *turn]):
            if peer not in reader.asked:
                reader.known.add(peer)
                asking = self._ask_one(reader, peer, message)
                reader.asked[peer] = asyncio.get_running_loop().create_task(asking)

    async def _ask_one(self, reader: _ReaderOfAll, peer: Peer, message: AskSpans) -> None:
        try:
            asked = self._recorder.now()
            received = await peer.call(message)
            got = self._recorder.now()
            for segment in received.segments:
                reader.came.append(Reading(peer.task, bytes(segment), asked, got))
        except PsyncError:
            pass  # it is gone: what it has said before is there
        finally:
            del reader.asked[peer]


ReadSpans = Callable[..., Awaitable[list[Reading]]]
"""``read(name, last=False)``, as of a ``SpanCollector``; a PsyncError: there is nobody to be
asked."""


class Trace:
    """A stretch of a run that is being traced.

    Args:
        read: Asks the coordinator.
        program: Whose run it is, for the file.

    Attributes:
        began: Set when all tasks have been told.
        cut_short: Why it ended before it was to; "" if it did not.
        summary: What the file has; None before it is written.
    """

    def __init__(self, read: ReadSpans, program: str) -> None:
        self.began = asyncio.Event()
        self.cut_short = ""
        self.summary: Summary | None = None
        self._read = read
        self._program = program
        self._name = random_hex(8)
        self._ended = asyncio.Event()
        self._over = asyncio.Event()  # set when ``record`` is over
        self._readings: list[Reading] = []
        self._nbytes = 0

    def end(self) -> None:
        """Record nothing more."""
        self._ended.set()

    async def wait(self, ended: asyncio.Event) -> None:
        """Wait for an event, or until nothing is recorded any more. Cancellation: safe."""
        waiting = [asyncio.ensure_future(each.wait()) for each in (ended, self._over)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    async def record(self) -> None:
        """Read until ``end``, or until the run ends.

        Raises:
            PsyncError: Nothing could be read.

        Cancellation: Safe; tasks stop recording by themselves.
        """
        try:
            while not self._ended.is_set() and not self.cut_short:
                self._take(await self._read(self._name))
                self.began.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(READ_EVERY_S):
                        await self._ended.wait()
            self._take(await self._read(self._name, last=True))
        except PsyncError as exc:
            if not self._readings:
                raise
            self.cut_short = exc.message
        finally:
            self.began.set()
            self._over.set()

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        about = {"program": self._program, **({"ended": self.cut_short} if self.cut_short else {})}
        with path.open("w", encoding="utf-8") as file:
            self.summary = write_trace(self._readings, file, **about)
        self._readings.clear()

    def _take(self, readings: list[Reading]) -> None:
        self._readings += readings
        self._nbytes += sum(len(reading.body) for reading in readings)
        if self._nbytes > MAX_BYTES:
            self.cut_short = f"more than {MAX_BYTES >> 20} MiB were recorded"


@contextlib.asynccontextmanager
async def tracing(
    read: ReadSpans, program: str, path: str | os.PathLike[str]
) -> AsyncIterator[Trace]:
    """Return a context whose time is traced, all tasks of it, into a file.

    Args:
        read: Asks the coordinator.
        program: Whose run it is.
        path: Of the file, which is replaced if it is there.

    Raises:
        ConfigurationError: The file cannot be written.
        PsyncError: There is nobody to be asked.

    Cancellation: What was recorded is written.
    """
    draft = _draft(Path(path))
    try:
        trace = Trace(read, program)
        recording = asyncio.create_task(trace.record())
        try:
            await trace.began.wait()
            if recording.done():
                recording.result()  # nothing could be read
            yield trace
        finally:
            trace.end()
            await recording
            await asyncio.to_thread(trace.write, draft)
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    """Return an empty file, mode 600, beside the one that it will be. Raises ConfigurationError."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        fd, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
        os.close(fd)
    except OSError as exc:
        raise ConfigurationError(
            f"{path}: a trace cannot be written there: {exc.strerror}"
        ) from exc
    return Path(draft)
