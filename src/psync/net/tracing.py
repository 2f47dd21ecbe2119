"""A stretch of a run that is being traced, and its file; see ``net.trace``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from psync.errors import ConfigurationError, PsyncError
from psync.net.platform import random_hex
from psync.net.trace_file import Reading, Summary, write_trace

READ_EVERY_S = 0.25
"""A task that is killed loses its entries since the last reading."""

MAX_BYTES = 256 << 20
"""Limit of the readings, which stay in memory until the file is written."""

ReadSpans = Callable[..., Awaitable[list[Reading]]]
"""``read(name, last=False)`` of a ``SpanCollector``; a PsyncError: the run has ended."""


class Trace:
    """A stretch of a run that is being traced.

    Args:
        read: Asks the coordinator.
        program: Name of the program, for the file.

    Attributes:
        began: Set when all tasks record.
        ended: Ends recording when it is set; set when that has ended.
        cut_short: Why it ended early; "" if it did not.
        summary: Contents of the file; None before it is written.
    """

    def __init__(self, read: ReadSpans, program: str) -> None:
        self.began = asyncio.Event()
        self.ended = asyncio.Event()
        self.cut_short = ""
        self.summary: Summary | None = None
        self._read = read
        self._program = program
        self._name = random_hex(8)
        self._readings: list[Reading] = []
        self._nbytes = 0

    async def record(self) -> None:
        """Read until ``ended`` is set, or until the run ends.

        Raises:
            PsyncError: Nothing could be read.

        Cancellation: Safe; tasks stop recording automatically.
        """
        try:
            while not self.ended.is_set() and not self.cut_short:
                self._take(await self._read(self._name))
                self.began.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(READ_EVERY_S):
                        await self.ended.wait()
            self._take(await self._read(self._name, last=True))
        except PsyncError as exc:
            if not self._readings:
                raise
            self.cut_short = exc.message
        finally:
            self.began.set()
            self.ended.set()

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
        recording = asyncio.create_task(trace.record())
        try:
            await trace.began.wait()
            if recording.done():
                recording.result()  # nothing could be read
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
