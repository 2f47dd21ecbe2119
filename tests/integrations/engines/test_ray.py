"""psync on Ray: a cluster of several nodes on this machine, and programs as drivers of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from engine_programs import HERE, environ, run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = str(HERE / "ray_programs.py")


class Nodes:
    """The cluster; see ray_nodes.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_nodes.py")],
            env=environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self._line()
        self.removed: list[str] = []

    def remove(self, address: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{address}\n")
        self.process.stdin.flush()
        assert self._line() == "removed"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


def on(nodes: Nodes) -> dict[str, str]:
    """The variables of a driver of that cluster. What tasks print is not left out if it repeats."""
    return {"RAY_ADDRESS": nodes.address, "RAY_DEDUP_LOGS": "0"}


def host_of(address: str) -> str:
    return address.partition(":")[0]


def test_tasks_are_actors_on_nodes_and_the_secret_is_nowhere(nodes: Nodes) -> None:
    said, lines = run([PROGRAMS, "all_else"], **on(nodes))
    places = said["places"]
    assert said["tasks"] == "<RayCluster, 2 ps, 2 workers, running>"
    # Where they listen is their nodes' addresses, and ps tasks are spread.
    assert all(host_of(place).startswith("127.0.0.") for place in places.values())
    assert host_of(places["ps-0"]) != host_of(places["ps-1"])
    # Workers come by scale.
    assert said["scaled"] == ["ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]
    assert said["counted"] == 60
    # What a step prints comes by Ray, with the task's name.
    assert host_of(said["step_on"]).startswith("127.0.0.")
    assert any("(worker-" in line and line.endswith("printed in a step") for line in lines), lines
    # Blocks of ray.data: each row once, each worker its own.
    rows, sums = zip(*said["eaten"], strict=True)
    assert rows == (500, 500)
    assert sum(sums) == sum(range(1000))
    # The secret is in this process, so it would have been found elsewhere.
    assert said["secret_here"]
    assert said["looked_at"] == ["gcs/gcs_server", "raylet/raylet"]
    assert said["secret_in"] == []
    assert "Ray has no room within 1 s for 1 worker tasks of 1000 CPU each" in said["no_room"]


def test_a_ps_that_was_killed_is_found_at_its_new_address(nodes: Nodes, tmp_path: Path) -> None:
    said, _ = run([PROGRAMS, "a_ps_is_killed", str(tmp_path)], **on(nodes))
    assert said["counted"] == 40
    assert said["after"] != said["before"]


def test_a_training_function_runs_inside_a_task(nodes: Nodes) -> None:
    said, _ = run([PROGRAMS, "inside_a_task"], **on(nodes))
    assert said["counted"] == 20


def test_psync_run_on_ray_runs_the_script_of_psync_run(nodes: Nodes) -> None:
    command = ["-m", "psync", "run", "--on", "ray", "--address", nodes.address, "--ps", "2"]
    said, _ = run([*command, str(HERE / "train.py"), "--", "--epochs", "2"])
    assert said == {"counted": [20, 20], "arguments": ["--epochs", "2"]}


# The last one: the node stays away.
def test_a_node_is_removed_in_the_middle_and_counts_are_exact(nodes: Nodes) -> None:
    def remove(said: dict[str, Any]) -> None:
        if "remove" in said:
            nodes.remove(said.pop("remove"))

    said, lines = run([PROGRAMS, "a_node_is_removed"], heard=remove, **on(nodes))
    lost, now = host_of(said["before"]["ps-1"]), said["after"]
    assert said["counted"] == [600, 700], "\n".join(lines)
    assert said["name"] == said["before"]["ps-1"]
    assert lost not in {host_of(place) for place in now.values()}
    assert sorted(now) == ["ps-0", "ps-1", "worker-0", "worker-1"]
