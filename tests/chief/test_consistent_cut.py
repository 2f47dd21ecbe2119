"""Cuts: one instant over all ps tasks while updates go on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import psync
from inside import chief_of, endpoint_of
from memory_cluster import MemoryCluster, cluster_of, until
from ps_cluster import OTHER, WORKER, PsCluster, assign, pull
from psync.chief import consistent_cut as cuts_module
from psync.chief.consistent_cut import Cuts
from psync.client.shard_locks import _locked
from psync.errors import CutLost

TWO_SHARDS = psync.FixedShardsPartitioner(2)


async def keep_adding(variable: psync.ShardedVariable, stop: asyncio.Event) -> int:
    count = 0
    while not stop.is_set():
        await variable.assign_add(np.ones(4, np.int64))
        count += 1
    return count


def cuts_of(coordinator: psync.ClusterCoordinator) -> Cuts:
    return chief_of(coordinator).cuts


@pytest.mark.promise("checkpoints.one-instant")
async def test_each_update_is_wholly_in_a_cut_or_wholly_out() -> None:
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            with coordinator.strategy.scope():
                v = psync.Variable(np.zeros(4, np.int64), name="v")
            await v.read()
            stop = asyncio.Event()
            adders = [asyncio.ensure_future(keep_adding(v, stop)) for _ in range(5)]
            seen = []
            for _ in range(20):
                async with cuts_of(coordinator).take() as cut:
                    parts = [await cut.read(ps, 0) for ps in (0, 1)]
                    seen.append(parts[0][0])
                    assert np.array_equal(parts[0], parts[1])
                    await asyncio.sleep(0)
            stop.set()
            assert sum(await asyncio.gather(*adders)) >= seen[-1] > 0
            assert seen == sorted(seen)


async def test_what_is_held_is_of_the_instant_of_the_cut_and_is_let_go_afterwards() -> None:
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            with coordinator.strategy.scope():
                v = psync.Variable(np.zeros(4, np.int64), name="v")
            await v.assign_add(np.ones(4, np.int64))
            noted: list[int] = []
            async with cuts_of(coordinator).take(lambda: noted.append(1)) as cut:
                assert noted == [1]
                assert cut.snapshots[0].shards[0].variable == "v"
                assert len(cut.snapshots) == 2
                await v.assign_add(np.ones(4, np.int64))
                assert (await cut.read(1, 0)).tolist() == [1, 1]
                assert (await v.read()).tolist() == [2] * 4
                assert cut.held_s < 10
            with pytest.raises(CutLost):
                await cut.read(1, 0)


def abort_all(cluster: MemoryCluster, name: str) -> None:
    for peer in endpoint_of(cluster.tasks[name]).peers:
        peer.abort()


async def test_a_cut_is_taken_anew_when_a_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            with coordinator.strategy.scope():
                v = psync.Variable(np.zeros(4, np.int64), name="v")
            await v.assign_add(np.ones(4, np.int64))
            cuts, admit = cuts_of(coordinator), Cuts._admit
            times = 0

            async def admit_then_lose(self: Cuts, *arguments: object) -> None:
                nonlocal times
                await admit(self, *arguments)  # type: ignore[arg-type]
                times += 1
                if times == 1:
                    abort_all(cluster, "ps-1")  # whose gate opens with it

            monkeypatch.setattr(Cuts, "_admit", admit_then_lose)
            async with cuts.take() as cut:
                assert times == 2
                assert cut.number == 2
                assert (await cut.read(1, 0)).tolist() == [1, 1]


@pytest.mark.virtual_time
async def test_an_update_that_waits_for_a_lock_and_its_holder_at_the_gate_let_each_other_go() -> (
    None
):
    """One ps has the update of all; on the other the lock was first, and its holder writes now."""
    loop = asyncio.get_running_loop()
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(2, np.int64), 2)
        adder, holder = cluster.client(WORKER, host="w"), cluster.client(OTHER)
        await pull(adder, v)
        cluster.network.partition("w", "ps1:1")
        adding = asyncio.ensure_future(assign(adder, v, [1, 1], "add"))
        await asyncio.sleep(1)
        cuts, plan, locked = Cuts(cluster.chief, cluster.creation.ensure), holder.plan((v,)), []

        async def assign_at_once() -> None:
            async with _locked(holder, plan) as lock:
                locked.append(lock)
                await asyncio.sleep(2)
                value = [np.array([10, 10])]
                await holder.assign(plan, value, op="assign", closure=-1, ordinal=0, lock=lock)

        assigning = asyncio.ensure_future(assign_at_once())
        await until(lambda: locked)
        cluster.network.heal("w", "ps1:1")
        began = loop.time()
        async with cuts.take() as cut:
            assert [(await cut.read(ps, 0)).tolist() for ps in (0, 1)] == [[10], [11]]
        assert loop.time() - began < 5
        await asyncio.gather(adding, assigning)
        await cuts.close()


async def test_who_holds_a_cut_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts_module, "PATIENCE_S", 0.05)
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            with coordinator.strategy.scope():
                v = psync.Variable(np.zeros(4, np.int64), name="v")
            await v.read()

            async def never(self: Cuts, number: int, wanted: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(Cuts, "_admit", never)
            with pytest.raises(CutLost, match="no cut over all ps tasks within"):
                async with cuts_of(coordinator).take():
                    pass
            await v.assign_add(np.ones(4, np.int64))  # nobody is held up any more
