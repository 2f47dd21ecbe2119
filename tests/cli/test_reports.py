"""psync checkpoint, top, trace and dashboard on the command line; beside a run: tests/processes."""

from __future__ import annotations

import asyncio
import io
import math
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from rich.console import Console

from data_files import add_data
from psync.checkpoints.files import Writer
from psync.cli import main as command_line
from psync.cli.main import main
from psync.errors import ConfigurationError, DeadlineExceeded, RemoteProtocolError
from psync.launch.process import run_loop
from psync.net.trace import Trace
from psync.net.trace_file import Reading, Summary
from psync.status import serving
from psync.status.dashboard.run_log import RunLog
from psync.status.model import Status
from psync.status.run_files import Run, run_file
from statuses import status, worker
from trace_events import TraceFile
from traced_by_hand import CHIEF, ByHand


def save(directory: Path, number: int, value: float) -> str:
    shapes = {"model/w": ((4,), "float32")}
    writer = Writer(directory, f"ckpt-{number:08d}", number, shapes, {"epoch": number})
    add_data(writer, "data", ("model/w", 0, np.full(4, value, np.float32)))
    return str(writer.commit())


def test_complete_checkpoints_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 1.0)
    (tmp_path / "ckpt-00000003.tmp").mkdir()
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ckpt-00000001", "ckpt-00000002"]


def test_what_is_in_one_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", save(tmp_path, 1, 1.0)]) == 0
    assert capsys.readouterr().out == "model/w  float32[4]  16 B\nepoch  1\n"


def test_differences_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = save(tmp_path, 1, 1.0), save(tmp_path, 2, 1.5)
    assert main(["checkpoint", "diff", first, first]) == 0
    assert capsys.readouterr().out == ""
    assert main(["checkpoint", "diff", first, second]) == 1
    assert capsys.readouterr().out == "model/w  values: 4 elements, by 0.5 at most\nepoch  state\n"


def test_an_export_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    path = save(tmp_path, 1, 1.0)
    assert main(["checkpoint", "export", path, str(out), "--only", "model"]) == 0
    assert capsys.readouterr().out == f"{out / 'model.safetensors'}\n"


def test_what_is_no_checkpoint_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no checkpoint here" in captured.err


def test_a_path_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["checkpoint", "--help"]) == 0
    assert "psync checkpoint export" in capsys.readouterr().out


R = TypeVar("R")

STATUS = Status(1.0, 7, "train.py", 2.0, 3.0, "running", "nothing")


