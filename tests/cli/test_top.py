"""`psync top` on the command line: its output and its errors; beside a run: tests/processes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ports import claimed_ports
from psync.cli import top
from psync.cli.main import main
from psync.errors import ConfigurationError, DeadlineExceeded, RemoteProtocolError
from psync.status import reading
from psync.status.model import Status
from psync.status.run_files import Run, run_file

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
    monkeypatch.setattr(top, "FIRST_WINDOW_S", 0.0)
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        directory = Path(made, "psync")
        directory.mkdir(mode=0o700)
        path = directory / "7.json"
        with run_file(path, Run(7, 1.0, "train.py", f"unix:{made}/7.sock", "ab" * 32)):
            yield path


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Status | Exception) -> Reader:
    reader = Reader(*answers)
    monkeypatch.setattr(reading, "reading_status", lambda run: contextlib.nullcontext(reader))
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
    assert "error: train.py (process 7) has ended, or is" in capsys.readouterr().err


def test_a_run_is_chosen_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--run", str(run)]) == 2
    assert "error: train.py (process 7) has ended, or is" in capsys.readouterr().err
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
    asyncio.run(top._follow(reader, console, 0.0))
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
    assert asyncio.run(top._follow_until_told(reader, console, 0.0)) == 143
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.rfind("\x1b[?1049l") > text.rfind("\x1b[?1049h") >= 0
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_live_it_ends_with_code_0_when_the_run_has_ended() -> None:
    reader: Any = Reader(STATUS, ConfigurationError("has ended"))
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    assert asyncio.run(top._follow_until_told(reader, console, 0.0)) == 0


def test_a_url_at_which_nobody_answers_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with claimed_ports(1) as (port,):
        assert main(["top", f"http://127.0.0.1:{port}/status?token=secret", "--once"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"psync: error: http://127.0.0.1:{port}/status does not answer")
    assert "secret" not in error
