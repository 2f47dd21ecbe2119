"""Tasks of `psync run` that are killed and started again; tasks by hand that lose their chief."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tasks_by_hand import (
    SERVE,
    by_hand,
    children_of,
    ended,
    interrupt,
    psync_run,
    script,
    wait_for_line,
    wait_until_gone,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def counting(directory: Path, *options: str) -> subprocess.Popen[str]:
    """A run of restarts.py that waits at 25, five steps after its newest checkpoint."""
    run = psync_run(*options, *script("restarts.py"), "--", str(directory))
    assert wait_for_line(run, "begins at", "stdout") == "begins at 0 None\n"
    wait_for_line(run, "waits", "stdout")
    return run


def kill(run: subprocess.Popen[str], name: str) -> None:
    os.kill(children_of(run.pid)[name], signal.SIGKILL)


def assert_sixty_steps(out: str) -> None:
    """Every step is there once: in the counter, and in the optimizer's momentum."""
    w = velocity = np.zeros(3, np.float32)
    for _ in range(60):
        velocity = np.float32(0.5) * velocity - np.array([-1, 0, 1], np.float32)
        w = w + velocity
    found = re.search(r"^ends at 60 (\d+) \[(.*)\]$", out, re.M)
    assert found, out
    # A push carries the highest step that its worker knows, and so may raise that of a ps which has
    # not had another worker's push yet: steps are no count.
    assert 60 <= int(found[1]) <= 70
    np.testing.assert_allclose([float(x) for x in found[2].split(",")], w, rtol=1e-5)


# --- psync run ---------------------------------------------------------------------------------


@pytest.mark.promise("failures.chief-restarts")
def test_a_chief_that_is_killed_goes_on_from_its_checkpoint_with_the_tasks_that_it_had(
    tmp_path: Path,
) -> None:
    run = counting(tmp_path, "--chief-restarts", "2")
    before = children_of(run.pid)
    os.kill(before["chief-0"], signal.SIGKILL)
    assert wait_for_line(run, "begins at", "stdout") == "begins at 20 ckpt-00000002\n"
    after = children_of(run.pid)
    end = ended(run)
    assert end.code == 0, end.err
    assert_sixty_steps(end.out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"chief-0"}
    (workers,) = re.findall(r"^workers (.*)$", end.out, re.M)
    assert {int(pid) for pid in workers.split()} <= {after["worker-0"], after["worker-1"]}
    assert "psync: the chief was killed by SIGKILL and is started again (1 of at most 2 times)" in (
        end.err.splitlines()
    )
    assert "Traceback" not in end.err
    wait_until_gone({**before, **after})


@pytest.mark.promise("failures.ps-with-checkpoint")
@pytest.mark.smoke
@pytest.mark.parametrize("victim", ["ps-0", "ps-1"])
def test_with_a_ps_that_is_killed_the_run_goes_on_from_the_checkpoint(
    victim: str, tmp_path: Path
) -> None:
    run = counting(tmp_path, "--chief-restarts", "1")
    before = children_of(run.pid)
    os.kill(before[victim], signal.SIGKILL)
    end = ended(run)
    assert end.code == 0, end.err
    assert_sixty_steps(end.out)
    again = f"psync: {victim} was killed by SIGKILL and is started again (at most 3 times a minute)"
    assert again in end.err.splitlines()
    wait_until_gone(before)


@pytest.mark.promise("failures.worker")
def test_a_worker_that_is_killed_costs_no_step(tmp_path: Path) -> None:
    run = counting(tmp_path, "--chief-restarts", "1")
    before = children_of(run.pid)
    os.kill(before["worker-1"], signal.SIGKILL)
    (tmp_path / "go on").touch()
    end = ended(run)
    assert end.code == 0, end.err
    assert_sixty_steps(end.out)
    assert "worker-1 was killed by SIGKILL and is started again (at most 3 times" in end.err
    assert "the chief" not in end.err
    wait_until_gone(before)


NOISE = (
    "left before its handshake",
    "refused /job:",
    "repeating a request",
    "lost /job:worker",
    "the session of",
    "a push whose step",
)
"""Of connections that end and begin as they should; a log without --debug has none of it."""

CHECKPOINT = r"/job:ps/task:1 at \S+ .*; all ps tasks roll back to the newest checkpoint"
BACKUP = r"/job:ps/task:1 at \S+ .*; its backup takes over"
NO_WAY_BACK = r"/job:ps/task:1 cannot be recovered: no CheckpointManager has saved .*"
WORKER = r"/job:worker/task:1 is lost \(.*\); its closures run again"


@pytest.mark.parametrize(
    ("mode", "victim", "alarm", "news"),
    [
        ("checkpoint", "ps-1", f"WARNING {CHECKPOINT}", ("recovered in", "is reachable again")),
        ("backup", "ps-1", f"WARNING {BACKUP}", ("no update is lost", "is reachable again")),
        ("nothing", "ps-1", f"ERROR {NO_WAY_BACK}", ()),
        ("nothing", "worker-1", f"WARNING {WORKER}", ("has rejoined",)),
        ("checkpoint", "chief-0", "", ("restored",)),
    ],
)
def test_the_log_of_a_loss_has_one_alarm_and_the_good_news_and_nothing_false(
    mode: str, victim: str, alarm: str, news: tuple[str, ...], tmp_path: Path
) -> None:
    run = psync_run("--chief-restarts", "1", *script("losses.py"), "--", mode, str(tmp_path))
    wait_for_line(run, "training", "stdout")
    os.kill(children_of(run.pid)[victim], signal.SIGKILL)
    end = ended(run)
    assert end.code == 0, end.err
    logged = re.findall(r"^(?:\[\S+\] )?[\d:]+ ([A-Z]+) psync\S+: (.*)$", end.err, re.M)
    alarms = [f"{level} {text}" for level, text in logged if level in ("WARNING", "ERROR")]
    assert len(alarms) == bool(alarm), end.err
    assert all(re.fullmatch(alarm, line) for line in alarms), alarms
    told = [text for level, text in logged if level == "INFO"]
    assert [each for each in news if not any(each in text for text in told)] == []
    assert len(told) <= 12, end.err
    assert [each for each in NOISE if each in end.err] == []
    assert end.err.count("hint:") == (mode == "nothing" and victim == "ps-1")


