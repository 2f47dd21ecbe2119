"""Processes that programs and steps fork: they end when they are told to, and hold nothing up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tasks_by_hand import by_hand, ended, plain_environ, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.promise("forks.end-when-terminated")
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_terminate_ends_what_was_forked_wherever_that_was(loop: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "psync", "run", *script("forks.py"), "--ps", "1", "--workers", "1"],
        env=plain_environ(PSYNC_LOOP=loop),
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        "{'(-15, [1, 2])'}",
        "wait: wait in closure 3, which has no event loop",
    ]


@pytest.mark.promise("forks.hold-nothing")
def test_a_child_that_outlives_its_worker_keeps_neither_its_address_nor_its_connections() -> None:
    command = script("forks.py")
    with by_hand() as cluster:
        cluster.start("ps", 0, stderr=subprocess.DEVNULL)
        worker = cluster.start("worker", 0, stderr=subprocess.DEVNULL)
        chief = cluster.start("chief", 0, command, environ={"STRAY": "1"})
        _, pid, child = wait_for_line(chief, "stray: ", "stdout").split()
        try:
            assert int(pid) == worker.pid
            worker.kill()
            wait_for_line(chief, "/job:worker/task:0 is lost")
            again = cluster.start("worker", 0)
            wait_for_line(again, " serves at ")
            os.kill(int(child), 0)  # it lives
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        chief.send_signal(signal.SIGTERM)
        assert ended(chief).code == 143
