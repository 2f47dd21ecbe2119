"""Who of the processes on this machine is a task of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from psync.testing.chaos.victims import Victim, victims_of

pytestmark = pytest.mark.processes


def sleeper(**environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
    )


def test_children_with_a_task_are_found_and_others_are_not() -> None:
    config = {"cluster": {"ps": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 1}}
    task, stranger = sleeper(TF_CONFIG=json.dumps(config)), sleeper(TF_CONFIG="{}")
    try:
        for process in (task, stranger):
            assert process.stdout is not None
            process.stdout.readline()  # it runs its program
        found = victims_of(os.getpid())
        assert found == {("ps", 1): Victim(task.pid, "ps", 1)}
        victim = found["ps", 1]
        assert victim.name == "ps-1"
        assert victim.config == config
        assert victims_of(task.pid) == {}
        assert victim.send(signal.SIGKILL)
        task.wait()
        assert victims_of(os.getpid()) == {}
        assert not victim.send(signal.SIGCONT), "it is gone"
    finally:
        for process in (task, stranger):
            process.kill()
            process.communicate()
