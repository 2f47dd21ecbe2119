"""`psync top` beside `psync run`: one user's processes, a real run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from live_program import PSYNC, program
from psync import Status

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [*PSYNC, "run", str(SCRIPTS / "seen.py"), "--workers", "2", "--metrics-port", "0"]

WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def top(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PSYNC, "top", *args], env=environ, capture_output=True, text=True)


@pytest.mark.smoke
def test_a_run_is_seen_while_it_lasts(environ: dict[str, str]) -> None:
    with program([*RUN, "--ps", "2"], environ) as run:
        once = top(environ, str(run.process.pid), "--once", "--json")  # of psync run
        assert once.stderr == ""
        status = Status.from_json(once.stdout)
        assert (status.program, status.state) == ("seen.py", "running")
        assert status.queue.closures_per_s > 0
        assert status.steps.global_step > 0
        assert [worker.task for worker in status.workers] == WORKERS
        assert {worker.state for worker in status.workers} <= {"busy", "idle"}
        assert sum(worker.closures_per_s for worker in status.workers) > 0
        assert [ps.bytes for ps in status.ps] == [4000, 0]
        assert status.ps[0].pushes_per_s > 0
        table = top(environ, "--once").stdout
        assert table.startswith("seen.py (process")
        assert "train_step" in table
        (file,) = Path(environ["XDG_RUNTIME_DIR"], "psync").glob("*.json")
        assert top(environ, str(file), "--once").returncode == 0
        url = run.wait_for_error(", status at ").partition("metrics at ")[2].partition(",")[0]
        with urllib.request.urlopen(url) as answer:
            assert b'psync_ps_bytes{task="/job:ps/task:0"} 4000.0' in answer.read()
        assert run.end()[0] == 0
    ended = top(environ, "--once")
    assert ended.returncode == 2
    assert ended.stderr.startswith("psync: error: no program of this user is running")


def test_a_training_session_is_seen_and_of_two_programs_the_one_that_is_chosen(
    environ: dict[str, str],
) -> None:
    sessions = [*PSYNC, "run", str(SCRIPTS / "sessions.py"), "--workers", "2", "--", "100000"]
    with program(RUN, environ), program(sessions, environ) as run:
        while " is at work as " not in run.line():
            continue
        unclear = top(environ, "--once")
        assert unclear.returncode == 2
        assert "error: expected one program, and 2 programs of this user run" in unclear.stderr
        (file,) = re.findall(r"(\S+)  sessions.py \(process \d+\), for ", unclear.stderr)
        for named in (file, file.partition("-")[0], "sessions.py"):
            once = top(environ, "--once", "--json", "--run", named)
            status = Status.from_json(once.stdout)
            assert (status.program, status.state) == ("sessions.py", "running")
            assert status.waits_for == "step 100000"
            assert status.steps.global_step > 0
            assert {worker.state for worker in status.workers} <= {"busy", "waiting"}
            assert [worker.task for worker in status.workers] == WORKERS
        assert top(environ, "--once", "--run", "seen").stdout.startswith("seen.py (process")
        run.interrupt(signal.SIGTERM)
        assert top(environ, "--once").stdout.startswith("seen.py (process")


def test_each_task_serves_its_own_metrics(environ: dict[str, str]) -> None:
    with program(RUN, environ) as run:
        found: dict[str, str] = {}
        while len(found) < 3:
            line = run.wait_for_error(": metrics at ")
            found.update(re.findall(r"(/job:\w+/task:\d): metrics at (\S+)", line))
        assert sorted(found) == ["/job:ps/task:0", *WORKERS]
        for task, url in found.items():
            with urllib.request.urlopen(url) as answer:
                text = answer.read().decode()
            assert f'psync_task_received_bytes_total{{task="{task}"}}' in text
            kind = "applies" if "ps" in task else "work_seconds"
            assert re.search(rf'psync_task_{kind}_total{{.*task="{task}"', text)


def test_a_run_that_was_killed_has_ended(environ: dict[str, str]) -> None:
    with program(RUN, environ) as run:
        status = Status.from_json(top(environ, "--once", "--json").stdout)
        os.kill(status.pid, signal.SIGKILL)
        assert run.end()[0] == 128 + signal.SIGKILL
    ended = top(environ, "--once")
    assert "psync: error: the newest run, seen.py (process" in ended.stderr
    with program(RUN, environ):  # takes away what that one has left
        assert len(list(Path(environ["XDG_RUNTIME_DIR"], "psync").glob("*.json"))) == 1
