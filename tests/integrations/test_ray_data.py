"""Datasets of ray.data, block by block on workers."""

from __future__ import annotations

import pytest

from engine_programs import HERE, RayNodes, run

pytest.importorskip("ray.data")

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]


def test_each_row_comes_once_on_the_worker_that_has_its_block(ray_nodes: RayNodes) -> None:
    said, _ = run([str(HERE / "ray_programs.py"), "blocks"], **ray_nodes.environ)
    rows, sums = zip(*said["eaten"], strict=True)
    assert rows == (500, 500)
    assert sum(sums) == sum(range(1000))
    assert said["spec"] == {"data": [50]}
    assert said["no_dataset"] == "data: expected a ray.data.Dataset, got list"
