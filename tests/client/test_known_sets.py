"""A connection that knows too many sets makes way for one that knows none."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ps_cluster import PsCluster, pull
from psync.client import known_sets


async def test_a_connection_that_knows_too_many_sets_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_sets, "SETS_PER_CONNECTION", 3)
    async with PsCluster() as cluster:
        variables = [await cluster.create(f"v{i}", np.float32(i)) for i in range(5)]
        client = cluster.client()
        for _ in range(2):
            got = await asyncio.gather(*(pull(client, v) for v in variables))
            assert [float(value) for (value,) in got] == [0, 1, 2, 3, 4]
