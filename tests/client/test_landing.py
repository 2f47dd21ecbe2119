"""Pulled values on one host: arrays over a ps's own memory, and when they are copies instead."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, peers_of, store_of
from ps_cluster import CONFIG, PsCluster, assign, pull, push
from psync.client.prefetch import Wanted
from psync.client.ps_client import PsClient
from psync.net.shared import bodies
from psync.net.shared.windows import Windows
from psync.net.transport import SocketNetwork
from psync.specs import dtype_of

MIB = 1 << 18  # elements of float32

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(Windows()._mremap is None, reason="only Linux has windows"),
]


class OneHost(SocketNetwork):
    """A network of real sockets whose addresses are files of a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(shares_memory=True)
        self._directory = directory

    async def listen(self, address: str, factory: Any) -> Any:
        return await super().listen(f"unix:{self._directory}/{address}", factory)

    async def connect(self, address: str, factory: Any) -> Any:
        return await super().connect(f"unix:{self._directory}/{address}", factory)

    def check(self) -> None:
        """Nothing was torn: it is asked of networks in memory."""


class OneHostCluster(PsCluster):
    def __init__(self, num_ps: int, directory: Path) -> None:
        super().__init__(0)
        self.network: Any = OneHost(directory)
        self.ps = [self._new_ps(index) for index in range(num_ps)]
        self.places = itertools.cycle(range(num_ps))


@asynccontextmanager
async def one_host(directory: Path, num_ps: int = 2) -> AsyncIterator[OneHostCluster]:
    async with OneHostCluster(num_ps, directory) as cluster:
        yield cluster
    gc.collect()


def is_lease(array: np.ndarray) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, memoryview) and owner.readonly


def now(client: PsClient) -> int:
    kept: int = endpoint_of(client.links[0]).statistics()["bytes_kept_now"]
    return kept


async def all_is_back(cluster: PsCluster, client: PsClient) -> None:
    """Wait until no ps has anything lent: what is said last comes behind what is given back."""
    gc.collect()
    for link in client.links:
        for peer in peers_of(link):
            await peer.ping()
            await peer.ping()
    assert now(client) == 0
    for task in cluster.ps:
        assert endpoint_of(task).statistics()["bytes_lent_now"] == 0


async def test_a_variable_on_one_ps_is_read_where_it_lies(tmp_path: Path) -> None:
    async with one_host(tmp_path, 1) as cluster:
        value = np.arange(3 * MIB, dtype=np.float32).reshape(3, -1)
        v = await cluster.create("v", value)
        client = cluster.client()
        (array,) = await pull(client, v)
        assert is_lease(array)
        assert array.shape == value.shape
        assert np.array_equal(array, value)
        assert now(client) == value.nbytes
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
        copy = pickle.loads(pickle.dumps(array))
        assert copy.flags.writeable or not is_lease(copy)
        part = array[1:, ::7]
        del array
        assert now(client) == value.nbytes
        del part
        await all_is_back(cluster, client)


@pytest.mark.parametrize(
    ("shape", "dtype", "shards"),
    [
        ((1 << 17, 10), "float32", 2),
        ((100_003, 10), "float32", 2),  # rows of 40 bytes: shards meet within a page
        ((100_003, 3), "int8", 3),
        ((50_001, 7), "bfloat16", 2),
        ((70_001,), "float64", 4),
        ((300_001,), "bool", 2),
        ((5, 40_000), "int64", 5),
    ],
)
async def test_shards_on_several_ps_are_one_array(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, shards: int
) -> None:
    async with one_host(tmp_path) as cluster:
        draw = np.random.default_rng(1)
        kind = dtype_of(dtype)
        value = draw.integers(0, 2, shape).astype(kind)
        v = await cluster.create("v", value, shards=shards)
        client = cluster.client()
        for number in range(3):
            (array,) = await pull(client, v)
            assert is_lease(array)
            assert array.dtype == kind
            assert array.tobytes() == value.tobytes()
            if dtype != "bool":
                value = value + np.ones(shape, kind)
                await assign(client, v, np.ones(shape, kind), "add")
            assert array.tobytes() != value.tobytes() or dtype == "bool", number
        del array
        await all_is_back(cluster, client)


async def test_what_is_held_stays_while_updates_go_on(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 3), np.float32), shards=2)
        client = cluster.client()
        held = []
        for number in range(8):
            (array,) = await pull(client, v)
            held.append((array, -float(number)))
            await push(client, (v,), [2.0])  # SGD at a rate of a half
            for earlier, was in held:
                assert (earlier == was).all()
            if number == 5:
                del held[1:4]
        held.clear()
        del array, earlier
        await all_is_back(cluster, client)


async def test_with_one_version_held_at_a_time_every_pull_is_leased(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 3), np.float32), shards=2)
        client = cluster.client()
        array = None
        for number in range(10):
            (array,) = await pull(client, v)
            assert is_lease(array)
            assert (array == -float(number)).all()
            await push(client, (v,), [2.0])
        spare = [store_of(task).statistics().spare_bytes for task in cluster.ps]
        assert sum(spare) <= 2 * v.nbytes


