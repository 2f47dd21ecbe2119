"""What happens between two messages, or before a step that is decided is known elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, running
from psync.errors import PsyncError, RemoteProtocolError
from psync.wire.messages import CloseStep, Update

pytestmark = pytest.mark.virtual_time


class Training(NamedTuple):
    """A large variable on ps 1 and a small one on ps 0, and a step that pushes to both."""

    cluster: MemoryCluster
    coordinator: psync.ClusterCoordinator
    variables: list[Any]
    step: Any


@contextlib.asynccontextmanager
async def training(*without: str, synchronous: bool = True) -> AsyncIterator[Training]:
    cluster = MemoryCluster(2, 1, tapped=True, without=frozenset(without))
    async with running(cluster), psync.ClusterCoordinator(cluster.strategy()) as coordinator:
        with coordinator.strategy.scope():
            small = psync.Variable(np.zeros(1, np.float32), name="small")
            large = psync.Variable(np.zeros(40_000, np.float32), name="large")
            global_step = psync.get_or_create_global_step()
        sgd = psync.optimizers.SGD(1.0)
        sync = psync.SyncReplicasOptimizer(sgd, 1)

        async def step() -> None:
            pairs = [(np.ones(each.shape, np.float32), each) for each in (small, large)]
            if synchronous:
                await sync.apply_gradients(pairs, global_step)
            else:
                await sgd.apply_gradients(pairs)

        await psync.pull([small, large])
        yield Training(cluster, coordinator, [small, large], step)


async def fails(training: Training, text: str) -> list[float]:
    """Run a step, which fails; return the first elements of the variables."""
    training.coordinator.schedule(training.step)
    with pytest.raises(PsyncError, match=text):
        await training.coordinator.join()
    return [float(value[0]) for value in await psync.pull(training.variables)]


async def test_an_update_can_end_when_one_ps_has_its_part() -> None:
    async with training(synchronous=False) as t:
        t.cluster.points("worker-0").fail("worker.push.between_ps")
        assert sorted(await fails(t, "failpoint worker.push.between_ps")) == [-1, 0]


async def test_a_synchronous_push_can_end_when_one_ps_has_its_part() -> None:
    async with training() as t:
        t.cluster.points("worker-0").fail("worker.push.between_ps")
        with (
            t.cluster.tap("ps-0").hearing(Update) as here,
            t.cluster.tap("ps-1").hearing(Update) as there,
        ):
            assert await fails(t, "failpoint worker.push.between_ps") == [0, 0]
        assert len(here) + len(there) == 1


@pytest.mark.parametrize("without", ["dedup", "staged_commit"])
async def test_without_staged_commit_ps_0_closes_a_step_before_all_parts_are_there(
    without: str,
) -> None:
    is_hasty = without == "staged_commit"
    refused = pytest.raises(RemoteProtocolError, match=r"push 1 of .* which has not come in yet")
    async with training(without) as t:
        go_on = asyncio.Event()
        with (
            t.cluster.tap("ps-1").hearing(CloseStep) as closed,
            t.cluster.tap("ps-1").at(Update, go_on.wait) as coming,
        ):
            t.coordinator.schedule(t.step)
            await coming.wait()
            await asyncio.sleep(1)
            assert bool(closed) is is_hasty
            go_on.set()
            with refused if is_hasty else contextlib.nullcontext():
                await t.coordinator.join()


async def test_a_step_that_is_decided_can_fail_before_any_other_ps_knows() -> None:
    async with training() as t:
        t.cluster.points("ps-0").fail("ps0.step.decided")
        assert await fails(t, "failpoint ps0.step.decided") == [0, 0]
