"""`psync scale` beside `psync run`: a run that goes on with more workers, and with fewer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from live_program import PSYNC, program

RUN = [*PSYNC, "run", str(Path(__file__).parent / "scripts" / "scaled.py")]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def scale(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PSYNC, "scale", *args], env=environ, capture_output=True, text=True)


@pytest.mark.smoke
def test_a_run_gets_more_workers_and_fewer(environ: dict[str, str]) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    with program([*RUN, "--workers", "2", "--gpus-per-worker", "1"], environ) as run:
        assert run.greeting == "ready"
        assert run.ask("2") == "workers 0 1"
        made = [path for path in Path(environ["XDG_RUNTIME_DIR"]).rglob("*")]
        assert len(made) == 6  # two directories; a file and a socket of launcher and chief
        assert [path for path in made if path.stat().st_mode & 0o077] == []
        who = f"scaled.py (process {run.process.pid}): "
        assert scale(environ, "4").stdout == f"{who}4 workers; 2 more are started\n"
        assert run.ask("4") == "workers 0 1 2 3"
        too_many = scale(environ, "5")
        assert too_many.returncode == 2
        assert "5 workers with 1 each need 5 GPUs" in too_many.stderr
        leave = f"{who}1 workers; 3 leave when what they run has ended\n"
        assert scale(environ, "1").stdout == leave
        assert run.ask("1") == "workers 0"
        left = {run.wait_for_error(" has left\n") for _ in range(3)}
        assert left == {f"psync: worker-{index} has left\n" for index in (1, 2, 3)}
        assert scale(environ, "2").returncode == 0
        assert run.ask("2") == "workers 0 1"
        assert run.end() == (0, "at last 0 1\n")
    none = scale(environ, "2")
    assert none.returncode == 2
    assert "no program of this user is running" in none.stderr


def test_a_chief_that_is_started_again_knows_the_workers_of_now(environ: dict[str, str]) -> None:
    with program([*RUN, "--workers", "1", "--chief-restarts", "1"], environ) as run:
        assert scale(environ, "3").returncode == 0
        assert run.ask("no number") == "ready"  # which ends the first chief
        assert run.end() == (0, "at last 0 1 2\n")


@pytest.mark.promise("workers.scale-any-time")
@pytest.mark.parametrize("sizes", [("1",), ("1", "3"), ("4",)], ids=str)
def test_a_run_is_scaled_before_its_coordinator_starts(
    environ: dict[str, str], sizes: tuple[str, ...]
) -> None:
    with program([*RUN, "--workers", "2", "--", "early"], environ) as run:
        assert run.greeting == "strategy"
        for size in sizes:
            assert scale(environ, size).returncode == 0
        assert run.ask("begin") == "ready"
        # Which ones depends on whether a worker that was told to leave has left by then.
        said, *there = run.ask(sizes[-1]).split()
        assert (said, len(there)) == ("workers", int(sizes[-1]))
        assert run.end() == (0, " ".join(["at last", *there]) + "\n")
