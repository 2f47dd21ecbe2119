"""``psync bench``, from the command line to the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psync.bench import sync_async
from psync.bench.sync_async import Options
from psync.cli.main import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options with which the benchmark would have run."""
    options: list[Options] = []

    def run(given: Options) -> int:
        options.append(given)
        return 0

    monkeypatch.setattr(sync_async, "run", run)
    monkeypatch.setenv("PSYNC_LOG_LEVEL", "warning")  # as the command does if it is not set
    return options


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "sync-async" in capsys.readouterr().out
    assert main(["bench", "sync-async", "--help"]) == 0
    assert "psync bench sync-async --quick" in capsys.readouterr().out


def test_options_reach_the_benchmark(asked: list[Options], tmp_path: Path) -> None:
    args = ["--quick", "--parts", "virtual", "--workers", "3", "--out", str(tmp_path)]
    assert main(["bench", "sync-async", *args]) == 0
    assert asked == [Options(parts=("virtual",), workers=(3,), quick=True, out=tmp_path)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workers", "1"], "1 is not in the range x>=2"),
        (["--parts", "all"], "'all' is not one of 'processes', 'virtual'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "sync-async", *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_quick_benchmark_runs_in_real_processes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    command = ["bench", "sync-async", "--quick", "--workers", "2", "--out", str(tmp_path)]
    parts = ["--parts", "processes"]
    ended = subprocess.run(
        [sys.executable, "-m", "psync", *command, *parts],
        env={**os.environ, "PSYNC_LOG_LEVEL": "warning"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 worker processes, one slow" in ended.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "sync_vs_async.json", "sync_vs_async_2_workers.png",
    }  # fmt: skip
    written: dict[str, Any] = json.loads((tmp_path / "sync_vs_async.json").read_text())
    assert [run["mode"] for run in written["processes"]] == [
        "async", "bounded 2", "sync", "sync, 1 backup",
    ] * 2  # fmt: skip
