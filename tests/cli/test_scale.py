"""`psync scale` and the launcher's end of it; with real tasks: tests/processes/test_scale.py."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from psync.cli.main import main
from psync.cli.scale import LAUNCHERS, scaled_on_request
from psync.errors import ConfigurationError
from psync.status.run_files import Run, directory_of_runs, make_directory, run_file, socket_of


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
    ("request_", "error"),
    [
        ({"token": "ab", "workers": 1}, "the token is not that of this run"),
        ({"workers": 1}, "expected a request of psync scale"),
        ({"token": "", "workers": "8"}, "expected a request of psync scale"),
        ([], "expected a request of psync scale"),
        ({"token": "\ud800", "workers": 1}, "the token is not that of this run"),
    ],
)
async def test_whoever_has_not_read_the_file_is_refused(
    environ: dict[str, str], request_: object, error: str
) -> None:
    async with scaled_on_request(scale, "train.py", environ):
        (socket,) = (path for path in files(environ) if path.suffix == ".sock")
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(json.dumps(request_).encode() + b"\n")
        assert json.loads(await reader.readline()) == {"error": error}
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
    with socket.socket(socket.AF_UNIX) as listening, run_file(directory / "a.json", run):
        listening.bind(str(socket_of(run)))
        listening.listen()
        assert main(["scale", "3"]) == 2
    assert (
        "no program started by psync run is running: spot.py (process 7) was started without it"
        in capsys.readouterr().err
    )
