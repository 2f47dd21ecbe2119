"""What a TensorFlow program starts on the chief to close steps."""

from __future__ import annotations

import asyncio

import pytest

import psync
from memory_cluster import cluster_of, until
from ps_cluster import heard
from psync import ChiefQueueRunner
from psync.wire.messages import AwaitEnd, EndTraining


@pytest.mark.parametrize("end", ["of training", "of its task"])
async def test_the_chiefs_queue_runner_waits_for_the_end(end: str) -> None:
    async with cluster_of(1, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            with coordinator.strategy.scope():
                step = psync.get_or_create_global_step()
            asked = heard(cluster.tasks["ps-0"], AwaitEnd)  # type: ignore[arg-type]
            running = asyncio.create_task(ChiefQueueRunner(step).run())
            await until(lambda: asked)
            assert not running.done()
            if end == "of training":
                runtime = coordinator.strategy._runtime
                assert runtime is not None
                await runtime.ps.links[0].call(lambda peer: EndTraining("enough", False))
                await running
        await running