async def test_values_that_a_push_brings_are_leased(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 2), np.float32), shards=2)
        client = cluster.client()
        plan = client.plan((v,))
        wanted = Wanted(plan)
        gradient = np.full(v.shape, 2, np.float32)
        await client.push(
            plan, [gradient], optimizer=1, config=CONFIG, elsewhere={}, closure=-1, ordinal=0,
            wanted=wanted,
        )  # fmt: skip
        assert wanted.arrays is not None
        assert is_lease(wanted.arrays[0])
        assert (wanted.arrays[0] == -1).all()


@pytest.mark.parametrize("how", ["writable", "out", "small", "fill"])
async def test_what_is_copied(tmp_path: Path, how: str) -> None:
    async with one_host(tmp_path) as cluster:
        size = 16_384 if how == "small" else MIB
        v = await cluster.create("v", np.arange(size, dtype=np.float32), shards=2)
        client = cluster.client()
        target = np.empty(size, np.float32)
        options: dict[str, Any] = {}
        if how == "writable":
            options["writable"] = True
        elif how == "out":
            options["out"] = [target]
        elif how == "fill":
            v = await cluster.create("filled", np.full(2 * MIB, 5, np.float32), shards=2)
        (array,) = await pull(client, v, **options)
        if how != "fill":
            assert not is_lease(array)
            assert (array is target) == (how == "out")
            assert array.tolist() == list(range(size))
        else:
            assert (array == 5).all()
        assert array.flags.writeable == (how in ("writable", "out"))


async def test_small_variables_and_those_that_are_given_lie_beside_leases(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        client = cluster.client()
        values = {
            "large": np.arange(MIB, dtype=np.float32),
            "small": np.arange(10, dtype=np.int8),
            "given": np.arange(MIB, dtype=np.float32) + 1,
            "empty": np.zeros((0, 3), np.float32),
            "number": np.float32(3),
        }
        specs = [await cluster.create(name, each, shards=2) if each.ndim else
                 await cluster.create(name, each) for name, each in values.items()]  # fmt: skip
        target = np.empty(MIB, np.float32)
        arrays = await client.pull(client.plan(specs), out=[None, None, target, None, None])
        assert arrays[2] is target
        for array, expected in zip(arrays, values.values(), strict=True):
            assert np.array_equal(array, expected)
        assert [is_lease(array) for array in arrays] == [True, False, False, False, False]
        for array in arrays[:2]:
            assert not array.flags.writeable
        del arrays, array
        await all_is_back(cluster, client)


async def test_who_keeps_everything_gets_copies_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "KEPT_BYTES", 0)
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 2), np.float32), shards=2)
        client = cluster.client()
        kept = []
        for _ in range(8):
            kept += await pull(client, v)
            await push(client, (v,), [2.0])
        assert [is_lease(array) for array in kept] == [True, True] + [False] * 6
        assert [float(array[0, 0]) for array in kept] == [-float(n) for n in range(8)]
        assert now(client) == 2 * v.nbytes
        for task in cluster.ps:  # what is kept, what is there, and one where updates go
            assert store_of(task).statistics().spare_bytes <= 3 * v.nbytes // 2
        kept.clear()
        kept += await pull(client, v)
        assert is_lease(kept[0])


async def test_arrays_outlive_the_cluster(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        value = np.arange(2 * MIB, dtype=np.float32)
        v = await cluster.create("v", value, shards=2)
        (array,) = await pull(cluster.client(), v)
        assert is_lease(array)
    assert np.array_equal(array, value)


async def test_a_client_that_is_closed_still_holds_what_it_has_pulled(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 2), np.float32), shards=2)
        client = cluster.client()
        (array,) = await pull(client, v)
        await client.close()
        await endpoint_of(client.links[0]).close()
        for _ in range(6):
            await push(cluster.chief, (v,), [2.0])
        assert (array == 0).all()
        lent: Callable[[], int] = lambda: sum(  # noqa: E731
            endpoint_of(task).statistics()["bytes_lent_now"] for task in cluster.ps
        )
        assert lent() == v.nbytes
        del array
        while lent():  # noqa: ASYNC110  the end of its side channels says so
            await asyncio.sleep(0)


async def test_a_pull_that_is_given_up_keeps_nothing(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 2), np.float32), shards=2)
        client = cluster.client()
        await pull(client, v)
        for turns in range(12):
            asking = asyncio.create_task(pull(client, v))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            del asking
        await pull(client, v)
        await all_is_back(cluster, client)


async def test_a_lost_connection_takes_nothing_from_who_reads(tmp_path: Path) -> None:
    async with one_host(tmp_path) as cluster:
        v = await cluster.create("v", np.zeros((MIB, 2), np.float32), shards=2)
        client = cluster.client()
        (array,) = await pull(client, v)
        for link in client.links:
            for peer in peers_of(link):
                peer.abort()
        for _ in range(6):
            await push(client, (v,), [2.0])
        assert (array == 0).all()
        (again,) = await pull(client, v)
        assert is_lease(again)
        assert (again == -6).all()
