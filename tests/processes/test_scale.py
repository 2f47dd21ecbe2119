"""`psync scale` beside `psync run`: a run that goes on with more workers, and with fewer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "scaled.py"
PSYNC = [sys.executable, "-m", "psync"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield {**os.environ, "XDG_RUNTIME_DIR": made, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def scale(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PSYNC, "scale", *args], env=environ, capture_output=True, text=True)


@pytest.mark.smoke
def test_a_run_gets_more_workers_and_fewer(environ: dict[str, str]) -> None:
    with subprocess.Popen(
        [*PSYNC, "run", str(SCRIPT), "--ps", "1", "--workers", "2", "--gpus-per-worker", "1"],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as run:  # fmt: skip
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None

        def there(number: int) -> str:
            run.stdin.write(f"{number}\n")
            run.stdin.flush()
            return run.stdout.readline()

        try:
            assert run.stdout.readline() == "ready\n"
            assert there(2) == "workers 0 1\n"
            made = [path for path in Path(environ["XDG_RUNTIME_DIR"]).rglob("*")]
            assert len(made) == 6  # two directories; a file and a socket of launcher and chief
            assert [path for path in made if path.stat().st_mode & 0o077] == []
            who = f"scaled.py (process {run.pid}): "
            assert scale(environ, "4").stdout == f"{who}4 workers; 2 more are started\n"
            assert there(4) == "workers 0 1 2 3\n"
            too_many = scale(environ, "5")
            assert too_many.returncode == 2
            assert "5 workers with 1 each need 5 GPUs" in too_many.stderr
            leave = f"{who}1 workers; 3 leave when what they run has ended\n"
            assert scale(environ, "1").stdout == leave
            assert there(1) == "workers 0\n"
            missing = {f"psync: worker-{index} has left\n" for index in (1, 2, 3)}
            while missing:
                missing.discard(run.stderr.readline())
            assert scale(environ, "2").returncode == 0
            assert there(2) == "workers 0 1\n"
            run.stdin.close()
            assert run.stdout.readline() == "at last 0 1\n"
            assert run.wait() == 0
        finally:
            run.terminate()
    none = scale(environ, "2")
    assert none.returncode == 2
    assert "no program of this user is running" in none.stderr


def test_a_chief_that_is_started_again_knows_the_workers_of_now(environ: dict[str, str]) -> None:
    with subprocess.Popen(
        [*PSYNC, "run", str(SCRIPT), "--workers", "1", "--chief-restarts", "1"],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    ) as run:  # fmt: skip
        assert run.stdin is not None
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "ready\n"
            assert scale(environ, "3").returncode == 0
            run.stdin.write("no number\n")
            run.stdin.flush()  # which ends the first chief
            assert run.stdout.readline() == "ready\n"
            run.stdin.close()
            assert run.stdout.readline() == "at last 0 1 2\n"
            assert run.wait() == 0
        finally:
            run.terminate()


@pytest.mark.promise("workers.scale-any-time")
@pytest.mark.parametrize("sizes", [("1",), ("1", "3"), ("4",)], ids=str)
def test_a_run_is_scaled_before_its_coordinator_starts(
    environ: dict[str, str], sizes: tuple[str, ...]
) -> None:
    with subprocess.Popen(
        [*PSYNC, "run", str(SCRIPT), "--workers", "2", "--", "early"],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    ) as run:  # fmt: skip
        assert run.stdin is not None
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "strategy\n"
            for size in sizes:
                assert scale(environ, size).returncode == 0
            run.stdin.write(f"begin\n{sizes[-1]}\n")
            run.stdin.flush()
            assert run.stdout.readline() == "ready\n"
            # Which ones depends on whether a worker that was told to leave has left by then.
            said, *there = run.stdout.readline().split()
            assert (said, len(there)) == ("workers", int(sizes[-1]))
            run.stdin.close()
            assert run.stdout.readline().split() == ["at", "last", *there]
            assert run.wait() == 0
        finally:
            run.terminate()
