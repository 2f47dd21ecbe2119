"""What a ps makes of slots and steps that do not fit."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import store_of, work_of
from ps_cluster import PsCluster, hold, pull, until
from psync.errors import GradientError, UnknownVariableError, UsageError
from psync.numerics.update_rule import SGD
from psync.wire.codec import Message
from psync.wire.ps_messages import SetOptimizer, SetSlots

pytestmark = pytest.mark.asyncio

MOMENTUM = SGD(0.5, momentum=0.5).to_config()


async def send(cluster: PsCluster, message: Message, *segments: Any) -> None:
    await cluster.chief.links[0].call(lambda peer: message, segments)


@pytest.mark.parametrize("segments", [[], [bytes(7)], [bytes(8), bytes(8)]])
async def test_values_of_another_size_are_refused(segments: list[bytes]) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        message = SetSlots(1, MOMENTUM, [(v.variable_id, 0, "momentum")])
        with pytest.raises(GradientError, match="do not have the slots' sizes"):
            await send(cluster, message, *segments)


async def test_a_shard_that_is_not_there_is_named() -> None:
    async with PsCluster() as cluster:
        with pytest.raises(UnknownVariableError, match="no shard 3 of variable 9"):
            await send(cluster, SetSlots(1, MOMENTUM, [(9, 3, "momentum")]), bytes(8))


async def test_a_negative_step_is_no_step() -> None:
    async with PsCluster() as cluster:
        await send(cluster, SetOptimizer(1, MOMENTUM, -1, None))  # leaves it as it is
        with pytest.raises(UsageError, match="is not defined"):
            store_of(cluster.ps[0]).set_optimizer_step(2, 1)
        with pytest.raises(UsageError, match="expected a step from 0, got -2"):
            store_of(cluster.ps[0]).set_optimizer_step(1, -2)


async def test_half_precision_has_slots_of_single_precision() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float16))
        message = SetSlots(1, MOMENTUM, [(v.variable_id, 0, "momentum")])
        with pytest.raises(GradientError):
            await send(cluster, message, bytes(4))
        await send(cluster, message, np.array([1, 2], np.float32).tobytes())


async def test_a_shard_that_is_being_updated_is_waited_for() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.zeros(2, np.float32))
        release = hold(cluster.ps[0], v)
        message = SetSlots(1, MOMENTUM, [(v.variable_id, 0, "momentum")])
        sent = asyncio.ensure_future(send(cluster, message, np.ones(2, np.float32).tobytes()))
        await until(lambda: work_of(cluster.ps[0]).waiting)
        release()
        await sent
        (read,) = await pull(cluster.chief, v, optimizer=1, slot="momentum")
        np.testing.assert_array_equal(read, [1, 1])
