"""`psync trace` on the command line: its output and its errors; beside a run: tests/processes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from psync.cli import trace as command
from psync.cli.main import main
from psync.errors import ConfigurationError, DeadlineExceeded
from psync.net.tracing.chrome import Summary
from psync.net.tracing.readings import Reading
from psync.net.tracing.stretch import Trace
from psync.status import reading
from psync.status.model import Status
from psync.status.run_files import Run, run_file
from trace_events import TraceFile
from traced_by_hand import CHIEF, ByHand

STATUS = Status(1.0, 7, "train.py", 2.0, 3.0, "running", "nothing")


class Reader:
    """A run whose chief does nothing; after so many questions it has ended."""

    def __init__(self, answers: float = math.inf, then: Exception | None = None) -> None:
        self._answers = answers
        self._then = then or ConfigurationError("train.py (process 7) has ended")
        self._chief = ByHand(CHIEF)
        self.last = False

    async def read(self) -> Status:
        if self._answers < 0:
            raise self._then
        return STATUS

    async def read_spans(self, name: str, *, last: bool = False) -> list[Reading]:
        self._answers -= 1
        if self._answers < 0:
            raise self._then
        self.last = last
        return [self._chief.reading(1.0)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The run file of a program."""
    path = tmp_path / "7.json"
    with run_file(path, Run(7, 1.0, "train.py", f"unix:{path}.sock", "ab" * 32)):
        yield path


def answering(monkeypatch: pytest.MonkeyPatch, reader: Reader) -> Reader:
    monkeypatch.setattr(reading, "reading_status", lambda run: contextlib.nullcontext(reader))
    return reader


def test_a_file_is_written_and_said_how_to_open(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader = answering(monkeypatch, Reader())
    out = tmp_path / "out.json"
    assert main(["trace", str(out), str(run), "--seconds", "0.1"]) == 0
    said = capsys.readouterr()
    assert said.err == "recording train.py for 0.1 s ...\n"
    assert said.out == (f"{out}: 0 events of 0.0 s, 1 tasks; open it at https://ui.perfetto.dev\n")
    assert list(TraceFile(out).tasks.values()) == ["chief"]
    assert out.stat().st_mode & 0o777 == 0o600
    assert reader.last


def test_ctrl_c_ends_it_sooner(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interrupted(Reader):
        async def read_spans(self, name: str, *, last: bool = False) -> list[Reading]:
            if self._answers == 9:
                os.kill(os.getpid(), signal.SIGINT)
            return await super().read_spans(name, last=last)

    answering(monkeypatch, Interrupted(10))
    assert main(["trace", str(tmp_path / "out.json"), str(run), "--seconds", "1000"]) == 0
    assert (tmp_path / "out.json").exists()


def test_a_run_that_ends_meanwhile_leaves_what_there_was(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering(monkeypatch, Reader(1))
    assert main(["trace", str(tmp_path / "out.json"), str(run), "--seconds", "1000"]) == 0
    assert "it ends early: train.py (process 7) has ended\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigurationError("train.py (process 7) has ended"), "train.py (process 7) has ended"),
        (DeadlineExceeded("no answer", hint="wait"), "no answer"),
    ],
)
def test_a_run_that_does_not_answer_is_one_error(
    error: Exception, text: str, run: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    answering(monkeypatch, Reader(0, error))
    assert main(["trace", str(tmp_path / "out.json"), str(run)]) == 2
    assert f"psync: error: {text}" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_run_that_has_ended_is_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["trace", str(tmp_path / "out.json"), str(tmp_path / "7.json")]) == 2
    assert "there is no such file: has the run ended?" in capsys.readouterr().err


def test_a_run_log_cannot_be_traced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "RUN.jsonl"
    log.write_text('{"psync_run_log": 1, "program": "train.py", "interval_s": 1.0}\n{}\n')
    log.chmod(0o600)
    assert main(["trace", str(tmp_path / "out.json"), str(log)]) == 2
    error = capsys.readouterr().err
    assert "only running programs can be traced" in error
    assert f"psync dashboard {log}" in error


def test_where_the_file_cannot_be_written_it_says_so(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering(monkeypatch, Reader())
    assert main(["trace", str(tmp_path / "no" / "out.json"), str(run)]) == 2
    assert "a trace cannot be written there: No such file" in capsys.readouterr().err


def test_what_was_dropped_and_how_well_clocks_are_aligned_is_said() -> None:
    trace = Trace(Reader().read_spans, "train.py")
    trace.summary = Summary(["chief", "ps-0"], 5.0, 100, {"ps-0": 7}, 0.0042)
    assert command._lines(Path("out.json"), trace) == [
        "out.json: 100 events of 5.0 s, 2 tasks; open it at https://ui.perfetto.dev",
        "ps-0: 7 events were dropped, since more came than could be asked for",
        "clocks of tasks are aligned within 4.2 ms only",
    ]
