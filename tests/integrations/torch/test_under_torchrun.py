"""One script under torchrun: its ranks are the tasks of a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks_by_hand import SECRET, plain_environ, script

pytest.importorskip("torch.distributed.run")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

RANKS = ("--standalone", "--nproc-per-node=4")


def torchrun(restarts: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    options = (*RANKS, f"--max-restarts={restarts}")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *command],
        env=plain_environ(PSYNC_JOBS="ps=2", **variables),
        capture_output=True,
        text=True,
        check=False,
    )


def test_ranks_are_tasks_and_meet_again_when_all_are_restarted(tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    failing = str(Path(__file__).parent / "fails_once.py")
    run = torchrun(1, failing, str(tmp_path), *script("anywhere.py"), PSYNC_SECRET=SECRET)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("began at 0\n") == 1
    assert "total True 0.0 [0.0, 0.0, 0.0]\n" in run.stdout
    for task in ("chief/task:0", "ps/task:1", "worker/task:0"):
        assert f"this process is /job:{task}, as torchrun says" in run.stderr


def test_without_a_secret_it_says_what_to_set(tmp_path: Path) -> None:
    run = torchrun(0, *script("anywhere.py", str(tmp_path)))
    assert run.returncode != 0
    assert "no secret is set" in run.stderr
