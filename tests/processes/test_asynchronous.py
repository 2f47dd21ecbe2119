"""Training programs from outside: under `psync run`, and with tasks started by hand."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks_by_hand import (
    SERVE,
    Ended,
    by_hand,
    children_of,
    ended,
    interrupt,
    plain_environ,
    script,
    wait_for_line,
    wait_until_gone,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LOOPS = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])


def psync_run(*args: str, **environ: str) -> subprocess.Popen[str]:
    """Start `psync run` of a script of ours with 2 ps tasks and 2 workers."""
    return subprocess.Popen(
        [sys.executable, "-m", "psync", "run", "--ps", "2", "--workers", "2", *args],
        env=plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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


def test_a_program_may_have_one_coordinator_after_another() -> None:
    run = ended(steps("twice"))
    assert (run.code, run.out) == (0, "1\n2\n"), run.err


def test_a_program_that_does_nothing_ends_soon() -> None:
    began = time.monotonic()
    run = ended(steps("nothing"))
    assert (run.code, run.out, run.err) == (0, "", "")
    assert time.monotonic() - began < 10  # a second, on a machine that has nothing else to do


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


@pytest.mark.promise("failures.worker")
@pytest.mark.parametrize(
    "point", ["worker.push.begun", "worker.push.between_ps", "worker.push.answered"]
)
def test_workers_that_die_in_a_push_leave_exact_counts(point: str) -> None:
    run = ended(steps("counts", "--max-restarts", "1000", PSYNC_FAILPOINTS=f"{point}=kill@9"))
    assert (run.code, run.out) == (0, "40.0 [40.0, 40.0, 40.0]\n"), run.err
    assert "was killed by SIGKILL and is started again" in run.err


@pytest.mark.promise("failures.ps-without-checkpoint")
def test_a_killed_ps_ends_the_program_with_an_error_soon() -> None:
    run = steps("endless")
    wait_for_line(run, "running", "stdout")
    began = time.monotonic()
    os.kill(children_of(run.pid)["ps-1"], signal.SIGKILL)
    lost = ended(run)
    assert time.monotonic() - began < 20  # two seconds, and the end of all tasks
    # The variable is on ps 0, but the coordinator watches over all of them.
    assert lost.code == 1
    assert "psync: ps-1 was killed by SIGKILL and is started again" in lost.err
    assert re.search(
        r"psync\.errors\.ParameterServerLost: /job:ps/task:1 at \S+ was restarted and has lost",
        lost.err,
    )
    assert "no checkpoint or complete backup: restart" in lost.err


@pytest.mark.promise("failures.launcher")
@pytest.mark.parametrize(
    ("victim", "code"), [("chief-0", 128 + signal.SIGKILL), ("launcher", -signal.SIGKILL)]
)
def test_no_process_is_left_when_chief_or_launcher_is_killed(victim: str, code: int) -> None:
    run = steps("endless")
    wait_for_line(run, "running", "stdout")
    tasks = children_of(run.pid)
    os.kill(run.pid if victim == "launcher" else tasks[victim], signal.SIGKILL)
    assert ended(run).code == code
    wait_until_gone(tasks)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_a_running_program_and_all_tasks(
    signum: signal.Signals,
) -> None:
    run = steps("endless")
    wait_for_line(run, "running", "stdout")
    tasks = children_of(run.pid)
    run.send_signal(signum)
    stopped = ended(run)
    assert stopped.code == 128 + signum
    assert "Traceback" not in stopped.err
    wait_until_gone(tasks)


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


def test_tasks_end_also_if_the_program_fails() -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        assert cluster.run("chief", 0, script("steps.py", "fails")).code == 1
        assert [ended(task).code for task in tasks] == [0, 0]


def test_ctrl_c_on_a_chief_ends_all_tasks_without_a_traceback() -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        chief = cluster.start("chief", 0, script("idle.py"))
        wait_for_line(chief, "connected", "stdout")
        run = interrupt(chief)
        assert (run.code, run.err) == (130, "")
        assert [ended(task).code for task in tasks] == [0, 0]


@pytest.mark.parametrize("command", [SERVE, EXAMPLE])
@pytest.mark.parametrize("job", ["ps", "worker"])
def test_ctrl_c_on_another_task_ends_it_without_a_traceback(
    job: str, command: tuple[str, ...]
) -> None:
    with by_hand() as cluster:
        task = cluster.start(job, 0, command)
        wait_for_line(task, " serves at ")
        run = interrupt(task)
        assert run.code == 130
        assert "Traceback" not in run.err


def test_sigterm_ends_a_serving_task_in_order() -> None:
    with by_hand() as cluster:
        for task in cluster.serve_all():
            task.terminate()
            run = ended(task)
            assert run.code == 0
            assert "Traceback" not in run.err


def test_a_chief_that_was_killed_can_be_started_anew_on_the_same_tasks() -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        chief = cluster.start("chief", 0, script("steps.py", "endless"))
        wait_for_line(chief, "running", "stdout")
        chief.kill()
        run = cluster.run("chief", 0, script("steps.py", "counts"))
        assert run.code == 0, run.err
        assert run.out == "40.0 [40.0, 40.0, 40.0]\n"
        assert [ended(task).code for task in tasks] == [0, 0]


# --- what a task costs -------------------------------------------------------------------------


def test_an_idle_ps_holds_at_most_60_mb() -> None:
    with by_hand() as cluster:
        ps, _ = cluster.serve_all()
        status = Path(f"/proc/{ps.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        assert int(found[1]) * 1024 < 60e6
