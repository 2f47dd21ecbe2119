"""Training programs from outside: under `psync run`, and with tasks started by hand."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks_by_hand import (
    SERVE,
    Ended,
    by_hand,
    ended,
    plain_environ,
    psync_run,
    script,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LOOPS = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])


def steps(name: str, *options: str, **environ: str) -> subprocess.Popen[str]:
    return psync_run(*options, *script("steps.py"), "--", name, **environ)


def losses_of(run: Ended) -> list[float]:
    lines = [line.split() for line in run.out.splitlines()]
    assert [int(epoch) for epoch, _ in lines] == list(range(10))
    return [float(loss) for _, loss in lines]


# --- psync run ---------------------------------------------------------------------------------


@pytest.mark.smoke
@LOOPS
def test_the_first_program_learns(loop: str) -> None:
    run = ended(psync_run(*script("example.py"), PSYNC_LOOP=loop))
    assert run.code == 0, run.err
    losses = losses_of(run)
    assert losses[-1] < losses[0] / 1000
    assert "WARNING" not in run.err
    assert "ERROR" not in run.err


@LOOPS
def test_classes_of_the_script_are_the_same_on_workers(loop: str) -> None:
    run = ended(steps("classes", PSYNC_LOOP=loop))
    assert (run.code, run.out) == (0, f"2 {loop == 'asyncio'}\n"), run.err


def test_what_a_step_prints_and_logs_reaches_the_user_with_the_tasks_name() -> None:
    run = ended(steps("prints"))
    assert run.code == 0
    found = re.fullmatch(r"\[(worker-[01])\] printed in a step\n", run.out)
    assert found, run.out
    assert f"[{found[1]}] an error of the step's\n" in run.err
    assert f"[{found[1]}] logged in a step\n" in run.err


def test_an_error_of_a_step_ends_the_program_with_its_remote_traceback() -> None:
    run = ended(steps("fails"))
    assert run.code == 1
    assert "KeyError: 'no such key'" in run.err
    assert re.search(r"remote traceback \(/job:worker/task:[01]\):", run.err)
    assert re.search(r'File ".*steps\.py", line \d+, in step', run.err)
    assert 'return {}["no such key"]' in run.err


def test_without_a_cluster_a_script_says_how_to_start_one() -> None:
    command = [sys.executable, *script("example.py")]
    run = subprocess.run(command, env=plain_environ(), capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == (
        "psync: error: this process belongs to no cluster: the program has opened none, "
        "and the variables of TF_CONFIG, torchrun, SLURM, Kubernetes describe none\n"
        f"hint: to train on this machine: psync run {command[1]} --ps 1 --workers 2; or open a "
        "psync.LocalCluster(1, 2) in the program, and start that by asyncio.run\n"
    )


# --- psync run, and tasks that are killed ------------------------------------------------------


# --- tasks started by hand ---------------------------------------------------------------------

EXAMPLE = script("example.py")
TASKS = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]


@pytest.mark.parametrize("seed", range(3))
def test_tasks_start_in_any_order_and_end_by_themselves(seed: int) -> None:
    order = list(itertools.permutations(TASKS))[(seed * 53 + 7) % 120]
    with by_hand(2, 2) as cluster:
        tasks = {
            (job, index): cluster.start(
                job, index, EXAMPLE if job == "chief" or index == seed % 2 else SERVE
            )
            for job, index in order
        }
        chief = ended(tasks.pop(("chief", 0)))
        assert chief.code == 0, chief.err
        assert losses_of(chief)[-1] < 0.01
        for task in tasks.values():
            run = ended(task)
            assert run.code == 0, run.err
            assert "/job:chief/task:0 asks it to stop: the chief has ended" in run.err


# --- what a task costs -------------------------------------------------------------------------


def test_an_idle_ps_holds_at_most_60_mb() -> None:
    with by_hand() as cluster:
        ps, _ = cluster.serve_all()
        status = Path(f"/proc/{ps.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        assert int(found[1]) * 1024 < 60e6
