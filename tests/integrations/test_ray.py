"""psync on Ray: a cluster of several nodes on this machine, and programs as drivers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_programs import EXAMPLES, HERE, RayNodes, run

pytest.importorskip("ray")

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = str(HERE / "ray_programs.py")


def host_of(address: str) -> str:
    return address.partition(":")[0]


def test_tasks_are_actors_on_nodes_and_the_secret_is_nowhere(ray_nodes: RayNodes) -> None:
    said, lines = run([PROGRAMS, "all_else"], **ray_nodes.environ)
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
    # The secret is in this process, so it would have been found elsewhere.
    assert said["secret_here"]
    assert said["looked_at"] == ["gcs/gcs_server", "raylet/raylet"]
    assert said["secret_in"] == []
    assert "Ray has no room within 1 s for 1 worker tasks of 1000 CPU each" in said["no_room"]


def test_a_ps_that_was_killed_is_found_at_its_new_address(
    ray_nodes: RayNodes, tmp_path: Path
) -> None:
    said, _ = run([PROGRAMS, "a_ps_is_killed", str(tmp_path)], **ray_nodes.environ)
    assert said["counted"] == 40
    assert said["after"] != said["before"]


def test_a_training_function_runs_inside_a_task(ray_nodes: RayNodes) -> None:
    said, _ = run([PROGRAMS, "inside_a_task"], **ray_nodes.environ)
    assert said["counted"] == 20


def test_the_example_finds_the_weights(ray_nodes: RayNodes) -> None:
    _, lines = run([str(EXAMPLES / "ray_cluster.py")], **ray_nodes.environ)
    assert "weights [0. 1. 2. 3.]" in lines


def test_psync_run_on_ray_runs_the_script_of_psync_run(ray_nodes: RayNodes) -> None:
    command = ["-m", "psync", "run", "--on", "ray", "--address", ray_nodes.address, "--ps", "2"]
    said, _ = run([*command, str(HERE / "train.py"), "--", "--epochs", "2"])
    assert said == {"counted": [20, 20], "arguments": ["--epochs", "2"]}


# The last one: the node stays away.
def test_a_node_is_removed_in_the_middle_and_counts_are_exact(ray_nodes: RayNodes) -> None:
    def remove(said: dict[str, Any]) -> None:
        if "remove" in said:
            ray_nodes.remove(said.pop("remove"))

    said, lines = run([PROGRAMS, "a_node_is_removed"], heard=remove, **ray_nodes.environ)
    lost, now = host_of(said["before"]["ps-1"]), said["after"]
    assert said["counted"] == [600, 700], "\n".join(lines)
    assert said["name"] == said["before"]["ps-1"]
    assert lost not in {host_of(place) for place in now.values()}
    assert sorted(now) == ["ps-0", "ps-1", "worker-0", "worker-1"]
