from __future__ import annotations

import asyncio

import numpy as np
import pytest

from memory_cluster import until
from ps_cluster import PsCluster, pull
from psync.chief.declarations import Declaration, beside, split
from psync.errors import ParameterServerLost, UnknownVariableError
from psync.specs import VariableSpec

pytestmark = pytest.mark.asyncio


async def test_cancelled_it_goes_on_with_the_next_call() -> None:
    async with PsCluster() as cluster:
        v = cluster.declare("v", np.ones(1 << 20, np.float32))
        creating = asyncio.create_task(cluster.creation.ensure())
        await until(lambda: cluster.network.links("ps0:1"))
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert cluster.creation.pending
        await cluster.creation.ensure()
        assert (await pull(cluster.chief, v))[0].all()


def declare_copy(cluster: PsCluster, name: str, original: VariableSpec) -> VariableSpec:
    number = next(cluster.variables)
    spec = beside(original, name, number, trainable=False, where="train.py:9")
    cluster.declared.append(Declaration(spec, None, original))
    return spec


async def test_a_copy_without_its_original_is_told() -> None:
    async with PsCluster() as cluster:
        nowhere = split(
            "v", 77, (4,), "float32", trainable=True, partitioner=None, place=lambda n: 0, where=""
        )
        declare_copy(cluster, "c", nowhere)
        with pytest.raises(UnknownVariableError, match=r'"c/part_0" on .* of variable 77, which'):
            await cluster.creation.ensure()


async def test_a_lost_ps_is_told_as_it_is() -> None:
    async with PsCluster(2, lost_after_s=0.02) as cluster:
        await cluster.ps[1].close()
        cluster.declare("v", np.zeros((4, 2), np.float32), shards=2)
        with pytest.raises(ParameterServerLost, match="/job:ps/task:1 at ps1:1 cannot be reached"):
            await cluster.creation.ensure()
