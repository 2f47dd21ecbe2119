"""The ported programs of docs/howto/tensorflow.md: examples/ported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import psync
from tasks_by_hand import children_of, ended, plain_environ, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ported"


def test_the_page_shows_lines_of_the_programs() -> None:
    page = (ROOT / "docs" / "howto" / "tensorflow.md").read_text()
    diffs = re.findall(r"```diff\n(.*?)```", page, flags=re.S)
    for diff, name in zip(diffs, ["train.py", "replica.py"], strict=True):
        lines = iter((EXAMPLES / name).read_text().splitlines())
        for shown in re.findall(r"^[+ ](.*)$", diff, flags=re.M):
            assert shown in lines, f"{name} has no such line after the one before: {shown}"


def test_the_ported_script_learns_on_two_workers() -> None:
    command = ["psync", "run", str(EXAMPLES / "train.py"), "--ps", "2", "--workers", "2"]
    run = ended(
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=plain_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    assert run.code == 0
    assert run.err == ""
    losses = [float(line.split()[1]) for line in run.out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 1e-3 * losses[0]


def replica_program(tmp_path: Path, *options: str, **changed: str) -> subprocess.Popen[str]:
    """Start the ported replica program, with numbers of its own."""
    code = (EXAMPLES / "replica.py").read_text()
    for option, value in changed.items():
        code, count = re.subn(rf"\b{option}=\d+", f"{option}={value}", code)
        assert count == 1
    (tmp_path / "replica.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, "-m", "psync", "run", *options, "replica.py", "--ps", "2"],
        cwd=tmp_path,
        env=plain_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_ported_replica_program_trains_and_saves(tmp_path: Path) -> None:
    for begins in ("new variables", "ckpt-00000001"):
        run = ended(replica_program(tmp_path))
        assert run.code == 0, run.err
        assert run.out.splitlines() == [
            f"begins with {begins}",
            "w [ 1.  2.  3.  4.  5.  6.  7.  8.  9. 10.]",
        ]


@pytest.mark.promise("failures.session-ps")
def test_the_ported_replica_program_goes_on_from_its_checkpoint_when_a_ps_is_killed(
    tmp_path: Path,
) -> None:
    options = {"save_checkpoint_secs": "0.1", "stop_at_step": "8000"}
    running = replica_program(tmp_path, "--chief-restarts", "1", **options)
    assert wait_for_line(running, "begins with", "stdout") == "begins with new variables\n"
    while psync.latest_checkpoint(tmp_path / "train_logs") is None:
        assert running.poll() is None
    os.kill(children_of(running.pid)["ps-1"], signal.SIGKILL)
    run = ended(running)
    assert run.code == 0, run.err
    assert re.search(r"^begins with ckpt-\d+\nw \[ 1\. .* 10\.\]$", run.out, re.M)
    assert "ParameterServerLost: /job:ps/task:1" in run.err
    assert "What a session survives" in run.err
