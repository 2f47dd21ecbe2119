"""The output of tasks, and the log of one.

A launcher reads the pipes of its tasks and forwards them line by line, each with the task's name,
so that lines of different tasks never mix. A task's own log goes to its stderr, in a way that
leaves the user's logging alone.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

from psync.errors import ConfigurationError

MAX_LINE_CHARS = 64 * 1024
"""So that a task that prints no newline cannot fill the launcher's memory."""

Sink = Callable[[str], None]


def write_stdout(text: str) -> None:
    """Write to what ``sys.stdout`` is now, which in a notebook is not file descriptor 1."""
    _write(sys.stdout, text)


def write_stderr(text: str) -> None:
    """Write to what ``sys.stderr`` is now."""
    _write(sys.stderr, text)


def say(text: str) -> None:
    """Say something about a run on stderr."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        write_stderr(f"psync: {text}\n")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # Python sets it to None where the descriptor was closed before it started
        return
    encoding = stream.encoding or "utf-8"  # a StringIO has none
    data = text.encode(encoding, "replace")
    fd = None
    if type(stream) is io.TextIOWrapper:  # and not what stands for one
        with contextlib.suppress(OSError):  # it is over memory
            fd = stream.fileno()
    if fd is None:
        stream.write(data.decode(encoding))
        stream.flush()
        return
    stream.flush()
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # whoever shares it with us wants it so; Python would lose the rest
            select.select([], [fd], [])


def fill_standard_streams() -> None:
    """Open /dev/null in place of stdin, stdout and stderr where they are closed.

    Or the next socket would get the number of one of them, and with it what somebody prints.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def release_blocked_output(signum: int, frame: object) -> None:
    """Send stdout and stderr to nowhere where a write would wait now, because nobody reads.

    A handler of ``signal.signal`` for signals that end the process: a loop that is blocked in such
    a write would not hear of them. The write is interrupted, and goes on to /dev/null. It is set
    after the loop's ``add_signal_handler``, which is served as before: ``signal.signal`` makes the
    signal interrupt system calls, which the loop had turned off.
    """
    for fd in (1, 2):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            if not select.select([], [fd], [], 0)[1]:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)


def write_whole_lines() -> None:
    """Let ``print`` write each line in one piece, at its end.

    A launcher starts its tasks unbuffered, so that nothing is lost with them. Then every part of a
    line is a write of its own, and in a pipe that the chief shares with its launcher the lines of
    other tasks would come in between.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


_told: set[int | None] = set()  # errors of output that were told of


class LineForwarder:
    r"""Turns the bytes of one pipe into whole lines with a prefix.

    ``\n``, ``\r\n`` and a lone ``\r`` (progress bars) end a line. Bytes that are not UTF-8 are
    replaced. A line above 64 Ki characters goes out in pieces. A task does not die because nobody
    reads what it prints: once whoever read it has gone, output is dropped; while the disk is full,
    what comes is lost, and that is said once on stderr.

    Args:
        prefix: Put before every line.
        sink: Called with one or more whole lines.
    """

    def __init__(self, prefix: str, sink: Sink) -> None:
        self._prefix = prefix
        self._sink: Sink | None = sink  # None once it has failed
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._rest = ""  # of the line that has not ended

    def feed(self, data: bytes) -> None:
        """Take bytes as they came from the pipe."""
        self._take(self._decoder.decode(data))

    def close(self) -> None:
        """The pipe is at its end: send what is left, as a line."""
        self._take(self._decoder.decode(b"", final=True), is_last=True)

    def _take(self, text: str, *, is_last: bool = False) -> None:
        *lines, rest = (self._rest + text).split("\n")
        if len(rest) > MAX_LINE_CHARS or (rest and is_last):
            lines, rest = [*lines, rest], ""
        self._rest = rest
        pieces = [
            f"{self._prefix}{line[start : start + MAX_LINE_CHARS]}\n"
            for line in lines
            for start in range(0, max(len(line), 1), MAX_LINE_CHARS)  # an empty line is a line
        ]
        if not pieces or self._sink is None:
            return
        try:
            self._sink("".join(pieces))
        except (BrokenPipeError, ValueError):  # nobody reads it; a closed file
            self._sink = None
        except OSError as exc:  # no space left: there may be some later
            if exc.errno not in _told:
                _told.add(exc.errno)
                with contextlib.suppress(OSError, ValueError):  # that is full, too
                    write_stderr(f"psync: output of tasks is lost: {exc.strerror or exc}\n")


class _TaskLogHandler(logging.StreamHandler[TextIO]):
    """Speaks only while the root logger has no handler, which would get the record as well."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose a record that cannot be written: a traceback for each would go the same way."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))


def configure_logging(level: str | int = "INFO", task: str | None = None) -> None:
    """Show psync's log on stderr as ``HH:MM:SS level name: message``.

    Only the logger ``psync`` is touched. As soon as the program gives the root logger a handler
    (``logging.basicConfig``), before or after this call, psync's records go there and nowhere else.
    Calling it again replaces what the earlier call set.

    Args:
        level: Lowest level shown: a name, in upper or lower case, or a number.
        task: Put before each line. None under a launcher, which does that itself.

    Raises:
        ConfigurationError: If there is no level of that name.
    """
    logger = logging.getLogger("psync")
    try:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    except ValueError:
        raise ConfigurationError(
            f"log level: expected debug, info, warning, error or critical, got {level!r}"
        ) from None
    for handler in logger.handlers[:]:
        if isinstance(handler, _TaskLogHandler):
            logger.removeHandler(handler)
    prefix = "" if task is None else f"[{task}] "
    line = f"{prefix}%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler = _TaskLogHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    logger.addHandler(handler)
