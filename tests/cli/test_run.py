"""The launcher's own decisions, and psync scale.

Runs of real clusters: tests/processes/test_psync_run.py, test_scale.py.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from psync.cli.main import main
from psync.cli.run import LAUNCHERS, Launcher, plugged, scaled_on_request, script_command
from psync.errors import ConfigurationError
from psync.launch import processes
from psync.status.run_files import Run, directory_of_runs, make_directory, run_file, socket_of

COMMAND = [sys.executable, "train.py"]


def test_a_file_that_is_not_python_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.touch()
    with pytest.raises(ConfigurationError) as caught:
        script_command(str(script))
    assert str(caught.value) == (
        f"script {str(script)!r} is not a Python file: expected a name ending in .py"
    )


def test_a_secret_that_cannot_be_used_is_an_error_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="PSYNC_SECRET: expected at least 16 bytes, got 5"):
        Launcher(COMMAND, environ={"PSYNC_SECRET": "short"}).launch()


def test_too_few_gpus_are_an_error_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="gpus_per_worker: 2 workers with 1 each need 2"):
        Launcher(
            COMMAND, num_workers=2, gpus_per_worker=1, environ={"CUDA_VISIBLE_DEVICES": "0"}
        ).launch()


def test_a_plugin_that_is_not_there_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    with pytest.raises(ConfigurationError, match="no module or package 'psync_nothing'") as caught:
        plugged({}, ["psync_nothing.rules"], script, module=False)
    assert str(caught.value.hint).startswith(f"searched in '{tmp_path}', '{Path.cwd()}'")
    with pytest.raises(ConfigurationError, match="expected names of modules"):
        plugged({}, ["rules.py!"], script, module=False)


@pytest.mark.parametrize("in_a_task", [False, True])
def test_too_few_files_are_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], in_a_task: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ExceptionGroup("in a task group", [error]) if in_a_task else error

    monkeypatch.setattr(processes, "ProcessGroup", full)
    assert Launcher(COMMAND, environ={}).launch() == 1
    assert capfd.readouterr().err == (
        "psync: error: Too many open files; raise `ulimit -n`: the run ends\n"
    )


def test_other_errors_of_the_system_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(processes, "ProcessGroup", refused)
    with pytest.raises(PermissionError):
        Launcher(COMMAND, environ={}).launch()


def test_a_script_runs_in_this_interpreter_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = script_command(str(script), ["--lr", "0.1"])
    assert command == [sys.executable, str(script), "--lr", "0.1"]


def test_a_directory_with_a_main_file_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert script_command(str(tmp_path)) == [sys.executable, str(tmp_path)]


def test_a_missing_script_is_an_error(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    with pytest.raises(ConfigurationError) as caught:
        script_command(script)
    assert str(caught.value) == f"script {script!r} does not exist"
    with pytest.raises(ConfigurationError, match="does not exist\nhint: a module runs with -m"):
        script_command("research.train")


def test_a_directory_without_a_main_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        script_command(str(tmp_path))
    assert str(caught.value) == f"script {str(tmp_path)!r} is a directory without a __main__.py"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the current directory, which says so if it is imported."""
    for name in ("research/__init__.py", "research/deep/__init__.py", "research/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError('imported')")
    (tmp_path / "research/deep/__main__.py").touch()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["research.train", "research.deep", "plain.train", "json.tool"])
@pytest.mark.usefixtures("package")
def test_a_module_runs_as_python_does_it_and_is_not_imported_before(name: str) -> None:
    command = script_command(name, ["--lr", "0.1"], module=True)
    assert command == [sys.executable, "-m", name, "--lr", "0.1"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("research.tran", "there is no 'research.tran' in this directory"),
        ("reserch.train", "there is no 'reserch' in this directory"),
        ("research/train.py", "there is no 'research/train' in this directory"),
        ("", "there is no '' in this directory"),
        ("research..train", "there is no 'research.' in this directory"),
        ("research.train.py", "'research.train' is not a package"),
        ("research", "'research' is a package without a __main__.py"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_module_that_is_not_there_is_an_error(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        script_command(name, module=True)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        yield {"XDG_RUNTIME_DIR": made}


def files(environ: dict[str, str]) -> list[Path]:
    return sorted(Path(environ["XDG_RUNTIME_DIR"], "psync", LAUNCHERS).glob("*"))


async def scale(number: int) -> str:
    if number > 4:
        raise ConfigurationError("there is no room", hint="take fewer")
    return f"{number} workers"


async def test_a_launcher_is_found_asked_and_answers(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    async with scaled_on_request(scale, "train.py", environ):
        run, socket = files(environ)
        assert (run.suffix, stat.S_IMODE(run.stat().st_mode)) == (".json", 0o600)
        assert (socket.suffix, stat.S_IMODE(socket.stat().st_mode)) == (".sock", 0o600)
        assert await asyncio.to_thread(main, ["scale", "3"]) == 0
        assert capsys.readouterr().out.endswith("): 3 workers\n")
        assert await asyncio.to_thread(main, ["scale", "3", str(files(environ)[0])]) == 0
        assert await asyncio.to_thread(main, ["scale", "3", "--run", "train"]) == 0
        assert await asyncio.to_thread(main, ["scale", "5"]) == 2
        assert "there is no room" in capsys.readouterr().err
    assert files(environ) == []


async def test_of_several_launchers_none_is_asked_until_one_is_chosen(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    async def other_scale(number: int) -> str:
        return f"{number} others"

    async with (
        scaled_on_request(scale, "train.py", environ),
        scaled_on_request(other_scale, "other.py", environ),
    ):
        assert await asyncio.to_thread(main, ["scale", "3"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("psync: error: expected one program, and 2 programs of this user")
        assert "train.py (process" in said
        assert await asyncio.to_thread(main, ["scale", "3", "--run", "other.py"]) == 0
        assert capsys.readouterr().out.endswith("): 3 others\n")


@pytest.mark.parametrize(
    "question",
    [{"token": "ab", "workers": 1}, {"workers": 1}, [], {"token": "\ud800", "workers": 1}],
)
async def test_whoever_has_not_read_the_file_is_refused(
    environ: dict[str, str], question: object
) -> None:
    async with scaled_on_request(scale, "train.py", environ):
        (socket,) = (path for path in files(environ) if path.suffix == ".sock")
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(json.dumps(question).encode() + b"\n")
        answer = json.loads(await reader.readline())
        assert answer == {"error": "the token is not that of this run"}
        writer.close()
        await writer.wait_closed()


async def test_it_may_be_turned_off_or_impossible(environ: dict[str, str], tmp_path: Path) -> None:
    async with scaled_on_request(scale, "train.py", {**environ, "PSYNC_STATUS": "0"}):
        assert files(environ) == []
    blocked = tmp_path / "psync"
    blocked.write_text("")
    async with scaled_on_request(scale, "train.py", {"XDG_RUNTIME_DIR": str(tmp_path)}):
        assert blocked.read_text() == ""


def test_where_nothing_runs_that_is_said(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "3"]) == 2
    assert "no program of this user is running" in capsys.readouterr().err
    assert main(["scale", "0"]) == 2


def test_a_run_without_a_launcher_is_named(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = directory_of_runs(environ)
    make_directory(directory)
    run = Run(7, 1.0, "spot.py", f"unix:{directory / 'a.sock'}", "ab" * 32)
    with socket.socket(socket.AF_UNIX) as listening, run_file(run):
        listening.bind(str(socket_of(run)))
        listening.listen()
        assert main(["scale", "3"]) == 2
    assert (
        "no program started by psync run is running: spot.py (process 7) was started without it"
        in capsys.readouterr().err
    )
