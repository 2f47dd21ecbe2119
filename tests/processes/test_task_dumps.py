"""SIGUSR1 and the watchdog on real processes, whose steps hang in several ways."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks_by_hand import plain_environ

SCRIPT = Path(__file__).parent / "scripts" / "stuck.py"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Stuck:
    """A run whose steps hang; what all its tasks say comes together."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.text = ""

    def read_until(self, *texts: str, times: int = 1) -> None:
        assert self.popen.stdout is not None
        while not all(self.text.count(text) >= times for text in texts):
            line = self.popen.stdout.readline()
            assert line, f"no {texts} in\n{self.text}"
            self.text += line


@contextlib.contextmanager
def stuck(kind: str, num_workers: int = 1, **environ: str) -> Iterator[Stuck]:
    command = ("-m", "psync", "run", str(SCRIPT), "--workers", str(num_workers), "--", kind)
    popen = subprocess.Popen(
        [sys.executable, *command],
        env=plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Stuck(popen)
    try:
        run.read_until("stuck")
        yield run
        popen.send_signal(signal.SIGTERM)
        run.read_until("SIGTERM: stopping all tasks")
        popen.send_signal(signal.SIGTERM)  # steps that hang need not be waited for
        assert popen.wait() == 128 + signal.SIGTERM
    finally:
        popen.kill()
        popen.communicate()


def test_a_step_that_waits_is_shown_by_every_task() -> None:
    with stuck("waits_for_ever") as run:
        run.popen.send_signal(signal.SIGUSR1)
        run.read_until("psync: end of the report", times=3)
        assert "coordinator, incarnation " in run.text
        assert "/job:worker/task:0: closure 0 (" in run.text
        assert "everybody waits for: closure 0 (" in run.text
        assert "[worker-0]   runs closure 0 (" in run.text
        assert "in waits_for_ever: await asyncio.Event().wait()" in run.text
        assert "[ps-0] /job:ps/task:0: serves coordinator " in run.text


@pytest.mark.promise("tasks.report-on-request")
def test_a_step_that_computes_on_the_loop_is_shown_all_the_same() -> None:
    with stuck("computes_on_the_loop") as run:
        run.popen.send_signal(signal.SIGUSR1)
        run.read_until("psync: end of the report", times=3)
        assert "[worker-0]   runs closure 0 (" in run.text
        assert "[worker-0]     " in run.text
        assert "in computes_on_the_loop" in run.text


def test_a_step_that_never_leaves_c_shows_its_bare_stack() -> None:
    with stuck("never_returns_from_c") as run:
        run.popen.send_signal(signal.SIGUSR1)
        run.read_until("psync: end of the report", times=2)  # chief and ps
        run.read_until("in never_returns_from_c")
        assert '[worker-0]   File "' in run.text  # faulthandler's


def test_who_waits_for_a_token_is_named_by_ps_0() -> None:
    with stuck("waits_for_a_token", num_workers=2) as run:
        run.read_until("stuck", times=2)
        run.popen.send_signal(signal.SIGUSR1)
        run.read_until("psync: end of the report", times=4)
        assert "step 0, 1 of 2 counted, 1 wait for a token" in run.text
        assert "[ps-0]   waiting for others: /job:worker/task:" in run.text


def test_the_watchdog_speaks_without_being_asked() -> None:
    with stuck("waits_for_ever", PSYNC_WATCHDOG_TIMEOUT="0.5") as run:
        run.read_until("psync: end of the report")
        assert "by the watchdog: no closure has ended for " in run.text
        assert "/job:worker/task:0: closure 0 (" in run.text


def test_a_task_that_is_asked_while_it_starts_answers_later_and_lives() -> None:
    command = ("-m", "psync", "run", str(SCRIPT), "--", "waits_for_ever")
    with subprocess.Popen(
        [sys.executable, *command],
        env=plain_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as popen:
        run = Stuck(popen)
        try:
            children = Path(f"/proc/{popen.pid}/task/{popen.pid}/children")
            asked: set[int] = set()
            while len(asked) < 3:  # the instant in which they are there
                for pid in map(int, children.read_text().split()):
                    if pid not in asked:
                        os.kill(pid, signal.SIGUSR1)
                        asked.add(pid)
            run.read_until("psync: end of the report", times=3)
            run.read_until("stuck")
            assert "was killed" not in run.text
            popen.send_signal(signal.SIGTERM)
            assert popen.wait() == 128 + signal.SIGTERM
        finally:
            popen.kill()
