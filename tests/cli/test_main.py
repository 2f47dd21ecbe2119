"""The command line: help, usage errors, and what each command hands on."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from psync.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that psync answers wrong usage with, along with exit code 2."""
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.rstrip("\n")


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"psync {importlib.metadata.version('psync')}\n"


def test_a_variable_named_like_the_version_option_does_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_VERSION", "1")
    assert main(["run", "--help"]) == 0
    assert "SCRIPT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "example"),
    [
        (["--help"], "psync run train.py --ps 2 --workers 2"),
        (["run", "--help"], "psync run train.py --ps 2 --workers 4 -- --epochs 10"),
        (["task", "-h"], "PSYNC_SECRET_FILE=~/cluster.secret psync task"),
    ],
)
def test_help_has_an_example(
    args: list[str], example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 0
    assert example in capsys.readouterr().out


def test_without_a_command_help_is_shown_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Commands:" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "Missing argument 'SCRIPT'."),
        (["run", "nowhere.py"], "script 'nowhere.py' does not exist"),
        (["run", "x.py", "--ps", "0"], "Invalid value for '--ps': 0 is not in the range x>=1."),
        (
            ["run", "x.py", "--workers", "-1"],
            "Invalid value for '--workers': -1 is not in the range x>=1.",
        ),
        (
            ["run", "x.py", "--max-restarts", "-1"],
            "Invalid value for '--max-restarts': -1 is not in the range x>=0.",
        ),
        (
            ["run", "x.py", "--ps", "two"],
            "Invalid value for '--ps': 'two' is not a valid integer range.",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *args) == f"psync: error: {message}"


def test_an_option_meant_for_the_script_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "run", "train.py", "--epochs", "3")
    assert "--epochs" in line
    assert line.endswith(" Options of the script go after --.")


def test_an_unknown_option_of_another_command_has_no_such_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not refused(capsys, "task", "--epochs").endswith("after --.")


def test_options_come_from_the_environment_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_RUN_WORKERS", "0")
    assert "0 is not in the range x>=1" in refused(capsys, "run", "x.py")


def test_an_unknown_log_level_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_LOG_LEVEL", "loud")
    assert "'loud' is not one of" in refused(capsys, "run", "x.py")


def python(*args: str) -> str:
    """What the interpreter prints."""
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.processes
def test_the_package_can_be_run_as_a_module() -> None:
    version = importlib.metadata.version("psync")
    assert python("-m", "psync", "--version") == f"psync {version}\n"


@pytest.mark.processes
def test_the_launcher_imports_nothing_that_is_slow_to_load() -> None:
    code = (
        "import sys, psync.cli.main, psync.cli.run\n"
        "print([name for name in ('numpy', 'uvloop', 'msgpack') if name in sys.modules])"
    )
    assert python("-c", code) == "[]\n"


@pytest.mark.processes
def test_a_reader_that_has_gone_does_not_change_the_exit_code() -> None:
    code = (
        "import sys; from psync.cli.main import main; print('unread'); sys.exit(main(['nonsense']))"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as gone:
        result = subprocess.run(
            [sys.executable, "-c", code],
            stdout=gone,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # the text is still to be flushed
            check=False,
        )
    assert (result.returncode, result.stderr) == (
        2,
        b"psync: error: No such command 'nonsense'.\n",
    )
