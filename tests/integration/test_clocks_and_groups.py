"""Bounds and synchronous groups in one program: nobody waits for a worker that waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import cluster_of, session_cluster

pytestmark = pytest.mark.virtual_time

TIMEOUT_S = 60.0  # of virtual time


def bounded(rounds: int = 0) -> psync.optimizers.Optimizer:
    return psync.optimizers.SGD(1.0, staleness_bound=psync.StalenessBound(rounds))


def synchronous(replicas: int) -> psync.SyncReplicasOptimizer:
    return psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), replicas)


async def train(
    num_workers: int, optimizers: Sequence[psync.optimizers.Optimizer], order: Sequence[int]
) -> dict[str, Any]:
    """Run closures of which each pushes through one of the optimizers; return ps 0's counters."""
    async with cluster_of(1, num_workers) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros(2, np.float32), name="v")
                global_step = psync.get_or_create_global_step()

            async def step(which: int) -> None:
                await v.read()
                await asyncio.sleep(0.1)
                optimizer = optimizers[which]
                wants_step = isinstance(optimizer, psync.SyncReplicasOptimizer)
                extra = (global_step,) if wants_step else ()
                await optimizer.apply_gradients([(np.ones(2, np.float32), v)], *extra)

            for which in order:
                coordinator.schedule(step, (which,))
            await coordinator.join(timeout=TIMEOUT_S)
            return cluster.tasks["ps-0"].statistics()


@pytest.mark.parametrize(
    ("order", "partial_steps"), [([0, 1] * 6, None), ([0, 1, 0, 0, 1, 0], 0)], ids=["all", "whole"]
)
async def test_one_that_waits_at_a_clock_goes_on_when_the_other_waits_in_a_group(
    order, partial_steps
):
    """While more is to come, the clock lets it go, and no step of the group is cut short."""
    counters = await train(2, [synchronous(2), bounded()], order)
    (group,) = counters["sync"].values()
    assert group["replicas"].keys() <= {"/job:worker/task:0", "/job:worker/task:1"}
    assert sum(c["accepted"] for c in group["replicas"].values()) == order.count(0)
    assert [c["ticks"] for c in counters["clocks"].values()] == [order.count(1)]
    if partial_steps is not None:
        assert (group["steps"], group["partial_steps"]) == (2, partial_steps)


@pytest.mark.promise("steps.never-stuck")
async def test_workers_at_a_clock_and_in_two_groups_go_on():
    counters = await train(3, [synchronous(3), bounded(), synchronous(3)], [0, 1, 2] * 5)
    accepted = [
        sum(c["accepted"] + c["stale"] for c in group["replicas"].values())
        for group in counters["sync"].values()
    ]
    assert accepted == [5, 5]


async def test_programs_in_sessions_go_on_where_one_waits_at_a_clock_and_one_in_a_group():
    clock, group = bounded(), synchronous(2)
    pushes: Counter[int] = Counter()

    async def main(strategy: psync.ParameterServerStrategy) -> None:
        with strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        worker = strategy.cluster_resolver.task_id

        async def push(number: int) -> None:
            await asyncio.sleep(0.1)
            gradients = [(np.ones(2, np.float32), v)]
            if (number + worker) % 2:
                await clock.apply_gradients(gradients)
            else:
                await group.apply_gradients(gradients, global_step)
            pushes[worker] += 1

        async with psync.MonitoredTrainingSession(strategy) as session:
            for number in range(8):
                await session.run(push, number)

    async with session_cluster(1, 2) as cluster:
        await asyncio.wait_for(cluster.run_all(main), TIMEOUT_S)
    assert pushes == {0: 8, 1: 8}
