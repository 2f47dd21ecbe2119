"""`psync dashboard` on the command line: its errors; with a run: tests/processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from psync.cli.main import main
from psync.status.dashboard.run_log import RunLog
from statuses import status, worker


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


def test_a_port_in_use_is_one_error(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = error(capsys, log, "--address", address)
    assert f"dashboard: {address} is in use by another program" in text


def test_an_address_that_is_none(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected \"HOST:PORT\", got '8787'" in error(capsys, log, "--address", "8787")


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
