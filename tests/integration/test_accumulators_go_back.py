"""An accumulator that was first used after the checkpoint to which all ps tasks go back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import psync
from memory_cluster import coordinating
from psync import RollbackEvent
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time


async def test_a_take_that_waits_meanwhile_goes_on_waiting_and_gets_what_comes_then(
    tmp_path: Path,
) -> None:
    async with coordinating(1, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
            held = psync.ConditionalAccumulator(np.float32, (2,), name="held")
        await w.read()
        await keep_snapshots(coordinator, tmp_path)
        events = coordinator.events()
        take = asyncio.create_task(held.take_grad(1))
        await asyncio.sleep(1)
        await cluster.kill("ps-0")
        await cluster.revive("ps-0")
        assert isinstance(await anext(events), RollbackEvent)
        assert int(await held.num_accumulated()) == 0
        await held.apply_grad(np.ones(2, np.float32), local_step=0)
        assert (await take).tolist() == [1, 1]
