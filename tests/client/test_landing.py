"""Pulled values on one host: arrays over a ps's own memory, and when they are copies instead."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, peers_of
from ps_cluster import PsCluster, pull, push
from psync.client.ps_client import PsClient
from psync.net.shared.windows import Windows
from psync.net.transport import SocketNetwork

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
