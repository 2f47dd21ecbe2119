"""An evaluator beside real training: `psync run --evaluator`, and one that is started by hand."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tasks_by_hand import ByHand, ended, plain_environ, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Run:
    """A launcher with a chief, a ps, a worker and an evaluator."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdin is not None
        self.popen = popen
        self.stdin = popen.stdin
        self._passed: list[str] = []  # lines that were read before anybody asked for them

    def save(self, number: int, *, then_end: bool = False) -> str:
        """Let the chief train and save; return the line in which it says what it has."""
        self.stdin.write("save\n")
        self.stdin.flush()
        if then_end:
            self.stdin.close()
        return self.wait_for(f"saved ckpt-{number:08d} ")

    def wait_for(self, text: str, stream: IO[str] | None = None) -> str:
        """Read a stream, by default stdout, up to a line with this; return what follows it.

        Lines of two tasks come in any order, so it may have been read before.
        """
        stream = stream or self.popen.stdout
        assert stream is not None
        for line in itertools.chain(list(self._passed), iter(stream.readline, "")):
            if text in line:
                if line in self._passed:
                    self._passed.remove(line)
                return line.partition(text)[2].strip()
            if line not in self._passed:
                self._passed.append(line)
        raise AssertionError(f"no {text!r} in {''.join(self._passed)}")

    def wait_for_error(self, text: str) -> str:
        return self.wait_for(text, self.popen.stderr)


@contextlib.contextmanager
def running(name: str, *args: str) -> Iterator[Run]:
    options = ("--evaluator", "--log-level", "error")
    command = [sys.executable, "-m", "psync", "run", *options, *script(name, "--", *args)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=plain_environ(),
    ) as popen:  # fmt: skip
        try:
            yield Run(popen)
        finally:
            popen.kill()


@pytest.mark.promise("failures.evaluator")
def test_it_evaluates_what_training_saves_and_may_be_killed_at_any_time(tmp_path: Path) -> None:
    with running("evaluated.py", str(tmp_path)) as run:
        pid = int(run.wait_for("[evaluator-0] evaluator "))
        saved = run.save(1)
        assert run.wait_for("[evaluator-0] found ckpt-00000001 ") == f"{saved} at step 5"
        os.kill(pid, signal.SIGKILL)
        run.wait_for_error("evaluator-0 was killed by SIGKILL and is started again")
        again = int(run.wait_for("[evaluator-0] evaluator "))
        assert run.wait_for("[evaluator-0] found ckpt-00000001 ") == f"{saved} at step 5"
        run.save(2)
        os.kill(again, signal.SIGTERM)  # its orderly end: it is not started again
        run.save(3, then_end=True)
        assert run.popen.wait() == 0
        assert run.popen.stderr is not None
        assert run.popen.stderr.read() == ""


def test_the_last_checkpoint_is_evaluated_when_the_run_has_ended(tmp_path: Path) -> None:
    with running("evaluated.py", str(tmp_path)) as run:
        for number in (1, 2):
            run.save(number)
        saved = run.save(3, then_end=True)
        assert run.wait_for("[evaluator-0] found ckpt-00000003 ") == f"{saved} at step 15"
        assert run.popen.wait() == 0


def test_without_a_program_it_says_so_and_training_goes_on() -> None:
    with running("example.py") as run:
        run.wait_for_error(
            "this process is the evaluator, but the program has no evaluate function"
        )
        run.wait_for_error("evaluator-0 exited with code 2 and is not started again; training goes")
        run.wait_for("9 ")  # the last epoch
        assert run.popen.wait() == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_one_that_is_started_by_hand_needs_no_secret_and_ends_on_signals(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    with contextlib.ExitStack() as cleanup:
        tasks = ByHand()
        cleanup.callback(tasks.close)
        command = script("evaluated.py", str(tmp_path))
        evaluator = tasks.start("evaluator", 0, command, secret=None)
        assert evaluator.stdout is not None
        assert evaluator.stdout.readline() == f"evaluator {evaluator.pid}\n"
        evaluator.send_signal(signum)
        assert evaluator.communicate() == ("evaluator ends\n", "")
        assert evaluator.returncode == code


def test_one_that_is_started_by_hand_ends_when_all_who_train_were_killed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as cleanup:
        cluster = ByHand()
        cleanup.callback(cluster.close)
        training = cluster.serve_all()
        environ = {"PSYNC_CHIEF_TIMEOUT": "1", "PSYNC_LOG_LEVEL": "debug"}
        command = script("evaluated.py", str(tmp_path))
        evaluator = cluster.start("evaluator", 0, command, environ=environ)
        wait_for_line(evaluator, "training goes on")
        for task in training:
            task.kill()
        left = ended(evaluator)
        assert "the evaluator ends: nobody trains any more (/job:ps/task:0 at " in left.err
        assert left.code == 0


def test_one_that_nobody_comes_to_ends_as_workers_do(tmp_path: Path) -> None:
    with contextlib.ExitStack() as cleanup:
        cluster = ByHand()
        cleanup.callback(cluster.close)
        environ = {"PSYNC_CHIEF_TIMEOUT": "0.5"}
        command = script("evaluated.py", str(tmp_path))
        run = cluster.run("evaluator", 0, command, environ=environ)
        assert run.code == 1
        assert (
            "psync: error: the evaluator ends: within 0.5 s nobody has come who trains" in run.err
        )
        assert "hint: PSYNC_CHIEF_TIMEOUT sets how many seconds it waits" in run.err
