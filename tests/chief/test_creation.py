from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from inside import handlers_of, points_of, store_of, work_of
from ps_cluster import PsCluster, assign, hold, pull, until
from psync.chief import creation, declarations
from psync.chief.declarations import Declaration, beside, split
from psync.errors import ParameterServerLost, PartitionError, UnknownVariableError
from psync.partitioners import FixedShardsPartitioner
from psync.specs import DTYPE_NAMES, VariableSpec, dtype_of
from psync.wire.messages import CreateShards

pytestmark = pytest.mark.asyncio


def declare(
    cluster: PsCluster, name: str, value: Any, shape: tuple[int, ...], shards: int = 1
) -> VariableSpec:
    spec = split(
        name, next(cluster.variables), shape, "float32", trainable=True,
        partitioner=FixedShardsPartitioner(shards), place=lambda nbytes: next(cluster.places),
        where="train.py:3",
    )  # fmt: skip
    cluster.declared.append(Declaration(spec, value))
    return spec


def watch_messages(cluster: PsCluster) -> list[list[str]]:
    """Return the list of what each message will create."""
    seen: list[list[str]] = []
    for task in cluster.ps:
        handler = handlers_of(task)[CreateShards]

        def run(peer: Any, message: CreateShards, body: Any, handler: Any = handler) -> Any:
            seen.append([f"{shard[0]}/{shard[2]}" for shard in message.shards])
            return handler.run(peer, message, body)

        handlers_of(task)[CreateShards] = type(handler)(run, handler.prepare)
    return seen


async def test_what_is_declared_is_created_in_one_message_to_each_ps() -> None:
    async with PsCluster(2) as cluster:
        seen = watch_messages(cluster)
        a = declare(cluster, "a", lambda: np.arange(6).reshape(3, 2), (3, 2), shards=2)
        b = declare(cluster, "b", lambda shape, offset: np.full(shape, offset[0]), (4,), shards=2)
        assert cluster.creation.pending
        await cluster.creation.ensure()
        assert not cluster.creation.pending
        assert sorted(seen) == [["a/0", "b/0"], ["a/1", "b/1"]]
        values = await pull(cluster.chief, a, b)
        assert [value.tolist() for value in values] == [[[0, 1], [2, 3], [4, 5]], [0, 0, 2, 2]]
        await cluster.creation.ensure()
        assert len(seen) == 2


async def test_messages_are_bounded_in_bytes_and_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(creation, "MESSAGE_BYTES", 100)
    monkeypatch.setattr(creation, "MESSAGE_SHARDS", 3)
    async with PsCluster() as cluster:
        seen = watch_messages(cluster)
        for i in range(4):
            cluster.declare(f"v{i}", np.float32(i))
        large = cluster.declare("large", np.ones((60, 2), np.float32), shards=4)
        await cluster.creation.ensure()
        assert seen == [
            ["v0/0", "v1/0", "v2/0"], ["v3/0", "large/0"], ["large/1"], ["large/2"], ["large/3"],
        ]  # fmt: skip
        assert (await pull(cluster.chief, large))[0].all()


