"""Values that come with the answers to a push."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, coordinating, until
from ps_cluster import heard, hold
from psync import SyncReplicasOptimizer
from psync.api.reads import runtime_of
from psync.client import plans, prefetch
from psync.optimizers import SGD
from psync.wire.messages import Pull, Push

pytestmark = pytest.mark.virtual_time

STEPS = 6


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that come with a token are good for a turn, however long that takes."""
    monkeypatch.setattr(prefetch, "GOOD_FOR_S", math.inf)


class Model:
    """A variable on each of two ps tasks, and the pulls and pushes that both hear."""

    def __init__(
        self, cluster: MemoryCluster, coordinator: psync.ClusterCoordinator, size: int
    ) -> None:
        self.coordinator = coordinator
        self.optimizer = SGD(1.0)
        with coordinator.strategy.scope():
            self.variables = [
                psync.Variable(np.zeros(size, np.float32), name=f"w{n}") for n in range(2)
            ]
        self.tasks = [cluster.ps(f"ps-{n}") for n in range(2)]
        self.pulls = [heard(task, Pull) for task in self.tasks]

    def gradients(self) -> list[tuple[np.ndarray, Any]]:
        return [(np.ones(w.shape, np.float32), w) for w in self.variables]

    @property
    def num_pulls(self) -> list[int]:
        return [len(pulls) for pulls in self.pulls]


@asynccontextmanager
async def model(size: int = 3, workers: int = 1) -> AsyncIterator[Model]:
    async with coordinating(2, workers) as (cluster, coordinator):
        yield Model(cluster, coordinator, size)


async def test_a_program_that_wants_other_variables_than_it_pushes_pulls_these() -> None:
    async with model() as m:
        first, second = m.variables
        _, value = await m.optimizer.push_pull([(np.ones(3, np.float32), first)], pull=second)
        assert value.tolist() == [0, 0, 0]
        _, value = await m.optimizer.push_pull([(np.ones(3, np.float32), second)], pull=second)
        assert value.tolist() == [-1, -1, -1]
        assert m.num_pulls == [0, 1]


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("at", [0, 1], ids=["with the variable", "on another ps"])
async def test_a_push_that_is_cancelled_counts_in_the_global_step(at, compression) -> None:
    optimizer = SGD(1.0, compression=compression)
    async with coordinating(2, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w, _, *steps = [psync.Variable(first) for first in (np.zeros(3, np.float32), 0.0, 0, 0)]
        await psync.pull([w, *steps])
        pushes, release = heard(cluster.ps("ps-0"), Push), hold(cluster.ps("ps-0"), w.spec)
        push = asyncio.ensure_future(
            optimizer.apply_gradients([(np.ones(3, np.float32), w)], steps[at])
        )
        await until(lambda: pushes)
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)
        release()
        await (await runtime_of("a test", w)).ps.outgoing.drain()
        values = [float(np.ravel(value)[0]) for value in await psync.pull([w, steps[at]])]
        assert values == [-1, 1]


async def test_an_option_is_that_of_apply_gradients_or_an_error_that_names_push_pull() -> None:
    async with coordinating(2, 1) as (cluster, coordinator):
        m = Model(cluster, coordinator, 3)
        with coordinator.strategy.scope():
            step = psync.get_or_create_global_step()
        both, variables = SyncReplicasOptimizer(SGD(1.0), 1, 1), m.variables

        async def train() -> list[float]:
            pairs = [(np.ones(3, np.float32), w) for w in variables]
            _, values = await both.push_pull(pairs, variables, step, name="n", weight=2.0)
            return [float(value[0]) for value in values]

        assert await coordinator.schedule(train) == [-1, -1]
        for optimizer in (m.optimizer, both):
            with pytest.raises(TypeError, match=r"push_pull\(\) got an unexpected .*'compression'"):
                await optimizer.push_pull(m.gradients(), m.variables, step, compression="bf16")


async def test_tasks_of_a_step_that_push_at_once() -> None:
    async with model() as m:

        async def both() -> list[float]:
            pairs = [
                m.optimizer.push_pull([(np.ones(3, np.float32), w)], pull=m.variables)
                for w in m.variables
            ]
            results = await asyncio.gather(*pairs)
            return [float(values[n][0]) for n, (_, values) in enumerate(results)]

        for n in range(1, STEPS):
            assert await both() == [-n, -n]


async def test_a_push_in_several_messages_to_a_ps_has_been_applied_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "MEMBERS_PER_REQUEST", 1)
    async with coordinating(1, 1) as (_, coordinator):
        with coordinator.strategy.scope():
            first, second = [psync.Variable(np.zeros(3, np.float32), name=n) for n in "ab"]
        pairs = [(np.ones(3, np.float32), first), (np.ones(3, np.float32), second)]
        for n in range(1, STEPS):
            _, value = await SGD(1.0, name=f"sgd{n}").push_pull(pairs, pull=second)
            assert value.tolist() == [-n] * 3


async def test_a_shard_that_is_busy_is_pulled_when_it_is_not() -> None:
    async with coordinating(2, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = [psync.Variable(np.zeros(3, np.float32), name=f"w{n}") for n in range(4)]
        optimizer = SGD(1.0)
        await psync.pull(v)
        release = hold(cluster.ps("ps-1"), v[3].spec)
        asyncio.get_running_loop().call_later(0.1, release)
        pairs = [(np.ones(3, np.float32), w) for w in v[:2]]
        _, values = await optimizer.push_pull(pairs, pull=v)
        assert [value.tolist() for value in values] == [[-1] * 3, [-1] * 3, [0] * 3, [0] * 3]


async def test_where_reads_are_kept_the_kept_ones_are_returned() -> None:
    async with model() as m:
        with psync.cache_variable_reads():
            await psync.pull(m.variables)
            _, values = await m.optimizer.push_pull(m.gradients(), pull=m.variables)
            assert [float(value[0]) for value in values] == [0, 0]
        _, values = await m.optimizer.push_pull(m.gradients(), pull=m.variables)
        assert [float(value[0]) for value in values] == [-2, -2]
