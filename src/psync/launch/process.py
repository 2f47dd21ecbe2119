"""The process of a task: its event loop, signals, the lifeline to its launcher.

The *lifeline* is a pipe that a task inherits: its end means that the launcher has gone, and the
task with it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import io
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TextIO, TypeVar

from psync.errors import ConfigurationError, check_fits, naming
from psync.net.platform import (
    FLAGS,
    Workforce,
    chief_timeouts,
    flag,
    inherited_file,
    limits_of,
    watchdog_timeout,
)
from psync.net.task_reports import report_on_signal

logger = logging.getLogger(__name__)

T = TypeVar("T")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Functions of the program travel as bytecode, which another version does not read."""

LAST_WORDS_S = 3.0
"""How long a worker may go on that is told to exit when its training session has ended. Less than
the launcher's patience (``GRACE_S``)."""


def run_loop(
    main: Callable[[], Awaitable[T]],
    *,
    terminated_code: int | None = None,
    last_words: asyncio.Event | None = None,
) -> T:
    """Run ``main`` on a new loop; SIGTERM, SIGHUP and Ctrl-C cancel it: everything is closed in
    order. A SIGHUP that is ignored (``nohup``), or for which the program has a handler, is left so.
    A handler that the program has set for SIGTERM is called when all is closed.

    SIGUSR1 is answered by a report of what the process does; see ``task_reports``. Processes that
    are forked meanwhile have the program's handlers.

    Args:
        main: Coroutine function without arguments.
        terminated_code: Exit code after SIGTERM and SIGHUP, whatever a handler of the program says:
            143, or 0 where a signal is the orderly end, as of a ps. None: 128 + the signal's
            number, unless a handler exits with another code.
        last_words: Once it is set, SIGTERM leaves ``main`` some seconds to end by itself. See also
            ``asked_first``.

    Raises:
        SystemExit: After a signal.
    """
    came: list[int] = []  # signals
    programs: dict[int, Any] = {signum: signal.getsignal(signum) for signum in _HANDLED}
    report_on_signal()

    async def body() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def terminate(is_first: bool, heard: threading.Event) -> None:
            heard.set()
            if is_first and _first_words is not None:
                _first_words()
            elif last_words is not None and last_words.is_set():
                loop.call_later(LAST_WORDS_S, task.cancel)
            else:
                task.cancel()

        def on_signal(signum: int, frame: object) -> None:
            came.append(signum)
            release_blocked_output(signum, frame)
            heard = threading.Event()
            loop.call_soon_threadsafe(terminate, len(came) == 1, heard)
            if _first_words is not None:
                watched = heard, len(came)
                threading.Thread(target=_watch, args=watched, daemon=True).start()

        # Not the loop's own handlers: those are not called while a step computes on the loop.
        signals = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signals.append(signal.SIGHUP)
        for signum in signals:
            signal.signal(signum, on_signal)
        for signum in _HANDLED:
            _handlers[signum] = signal.getsignal(signum), programs[signum]
        try:
            return await main()
        finally:
            _handlers.clear()
            for signum in signals:
                signal.signal(signum, programs[signum])

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(body())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        if came:
            sys.exit(0 if terminated_code == 0 else 128 + came[-1])
        raise
    finally:
        if came and callable(handler := programs[came[-1]]):
            with contextlib.suppress(*() if terminated_code is None else (SystemExit,)):
                handler(came[-1], None)


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_handlers: dict[int, tuple[Any, Any]] = {}
"""While ``run_loop`` runs, of each signal: the handler, and the one that was there before."""


_forking = threading.local()


def _before_fork() -> None:
    """Hold signals back: a child's could come before it has its handlers, and would be lost."""
    if _handlers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _after_fork(*, in_child: bool) -> None:
    """Let signals in again; a child first gets the handlers that the program has.

    Ours would note them for a loop that does not turn there; and the parent's loop, whose file they
    wake, would take them for its own.
    """
    mask = _forking.__dict__.pop("mask", None)
    if in_child and _handlers:
        signal.set_wakeup_fd(-1)
        for signum, (handler, before) in _handlers.items():
            if before is not None and signal.getsignal(signum) is handler:
                signal.signal(signum, before)
        _handlers.clear()
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, in_child=False),
    after_in_child=functools.partial(_after_fork, in_child=True),
)


_first_words: Callable[[], None] | None = None
"""What the first SIGTERM calls, instead of ending what ``run_loop`` runs."""

BUSY_S = 1.0
"""A loop that does not turn for so long computes: nothing can be said to what it runs."""


@contextlib.contextmanager
def asked_first(begin_to_end: Callable[[], None]) -> Iterator[None]:
    """Return a context in which the first SIGTERM calls ``begin_to_end``.

    The second ends what ``run_loop`` runs. While a step computes on the loop the first is only
    noted in the log, and the second ends the process with code 143 as it is.
    """
    global _first_words
    _first_words = begin_to_end
    try:
        yield
    finally:
        _first_words = None


