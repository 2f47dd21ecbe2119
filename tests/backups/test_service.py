"""A ps gets a backup, loses it, and gets another one, at the coordinator's word."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

from inside import backup_of, settled
from memory_cluster import until
from ps_cluster import PsCluster, assign, pull, push
from psync.errors import ConnectionLost, ParameterServerLost, PsyncError
from psync.store import commit_log
from psync.testing.simulation.ps_oracle import faults_of_pairs
from psync.wire.codec import Message
from psync.wire.messages import (
    BackUp,
    DefineAccumulator,
    Fence,
    Promote,
    TakeGradient,
    UpdateAccumulator,
)
from psync.wire.tensors import to_bytes_view

MANY = (3 << 20) // 4  # elements of float32: work in pieces


async def say(cluster: PsCluster, ps: int, message: Message) -> Message:
    return (await cluster.chief.links[ps].call(message)).message


async def back_up(cluster: PsCluster, epoch: int = 1, *, lost: bool = False) -> None:
    """Let ps 0 make a backup in the process of ps 1."""
    await say(cluster, 0, BackUp(epoch, "/job:ps/task:1", "ps1:1", lost))


async def create(cluster: PsCluster) -> Any:
    cluster.places = iter([0, 0, 0])
    return await cluster.create("w", np.arange(6, dtype=np.float32))


class Traffic:
    """Whatever clients may ask of ps 0, in an order that a seed gives, much of it at once."""

    def __init__(self, cluster: PsCluster, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.cluster = cluster
        self.clients = [cluster.client(f"/job:worker/task:{i}", 1000, host="w") for i in range(3)]
        self.sequences = [1000, 1000, 1000]  # above those that the clients give themselves
        self.variables: list[Any] = []
        self.under_way: set[asyncio.Task[Any]] = set()
        self.refused = 0

    def draw(self, below: int) -> int:
        return int(self.random.integers(below))

    def go(self, count: int) -> None:
        for _ in range(count):
            self.under_way.add(asyncio.create_task(self.something()))

    async def something(self) -> None:
        kinds = [self.push, self.push, self.assign, self.create, self.fence, self.accumulate,
                 self.accumulate, self.take]  # fmt: skip
        with contextlib.suppress(ConnectionLost):
            try:
                await kinds[self.draw(len(kinds))]()
            except PsyncError:
                self.refused += 1

    def some(self) -> list[Any]:
        """Some of the variables, in an order of their own."""
        count = 1 + self.draw(len(self.variables))
        return [self.variables[i] for i in self.random.permutation(len(self.variables))[:count]]

    async def push(self) -> None:
        variables = self.some()
        closure = self.draw(60) - 30
        await push(
            self.clients[self.draw(3)], variables, [self.draw(9)] * len(variables),
            closure=max(closure, -1), ordinal=len(variables),
        )  # fmt: skip

    async def assign(self) -> None:
        variable = self.variables[self.draw(len(self.variables))]
        value = np.full(variable.shape, self.draw(9), np.float32)
        await assign(self.clients[self.draw(3)], variable, value, ("add", "assign")[self.draw(2)])

    async def create(self) -> None:
        if len(self.variables) < 12:
            size = (5, MANY)[self.draw(2)]
            made = await self.cluster.create(f"v{len(self.cluster.declared)}", np.ones(size, "f4"))
            self.variables.append(made)

    async def fence(self) -> None:
        if not self.draw(4):  # by one, whose next incarnation nobody plays
            await say(self.cluster, 0, Fence("/job:worker/task:2", 1000 + self.draw(2)))

    async def accumulate(self) -> None:
        which, values = self.draw(3), np.ones((1, MANY)[self.draw(2)], np.float32)
        self.sequences[which] += 1
        name = str(values.size)
        message = UpdateAccumulator(self.sequences[which], 0, -1, 0, name, 1 << 40, [values.size])
        link = self.clients[which].links[0]
        await link.call(message, [to_bytes_view(values)], bulk=True)

    async def take(self) -> None:
        which = self.draw(3)
        self.sequences[which] += 1
        message = TakeGradient(str((1, MANY)[self.draw(2)]), self.sequences[which], 0, 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.draw(20) / 1000):
                await self.clients[which].links[0].call(message)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_asked_a_backup_is_what_its_primary_is(seed: int) -> None:
    async with PsCluster(2, chunk=(1 << 18, 1 << 20)) as cluster:
        traffic = Traffic(cluster, seed)
        traffic.variables = [await create(cluster), await cluster.create("x", np.ones(MANY, "f4"))]
        cluster.places = itertools.repeat(0)
        for size in (1, MANY):
            await say(cluster, 0, DefineAccumulator(str(size), "dense", "float32", None, "MEAN", "",
                                                    False, 0))  # fmt: skip
        traffic.go(20)
        for _ in range(traffic.draw(30)):
            await asyncio.sleep(0)
        copying, epoch = asyncio.create_task(back_up(cluster)), 1
        for _ in range(8):
            traffic.go(10)
            for _ in range(traffic.draw(30)):
                await asyncio.sleep(0)
            if not traffic.draw(3):
                cluster.network.cut(("w", "ps1:1")[traffic.draw(2)])
            if not traffic.draw(4):  # another one in its place
                await copying
                epoch += 1
                copying = asyncio.create_task(back_up(cluster, epoch))
        await copying
        await asyncio.gather(*traffic.under_way)
        await until(lambda: cluster.ps[0].statistics()["backup"]["waiting"] == 0)
        await settled(cluster.ps[1])
        compared, faults = faults_of_pairs({"ps-0": cluster.ps[0], "ps-1": cluster.ps[1]})
        assert (compared, faults) == (1, [])
        primary, backup = cluster.ps[0].services, backup_of(cluster.ps[1], 0).services
        assert primary.digest() == backup.digest()
        assert traffic.refused < len(traffic.under_way) / 2


@pytest.mark.virtual_time
async def test_a_plan_that_goes_while_a_copy_begins_is_known_where_entries_name_it() -> None:
    """Its client's next incarnation comes after the entry, and before the copy is held."""
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        before, after = cluster.client(incarnation=1000), cluster.client(incarnation=1001)
        await push(before, [w], [1.0])
        executor, computed = cluster.ps[0].services.executor, asyncio.Event()
        plain = executor.computes.settled

        async def settled(places: Any = None) -> None:
            await computed.wait()
            await plain(places)

        executor.computes.settled = settled  # type: ignore[method-assign]
        made = asyncio.create_task(back_up(cluster))
        await until(lambda: executor.waiting)
        pushed = asyncio.create_task(push(before, [w], [1.0]))
        await until(lambda: executor.waiting == 2)
        await pull(after, w)
        computed.set()
        await made
        await pushed
        assert faults_of_pairs({"ps-0": cluster.ps[0], "ps-1": cluster.ps[1]}) == (1, [])


