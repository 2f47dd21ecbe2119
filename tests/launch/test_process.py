"""The process of a task: loop, signals, lifeline, output."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from process_tools import script, watching
from psync.closures.scaling import Load
from psync.errors import ConfigurationError
from psync.launch import process
from psync.launch.process import (
    MAX_LINE_CHARS,
    LineForwarder,
    configure_logging,
    end_of_run,
    following_launcher,
    loop_factory,
    run_loop,
    write_stderr,
    write_stdout,
    write_whole_lines,
)
from psync.net.platform import Workforce
from psync.net.resolvers import TFConfigClusterResolver
from psync.testing import settle


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSYNC_LOOP", raising=False)


def test_the_loop_is_uvloops_unless_the_standard_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert loop_factory() is uvloop.new_event_loop
    monkeypatch.setenv("PSYNC_LOOP", "asyncio")
    assert loop_factory() is None
    monkeypatch.setenv("PSYNC_LOOP", "trio")
    with pytest.raises(ConfigurationError, match="expected uvloop or asyncio, got 'trio'"):
        loop_factory()


@pytest.mark.parametrize(
    ("signum", "terminated_code", "code"),
    [
        (signal.SIGTERM, 0, 0),
        (signal.SIGTERM, 143, 143),
        (signal.SIGHUP, 0, 0),
        (signal.SIGHUP, 143, 129),
        (signal.SIGINT, None, 130),
    ],
)
def test_a_signal_cancels_what_runs_and_ends_the_process_with_its_code(
    signum: signal.Signals, terminated_code: int | None, code: int
) -> None:
    cleaned = []
    before = signal.getsignal(signum)

    async def main() -> None:
        try:
            signal.raise_signal(signum)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    with pytest.raises(SystemExit) as caught:
        run_loop(main, terminated_code=terminated_code)
    assert caught.value.code == code
    assert cleaned == ["yes"]
    assert signal.getsignal(signum) is before


def test_last_words_that_take_too_long_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    last_words = asyncio.Event()

    async def main() -> None:
        last_words.set()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(process, "LAST_WORDS_S", 0.01)
    with pytest.raises(SystemExit) as caught:
        run_loop(main, last_words=last_words)
    assert caught.value.code == 143


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_first_sigterm_asks_what_runs_to_end_and_wakes_a_loop_that_sleeps(
    monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setenv("PSYNC_LOOP", loop)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))

    async def main() -> str:
        asked = asyncio.Event()
        with process.asked_first(asked.set):
            timer.start()
            await asked.wait()
        return "the end"

    assert run_loop(main) == "the end"
    timer.join()


def test_the_second_sigterm_ends_what_was_asked_to_end() -> None:
    asked = []

    async def main() -> None:
        with process.asked_first(lambda: asked.append("once")):
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(SystemExit) as caught:
        run_loop(main, terminated_code=0)
    assert caught.value.code == 0
    assert asked == ["once"]


@pytest.mark.parametrize(("terminated_code", "code"), [(None, 7), (143, 143), (0, 0)])
def test_a_handler_of_the_program_is_called_when_all_is_closed(
    terminated_code: int | None, code: int
) -> None:
    """Its exit code is that of a program, not of a task that serves."""
    heard = []

    def handler(signum: int, frame: object) -> None:
        heard.append(f"signal {signum}")
        sys.exit(7)

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            heard.append("closed")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as caught:
            run_loop(main, terminated_code=terminated_code)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["closed", "signal 15"]
    assert caught.value.code == code


def test_a_handler_of_the_program_is_called_where_a_task_leaves_in_order() -> None:
    heard = []

    async def main() -> None:
        asked = asyncio.Event()
        with process.asked_first(asked.set):
            signal.raise_signal(signal.SIGTERM)
            await asked.wait()

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("heard"))
    try:
        run_loop(main)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["heard"]


# --- forked children -----------------------------------------------------------------------------

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handlers_of_child() -> list[Any]:
    """Fork, and return what the child says of its handlers, and of the file that wakes a loop."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        handlers = [repr(signal.getsignal(signum)) for signum in HANDLED]
        os.write(write_end, json.dumps([*handlers, signal.set_wakeup_fd(-1)]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as said:
        found: list[Any] = json.load(said)
    return found


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_forked_child_has_the_handlers_that_the_program_had(
    monkeypatch: pytest.MonkeyPatch, loop: str, in_thread: bool
) -> None:
    monkeypatch.setenv("PSYNC_LOOP", loop)

    def handler(*_: object) -> None: ...

    async def main() -> list[Any]:
        ours = [signal.getsignal(signum) for signum in HANDLED]
        found = await asyncio.to_thread(handlers_of_child) if in_thread else handlers_of_child()
        assert [signal.getsignal(signum) for signum in HANDLED] == ours
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(HANDLED)
        return found

    before = signal.signal(signal.SIGTERM, handler)
    try:
        told = [repr(signal.getsignal(signum)) for signum in HANDLED]
        assert run_loop(main) == [*told, -1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_as_soon_as_a_child_is_forked_ends_it() -> None:
    async def main() -> None:
        for _ in range(50):
            child = os.fork()
            if not child:
                signal.pause()
                os._exit(1)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM

    run_loop(main)


def test_a_child_hears_a_handler_that_the_program_has_set_meanwhile() -> None:
    async def main() -> list[Any]:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            return handlers_of_child()
        finally:
            signal.signal(signal.SIGTERM, before)

    assert run_loop(main)[1] == repr(signal.SIG_IGN)


# --- the end of the run --------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
async def test_the_end_of_a_pipe_is_the_end_of_the_run_also_to_one_who_listens_late(late):
    read_end, write_end = os.pipe()
    if late:
        os.close(write_end)
    with end_of_run(read_end) as over:
        await asyncio.sleep(0)
        if not late:
            assert not over.is_set()
            os.close(write_end)
        await over.wait()


async def test_the_pipe_is_closed_with_the_context() -> None:
    read_end, write_end = os.pipe()
    with end_of_run(read_end) as over:
        pass
    os.close(write_end)
    assert not over.is_set()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_hangup_that_is_ignored_or_handled_stays_so(handler: Any) -> None:
    async def main() -> str:
        signal.raise_signal(signal.SIGHUP)
        await settle()  # a cancellation would come in the next turn
        return "went on"

    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert run_loop(main) == "went on"
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_chief_hears_of_workers_and_its_next_strategy_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv("PSYNC_WORKERS_FD", f"{read_end}:{os.fstat(read_end).st_ino}")
    config = {"cluster": {"ps": ["a:1"], "worker": ["b:1", "b:2"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    workforce, follower = Workforce(), Follower()
    workforce.follow(follower)
    first = {"added": {"2": "b:3"}, "removed": [], "workers": {"0": "b:1", "1": "b:2", "2": "b:3"}}
    second = {"added": {}, "removed": [2, 1], "workers": {"0": "b:1"}}
    news = f"{json.dumps(first)}\n{json.dumps(second)}\n".encode()
    with following_launcher(workforce):
        for part in (news[:30], news[30:]):  # a pipe knows no lines
            os.write(write_end, part)
            await turns_of_io()
        os.close(write_end)
        await turns_of_io()
    assert follower.heard == [({}, []), ({2: "b:3"}, []), ({}, [2, 1])]
    assert TFConfigClusterResolver().cluster_spec().as_dict()["worker"] == ["b:1"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


async def turns_of_io() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Follower:
    def __init__(self) -> None:
        self.heard: list[tuple[dict[int, str], list[int]]] = []

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        self.heard.append((dict(added), list(removed)))
        return []

    def load(self) -> Load:
        return Load()


async def test_without_a_launcher_nobody_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_WORKERS_FD", "0:0")  # inherited from a chief: another file is there
    with following_launcher(Workforce()):
        pass


@contextlib.contextmanager
def on_a_lifeline(*kind: str) -> Iterator[tuple[list[int], list[select.poll], int]]:
    """A sleeper that leads a session: its process ids, their ends, our end of its lifeline."""
    read_end, write_end = os.pipe()
    command = script("sleeper.py", *kind)
    environ = {**os.environ, "PSYNC_LIFELINE_FD": str(read_end)}
    with contextlib.ExitStack() as stack:
        with open(read_end, "rb"):
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environ,
                    stdout=subprocess.PIPE,
                    pass_fds=[read_end],
                    start_new_session=True,
                )
            )
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2 if kind else 1)]
        ends = [stack.enter_context(watching(pid)) for pid in pids]
        yield pids, ends, write_end


@pytest.mark.processes
@pytest.mark.parametrize("kind", [(), ("parent",), ("parent", "stubborn")])
def test_a_task_and_what_it_has_started_end_when_the_launcher_has_gone(
    kind: tuple[str, ...],
) -> None:
    with on_a_lifeline(*kind) as (_, ends, write_end):
        assert not any(end.poll(0) for end in ends)
        os.close(write_end)
        for end in ends:
            end.poll()


def forward(*chunks: bytes) -> str:
    """What a forwarder with the prefix ``> `` makes of a pipe that brings these chunks."""
    sent: list[str] = []
    forwarder = LineForwarder("> ", sent.append)
    for chunk in chunks:
        forwarder.feed(chunk)
        assert all(lines.endswith("\n") for lines in sent)
    forwarder.close()
    return "".join(sent)


def test_lines_come_out_whole_and_prefixed() -> None:
    for chunks, expected in [
        ([], ""),
        ([b"one\n"], "> one\n"),
        ([b"one\ntwo\n"], "> one\n> two\n"),
        ([b"o", b"n", b"e\ntw", b"o\n"], "> one\n> two\n"),
        ([b"no newline at the end"], "> no newline at the end\n"),
        ([b"\n\n"], "> \n> \n"),
        ([b"dos\r\nline\r\n"], "> dos\n> line\n"),
        ([b"dos\r", b"\nline"], "> dos\n> line\n"),
        ([b" 10%\r 20%\r", b"100%\n"], ">  10%\n>  20%\n> 100%\n"),
        ([b"ends with \r"], "> ends with \n"),
        (["größe\n".encode()[:3], "größe\n".encode()[3:]], "> größe\n"),
        ([b"\xff\xfe?\n"], "> \ufffd\ufffd?\n"),
        ([b"cut \xc3"], "> cut \ufffd\n"),
    ]:
        assert forward(*chunks) == expected


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_the_pieces_in_which_output_arrives_make_no_difference(
    data: bytes, cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert forward(*pieces) == forward(data)


def test_a_line_without_end_goes_out_in_pieces_while_it_comes() -> None:
    sent: list[str] = []
    forwarder = LineForwarder("> ", sent.append)
    for _ in range(3):
        forwarder.feed(b"x" * MAX_LINE_CHARS)
    assert sum(lines.count("x") for lines in sent) >= 2 * MAX_LINE_CHARS
    forwarder.close()
    lines = "".join(sent).splitlines()
    assert "".join(line.removeprefix("> ") for line in lines) == "x" * 3 * MAX_LINE_CHARS
    assert max(map(len, lines)) <= len("> ") + 2 * MAX_LINE_CHARS


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_output_is_dropped_once_nobody_reads_it(error: Exception) -> None:
    calls: list[str] = []

    def sink(lines: str) -> None:
        calls.append(lines)
        raise error

    forwarder = LineForwarder("> ", sink)
    forwarder.feed(b"one\n")
    forwarder.feed(b"two\n")
    forwarder.close()
    assert calls == ["> one\n"]


def test_the_writers_use_what_the_streams_are_at_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    write_stdout("to out\n")
    write_stderr("to err\n")
    assert (out.getvalue(), err.getvalue()) == ("to out\n", "to err\n")


def test_characters_that_the_stream_cannot_encode_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    write_stdout("größe\n")
    assert raw.getvalue() == b"gr??e\n"


def test_writing_to_a_closed_descriptor_that_python_gave_up_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    write_stdout("nobody sees this\n")


# --- configure_logging -------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_logging() -> Iterator[logging.Logger]:
    """A logger of psync's in a program that has not set up logging (pytest has, in every test)."""
    root, psync = logging.getLogger(), logging.getLogger("psync")
    before = root.handlers, psync.handlers, root.level, psync.level
    root.handlers, psync.handlers = [], []
    try:
        yield psync.getChild("rpc")
    finally:
        root.handlers, psync.handlers, root.level, psync.level = before
        psync.setLevel(psync.level)  # forgets which levels its loggers had found enabled


LINE = r"\d\d:\d\d:\d\d WARNING psync\.rpc: lost it\n"


def test_log_lines_have_time_level_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logging() as log:
        configure_logging("info")
        log.warning("lost %s", "it")
        log.debug("not shown")
        assert re.fullmatch(LINE, capsys.readouterr().err)


def test_log_lines_have_the_name_of_the_task_if_it_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fresh_logging() as log:
        configure_logging("INFO", "worker-0")
        log.warning("lost it")
        assert re.fullmatch(r"\[worker-0\] " + LINE, capsys.readouterr().err)


def test_configuring_again_replaces_the_earlier_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fresh_logging() as log:
        configure_logging("debug", "worker-0")
        configure_logging(logging.WARNING)
        log.info("not shown")
        log.warning("lost it")
        assert re.fullmatch(LINE, capsys.readouterr().err)


def test_a_program_that_sets_up_logging_later_gets_each_record_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fresh_logging() as log:
        configure_logging("info")
        logging.basicConfig(format="mine: %(message)s")
        log.warning("lost it")
        assert capsys.readouterr().err == "mine: lost it\n"


def test_the_logging_of_the_program_itself_is_left_alone() -> None:
    with fresh_logging():
        level = logging.getLogger().level
        handler = logging.NullHandler()
        logging.getLogger("psync").addHandler(handler)
        configure_logging("debug")
        assert handler in logging.getLogger("psync").handlers
        assert logging.getLogger().handlers == []
        assert logging.getLogger().level == level


def test_an_unknown_log_level_is_refused() -> None:
    with fresh_logging():
        with pytest.raises(ConfigurationError) as caught:
            configure_logging("loud")
        assert str(caught.value) == (
            "log level: expected debug, info, warning, error or critical, got 'loud'"
        )


class Writes(io.RawIOBase):
    """A raw stream that notes each write, as an unbuffered stdout is."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.pieces.append(bytes(data))  # type: ignore[call-overload]
        return len(self.pieces[-1])


def test_an_unbuffered_task_writes_each_line_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Writes()
    unbuffered = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)  # type: ignore[type-var]
    monkeypatch.setattr(sys, "stdout", unbuffered)
    print("ready", 1)
    assert len(raw.pieces) > 1  # what another task's line may come in between
    raw.pieces.clear()
    write_whole_lines()
    print("ready", 1)
    print("ready", 2)
    assert raw.pieces == [b"ready 1\n", b"ready 2\n"]


# --- output that nobody takes ------------------------------------------------------------------


def test_lines_that_meet_a_full_disk_are_lost_and_told_of_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_told", set())
    written: list[str] = []
    room = False

    def sink(text: str) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(text)

    forwarders = [LineForwarder(f"[{name}] ", sink) for name in "ab"]
    for forwarder in forwarders:
        forwarder.feed(b"lost\n")
        forwarder.feed(b"lost, too\n")
    room = True
    for forwarder in forwarders:
        forwarder.feed(b"kept\n")
    assert written == ["[a] kept\n", "[b] kept\n"]
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["psync: output of tasks is lost: No space left on device"]


def test_a_record_that_meets_a_full_disk_is_lost_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with open("/dev/full", "w") as full:
        handler = process._TaskLogHandler(full)
        record = logging.LogRecord("psync", logging.INFO, "", 1, "lost", (), None)
        handler.emit(record)
        assert capfd.readouterr().err == ""
        record.args = ("too many",)
        handler.emit(record)  # a mistake of the program's is shown as ever
        assert "--- Logging error ---" in capfd.readouterr().err
        with contextlib.suppress(OSError):
            full.close()


def test_a_blocked_write_goes_on_to_nowhere_and_others_stay() -> None:
    code = """
import os, signal, sys
from psync.launch.process import release_blocked_output
signal.signal(signal.SIGALRM, release_blocked_output)
signal.setitimer(signal.ITIMER_REAL, 0.2)
os.write(1, b"x" * 1_000_000)
os.write(2, b"stderr has a reader\\n")
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.wait() == 0
        assert process.stderr.read() == b"stderr has a reader\n"


def test_closed_descriptors_are_filled_and_open_ones_stay() -> None:
    code = """
import os
from psync.launch.process import fill_standard_streams
fill_standard_streams()
other = os.open("/dev/null", os.O_RDONLY)
assert other > 2, other
os.write(1, b"lost"); os.write(2, b"kept")
fill_standard_streams()
assert os.open("/dev/null", os.O_RDONLY) == other + 1
"""
    ended = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" <&- >&-', sys.executable, code], capture_output=True, check=True
    )
    assert (ended.stdout, ended.stderr) == (b"", b"kept")


def test_a_descriptor_that_does_not_wait_loses_nothing() -> None:
    """Some parents hand on such pipes."""
    code = "from psync.launch.process import write_stdout; write_stdout('x' * 999_999 + chr(10))"
    read, write = os.pipe()
    os.set_blocking(write, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=write) as process:
        os.close(write)
        with open(read, "rb") as pipe:
            assert len(pipe.read()) == 1_000_000
        assert process.wait() == 0
