"""An update that takes longer than a turn is answered, whatever becomes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from ps_cluster import WORKER as FIRST_WORKER
from ps_cluster import PsCluster, assign, pull
from psync.errors import ValueMismatchError
from psync.numerics.rules import SGD
from psync.ps.updates import PsUpdates
from psync.testing import settle
from psync.wire.limits import Limits
from psync.wire.messages import DefinePlan, LockShards, UnlockShards, Update
from stage import Stage, planned
from sync_tools import config

W = (0, 0)
HOLDER, WORKER = ("/job:worker/task:1", 1001), ("/job:worker/task:0", 1000)


LARGE = 1 << 20  # elements: more than is done within a turn


def push(*keys: tuple[int, int], pull: bool = False) -> Update:
    plan = planned(DefinePlan(0, [*keys], 1, pull=[*keys] if pull else None))
    return Update(1, 0, -1, 0, plan.plan)


def no_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.virtual_time
async def test_one_that_has_waited_for_a_lock_fails_for_want_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    await stage.begin()
    stage.create(W, "w", np.zeros(2, np.float32))
    stage.serving.services.store.define_optimizer(1, SGD(1.0).to_config())
    await stage.request(HOLDER, LockShards(1, [W], 10.0))
    said: list[Any] = []
    gradient = np.ones(2, np.float32).tobytes()
    stage.ask(WORKER, push(W, pull=True), [gradient], said.append)
    await settle()
    assert said == []

    monkeypatch.setattr(PsUpdates, "_submit", no_memory)
    await stage.request(HOLDER, UnlockShards(1))
    await settle()
    await stage.close()
    assert [type(each) for each in said] == [MemoryError]


@pytest.mark.virtual_time
async def test_one_that_is_applied_fails_if_there_is_no_memory_for_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shards are free again: who locks them does not wait for ever."""
    stage = Stage()
    await stage.begin()
    stage.create(W, "w", np.zeros(LARGE, np.float32))
    stage.serving.services.store.define_optimizer(1, SGD(1.0).to_config())
    monkeypatch.setattr(PsUpdates, "_answer", no_memory)
    said: list[Any] = []
    gradient = np.ones(LARGE, np.float32).tobytes()
    stage.ask(WORKER, push(W, pull=True), [gradient], said.append)
    await settle()
    assert [type(each) for each in said] == [MemoryError]
    await stage.request(HOLDER, LockShards(1, [W], 10.0))
    await stage.close()


@pytest.mark.virtual_time
async def test_small_shards_that_are_updated_together_get_their_part_of_a_large_push() -> None:
    stage = Stage()
    await stage.begin()
    sizes = {(0, 0): 2, (1, 0): 3, (2, 0): LARGE}
    for key, size in sizes.items():
        stage.create(key, f"v{key[0]}", np.zeros(size, np.float32))
    stage.serving.services.store.define_optimizer(1, SGD(1.0).to_config())
    said: list[Any] = []
    gradients = [np.full(size, key[0], np.float32).tobytes() for key, size in sizes.items()]
    stage.ask(WORKER, push(*sizes), gradients, said.append)
    await settle()
    assert [each.message.outcome for each in said] == ["accepted"]
    for key in sizes:
        assert set(stage.value(key).tolist()) == {-key[0]}
    await stage.close()


@pytest.mark.virtual_time
@pytest.mark.promise("input.peers-bounded")
@pytest.mark.parametrize("is_its_own", [False, True])
async def test_small_updates_that_wait_for_a_lock_are_bounded_unless_their_sender_can_end_it(
    is_its_own: bool,
) -> None:
    limits = Limits(unfinished_bytes=1 << 20)
    async with PsCluster(1, limits=limits, chunk=(1 << 16, 1 << 16)) as cluster:
        v = await cluster.create("v", np.zeros(15_000, np.float32))
        worker = cluster.client()
        holder = worker if is_its_own else cluster.client("/job:worker/task:1")
        members = [shard.key for shard in v.shards]
        await holder.links[0].call(LockShards(1, members, 30.0))
        one = np.ones(15_000, np.float32)
        adding = [asyncio.create_task(assign(worker, v, one, "add")) for _ in range(100)]
        await asyncio.sleep(5)
        peers = cluster.ps[0]._endpoint.peers
        waiting = sum(peer._unfinished_bytes for peer in peers if peer.task == FIRST_WORKER)
        assert waiting == 6_000_000 if is_its_own else waiting < (1 << 20) + 60_001
        await holder.links[0].call(UnlockShards(1))
        await asyncio.gather(*adding)
        assert set((await pull(worker, v))[0]) == {100}


@pytest.mark.virtual_time
@pytest.mark.parametrize("variable_set", [b"", b"set"])
async def test_no_cut_waits_for_one_that_is_refused_for_its_size(variable_set: bytes) -> None:
    """Of a synchronous part, which no cut waits for, the ledger knows nothing."""
    stage = Stage()
    await stage.begin()
    stage.create(W, "w", np.zeros(2, np.float32))
    rule = SGD(1.0).to_config()
    known = msgspec.structs.replace(config(1), optimizer=rule).to_config() if variable_set else rule
    plan = planned(DefinePlan(0, [W], 1, known, variable_set=variable_set))
    said: list[Any] = []
    stage.ask(WORKER, Update(1, 0, -1, 0, plan.plan), [bytes(12)], said.append)
    await settle()
    assert [type(each) for each in said] == [ValueMismatchError]
    assert stage.serving.services.ledger.is_settled(WORKER, 1) is not bool(variable_set)
    await stage.close()


@pytest.mark.virtual_time
async def test_one_whose_shard_is_busy_is_applied_after_that() -> None:
    stage = Stage()
    await stage.begin()
    stage.create(W, "w", np.zeros((2, 1), np.float32))
    store = stage.serving.services.store
    store.define_optimizer(1, SGD(1.0).to_config())
    rows = np.arange(2)
    work = store.scatter(W, "assign", rows, store.check_rows(W, rows, bytes(8)))
    next(work)
    said: list[Any] = []
    stage.ask(WORKER, push(W), [np.ones(2, np.float32).tobytes()], said.append)
    await settle()
    assert said == []
    await stage.serving.work.finish(work)
    await settle()
    assert [each.message.outcome for each in said] == ["accepted"]
    assert stage.value(W).tolist() == [[-1], [-1]]
    await stage.close()
