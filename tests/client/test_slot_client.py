"""A client sets what optimizers keep: slots of any shard, steps, learning rates."""

from __future__ import annotations

import numpy as np
import pytest

from ps_cluster import PsCluster, pull, push
from psync.client.optimizer_client import set_optimizer
from psync.errors import ConfigurationError
from psync.numerics.rules import SGD

pytestmark = pytest.mark.asyncio


async def test_what_is_no_learning_rate_changes_nothing() -> None:
    async with PsCluster() as cluster:
        config = SGD(1.0).to_config()
        with pytest.raises(ConfigurationError):
            await set_optimizer(cluster.chief, 1, config, learning_rate={"schedule": "none"})
        v = await cluster.create("v", np.zeros(2, np.float32))
        await push(cluster.chief, [v], [-1.0], config=config)
        np.testing.assert_array_equal((await pull(cluster.chief, v))[0], [1.0, 1.0])
