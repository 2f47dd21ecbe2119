"""A client sets what optimizers keep: slots of any shard, steps, learning rates."""

from __future__ import annotations

import numpy as np
import pytest

from backups import say
from ps_cluster import OTHER, PsCluster, pull, push
from psync import schedules
from psync.client.optimizer_client import num_pushes, set_optimizer, set_slot
from psync.errors import ConfigurationError
from psync.numerics.rules import SGD
from psync.specs import count_of, marked_after
from psync.wire.messages import SetOptimizer

pytestmark = pytest.mark.asyncio

MOMENTUM = SGD(0.5, momentum=0.5).to_config()


@pytest.mark.parametrize(
    ("shape", "shards"),
    [((5, 2), 3), ((), 1), ((3 << 20,), 1)],
    ids=["shards", "a scalar", "block by block"],
)
async def test_slots_of_all_shards_are_set_while_it_is_read(
    shape: tuple[int, ...], shards: int
) -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(shape, np.float32), shards=shards)
        value = np.arange(3, 3 + np.prod(shape), dtype=np.float32).reshape(shape)
        (before,) = await pull(cluster.chief, v)
        await set_slot(cluster.chief, v, value, optimizer=1, config=MOMENTUM, slot="momentum")
        (read,) = await pull(cluster.chief, v, optimizer=1, slot="momentum")
        np.testing.assert_array_equal(read, value)
        assert not before.any()
        await push(cluster.chief, [v], [0.0], config=MOMENTUM)
        np.testing.assert_array_equal((await pull(cluster.chief, v))[0], value / 2)


async def test_the_next_push_has_the_step_that_was_set() -> None:
    rule = SGD(schedules.PiecewiseConstantDecay([9], [1.0, 0.25]))
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(4, np.float32), shards=2)
        await set_optimizer(cluster.chief, 1, rule.to_config(), step=10)
        answers = await push(cluster.chief, [v], [-1.0], config=rule.to_config())
        assert max(count_of(answer.step) for answer in answers) == 11
        np.testing.assert_array_equal((await pull(cluster.chief, v))[0], np.full(4, 0.25))


async def test_a_step_that_one_ps_is_told_twice_counts_from_where_it_is() -> None:
    config = SGD(1.0).to_config()
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(4, np.float32), shards=2)
        set_step = SetOptimizer(1, config, marked_after(0, 10), None)
        for ps in (0, 1):
            await say(cluster, ps, set_step)
        await push(cluster.chief, [v], [-1.0], config=config)
        await say(cluster, 0, set_step)  # as where its answer was lost, or a rollback came between
        answers = await push(cluster.chief, [v], [-1.0], config=config)
        assert max(answer.step for answer in answers) == marked_after(0, 12)
        await set_optimizer(cluster.chief, 1, config, step=3)
        assert await num_pushes(cluster.chief, 1, config) == 3


async def test_a_learning_rate_holds_for_clients_that_do_not_know_of_it() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        config = SGD(1.0).to_config()
        await push(cluster.chief, [v], [-1.0], config=config)
        await set_optimizer(
            cluster.chief, 1, config, learning_rate=schedules.Constant(0.25).to_config()
        )
        await push(cluster.client(OTHER), [v], [-1.0], config=config)
        np.testing.assert_array_equal((await pull(cluster.chief, v))[0], [1.25, 1.25])


async def test_what_is_no_learning_rate_changes_nothing() -> None:
    async with PsCluster() as cluster:
        config = SGD(1.0).to_config()
        with pytest.raises(ConfigurationError):
            await set_optimizer(cluster.chief, 1, config, learning_rate={"schedule": "none"})
        v = await cluster.create("v", np.zeros(2, np.float32))
        await push(cluster.chief, [v], [-1.0], config=config)
        np.testing.assert_array_equal((await pull(cluster.chief, v))[0], [1.0, 1.0])
