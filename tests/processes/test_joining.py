"""`psync join`: workers that know the chief's address and the secret come and leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from live_program import PSYNC, program
from tasks_by_hand import children_of

SCRIPT = str(Path(__file__).parent / "scripts" / "asked.py")
RUN = [*PSYNC, "run", SCRIPT, "--workers", "1"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def environ(environ: dict[str, str]) -> dict[str, str]:
    return {**environ, "PSYNC_SECRET": "a secret of some thirty-two bytes"}


def join(environ: dict[str, str], *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*PSYNC, "join", *args], env=environ, stderr=subprocess.PIPE, text=True)


def end_of(worker: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it has said."""
    _, said = worker.communicate()
    return worker.returncode, said


@pytest.mark.smoke
@pytest.mark.parametrize("command", [RUN, [sys.executable, SCRIPT, "--local"]])
def test_workers_join_leave_by_sigterm_and_end_with_the_program(
    command: list[str], environ: dict[str, str]
) -> None:
    with program(command, environ) as chief:
        own = chief.there(1)
        first, second = join(environ, chief.greeting), join(environ, chief.greeting)
        assert chief.there(3) == own | {first.pid, second.pid}
        assert chief.ask("add 200") == "begun"
        first.terminate()
        assert end_of(first)[0] == 0
        assert chief.line() == "total 200"
        assert chief.there(2) == own | {second.pid}
        assert chief.end()[0] == 0
        code, said = end_of(second)
        assert code == 0
        assert "asks it to stop: the chief has ended" in said


def test_one_that_is_killed_is_replaced_by_another_one(environ: dict[str, str]) -> None:
    with program(RUN, environ) as chief:
        own = chief.there(1)
        killed = join(environ, chief.greeting)
        chief.there(2)
        assert chief.ask("add 200") == "begun"
        killed.kill()
        end_of(killed)
        assert chief.line() == "total 200"
        next_one = join(environ, chief.greeting)
        assert chief.there(2) == own | {next_one.pid}
        assert chief.end()[0] == 0
        assert end_of(next_one)[0] == 0


def test_a_worker_with_the_script_knows_its_classes(environ: dict[str, str]) -> None:
    with program([*RUN, "--", "--by-name"], environ) as chief:
        worker = join(environ, chief.greeting, SCRIPT)
        (own,) = chief.there(2) - {worker.pid}
        assert own != worker.pid
        code, said = chief.end()
        assert (code, "by name" in said) == (0, True)
        assert end_of(worker)[0] == 0


def test_joined_workers_find_a_chief_that_is_started_again(environ: dict[str, str]) -> None:
    with program([*RUN, "--chief-restarts", "1"], environ) as chief:
        worker = join(environ, chief.greeting)
        assert worker.pid in chief.there(2)
        os.kill(children_of(chief.process.pid)["chief-0"], signal.SIGKILL)
        assert chief.line() == chief.greeting
        assert worker.pid in chief.there(2)
        assert chief.end()[0] == 0
        assert end_of(worker)[0] == 0
