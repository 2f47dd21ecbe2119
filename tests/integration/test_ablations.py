"""Without a safeguard something goes wrong, and the oracles of the simulations notice it.

Which safeguards have a switch: ``psync.testing.sabotage.switches``. Real processes with a switch
off: ``tests/processes/test_chaos_command.py``; docs/explanation/testing.md has a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import cluster_of, event_of
from psync.net.platform import Platform
from psync.testing.sabotage import SabotagedParts
from psync.testing.simulation.drawing import drawn
from psync.testing.simulation.mutants import MUTANTS
from psync.testing.simulation.run import simulate

MAX_SEEDS = 100


def switch_off(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let every task of the clusters in memory lack these safeguards."""
    plain = memory_cluster.MemoryCluster.platform

    def platform(self: Any, *args: Any, **options: Any) -> Platform:
        parts = SabotagedParts(without=frozenset(names))
        return dataclasses.replace(plain(self, *args, **options), parts=parts)

    monkeypatch.setattr(memory_cluster.MemoryCluster, "platform", platform)


@pytest.mark.promise("updates.tests-notice")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dedup", "staleness", "staged_commit"])
def test_the_simulation_notices_that_a_safeguard_is_missing(name: str) -> None:
    (shape,) = MUTANTS[name].shapes
    plans = (drawn(seed, shape) for seed in range(1, MAX_SEEDS))
    assert any(simulate(plan, frozenset({name})).oracle for plan in plans)


@pytest.mark.virtual_time
@pytest.mark.parametrize("fenced", [True, False])
async def test_without_fencing_an_earlier_program_changes_the_values_of_the_present_one(
    fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is cut off from the chief, and so does not hear that there is a new one."""
    if not fenced:
        switch_off(monkeypatch, "fencing")

    async def late(counter: psync.Variable) -> None:
        event_of(f"begun {psync.get_worker_index()}").set()
        await event_of("go on").wait()
        try:
            await count(counter, 7)
        finally:
            event_of("over").set()

    async def count(counter: psync.Variable, row: int) -> None:
        one = np.ones((1, 1), np.float32)
        await counter.scatter_add(psync.IndexedSlices(one, [row]))

    def counter_of(coordinator: psync.ClusterCoordinator) -> psync.Variable:
        with coordinator.strategy.scope():
            return psync.Variable(np.zeros((8, 1), np.float32), name="rows")

    async with cluster_of(1, 2) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy()) as earlier:
            old = counter_of(earlier)
            for row in range(6):
                earlier.schedule(count, (old, row))
            await earlier.join()
            for _ in range(2):
                earlier.schedule(late, (old,))
            for worker in range(2):
                await event_of(f"begun {worker}").wait()
            cluster.network.partition("worker-0", "chief-0")
        async with psync.ClusterCoordinator(cluster.strategy(), min_workers=1) as present:
            counter = counter_of(present)
            for row in range(4):
                present.schedule(count, (counter, row))
            await present.join()
            event_of("go on").set()
            await event_of("over").wait()
            found = (await counter.read())[:, 0].tolist()
            assert (found == [1, 1, 1, 1, 0, 0, 0, 0]) is fenced, found
        cluster.network.heal("worker-0", "chief-0")