def _watch(heard: threading.Event, came: int) -> None:
    """Say, or do, what the loop does not come to. Runs in a thread of its own."""
    if heard.wait(BUSY_S):
        return
    if came == 1:
        logger.info("SIGTERM waits for a computation on the event loop; a second SIGTERM ends it")
    else:
        logger.warning("a second SIGTERM ends this process during a computation")
        logging.shutdown()
        os._exit(128 + signal.SIGTERM)


def check_settings(environ: Mapping[str, str]) -> None:
    """Read the variables of tasks: one error here, before any is started, and not one on each.

    Raises:
        ConfigurationError: The value of one makes no sense.
    """
    from psync.status.http import checked_address  # a task needs it only where it serves

    for variable in FLAGS:
        flag(environ, variable)
    limits_of(environ)
    chief_timeouts(environ)
    watchdog_timeout(environ)
    loop_name(environ)
    for variable in ("PSYNC_METRICS", "PSYNC_TASK_METRICS", "PSYNC_DASHBOARD"):
        if address := environ.get(variable):  # whether it can be served is seen where it is
            with naming(variable):
                checked_address(variable.rpartition("_")[2].lower(), address)


def loop_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return "uvloop" or "asyncio".

    Raises:
        ConfigurationError: If ``PSYNC_LOOP`` names neither.
    """
    name = environ.get("PSYNC_LOOP", "uvloop")
    check_fits(name in ("uvloop", "asyncio"), "PSYNC_LOOP: expected uvloop or asyncio", name)
    return name


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, where it is installed and not turned off with ``PSYNC_LOOP=asyncio``.

    Raises:
        ConfigurationError: See ``loop_name``.
    """
    name = loop_name()
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        if name == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def _heard(fd: int, hear: Callable[[], None]) -> Iterator[None]:
    """Return a context in which ``hear`` is called when an inherited pipe can be read."""
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, hear)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        os.close(fd)


@contextlib.contextmanager
def end_of_run(fd: int) -> Iterator[asyncio.Event]:
    """Return a context manager for an event that is set once the launcher says that the run ends.

    Args:
        fd: Read end of a pipe, ``PSYNC_RUN_FD``, which is closed with the context. Nobody writes
            to it; its end is the message, so that one who begins to listen late hears it too.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def ended() -> None:
        loop.remove_reader(fd)
        over.set()

    with _heard(fd, ended):
        yield over


@contextlib.contextmanager
def following_launcher(workforce: Workforce) -> Iterator[None]:
    """Return a context manager in which a chief hears which workers its launcher starts and ends.

    It hears it by a pipe, ``PSYNC_WORKERS_FD``: a line of JSON for each change. ``TF_CONFIG`` is
    changed as well, so that the program's next strategy is made of the workers that there are then.

    Args:
        workforce: What is told.
    """
    fd = inherited_file("PSYNC_WORKERS_FD")
    if fd is None:
        yield
        return
    loop, lines = asyncio.get_running_loop(), [b""]

    def hear() -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:  # the launcher has gone; the lifeline says so, too
            loop.remove_reader(fd)
        *whole, lines[0] = (lines[0] + data).split(b"\n")
        for line in whole:
            news = json.loads(line)
            config = json.loads(os.environ["TF_CONFIG"])
            config["cluster"]["worker"] = news["workers"]
            os.environ["TF_CONFIG"] = json.dumps(config)
            added = {int(index): address for index, address in news["added"].items()}
            workforce.change(added, news["removed"])

    with _heard(fd, hear):
        hear()  # what has changed while this process started
        yield


GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""


def watch_launcher(*, grace_s: float = GRACE_S) -> None:
    """End this process when the launcher that started it has gone, in whatever way that happened.

    A daemon thread reads the lifeline. At its end this process and all it has started get SIGTERM;
    if it is there ``grace_s`` seconds later, they are killed.

    Args:
        grace_s: Seconds between SIGTERM and the end.
    """
    if lifeline := os.environ.pop("PSYNC_LIFELINE_FD", None):
        fd = int(lifeline)
        os.set_inheritable(fd, False)
        threading.Thread(
            target=_end_with_launcher, args=(fd, grace_s), name="psync-lifeline", daemon=True
        ).start()


def _end_with_launcher(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):  # nobody writes to it; its end is the message
        continue
    leads = os.getpgrp() == os.getpid()  # else others are in the group, which we did not start
    signal_all = os.killpg if leads else os.kill
    signal_all(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    signal_all(os.getpid(), signal.SIGKILL)


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
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
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
        if not lines or self._sink is None:
            return
        try:
            self._sink("".join(f"{self._prefix}{line}\n" for line in lines))
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
