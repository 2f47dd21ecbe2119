"""Output that nobody takes: full disks, closed descriptors, readers that have gone or do not read.

Training goes on where only output is lost; what ends, ends with an error and its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks_by_hand import SERVE, by_hand, plain_environ, script

SCRIPTS = Path(__file__).parent / "scripts"
RUN = f"{sys.executable} -m psync run {SCRIPTS / 'talk.py'}"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=plain_environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.promise("failures.output")
def test_training_ends_well_while_the_output_of_tasks_meets_a_full_disk() -> None:
    ended = shell(f"{RUN} -- quiet > /dev/full")
    assert ended.returncode == 0
    assert ended.stderr.count("psync: output of tasks is lost: No space left on device\n") == 1
    assert "[worker-0] error 19\n" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_log_on_a_full_disk_stops_nobody() -> None:
    ended = shell(f"{RUN} 2> /dev/full")
    assert ended.returncode == 0
    assert "the chief has ended\n" in ended.stdout  # what workers print may come after it


def test_a_chief_whose_own_output_cannot_be_written_fails_as_any_program() -> None:
    ended = shell(f"{RUN} > /dev/full")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "OSError: [Errno 28] No space left on device" in ended.stderr


@pytest.mark.promise("failures.output")
def test_a_reader_that_leaves_after_one_line_stops_nobody() -> None:
    ended = shell(f"{RUN} -- quiet | head -1")
    assert ended.returncode == 0
    assert ended.stdout.startswith("[worker-0] step ")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_stop_nobody(closed: str) -> None:
    """What is opened next would get their numbers, and what is printed."""
    ended = shell(f"{RUN} {closed}")
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("options", ["--version", "run --help"])
def test_the_command_line_says_that_its_output_is_lost(options: str) -> None:
    ended = shell(f"{sys.executable} -m psync {options} > /dev/full")
    assert ended.returncode == 1
    assert ended.stderr == ("psync: error: the output cannot be written: No space left on device\n")


def blocked_in_a_write(pid: int) -> bool:
    return "pipe_write" in Path(f"/proc/{pid}/wchan").read_text()


def test_a_run_whose_output_nobody_reads_can_still_be_stopped() -> None:
    command = [sys.executable, "-m", "psync", "run", str(SCRIPTS / "talk.py"), "--", "much"]
    with subprocess.Popen(
        command, env=plain_environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as popen:  # fmt: skip
        try:
            while not blocked_in_a_write(popen.pid):
                os.sched_yield()
            popen.send_signal(signal.SIGTERM)
            assert popen.wait() == 128 + signal.SIGTERM
        finally:
            popen.kill()


def test_a_task_that_logs_to_a_full_disk_serves_and_ends_well() -> None:
    with by_hand() as cluster, open("/dev/full", "w") as full:
        tasks = [
            cluster.start(job, 0, (*SERVE, "--log-level", "debug"), stderr=full)
            for job in ("ps", "worker")
        ]
        chief = cluster.run("chief", 0, script("talk.py", "log"))
        assert (chief.code, chief.err.count("Traceback")) == (0, 0)
        assert [task.wait() for task in tasks] == [0, 0]


def test_what_the_command_line_opens_gets_no_number_of_a_closed_descriptor() -> None:
    code = "import os; from psync.cli.main import main; main(['--version']); print(os.dup(0))"
    ended = shell(f'{sys.executable} -c "{code}" <&- 2>&-')
    assert ended.returncode == 0
    assert int(ended.stdout.splitlines()[-1]) > 2