@pytest.mark.virtual_time
async def test_a_backup_that_is_not_what_its_primary_is_serves_nothing_and_another_one_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit_log, "CHECK_EVERY", 1)
    async with PsCluster(2) as cluster:
        w, worker = await create(cluster), cluster.client()
        await back_up(cluster)
        backup_of(cluster.ps[1], 0).services.ledger.final_below(99)  # as by some fault
        until_lost = asyncio.create_task(back_up(cluster, lost=True))
        for _ in range(2):
            await push(worker, [w], [1.0])
        unanswered = asyncio.create_task(push(worker, [w], [1.0]))
        await until_lost
        assert not unanswered.done()
        with pytest.raises(PsyncError, match="the backup of /job:ps/task:0 is damaged"):
            await say(cluster, 1, Promote(0, 1, 100, []))
        await back_up(cluster, 2)
        await unanswered
        await push(worker, [w], [1.0])
        await settled(cluster.ps[1])
        assert faults_of_pairs({"ps-0": cluster.ps[0], "ps-1": cluster.ps[1]}) == (1, [])


@pytest.mark.virtual_time
async def test_one_whose_backup_serves_answers_nobody_and_drops_what_it_holds() -> None:
    """It was taken for dead while it was only slow."""
    async with PsCluster(2) as cluster:
        w, worker = await create(cluster), cluster.client()
        await back_up(cluster)
        await push(worker, [w], [1.0])
        await say(cluster, 1, Promote(0, 1, 100, []))
        with pytest.raises(ParameterServerLost, match="ps/task:0 at ps0:1 cannot be reached"):
            await push(worker, [w], [1.0])
        assert cluster.ps[0].statistics()["store"]["shards"] == 0
        promoted = backup_of(cluster.ps[1], 0)
        assert promoted.statistics()["store"]["applies"] == 1
