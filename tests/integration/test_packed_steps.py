"""Synchronous steps of small models: what lies on ps 0 alone asks no other ps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, cluster_of, running
from psync.wire.messages import CloseStep

pytestmark = pytest.mark.virtual_time

WORKERS = 2
TIMEOUT_S = 60.0  # of virtual time


class Training:
    """Two workers in step; ``small`` lies on ps 0, ``other`` on ps 1."""

    def __init__(self, strategy: psync.ParameterServerStrategy) -> None:
        with strategy.scope():
            self.small = psync.Variable(np.zeros(3, np.float32), name="small")
            self.step = psync.get_or_create_global_step()
            with strategy.pinned(1):
                self.other = psync.Variable(np.zeros(3, np.float32), name="other")
        self.optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), WORKERS)

    async def follow(self, pulls: Sequence[str], pushes: Sequence[str]) -> list[str]:
        """Pull and push, in each step what a letter says: s, o or b for both."""
        named = {"s": [self.small], "o": [self.other], "b": [self.other, self.small]}
        outcomes = []
        for pulled, pushed in zip(pulls, pushes, strict=True):
            await psync.pull(named[pulled])
            pairs = [(np.ones(3, np.float32), v) for v in named[pushed]]
            result = await self.optimizer.apply_gradients(pairs, self.step)
            outcomes.append(result.outcome.value)
        return outcomes

    async def values(self) -> list[float]:
        return [float(value[0]) for value in await psync.pull([self.small, self.other])]


@pytest.mark.promise("steps.packed")
async def test_a_packed_model_trains_while_ps_0_reaches_no_other_ps() -> None:
    async with cluster_of(2, WORKERS) as cluster:
        strategy = cluster.strategy(placement="packed")
        async with psync.ClusterCoordinator(strategy) as coordinator:
            training = Training(strategy)
            train = ["s"] * 3
            for _ in range(WORKERS):
                coordinator.schedule(training.follow, args=(train, train))
            await coordinator.join()
            cluster.network.partition("ps-0", "ps-1")
            results = [coordinator.schedule(training.follow, args=(train, train)) for _ in range(2)]
            assert await coordinator.fetch(results) == [["accepted"] * 3] * 2
            assert await training.values() == [-6.0, 0.0]
            assert not cluster.ps("ps-1").statistics()["staging"]["staged"]


@pytest.mark.parametrize("seed", range(12))
async def test_a_group_that_leaves_ps_0_in_the_midst_loses_no_push_and_calls_none_stale(
    seed: int,
) -> None:
    rng = random.Random(seed)
    alone = rng.randrange(5)
    pulls = [[rng.choice("sob") for _ in range(12)] for _ in range(WORKERS)]
    pushes = [
        ["s"] * alone + [rng.choice("ssob") for _ in range(12 - alone)] for _ in range(WORKERS)
    ]
    async with cluster_of(2, WORKERS) as cluster:
        strategy = cluster.strategy(placement="packed")
        async with psync.ClusterCoordinator(strategy) as coordinator:
            training = Training(strategy)
            results: list[Any] = [
                coordinator.schedule(training.follow, args=each)
                for each in zip(pulls, pushes, strict=True)
            ]
            done = coordinator.fetch(results)
            assert await asyncio.wait_for(done, TIMEOUT_S) == [["accepted"] * 12] * WORKERS
            steps = [set(step) for step in zip(*pushes, strict=True)]
            expected = [-float(sum(bool(step & {"b", name}) for step in steps)) for name in "so"]
            assert await training.values() == expected


async def test_who_comes_late_and_pulls_elsewhere_loses_one_push_at_most() -> None:
    async with cluster_of(2, WORKERS) as cluster:
        strategy = cluster.strategy(placement="packed")
        async with psync.ClusterCoordinator(strategy) as coordinator:
            training = Training(strategy)
            coordinator.schedule(training.follow, args=("sss", "sss"))
            await coordinator.join()  # alone: its steps close as nobody else comes
            results = [
                coordinator.schedule(training.follow, args=each)
                for each in (("ooo", "ooo"), ("ooo", "sss"))
            ]
            for outcomes in await asyncio.wait_for(coordinator.fetch(results), TIMEOUT_S):
                assert outcomes[1:] == ["accepted"] * 2


@pytest.mark.parametrize("when", ["before the pushes", "when the step is decided"])
async def test_a_step_of_which_ps_0_cannot_tell_another_ps_ends_training_with_that_error(
    when: str,
) -> None:
    async with running(MemoryCluster(2, WORKERS, tapped=True)) as cluster:
        strategy = cluster.strategy(placement="packed")
        async with psync.ClusterCoordinator(strategy) as coordinator:
            training = Training(strategy)
            for _ in range(WORKERS):
                coordinator.schedule(training.follow, args=("b", "b"))
            await coordinator.join()
            if when == "before the pushes":
                cluster.network.partition("ps-0", "ps-1")
            with cluster.tap("ps-1").at(CloseStep, asyncio.Event().wait) as decided:
                for _ in range(WORKERS):
                    coordinator.schedule(training.follow, args=("b", "b"))
                if when == "when the step is decided":
                    await decided.wait()
                    cluster.network.partition("ps-0", "ps-1")
                with pytest.raises(psync.ParameterServerLost, match=r"ps/task:1 .* be reached"):
                    await coordinator.join()
            assert (await training.values())[1] == -1.0
