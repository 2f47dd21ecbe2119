"""What a ps makes of slots and steps that do not fit."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import work_of
from memory_cluster import until
from ps_by_hand import A, PsByHand
from ps_cluster import PsCluster, hold, pull
from psync.errors import UnknownVariableError, ValueMismatchError
from psync.numerics.rules import SGD
from psync.wire.codec import Message
from psync.wire.messages import SetSlots

MOMENTUM = SGD(0.5, momentum=0.5).to_config()


async def send(cluster: PsCluster, message: Message, *segments: Any) -> None:
    await cluster.chief.links[0].call(lambda peer: message, segments)


@pytest.mark.parametrize("segments", [[], [bytes(7)], [bytes(8), bytes(8)]])
def test_values_of_another_size_are_refused(segments: list[bytes]) -> None:
    ps = PsByHand()
    v = ps.create("v", np.zeros(2, np.float32))
    with pytest.raises(ValueMismatchError, match="do not have the slots' sizes"):
        ps.ask(A, SetSlots(1, MOMENTUM, [(*v, "momentum")]), *segments)


def test_a_shard_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownVariableError, match="no shard 3 of variable 9"):
        PsByHand().ask(A, SetSlots(1, MOMENTUM, [(9, 3, "momentum")]), bytes(8))


def test_half_precision_has_slots_of_single_precision() -> None:
    ps = PsByHand()
    v = ps.create("v", np.zeros(2, np.float16))
    message = SetSlots(1, MOMENTUM, [(*v, "momentum")])
    with pytest.raises(ValueMismatchError):
        ps.arrives(A, message, bytes(4))
    assert len(ps.arrives(A, message, bytes(8)).segments) == 1


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
