"""Training without a coordinator in real processes: runs to their end, and tasks that die."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from tasks_by_hand import ByHand, by_hand, ended, psync_run, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def sessions(steps: int, workers: int = 2) -> subprocess.Popen[str]:
    return psync_run(*script("sessions.py"), "--", str(steps), workers=workers)


def pid_in(line: str) -> int:
    return int(line.split()[-1])


def assert_gone(*pids: int) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def begun(cluster: ByHand, steps: int) -> dict[str, subprocess.Popen[str]]:
    """Start all tasks by hand; return the chief and the workers once all are at work."""
    cluster_of = cluster.cluster
    for index in range(len(cluster_of["ps"])):
        wait_for_line(cluster.start("ps", index), " serves at ")
    programs = {
        f"{job}-{index}": cluster.start(job, index, script("sessions.py", str(steps)))
        for job in ("chief", "worker")
        for index in range(len(cluster_of.get(job, ())))
    }
    for name, program in programs.items():
        sign = " begins as " if name.startswith("chief") else " is at work as "
        wait_for_line(program, f"{name}{sign}", "stdout")
    return programs


# --- psync run ---------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_run_to_its_end() -> None:
    run = ended(sessions(20))
    assert run.code == 0
    lines = run.out.splitlines()
    assert "chief-0: step 20, w [20.0, 20.0, 20.0, 20.0]" in lines
    # What workers say after the chief has ended is not lost.
    assert "[worker-0] worker-0: 20 accepted" in lines
    assert "[worker-1] worker-1: 20 accepted" in lines
    assert re.fullmatch(r"\S+ INFO psync\.\S+: training ends: step 20 is reached\n", run.err)
    assert_gone(*(pid_in(line) for line in lines if " begins as " in line))


def test_a_worker_that_is_killed_is_started_again_and_takes_part_again() -> None:
    running = sessions(150)
    assert running.stdout is not None
    first = pid_in(wait_for_line(running, "worker-1 is at work as ", "stdout"))
    os.kill(first, signal.SIGKILL)
    second = pid_in(wait_for_line(running, "worker-1 begins as ", "stdout"))
    run = ended(running)
    assert run.code == 0
    assert "chief-0: step 150, w [150.0, 150.0, 150.0, 150.0]" in run.out
    (accepted,) = re.findall(r"worker-1: (\d+) accepted", run.out)
    assert 0 < int(accepted) < 150
    assert "worker-1 was killed by SIGKILL and is started again" in run.err
    assert_gone(first, second)


@pytest.mark.promise("failures.session-worker-raises")
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("step", "NameError on /job:worker/task:1: name 'typo' is not defined"),
        ("outside", "KeyError on /job:worker/task:1: 'no such thing'"),
        ("exit", "SystemExit on /job:worker/task:1: no more"),
    ],
)
def test_a_worker_that_leaves_by_an_error_fails_the_run(how: str, error: str) -> None:
    run = ended(psync_run(*script("sessions.py"), "--", "100000", how))
    assert run.code == 1
    said = run.err.partition("RemoteError: ")[2]
    assert said.startswith(f"{error}\nremote traceback (/job:worker/task:1):\n")
    assert re.search(r"  File \S*sessions.py\S, line \d+, in ", said)
    assert "[worker-0] psync: error: /job:worker/task:1 failed: " in run.err


# --- tasks that are started by hand ------------------------------------------------------------


def test_when_training_ends_every_task_exits() -> None:
    with by_hand(num_ps=2, num_workers=2) as cluster:
        begun(cluster, 20)
        ends = [ended(process) for process in cluster.processes]
    assert [end.code for end in ends] == [0] * 5
    assert "w [20.0, 20.0, 20.0, 20.0]" in ends[2].out
