"""What tasks print: whole lines, whatever the pieces they came in; and psync's own log."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import ConfigurationError
from psync.launch import task_output
from psync.launch.task_output import (
    MAX_LINE_CHARS,
    LineForwarder,
    configure_logging,
    write_stderr,
    write_stdout,
    write_whole_lines,
)


def forward(*chunks: bytes) -> str:
    """What a forwarder with the prefix ``> `` makes of a pipe that brings these chunks."""
    sent: list[str] = []
    forwarder = LineForwarder("> ", sent.append)
    for chunk in chunks:
        forwarder.feed(chunk)
        assert all(lines.endswith("\n") for lines in sent)
    forwarder.close()
    return "".join(sent)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
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
    ],
)
def test_lines_come_out_whole_and_prefixed(chunks: list[bytes], expected: str) -> None:
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
    assert max(map(len, lines)) == len("> ") + MAX_LINE_CHARS


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
    monkeypatch.setattr(task_output, "_told", set())
    written: list[str] = []
    room = False

    def sink(text: str) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(text)

    forwarders = [task_output.LineForwarder(f"[{name}] ", sink) for name in "ab"]
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
        handler = task_output._TaskLogHandler(full)
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
from psync.launch.task_output import release_blocked_output
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
from psync.launch.task_output import fill_standard_streams
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
    code = (
        "from psync.launch.task_output import write_stdout; write_stdout('x' * 999_999 + chr(10))"
    )
    read, write = os.pipe()
    os.set_blocking(write, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=write) as process:
        os.close(write)
        with open(read, "rb") as pipe:
            assert len(pipe.read()) == 1_000_000
        assert process.wait() == 0
