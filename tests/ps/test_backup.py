"""A ps gets a backup, loses it, and gets another one, at the coordinator's word."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from backups import W, alone, back_up, create, promote, take_over
from inside import is_deposed
from ps_by_hand import A, PsByHand
from ps_cluster import CHIEF, CONFIG, PsCluster, assign, pull, push, until
from psync.client.shard_locks import assign_at_once
from psync.errors import ParameterServerLost, UsageError
from psync.wire.ps_messages import Push
from psync.wire.recovery_messages import BackUp
from snapshot_tools import freeze, prepare, take, write


def test_before_the_first_order_there_is_nothing_to_wait_for() -> None:
    ps = PsByHand()
    w = ps.create("w", np.zeros(3, np.float32))
    ps.ask(A, Push(1, 0, -1, 0, 9, [w], 1, CONFIG, 0), bytes(12))  # answered at once
    told = ps.services.statistics()["backup"]
    assert (told["state"], told["taken"], told["waiting"]) == ("alone", 0, 0)


async def test_a_backup_has_what_was_before_and_what_comes_after() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        worker = cluster.client()
        await push(worker, (w,), (1.0,))
        await back_up(cluster)
        await push(worker, (w,), (2.0,))
        await assign(worker, w, np.ones(6, np.float32), "add")
        counts = cluster.ps[0].statistics()["backup"]
        assert counts["state"] == "paired"
        assert counts["taken"] == counts["entries"] > 0
        (before,) = await pull(cluster.chief, w)
        await take_over(cluster)
        (after,) = await pull(cluster.chief, w)
        assert before.tobytes() == after.tobytes()


async def test_an_order_that_is_repeated_makes_no_second_backup() -> None:
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        await back_up(cluster)
        assert cluster.ps[0].statistics()["backup"]["epoch"] == 1
        await alone(cluster, 3)
        with pytest.raises(UsageError, match="is older than 3"):
            await back_up(cluster, 2)


async def test_without_its_backup_it_waits_until_the_coordinator_knows() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        lost = asyncio.create_task(back_up(cluster, lost=True))
        await cluster.ps[1].close()
        pushing = asyncio.create_task(push(cluster.client(), (w,), (1.0,)))
        await lost
        assert not pushing.done()
        await alone(cluster)
        await pushing
        (value,) = await pull(cluster.chief, w)
        assert np.array_equal(value, W - np.float32(0.5))


async def test_what_waits_for_a_backup_when_its_ps_goes_back_is_said_again(tmp_path: Path) -> None:
    """It is of the same program: nobody has replaced that."""
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        state, _ = await freeze(cluster)
        places = await write(cluster, state, tmp_path / "a")
        await prepare(cluster, state, tmp_path / "a", places)
        await back_up(cluster)
        await cluster.ps[1].close()
        adding = asyncio.create_task(assign(cluster.chief, w, np.ones(6, np.float32), "add"))
        await until(lambda: cluster.ps[0].statistics()["backup"]["entries"] > 0)
        assert not adding.done()
        await take(cluster)
        await adding
        (value,) = await pull(cluster.chief, w)
        assert np.array_equal(value, W + 1)


async def test_a_copy_to_nobody_fails_and_updates_go_on() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        with pytest.raises(Exception, match="no connection within"):
            await cluster.chief.links[0].call(
                lambda _: BackUp(1, "/job:ps/task:1", "nobody:1", False)
            )
        await push(cluster.client(), (w,), (1.0,))


async def test_one_that_was_replaced_serves_nobody() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        worker = cluster.client()
        await push(worker, (w,), (1.0,))
        await promote(cluster)
        pushing = asyncio.create_task(push(worker, (w,), (1.0,)))
        await until(lambda: is_deposed(cluster.ps[0]))
        await until(lambda: not cluster.ps[0].statistics()["store"]["shards"])
        assert not pushing.done()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        with pytest.raises(ParameterServerLost, match="has been replaced by its backup"):
            await back_up(cluster, 10)  # of nothing


def test_only_the_coordinator_may_order_it() -> None:
    with pytest.raises(UsageError, match="is not a coordinator"):
        PsByHand().ask((CHIEF, 99), BackUp(1, "/job:ps/task:1", "ps1:1", False))


async def test_an_assign_under_locks_is_followed_though_locks_are_not() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros((2, 2), np.float32), shards=2)
        await back_up(cluster)
        worker = cluster.client()
        values = np.full((2, 2), 3, np.float32)
        for ordinal in (1, 2):
            plan = worker.plan((v,))
            await assign_at_once(worker, plan, [values], op="add", closure=4, ordinal=ordinal)
        assert cluster.ps[0].statistics()["locks"]["taken"] > 0
        await take_over(cluster)
        (value,) = await pull(cluster.chief, v)
        assert np.array_equal(value, 2 * values)
