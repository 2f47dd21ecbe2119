"""What a ps says of itself in a report."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import psync
from inside import chief_of
from memory_cluster import coordinating, event_of, note
from psync.wire.messages import Gate, OpenGate


@pytest.mark.virtual_time
async def test_a_gate_that_is_shut_is_told_with_who_waits_at_it():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(8, np.float32), name="v")
        await v.read()
        link = chief_of(coordinator).links.ps.links[0]
        await link.call(lambda _: Gate(1))

        async def assigns():
            await note("assigning")
            await v.assign(np.ones(8, np.float32))

        value = coordinator.schedule(assigns)
        await event_of("assigning").wait()
        await asyncio.sleep(1)
        text = "\n".join(cluster.tasks["ps-0"].describe())
        assert "the gate is shut for cut 1: 0 updates are under way, 1 wait" in text
        await link.call(lambda _: OpenGate(1))
        await value
        assert "the gate" not in "\n".join(cluster.tasks["ps-0"].describe())
