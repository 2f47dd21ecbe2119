"""The programs of the gallery in their short form: what they print is true, and they draw it.

Each program checks its own outcome, too, and ends with a code other than 0 where it is not as
expected. `make gallery` runs them in full.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks_by_hand import ended, plain_environ

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(180)]

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
PNG = b"\x89PNG"


def run(name: str, out: Path, *tasks: str) -> str:
    """Run a program to its end, with psync run if tasks are given; return what it printed."""
    script = [str(GALLERY / f"{name}.py")]
    command = ["-m", "psync", "run", *tasks, *script, "--"] if tasks else script
    process = subprocess.Popen(
        [sys.executable, *command, "--quick", "--out", str(out)],
        env={**plain_environ(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = ended(process)
    assert end.code == 0, f"{end.out}\n{end.err}"
    assert (out / f"{name}.png").read_bytes().startswith(PNG)
    return end.out


def numbers(pattern: str, printed: str) -> list[list[float]]:
    """Return the groups of each line that matches, as numbers."""
    found = re.finditer(pattern, printed, re.MULTILINE)
    return [[float(number) for number in match.groups()] for match in found]


def test_five_modes_learn_the_digits_and_a_backup_drops_a_quarter(tmp_path: Path) -> None:
    printed = run("digits_modes", tmp_path, "--ps", "2", "--workers", "4")
    rows = numbers(r" +\d+\.\d +\d+ +(\d+\.\d)% +(0\.\d+)$", printed)
    assert len(rows) == 6
    assert all(reached > 0.6 for _, reached in rows)
    dropped = [share for share, _ in rows]
    assert [share for share in dropped if share] == [pytest.approx(25, abs=2)]
    assert "the same bits: True" in printed


def test_ten_million_rows_are_learned_by_moving_few(tmp_path: Path) -> None:
    printed = run("wide_and_deep", tmp_path, "--ps", "2", "--workers", "3")
    rows = numbers(r"^ +(\d+) +(0\.\d+) +(\d+) +\d+$", printed)
    views, scores, named = zip(*rows, strict=True)
    assert views[-1] == 300 * 2048
    assert 0.68 < scores[-1] < 0.82
    assert scores[0] < scores[-1]
    assert named[-1] < 5 * views[-1]
    assert numbers(r"moved (\d+) rows each way, (0\.\d+)%", printed)[0][1] < 0.1


def test_local_steps_send_less_and_learn_what_no_site_knows_alone(tmp_path: Path) -> None:
    printed = run("local_steps", tmp_path, "--ps", "1", "--workers", "4")
    ((alone,),) = numbers(r"the best site alone: accuracy (0\.\d+)$", printed)
    rows = numbers(r"^ +(\d+) +(\d+) +(\d+\.\d) +(0\.\d+)$", printed)
    assert [steps * rounds for steps, rounds, _, _ in rows] == [160, 160, 160]
    assert rows[-1][2] == pytest.approx(rows[0][2] / 16, abs=0.1)  # MB sent
    assert all(reached > max(alone, 0.93) for _, _, _, reached in rows)


def test_a_pole_is_balanced_without_a_gradient(tmp_path: Path) -> None:
    printed = run("evolution", tmp_path, "--ps", "1", "--workers", "8")
    ((first, learned),) = numbers(r"first 100 games: (\d+) steps; 100 new ones: (\d+)$", printed)
    assert first < 100
    assert learned >= 450
    assert "on 8 workers" in printed


def test_half_of_the_trials_is_given_up_in_each_round(tmp_path: Path) -> None:
    printed = run("search", tmp_path)
    rows = numbers(r"^ *(\d+) trials, +(\d+) steps each", printed)
    assert [trials for trials, _ in rows] == [16, 8, 4, 2, 1]
    ((done, instead),) = numbers(r"^(\d+) steps in .*, instead of (\d+);", printed)
    assert done < instead / 5
    ((reached,),) = numbers(r"no choice has seen: (0\.\d+)$", printed)
    assert reached >= 0.95
