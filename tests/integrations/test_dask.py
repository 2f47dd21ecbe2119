"""psync on Dask: programs that train on the workers of a Dask cluster."""

from __future__ import annotations

import pytest

from engine_programs import EXAMPLES, HERE, run

pytest.importorskip("distributed")

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = str(HERE / "dask_programs.py")


def test_a_worker_is_killed_and_counts_are_exact_and_nothing_stays() -> None:
    said, lines = run([PROGRAMS, "a_worker_is_killed"])
    assert said["others"] == sum(range(1, 101))
    assert said["stayed"]  # tasks were not stolen
    assert said["secret_in"] == []
    assert said["counted"] == [700, 800], "\n".join(lines)
    assert said["after"]["ps-1"] != said["before"]["ps-1"]
    assert said["after"]["ps-0"] == said["before"]["ps-0"]
    assert said["scaled"] == ["ps-0", "ps-1", "worker-0"]
    assert said["left"] == []


def test_the_example_finds_the_weights() -> None:
    _, lines = run([str(EXAMPLES / "dask_cluster.py")])
    assert "weights [0. 1. 2. 3.]" in lines


def test_psync_run_on_dask_runs_the_script_of_psync_run() -> None:
    command = ["-m", "psync", "run", "--on", "dask", "--ps", "2"]
    said, _ = run([*command, str(HERE / "train.py"), "--", "--epochs", "2"])
    assert said == {"counted": [20, 20], "arguments": ["--epochs", "2"]}
