"""What a TensorFlow program starts on the chief to close steps."""

from __future__ import annotations

import asyncio

import pytest

import psync
from memory_cluster import coordinating, until
from psync import ChiefQueueRunner
from psync.wire.messages import AwaitEnd


@pytest.mark.parametrize("end", ["of its ps", "of its task"])
async def test_the_chiefs_queue_runner_waits_for_the_end(end: str) -> None:
    async with coordinating(1, 1, tapped=True) as (cluster, coordinator):
        with coordinator.strategy.scope():
            step = psync.get_or_create_global_step()
        with cluster.tap("ps-0").hearing(AwaitEnd) as asked:
            running = asyncio.create_task(ChiefQueueRunner(step).run())
            await until(lambda: asked)
        assert not running.done()
        if end == "of its ps":
            await cluster.stop("ps-0")
            with pytest.raises(psync.PsyncError):
                await running
            return
    await running
