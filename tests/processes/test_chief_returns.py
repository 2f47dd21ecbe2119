"""The chief is killed in the middle of training and started again: it goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks_by_hand import (
    by_hand,
    children_of,
    ended,
    plain_environ,
    psync_run,
    script,
    wait_for_line,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLACES = 4096


def lines(path: Path) -> list[int]:
    """The whole lines of the journal."""
    text = path.read_text() if path.exists() else ""
    return [int(line) for line in text.split("\n")[:-1]]


def wait_for_lines(journal: Path, count: int, chief: subprocess.Popen[str]) -> None:
    """Wait until the journal has so many lines."""
    deadline = time.monotonic() + 60
    while len(lines(journal)) < count:
        assert chief.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.promise("failures.chief-attach")
@pytest.mark.parametrize("kills", [1, 3])
def test_each_update_that_was_acknowledged_is_there_and_none_twice(
    kills: int, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    with by_hand(2, 2) as cluster:
        command = script("returning.py", str(journal), "960")
        tasks = [cluster.start(job, index, command) for job in ("ps", "worker") for index in (0, 1)]
        for _ in range(kills):
            known = len(lines(journal))
            chief = cluster.start("chief", 0, command)
            wait_for_lines(journal, known + 40, chief)
            chief.kill()
            chief.wait()
        acknowledged = lines(journal)
        last = ended(cluster.start("chief", 0, command))
        assert last.code == 0, last.err
        at_first, at_last = map(json.loads, last.out.splitlines())
        for marks in (at_first[0], at_last[0]):
            halves = marks[:PLACES], marks[PLACES:]
            for half in halves:
                assert max(half) == 1  # no update twice
                assert [place for place in acknowledged if not half[place]] == []
        assert at_first[1] >= len(acknowledged)  # the optimizer's steps go on
        assert max(at_last[1]) >= len(acknowledged) + 960  # its updates are there, too
        assert max(at_last[1]) <= sum(at_last[0][:PLACES]) + 2 * kills
        assert [ended(task).code for task in tasks] == [0, 0, 0, 0]


@pytest.mark.promise("failures.chief-with-other-variables")
@pytest.mark.parametrize(("when", "code"), [("early", 2), ("late", 1), ("grouped", 1)])
def test_a_program_with_other_variables_leaves_the_values_to_the_next_one(
    when: str, code: int
) -> None:
    with by_hand(1, 1) as cluster:
        tasks = [cluster.start(job, 0, script("declaring.py", "2")) for job in ("ps", "worker")]
        ended(cluster.start("chief", 0, script("declaring.py", "2", when, "die")))
        wrong = ended(cluster.start("chief", 0, script("declaring.py", "3", when, "live")))
        assert wrong.code == code
        assert "nothing was changed" in wrong.err
        right = ended(cluster.start("chief", 0, script("declaring.py", "2", when, "live")))
        assert (right.code, right.out.strip()) == (0, "[2.0, 2.0]")
        assert [ended(task).code for task in tasks] == [0, 0]


@pytest.mark.promise("failures.chief-restarts")
def test_psync_run_starts_it_again_and_it_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    run = psync_run("--chief-restarts", "2", *script("returning.py"), "--", str(journal), "960")
    try:
        for _ in range(2):
            wait_for_lines(journal, len(lines(journal)) + 40, run)
            os.kill(children_of(run.pid)["chief-0"], signal.SIGKILL)
            wait_for_line(run, "started again")
        acknowledged = lines(journal)
        last = ended(run)
    finally:
        run.kill()
        run.communicate()
    assert last.code == 0, last.err
    *_, at_first, at_last = map(json.loads, last.out.splitlines())
    for marks in (at_first[0], at_last[0]):
        for half in (marks[:PLACES], marks[PLACES:]):
            assert max(half) == 1
            assert [place for place in acknowledged if not half[place]] == []
    assert min(at_last[1]) >= len(acknowledged) + 960


@pytest.mark.promise("failures.chief-updates-in-progress")
@pytest.mark.parametrize("recovery", ["checkpoint", "backup"])
def test_pushes_under_way_when_it_is_killed_in_a_save_are_on_all_ps_tasks_or_counted(
    recovery: str, tmp_path: Path
) -> None:
    lives = 8
    run = subprocess.run(
        [sys.executable, "-m", "psync", "run", "--quiet", "--ps", "3", "--workers", "3",
         "--chief-restarts", str(lives), *script("saving.py"), "--", str(tmp_path / "saved"),
         str(lives), recovery],
        env=plain_environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    counted, before = 0, -1.0
    said = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(said) == lives + 1
    for found, partial in said:
        counted += partial
        assert max(found) - min(found) <= counted
        assert min(found) > before
        before = min(found)
