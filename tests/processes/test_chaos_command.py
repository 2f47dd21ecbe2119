"""``python -m psync.testing.chaos``: real processes, a few seconds of chaos."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from psync.testing.chaos.__main__ import PS_POINTS, WORKER_POINTS, drawn_failpoints
from psync.testing.sabotage import Failpoints

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(170)]


def chaos(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "psync.testing.chaos", "--out", str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=160)


@pytest.mark.promise("updates.at-most-once")
def test_a_few_seconds_of_kills_and_losses_leave_everything_counted_once(tmp_path: Path) -> None:
    ended = chaos(tmp_path, "--seed", "5", "--minutes", "0.08", "--pause", "0.5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing was found" in ended.stdout
    assert "bit for bit" in ended.stdout
    assert "  worker   SIG" in ended.stdout


def test_so_do_deaths_of_ps_tasks_whose_backups_serve(tmp_path: Path) -> None:
    ended = chaos(
        tmp_path, "--seed", "3", "--minutes", "0.15", "--recovery", "backup", "--jobs", "ps=1",
        "--signals", "SIGKILL=1", "--failpoints", "none", "--pause", "2", "--at-least", "ps=1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"bit for bit; .* [1-9]\d* backups that came to serve", ended.stdout)
    assert re.search(r"LogEntries( +[1-9]\d*){3}", ended.stdout), ended.stdout


@pytest.mark.promise("updates.tests-notice")
@pytest.mark.full
def test_without_dedup_updates_are_counted_twice_and_the_run_says_how_to_repeat_it(
    tmp_path: Path,
) -> None:
    ended = chaos(
        tmp_path, "--minutes", "0.02", "--recovery", "none", "--without", "dedup",
        "--failpoints", "none",
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAULT: rows: closure" in ended.stdout
    assert f"left in {tmp_path}/async" in ended.stdout
    assert "again: " in ended.stdout


@pytest.mark.promise("updates.tests-notice", "updates.none-from-before-rollback")
@pytest.mark.full
@pytest.mark.parametrize(
    ("scene", "without", "seen", "fault"),
    [
        (
            "torn", "commit_marker", "the chief died while it saved, and went on from ckpt-",
            "rows: closure 0 was counted 0 times, expected 1",
        ),
        (
            "late", "timeline", "late updates came to ps 0",
            r": closure \d+ was counted 1 times on ps 0 and 0 times on ps 1",
        ),
        (
            "former", "fencing", "the chief was started again, and then",
            r"rows: closure \d+ was counted 2 times",
        ),
        (
            "cut", "one_cut", "ps tasks went back 3 times",
            r": closure \d+ was counted [01] times on ps 0 and [01] times on ps 1",
        ),
        (
            "alone", "replica_ack", "when its backup did not hear of it any more",
            r": closure \d+ was counted 0 times on ps 0 and 1 times on ps 1",
        ),
    ],
)  # fmt: skip
def test_a_scene_is_seen_to_end_badly_only_without_the_safeguard_that_it_is_about(
    scene: str, without: str, seen: str, fault: str, tmp_path: Path
) -> None:
    ended = chaos(tmp_path / "with", "--scene", scene)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert seen in ended.stdout
    assert "nothing was found" in ended.stdout
    ended = chaos(tmp_path / "without", "--scene", scene, "--without", without)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert seen in ended.stdout
    assert re.search(f"FAULT: .*{fault}", ended.stdout), ended.stdout


@pytest.mark.full
def test_fewer_deaths_than_were_asked_for_are_a_fault(tmp_path: Path) -> None:
    options = ("--minutes", "0.01", "--recovery", "none", "--no-losses", "--failpoints", "none")
    ended = chaos(tmp_path, *options, "--at-least", "worker=100")
    assert ended.returncode == 1
    assert "deaths of worker, expected at least 100" in ended.stdout


def test_failpoints_are_drawn_from_the_seed_and_exist() -> None:
    for points in (*WORKER_POINTS.values(), *PS_POINTS.values()):
        for name in points:
            Failpoints(f"{name}=kill")
    drawn = [drawn_failpoints(seed, "sync", "checkpoint") for seed in range(5)]
    assert drawn == [drawn_failpoints(seed, "sync", "checkpoint") for seed in range(5)]
    assert len(set(drawn)) > 1
    assert "ps" not in drawn_failpoints(1, "async", "none").replace("between_ps", "")
