"""One trace, from its beginning to its file: of a program's own coordinator, or of another one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Protocol

from psync.errors import ConfigurationError, PsyncError
from psync.net.platform import random_hex
from psync.net.tracing.chrome import Summary, write_trace
from psync.net.tracing.readings import Reading

READ_EVERY_S = 0.25
"""What a task has recorded since is lost with it, if it is killed."""

MAX_BYTES = 256 << 20
"""Of readings: they are in memory until the file is written."""


class ReadSpans(Protocol):
    """Returns what has been recorded since this reader has asked last."""

    async def __call__(self, name: str, *, last: bool = False) -> list[Reading]:
        """Raise a PsyncError if there is nobody to be asked."""


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

    def write(self, file: IO[str]) -> None:
        """Write the file. Raises OSError."""
        about = {"program": self._program, **({"ended": self.cut_short} if self.cut_short else {})}
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
            await asyncio.to_thread(_write, trace, draft)
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


def _write(trace: Trace, draft: Path) -> None:
    with draft.open("w", encoding="utf-8") as file:
        trace.write(file)
