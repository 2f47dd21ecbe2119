"""A ps that is stopped is found by pings, and one that is slow for a moment is forgiven."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ps_cluster import PsCluster, pull
from psync.errors import ParameterServerLost


@pytest.mark.virtual_time
@pytest.mark.parametrize("size", [3, 1 << 16], ids=["control", "bulk"])
async def test_one_that_is_stopped_but_connected_is_found_by_pings(size: int) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(size, np.float32))
        client = cluster.client(host="w")
        await pull(client, v)
        cluster.network.partition("w")  # connections stay, nothing is answered
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(ParameterServerLost, match="cannot be reached"):
            await pull(client, v)
        assert 20 < loop.time() - began < 60
        cluster.network.heal("w")