class Reader:
    """Answers from a list, in turn."""

    def __init__(self, *answers: Status | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def read(self) -> Status:
        self.asked += 1
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run file of a program that does not run."""
    monkeypatch.setattr(command_line, "FIRST_WINDOW_S", 0.0)
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        directory = Path(made, "psync")
        directory.mkdir(mode=0o700)
        path = directory / "7.json"
        with run_file(Run(7, 1.0, "train.py", f"unix:{directory}/7.sock", "ab" * 32)):
            yield path


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Status | Exception) -> Reader:
    return asked(monkeypatch, Reader(*answers))


def asked(monkeypatch: pytest.MonkeyPatch, reader: R) -> R:
    """Let whoever asks the run get the answers of a reader."""
    monkeypatch.setattr(serving, "reader_of_run", lambda run: reader)
    return reader


def test_one_table_is_printed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, STATUS, STATUS)
    assert main(["top", str(run), "--once"]) == 0
    assert capsys.readouterr().out.startswith("train.py (process 7)  running  up 2 s\n")


def test_without_a_terminal_one_table_is_printed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = answering(monkeypatch, STATUS, STATUS)
    assert main(["top", str(run)]) == 0
    assert capsys.readouterr().out.startswith("train.py")
    assert reader.asked == 2


def test_json_is_that_of_the_status(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, STATUS, STATUS)
    assert main(["top", str(run), "--once", "--json"]) == 0
    assert Status.from_json(capsys.readouterr().out) == STATUS


def test_json_again_and_again_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json"]) == 2
    assert "--json prints one status: it needs --once" in capsys.readouterr().err


def test_a_run_that_has_ended_is_one_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 2
    assert (
        "psync: error: the newest run, train.py (process 7), has ended" in capsys.readouterr().err
    )
    assert main(["top", str(run), "--once"]) == 2
    assert "error: train.py (process 7) has ended" in capsys.readouterr().err


def test_a_run_is_chosen_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--run", str(run)]) == 2
    assert "error: train.py (process 7) has ended" in capsys.readouterr().err
    assert main(["top", "--once", str(run), "--run", "train.py"]) == 2
    assert "the run is given twice" in capsys.readouterr().err


def test_no_run_at_all_is_one_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = run.with_name("8.json")
    assert main(["top", str(missing)]) == 2
    assert capsys.readouterr().err.startswith(f"psync: error: {missing}: there is no such file")


@pytest.mark.parametrize(
    "error", [RemoteProtocolError("another version"), DeadlineExceeded("it does not answer")]
)
def test_what_a_run_answers_wrongly_is_one_error(
    run: Path,
    error: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, error)
    assert main(["top", str(run), "--once"]) == 2
    assert capsys.readouterr().err == f"psync: error: {error.message}\n"


def test_live_it_goes_on_when_the_run_is_silent_and_ends_with_it() -> None:
    reader: Any = Reader(
        STATUS, DeadlineExceeded("not answered for 5 s"), STATUS, ConfigurationError("has ended")
    )
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    asyncio.run(command_line._follow(reader, console, 0.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert reader.asked == 4
    assert "not answered for 5 s" in text
    assert text.rstrip().endswith("has ended")
    assert "train.py" in text.rpartition("\x1b[?1049l")[2]  # the last one stays on the screen


def test_sigterm_leaves_the_terminal_as_it_was() -> None:
    class Stopped(Reader):
        async def read(self) -> Status:
            if self.asked:
                signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(60)
            return await super().read()

    reader: Any = Stopped(STATUS, STATUS)
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    with pytest.raises(SystemExit, match="143"):
        run_loop(lambda: command_line._follow(reader, console, 0.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.rfind("\x1b[?1049l") > text.rfind("\x1b[?1049h") >= 0
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


class TracedRun:
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


def test_a_file_is_written_and_said_how_to_open(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    reader = asked(monkeypatch, TracedRun())
    out = tmp_path / "out.json"
    assert main(["trace", str(out), str(run), "--seconds", "0.1"]) == 0
    said = capsys.readouterr()
    assert said.err == "recording train.py for 0.1 s ...\n"
    assert said.out == (f"{out}: 0 events of 0.0 s, 1 tasks; open it at https://ui.perfetto.dev\n")
    assert list(TraceFile(out).tasks.values()) == ["chief"]
    assert out.stat().st_mode & 0o777 == 0o600
    assert reader.last


def test_a_run_that_ends_meanwhile_leaves_what_there_was(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked(monkeypatch, TracedRun(1))
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
    asked(monkeypatch, TracedRun(0, error))
    assert main(["trace", str(tmp_path / "out.json"), str(run)]) == 2
    assert f"psync: error: {text}" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_run_that_has_ended_is_not_traced(
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
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked(monkeypatch, TracedRun())
    assert main(["trace", str(tmp_path / "no" / "out.json"), str(run)]) == 2
    assert "a trace cannot be written there: No such file" in capsys.readouterr().err


def test_what_was_dropped_and_how_well_clocks_are_aligned_is_said() -> None:
    trace = Trace(TracedRun().read_spans, "train.py")
    trace.summary = Summary(["chief", "ps-0"], 5.0, 100, {"ps-0": 7}, 0.0042)
    assert command_line._lines(Path("out.json"), trace) == [
        "out.json: 100 events of 5.0 s, 2 tasks; open it at https://ui.perfetto.dev",
        "ps-0: 7 events were dropped, since more came than could be asked for",
        "clocks of tasks are aligned within 4.2 ms only",
    ]


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "run.jsonl"
    written = RunLog(path, "train.py")
    written.add(status(worker()))
    written.close()
    return str(path)


def error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["dashboard", *args]) == 2
    text = capsys.readouterr().err
    assert text.startswith("psync: error: ")
    return text


def test_a_file_that_is_no_run_log_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp")
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert f"{path}: expected a run log of psync, got something else" in error(capsys, str(path))
    assert "No such file" in error(capsys, str(tmp_path / "none"))


def test_without_aiohttp_the_error_names_the_extra(
    log: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "psync[dashboard]"' in error(capsys, log)


def test_a_run_is_not_started_for_a_dashboard_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", str(script), "--dashboard"]) == 2
    assert 'pip install "psync[dashboard]"' in capsys.readouterr().err
    assert main(["run", str(script), "--dashboard-address", "8787"]) == 2
    assert 'expected "HOST:PORT"' in capsys.readouterr().err
