"""The examples as their users run them: to the end, with a worker that dies, with a typo.

`make examples` runs the rest: those that need no more than to be run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tasks_by_hand import Ended, children_of, ended, psync_run, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def started(name: str, *options: str) -> subprocess.Popen[str]:
    return psync_run(str(EXAMPLES / name), "--", *options)


def run(name: str, *options: str) -> Ended:
    return ended(started(name, *options))


def test_ratings_are_learned_as_well_as_noise_allows_though_a_worker_is_killed() -> None:
    running = started("gallery/matrix_factorization.py")
    wait_for_line(running, "epoch  RMSE", "stdout")
    os.kill(children_of(running.pid)["worker-1"], signal.SIGKILL)
    end = ended(running)
    assert end.code == 0, end.err
    assert "worker-1 was killed by SIGKILL and is started again" in end.err
    reached, noise, least = map(float, re.findall(r": (0\.\d+)$", end.out, re.M))
    assert noise < least < reached < 1.1 * least


def test_a_fit_goes_on_where_the_one_before_has_ended(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")

    def table(end: Ended) -> list[str]:
        assert end.code == 0, end.err
        return re.findall(r"^ +\d+(?: +[\d.]+)+$", end.out, re.M)

    first = run("fit.py", "--epochs", "2", "--out", str(tmp_path))
    second = run("fit.py", "--epochs", "3", "--out", str(tmp_path))
    assert [line.split()[0] for line in table(second)] == ["1", "2", "3"]
    assert table(second)[:2] == table(first)
    assert re.findall(r"^epoch (\d+)/3: ", second.out, re.M) == ["3"]
    rows = (tmp_path / "epochs.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "2"]


@pytest.mark.parametrize("name", ["embeddings.py", "fit.py", "gallery/matrix_factorization.py"])
def test_a_typo_in_the_options_is_told_once_and_ends_the_run(name: str) -> None:
    end = run(name, "--epoch-s", "3")
    assert end.code == 2
    assert end.out == ""
    assert end.err.endswith(f"{Path(name).name}: error: unrecognized arguments: --epoch-s 3\n")
    assert end.err.count("error:") == 1
