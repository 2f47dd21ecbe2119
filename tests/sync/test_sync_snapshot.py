"""A backup that begins in the middle of a step has what of it was there."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from psync.sync.replay import SyncSnapshot

from backups import back_up, take_over
from inside import sync_of
from ps_cluster import pull, until
from psync.specs import VariableSpec
from psync.testing import settle
from sync_cluster import GROUP, SyncCluster, SyncReplica

pytestmark = pytest.mark.asyncio

SMALL, LARGE = 4, 20_000  # columns: pushes come whole to ps 0, or in parts to every ps


async def created(cluster: SyncCluster, size: int) -> VariableSpec:
    v = await cluster.create("v", np.zeros((2, size), np.float32), shards=2)
    cluster.configure(2)
    return v


async def goes_on(cluster: SyncCluster) -> None:
    """The backup of ps 0 serves, and everybody knows where."""
    await take_over(cluster)
    await cluster.attach(cluster.chief, 100)


def replica(cluster: SyncCluster, index: int) -> SyncReplica:
    made = cluster.replica(index)
    made.client.links[0].address = cluster.chief.links[0].address
    return made


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("later", [False, True])
async def test_what_was_counted_before_the_copy_or_after_it_counts_with_the_backup(
    size: int, later: bool
) -> None:
    async with SyncCluster(2) as cluster:
        v = await created(cluster, size)
        if later:
            await back_up(cluster)
        pushing = asyncio.create_task(replica(cluster, 0).push([v], [1.0], closure=1))
        await until(lambda: cluster.ps[0].statistics()["sync"] and cluster.group()["counted"])
        if not later:
            await back_up(cluster)
        await settle()
        pushing.cancel()
        await asyncio.wait((pushing,))
        await goes_on(cluster)
        answer = await replica(cluster, 1).push([v], [3.0], 0, closure=2)
        assert (answer.outcome, answer.count) == ("accepted", 2)
        (values,) = await pull(cluster.chief, v)
        assert (values == -0.5 * 2).all()
        assert await cluster.global_step() == 1


async def test_without_anything_that_decides_it_is_the_parts_and_steps_of_this_ps() -> None:
    async with SyncCluster(2) as cluster:
        v = await created(cluster, LARGE)
        one, two = replica(cluster, 0), replica(cluster, 1)
        await asyncio.gather(one.push([v], [1.0]), two.push([v], [1.0]))
        snapshot = SyncSnapshot(sync_of(cluster.ps[1]), None)
        await snapshot.pause("a copy")
        snapshot.resume("a copy")
        assert list(snapshot.groups()) == [GROUP]
        ((_, build, segments),) = snapshot.entries()
        state = build(None)  # type: ignore[arg-type]
        assert [(group, step) for group, _, step, _ in state.groups] == [(GROUP, 1)]  # type: ignore[attr-defined]
        assert segments == ()
