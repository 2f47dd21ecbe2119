"""`psync trace` beside `psync run`: real processes, whose clocks differ; some of them die."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_program import PSYNC, program
from psync.status.run_files import read_run
from trace_events import TraceFile

SCRIPTS = Path(__file__).parent / "scripts"
WORKERS = ["worker-0", "worker-1"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def run(environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with program([*PSYNC, "run", str(SCRIPTS / "traced.py"), "--workers", "2"], environ) as run:
        yield run.process


def trace(environ: dict[str, str], *args: str) -> subprocess.Popen[str]:
    """Begin to trace; it has begun when it says so."""
    process = subprocess.Popen(
        [*PSYNC, "trace", *args], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("recording traced.py for ")
    return process


def chief_of(environ: dict[str, str]) -> int:
    (file,) = Path(environ["XDG_RUNTIME_DIR"], "psync").glob("*.json")
    return read_run(file).pid


@pytest.mark.smoke
def test_a_run_whose_clocks_differ_is_traced(
    environ: dict[str, str], run: subprocess.Popen[str], tmp_path: Path
) -> None:
    out, err = trace(environ, str(tmp_path / "t.json"), "--seconds", "1").communicate()
    assert err == ""
    assert "events of" in out
    assert "4 tasks; open it at https://ui.perfetto.dev" in out
    traced = TraceFile(tmp_path / "t.json")  # nothing in it comes before it was sent
    assert list(traced.tasks.values()) == ["chief", "ps-0", *WORKERS]
    arrows = set(traced.arrows())
    assert {("Update", worker, "ps-0") for worker in WORKERS} <= arrows
    for worker in WORKERS:
        assert traced.slices(worker, "steps", "train_step")
        assert {"compute", "pull", "push"} <= {
            each["name"] for each in traced.slices(worker, "steps")
        }
    assert max(each["ts"] for each in traced.events) < 20e6  # and not the 1,000 s of the clocks
    assert traced.counter("ps-0", "queue")


def test_what_was_recorded_of_a_program_that_is_killed_is_written(
    environ: dict[str, str], run: subprocess.Popen[str], tmp_path: Path
) -> None:
    tracing = trace(environ, str(tmp_path / "t.json"), "--seconds", "60")
    os.kill(chief_of(environ), signal.SIGKILL)
    out, _ = tracing.communicate()
    assert tracing.returncode == 0
    assert "it ends early: traced.py (process" in out
    assert set(WORKERS) <= set(TraceFile(tmp_path / "t.json").tasks.values())


def test_a_run_that_has_ended_is_one_clear_error(
    environ: dict[str, str], run: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.kill(chief_of(environ), signal.SIGKILL)
    run.communicate()
    ended = subprocess.run(
        [*PSYNC, "trace", str(tmp_path / "t.json")], env=environ, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("psync: error: the newest run, traced.py (process ")
    assert ended.stderr.splitlines()[0].endswith("has ended")
    assert list(tmp_path.iterdir()) == []
