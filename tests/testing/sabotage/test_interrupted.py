"""What happens between two messages, or before a step that is decided is known elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import handlers_of, points_of
from memory_cluster import until
from ps_cluster import PsCluster, heard, pull, push
from psync.client.sync_client import SyncClient
from psync.errors import PsyncError
from psync.net.connection import Handler
from psync.testing.sabotage import FailpointError, Failpoints, SabotagedParts
from psync.wire.messages import Contribute, StagePush
from sync_cluster import SyncCluster, SyncReplica

LARGE = np.ones((2, 20_000), np.float32)  # each half is staged


async def test_an_update_can_end_when_one_ps_has_its_part() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros((2, 1), np.float32), shards=2)
        client = cluster.client(failpoints=Failpoints("worker.push.between_ps=error"))
        with pytest.raises(FailpointError):
            await push(client, (v,), (2.0,))
        (values,) = await pull(cluster.chief, v)
        assert values.ravel().tolist() == [-1, 0]


async def test_a_synchronous_push_can_end_when_all_but_ps_0_have_their_parts() -> None:
    async with SyncCluster(2) as cluster:
        large = await cluster.create("large", LARGE[0])
        small = await cluster.create("small", np.zeros(1, np.float32))
        assert (large.shards[0].ps, small.shards[0].ps) == (1, 0)
        told, staged = heard(cluster.ps[0], Contribute), heard(cluster.ps[1], StagePush)
        points = Failpoints("worker.push.between_ps=error")
        replica = SyncReplica(cluster.client(failpoints=points), cluster.config)
        with pytest.raises(FailpointError):
            await replica.push((large, small), (1.0, 1.0))
        assert (len(told), len(staged)) == (0, 1)


@pytest.mark.parametrize("without", ["dedup", "staged_commit"])
async def test_without_staged_commit_ps_0_hears_of_a_push_before_its_parts_are_there(
    without: str,
) -> None:
    async with SyncCluster(2) as cluster:
        w = await cluster.create("w", LARGE, shards=2)
        replica = cluster.replica()
        parts = SabotagedParts(without=frozenset({without}))
        replica.sync = parts.of(SyncClient)(replica.client)
        told, staging = heard(cluster.ps[0], Contribute), asyncio.Event()

        async def never(*_: Any) -> Any:
            staging.set()
            await asyncio.Event().wait()

        handlers = handlers_of(cluster.ps[1])
        handlers[StagePush] = Handler(never, handlers[StagePush].prepare)
        pushing = asyncio.create_task(replica.push((w,), (1.0,)))
        await staging.wait()
        if without == "staged_commit":
            await until(lambda: told)
        else:
            await cluster.global_step()  # an answer of ps 0: nothing else is on its way there
            assert not told
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)


async def test_a_step_that_is_decided_can_fail_before_any_other_ps_knows() -> None:
    async with SyncCluster(2) as cluster:
        w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
        points_of(cluster.ps[0]).fail("ps0.step.decided")
        pushes = [cluster.replica(index).push((w,), (1.0,)) for index in range(2)]
        for answer in await asyncio.gather(*pushes, return_exceptions=True):
            assert isinstance(answer, PsyncError)
            assert "failpoint ps0.step.decided" in str(answer)
        assert cluster.versions(w) == [0, 0]
        assert await cluster.global_step() == 0
