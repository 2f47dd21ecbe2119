"""A Ray cluster for all tests that need one: it takes a while to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_programs import RayNodes


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    yield nodes
    nodes.close()