async def test_the_chief_holds_a_message_and_a_shard_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(creation, "MESSAGE_BYTES", 1 << 16)
    async with PsCluster(chunk=(1 << 16, 1 << 20), check_buffers=False) as cluster:
        alive: set[int] = set()
        most = 0

        class Value(np.ndarray):
            def __del__(self) -> None:
                alive.discard(id(self))

        def value(shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
            nonlocal most
            made = np.zeros(shape, np.float32).view(Value)
            alive.add(id(made))
            most = max(most, len(alive))
            return made

        def as_is(array: np.ndarray, dtype: str, subject: str) -> np.ndarray:
            return array  # so that what is counted is what is held

        monkeypatch.setattr(declarations, "as_array", as_is)
        declare(cluster, "table", value, (64, 1 << 12), shards=64)
        await cluster.creation.ensure()
        assert most <= 8  # of 64: four in a message, one in the making, what is in flight


async def test_those_declared_meanwhile_are_created_too() -> None:
    async with PsCluster() as cluster:
        a = cluster.declare("a", np.float32(1))
        creating = asyncio.create_task(cluster.creation.ensure())
        await until(lambda: store_of(cluster.ps[0]).keys())
        b = cluster.declare("b", np.float32(2))
        await asyncio.gather(creating, cluster.creation.ensure())
        assert [float(value) for value in await pull(cluster.chief, a, b)] == [1, 2]


@pytest.mark.parametrize("size", [3, 1 << 18])
async def test_a_connection_that_is_cut_in_the_middle_repeats_it(size: int) -> None:
    async with PsCluster(2) as cluster:
        for task in cluster.ps:
            cut = functools.partial(cluster.network.cut, cluster.address(task))
            points_of(task).arm("ps.create.done", cut)
        v = cluster.declare("v", np.ones((4, size), np.float32), shards=4)
        w = cluster.declare("w", np.float32(5))
        await cluster.creation.ensure()
        values = await pull(cluster.chief, v, w)
        assert values[0].all()
        assert values[1] == 5


async def test_a_cut_in_the_middle_of_a_body_repeats_it() -> None:
    async with PsCluster() as cluster:
        v = cluster.declare("v", np.ones(1 << 20, np.float32))
        creating = asyncio.create_task(cluster.creation.ensure())
        links = cluster.network.links
        await until(lambda: any(a.to_server.delivered_bytes > 1 << 20 for a in links("ps0:1")))
        cluster.network.cut("ps0:1")
        await creating
        assert (await pull(cluster.chief, v))[0].all()


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


async def test_an_initial_value_that_does_not_fit_is_told_at_every_call() -> None:
    async with PsCluster() as cluster:
        declare(cluster, "bad", lambda: np.zeros(4), (3,))
        for _ in range(3):
            with pytest.raises(PartitionError) as caught:
                await cluster.creation.ensure()
            assert caught.value.message == (
                'variable "bad" declared at train.py:3: expected shape (3,), its initial_value '
                "returned (4,)"
            )
        traceback = caught.value.__traceback__
        depth = 0
        while traceback is not None:
            depth, traceback = depth + 1, traceback.tb_next
        assert depth < 6  # and not longer each time
        assert cluster.creation.pending


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
async def test_of_a_constant_one_element_is_sent_whatever_its_dtype(dtype: str) -> None:
    async with PsCluster(2) as cluster:
        element = np.array(1, dtype_of(dtype))
        spec = split(
            "table", 0, (1 << 20, 3), dtype, trainable=True, partitioner=FixedShardsPartitioner(4),
            place=lambda nbytes: next(cluster.places), where="train.py:3",
        )  # fmt: skip
        cluster.declared.append(Declaration(spec, np.broadcast_to(element, spec.shape)))
        await cluster.creation.ensure()
        assert bytes_received(cluster) < 3000
        shard = dataclasses.replace(spec.shards[1], index=1)
        assert store_of(cluster.ps[1]).spec(shard.key) == shard
        first = bytes(store_of(cluster.ps[1]).read(shard.key)[0][: element.itemsize])
        assert first == element.tobytes()


async def test_constants_of_a_callable_and_of_one_row_are_created_among_others() -> None:
    async with PsCluster(2) as cluster:

        def by_shard(shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
            return np.broadcast_to(np.float32(offset[0]), shape)

        a = declare(cluster, "a", by_shard, (5, 2), shards=2)
        b = declare(cluster, "b", np.arange(4, dtype=np.float32), (4,), shards=2)
        c = declare(cluster, "c", lambda: np.broadcast_to(np.float32(9), (2, 1)), (2, 1), shards=2)
        await cluster.creation.ensure()
        values = await pull(cluster.chief, a, b, c)
        assert values[0].tolist() == [[0, 0], [0, 0], [0, 0], [3, 3], [3, 3]]
        assert [value.ravel().tolist() for value in values[1:]] == [[0, 1, 2, 3], [9, 9]]


async def test_a_constant_that_was_updated_is_not_created_anew_by_a_repetition() -> None:
    async with PsCluster() as cluster:
        task = cluster.ps[0]

        def cut() -> None:
            for _ in store_of(task).assign((0, 0), "add", np.ones(6, np.float32)):
                pass
            cluster.network.cut(cluster.address(task))

        points_of(task).arm("ps.create.done", cut)
        v = declare(cluster, "v", np.broadcast_to(np.float32(0.5), (6,)), (6,))
        await cluster.creation.ensure()
        assert (await pull(cluster.chief, v))[0].tolist() == [1.5] * 6


def declare_copy(cluster: PsCluster, name: str, original: VariableSpec) -> VariableSpec:
    number = next(cluster.variables)
    spec = beside(original, name, number, trainable=False, where="train.py:9")
    cluster.declared.append(Declaration(spec, None, original))
    return spec


def bytes_received(cluster: PsCluster) -> int:
    links = [link for task in cluster.ps for link in cluster.network.links(cluster.address(task))]
    return sum(link.to_server.delivered_bytes for link in links)


@pytest.mark.parametrize("size", [3, 1 << 19])
async def test_copies_begin_beside_their_originals_in_the_same_message(size: int) -> None:
    async with PsCluster(2, chunk=(1 << 16, 1 << 20), check_buffers=False) as cluster:
        seen = watch_messages(cluster)
        value = np.arange(3 * size, dtype=np.float32).reshape(3, size)
        v = cluster.declare("v", value, shards=3)
        c = declare_copy(cluster, "c", v)
        cc = declare_copy(cluster, "cc", c)
        await cluster.creation.ensure()
        assert sorted(seen) == [
            ["v/0", "v/2", "c/0", "c/2", "cc/0", "cc/2"],
            ["v/1", "c/1", "cc/1"],
        ]
        assert bytes_received(cluster) < value.nbytes + 10_000
        for copied in await pull(cluster.chief, c, cc):
            assert np.array_equal(copied, value)


async def test_the_present_value_of_a_large_original_is_copied_without_its_bytes_travelling() -> (
    None
):
    async with PsCluster(2, chunk=(1 << 16, 1 << 20), check_buffers=False) as cluster:
        value = np.random.default_rng(0).random((10, 1 << 20), np.float32)  # 40 MiB
        v = await cluster.create("v", np.zeros_like(value), shards=2)
        await assign(cluster.client(), v, value)
        before = bytes_received(cluster)
        assert before > value.nbytes
        c = declare_copy(cluster, "c", v)
        await cluster.creation.ensure()
        assert bytes_received(cluster) - before < 1000
        assert np.array_equal((await pull(cluster.chief, c))[0], value)


async def test_an_original_that_is_being_updated_is_waited_for() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.ones(3, np.float32))
        release = hold(cluster.ps[0], v)
        c = declare_copy(cluster, "c", v)
        creating = asyncio.create_task(cluster.creation.ensure())
        await until(lambda: work_of(cluster.ps[0]).waiting)
        assert store_of(cluster.ps[0]).keys() == [(0, 0)]
        release()
        await creating
        assert (await pull(cluster.chief, c))[0].all()


@pytest.mark.parametrize("size", [3, 1 << 20])
async def test_copying_is_repeated_after_a_lost_connection_and_done_once(size: int) -> None:
    async with PsCluster(chunk=(1 << 16, 1 << 20), check_buffers=False) as cluster:
        task = cluster.ps[0]
        seen = watch_messages(cluster)
        v = await cluster.create("v", np.ones(size, np.float32))

        def cut() -> None:  # and let the original go on before the repetition comes
            for _ in store_of(task).assign((0, 0), "add", np.ones(size, np.float32)):
                pass
            cluster.network.cut(cluster.address(task))

        points_of(task).arm("ps.create.done", cut)
        c = declare_copy(cluster, "c", v)
        await cluster.creation.ensure()
        assert seen == [["v/0"], ["c/0"], ["c/0"]]
        values = await pull(cluster.chief, v, c)
        assert [value.max() for value in values] == [2, 1]


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


async def test_what_a_ps_has_lost_is_created_on_it_again_and_on_no_other() -> None:
    async with PsCluster(2) as cluster:
        cluster.creation.repeatable = []
        declare(cluster, "a", np.zeros((4, 2), np.float32), (4, 2), shards=2)
        await cluster.creation.ensure()
        declare(cluster, "b", lambda shape, offset: np.ones(shape), (4,), shards=2)
        await cluster.creation.ensure()
        seen = watch_messages(cluster)
        await cluster.creation.create_again({1})
        assert seen == [["a/1", "b/1"]]
