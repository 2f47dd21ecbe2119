"""psync on Ray: a cluster of several nodes on this machine, and programs as drivers of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]


def environ(**more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PSYNC_", "TF_CONFIG", "RAY_"))
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }


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


def ended(nodes: Nodes, command: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Run a program; return what it says, and all lines that it prints."""
    program = subprocess.Popen(
        [sys.executable, *command], env=environ(RAY_ADDRESS=nodes.address),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said: dict[str, Any] = {}
    lines: list[str] = []
    assert program.stdout is not None
    with program:
        for line in program.stdout:
            lines.append(line.rstrip())
            if line.startswith("SAYS "):
                said.update(json.loads(line.removeprefix("SAYS ")))
                if "remove" in said:
                    nodes.remove(said.pop("remove"))
    assert program.returncode == 0, "\n".join(lines)
    return said, lines


def run(nodes: Nodes, program: str, *args: str) -> tuple[dict[str, Any], list[str]]:
    return ended(nodes, [str(HERE / "ray_programs.py"), program, *args])


def host_of(address: str) -> str:
    return address.partition(":")[0]


def test_tasks_are_actors_on_nodes_and_the_secret_is_nowhere(nodes: Nodes) -> None:
    said, lines = run(nodes, "all_else")
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
    said, _ = run(nodes, "a_ps_is_killed", str(tmp_path))
    assert said["counted"] == 40
    assert said["after"] != said["before"]


def test_a_training_function_runs_inside_a_task(nodes: Nodes) -> None:
    said, _ = run(nodes, "inside_a_task")
    assert said["counted"] == 20


def test_psync_run_on_ray_runs_the_script_of_psync_run(nodes: Nodes) -> None:
    command = ["-m", "psync", "run", "--on", "ray", "--address", nodes.address, "--ps", "2"]
    said, _ = ended(nodes, [*command, str(HERE / "train.py"), "--", "--epochs", "2"])
    assert said == {"counted": [20, 20], "arguments": ["--epochs", "2"]}


# The last one: the node stays away.
def test_a_node_is_removed_in_the_middle_and_counts_are_exact(nodes: Nodes) -> None:
    said, lines = run(nodes, "a_node_is_removed")
    lost, now = host_of(said["before"]["ps-1"]), said["after"]
    assert said["counted"] == [600, 700], "\n".join(lines)
    assert said["name"] == said["before"]["ps-1"]
    assert lost not in {host_of(place) for place in now.values()}
    assert sorted(now) == ["ps-0", "ps-1", "worker-0", "worker-1"]
