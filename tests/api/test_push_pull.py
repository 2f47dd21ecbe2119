"""Values that come with the answers to a push."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import coordinating
from psync import SyncReplicasOptimizer
from psync.optimizers import SGD
from psync.wire.messages import Pull, Push

pytestmark = pytest.mark.virtual_time  # values are good for a millisecond

STEPS = 6


class Model:
    """A variable on each of two ps tasks, and the pulls that both hear."""

    def __init__(self, coordinator: psync.ClusterCoordinator, pulls: list[list[Pull]]) -> None:
        self.coordinator, self.pulls = coordinator, pulls
        self.optimizer = SGD(1.0)
        with coordinator.strategy.scope():
            self.variables = [
                psync.Variable(np.zeros(3, np.float32), name=f"w{n}") for n in range(2)
            ]

    def gradients(self) -> list[tuple[np.ndarray, Any]]:
        return [(np.ones(w.shape, np.float32), w) for w in self.variables]

    @property
    def num_pulls(self) -> list[int]:
        return [len(pulls) for pulls in self.pulls]


@asynccontextmanager
async def model() -> AsyncIterator[Model]:
    async with coordinating(2, 1, tapped=True) as (cluster, coordinator):
        with (
            cluster.tap("ps-0").hearing(Pull) as first,
            cluster.tap("ps-1").hearing(Pull) as second,
        ):
            yield Model(coordinator, [first, second])


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
    async with coordinating(2, 1, tapped=True) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w, _, *steps = [psync.Variable(first) for first in (np.zeros(3, np.float32), 0.0, 0, 0)]
        await psync.pull([w, *steps])
        go_on = asyncio.Event()
        with cluster.tap("ps-0").at(Push, go_on.wait) as sent:
            pairs = [(np.ones(3, np.float32), w)]
            push = asyncio.ensure_future(optimizer.apply_gradients(pairs, steps[at]))
            await sent.wait()
            push.cancel()
            await asyncio.gather(push, return_exceptions=True)
            go_on.set()
            while not int(await steps[at].read()):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0)
        assert (await w.read()).tolist() == [-1] * 3


async def test_an_option_is_that_of_apply_gradients_or_an_error_that_names_push_pull() -> None:
    async with model() as m:
        with m.coordinator.strategy.scope():
            step = psync.get_or_create_global_step()
        both, variables = SyncReplicasOptimizer(SGD(1.0), 1, 1), m.variables

        async def train() -> list[float]:
            pairs = [(np.ones(3, np.float32), w) for w in variables]
            _, values = await both.push_pull(pairs, variables, step, name="n", weight=2.0)
            return [float(value[0]) for value in values]

        assert await m.coordinator.schedule(train) == [-1, -1]
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


async def test_where_reads_are_kept_the_kept_ones_are_returned() -> None:
    async with model() as m:
        with psync.cache_variable_reads():
            await psync.pull(m.variables)
            _, values = await m.optimizer.push_pull(m.gradients(), pull=m.variables)
            assert [float(value[0]) for value in values] == [0, 0]
        _, values = await m.optimizer.push_pull(m.gradients(), pull=m.variables)
        assert [float(value[0]) for value in values] == [-2, -2]