def test_a_step_that_writes_past_numpy_to_what_it_has_pulled_is_told_of_copy() -> None:
    end = ended(psync_run(*script("writes_pulled.py")))
    assert end.code == 0, end.err
    written, lost, hint = end.out.splitlines()
    assert written == "written", "with copy=True"
    assert re.fullmatch(r"closure 1 \(step\) was lost with its worker 3 times: .*", lost)
    assert "SIGSEGV or SIGBUS" in hint
    assert "copy=True" in hint
    lines = end.err.splitlines()
    told = [number for number, line in enumerate(lines) if "copy=True" in line]
    killed = [number for number, line in enumerate(lines) if "was killed by SIGSEGV" in line]
    assert len(told) == 1, "once, at the first death"
    assert told[0] < killed[0]
    # The worker itself says which line of the step it was.
    assert re.search(r"\[worker-\d\] +File \".*writes_pulled.py\", line \d+ in step", end.err)


@pytest.mark.parametrize("victim", ["launcher", "chief-0"])
def test_a_launcher_that_is_killed_leaves_nobody_whatever_it_would_start_again(
    victim: str, tmp_path: Path
) -> None:
    run = counting(tmp_path, "--chief-restarts", "9")
    before = children_of(run.pid)
    if victim != "launcher":  # in the middle of a restart
        os.kill(before[victim], signal.SIGKILL)
        wait_for_line(run, "is started again")
    os.kill(run.pid, signal.SIGKILL)
    assert ended(run).code == -signal.SIGKILL  # also: nobody holds its stdout, the chief's own
    wait_until_gone(before)


def test_workers_that_run_the_program_themselves_find_the_next_chief() -> None:
    run = psync_run("--chief-restarts", "1", *script("sessions.py"), "--", "150")
    wait_for_line(run, " is at work as ", "stdout")
    kill(run, "chief-0")
    end = ended(run)
    assert end.code == 0, end.err
    assert "chief-0: step 150, w [150.0, 150.0, 150.0, 150.0]" in end.out
    for index in range(2):
        line = f"psync: worker-{index} exited with code 1 and is started again, as the chief was"
        assert line in end.err.splitlines()


# --- tasks started by hand ---------------------------------------------------------------------


@pytest.mark.parametrize("command", [SERVE, script("idle.py")])
@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_task_to_which_no_chief_comes_ends_by_itself(job: str, command: tuple[str, ...]) -> None:
    with by_hand() as cluster:
        end = cluster.run(job, 0, command, environ={"PSYNC_CHIEF_TIMEOUT": "0.2"})
    assert end.code == 1
    text = f"psync: error: /job:{job}/task:0 ends: no chief has connected within 0.2 s since it"
    assert text in end.err
    assert "PSYNC_CHIEF_TIMEOUT" in end.err
    assert "Traceback" not in end.err


def test_the_option_wins_over_the_variable() -> None:
    with by_hand() as cluster:
        command = (*SERVE, "--chief-timeout", "0.2")
        end = cluster.run("ps", 0, command, environ={"PSYNC_CHIEF_TIMEOUT": "none"})
        assert end.code == 1
        wrong = cluster.run("ps", 0, (*SERVE, "--chief-timeout", "soon"))
    assert wrong.code == 2
    assert "(--chief-timeout): expected seconds above 0, or none, got 'soon'" in wrong.err


@pytest.mark.promise("failures.chief-absent")
def test_tasks_whose_chief_was_killed_wait_for_another_one_and_then_end() -> None:
    with by_hand() as cluster:
        command = (*SERVE, "--chief-timeout", "6")
        tasks = [cluster.start(job, 0, command) for job in ("ps", "worker")]
        for _ in range(2):
            chief = cluster.start("chief", 0, script("idle.py"))
            wait_for_line(chief, "connected", "stdout")
            chief.kill()
        for task in tasks:
            end = ended(task)
            assert end.code == 1
            assert "no chief has connected within 6 s since the last one went" in end.err


@pytest.mark.promise("failures.replaced-chief")
def test_a_chief_that_was_replaced_does_not_end_the_tasks_of_its_successor() -> None:
    with by_hand() as cluster:
        tasks = cluster.serve_all()
        old = cluster.start("chief", 0, script("idle.py"))
        wait_for_line(old, "connected", "stdout")
        new = cluster.start("chief", 0, script("idle.py"))
        wait_for_line(new, "connected", "stdout")
        assert interrupt(old).code == 130
        assert [task.poll() for task in tasks] == [None, None]
        assert interrupt(new).code == 130
        assert [ended(task).code for task in tasks] == [0, 0]
