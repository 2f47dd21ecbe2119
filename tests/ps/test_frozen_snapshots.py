"""Snapshots that a real ps holds for a cut: frozen, read, written, dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, store_of, work_of
from ps_cluster import PsCluster, assign, hold, pull, push, until
from psync.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CutLost,
    RemoteProtocolError,
)
from psync.numerics.rules import Adam
from psync.specs import VariableSpec
from psync.store.snapshot import SnapshotState
from psync.wire.messages import (
    Done,
    DropFrozen,
    Freeze,
    WriteFrozen,
    Written,
)
from snapshot_tools import call, freeze, read, read_all, write

MiB = 1 << 20
LARGE = 3 * MiB // 4  # elements of float32: three blocks
ADAM = Adam(0.125).to_config()


async def adam(cluster: PsCluster, v: VariableSpec, value: float, **kwargs: Any) -> list[str]:
    client = kwargs.pop("client", cluster.chief)
    answers = await push(client, (v,), (value,), config=ADAM, **kwargs)
    return [answer.outcome for answer in answers]


async def everything(cluster: PsCluster, v: VariableSpec) -> list[bytes]:
    """Value and slots, as anybody reads them."""
    (value,) = await pull(cluster.chief, v)
    arrays = [value]
    for slot in ("m", "v"):
        arrays += await pull(cluster.chief, v, optimizer=1, slot=slot)
    return [array.tobytes() for array in arrays]


def held(cluster: PsCluster, ps: int = 0) -> dict[str, Any]:
    snapshot: dict[str, Any] = cluster.ps[ps].statistics()["snapshot"]
    return snapshot


@pytest.mark.asyncio
class TestFreeze:
    async def test_pushes_go_on_and_what_is_read_stays(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(LARGE, np.float32))
            await adam(cluster, v, 1.0)
            state, pending = await freeze(cluster)
            assert pending == []
            before = await everything(cluster, v)
            for value in (2.0, -3.0):
                await adam(cluster, v, value)
                assert await read_all(cluster, state) == before
            assert await everything(cluster, v) != before
            assert state.iterations == 1
            assert state.versions == {v.shards[0].key: 2}  # created, pushed

    async def test_parts_of_an_item(self) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.arange(LARGE, dtype=np.float32))
            await freeze(cluster)
            got = await read(cluster, 0, MiB - 4, MiB + 8)
            assert np.frombuffer(got, np.float32).tolist() == [MiB // 4 - 1, MiB // 4, MiB // 4 + 1]
            with pytest.raises(CheckpointError, match="no bytes"):
                await read(cluster, 0, 0, 4 * MiB)
            with pytest.raises(CheckpointError, match="item 7 of a snapshot"):
                await read(cluster, 7, 0, 1)
            with pytest.raises(RemoteProtocolError, match="at most 16777216 bytes"):
                await read(cluster, 0, 0, 17 * MiB)

    async def test_an_update_under_way_is_waited_for(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            release = hold(cluster.ps[0], v)
            freezing = asyncio.create_task(freeze(cluster))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            release()
            state, _ = await freezing
            assert state.versions == {v.shards[0].key: 1}

    async def test_the_same_cut_again_is_the_same_contents(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            first = await freeze(cluster)
            await assign(cluster.chief, v, np.ones(3, np.float32))
            repeated = await call(cluster.chief, Freeze(1))
            assert SnapshotState.from_bytes(bytes(repeated.segments[0]), "frozen") == first[0]
            assert await read(cluster, 0, 0, 12) == bytes(12)
            await freeze(cluster, 2)
            assert await read(cluster, 0, 0, 12, cut=2) != bytes(12)
            with pytest.raises(CutLost, match="does not hold cut 1 any more"):
                await read(cluster, 0, 0, 12)

    async def test_it_is_held_until_it_is_dropped(self) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.zeros(3, np.float32))
            await freeze(cluster, 2)
            assert held(cluster)["held"] == 1
            assert (await call(cluster.chief, DropFrozen(1))).message == Done()  # another one
            assert await read(cluster, 0, 0, 12, cut=2) == bytes(12)
            for _ in range(2):
                assert (await call(cluster.chief, DropFrozen(2))).message == Done()
            with pytest.raises(CutLost):
                await read(cluster, 0, 0, 12, cut=2)
            assert (held(cluster)["held"], held(cluster)["frozen"]) == (0, 1)

    async def test_it_ends_with_the_connection_over_which_it_was_asked_for(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(LARGE, np.float32))
            await assign(cluster.chief, v, np.ones(LARGE, np.float32))
            await freeze(cluster)
            block = store_of(cluster.ps[0]).shards()[v.shards[0].key].values.block(1)
            assert block.held()
            (await cluster.chief.links[0].peer("control")).abort()
            await until(lambda: not held(cluster)["held"])
            assert not block.held()
            with pytest.raises(CutLost):
                await read(cluster, 0, 0, 12)

    async def test_who_has_gone_when_it_is_frozen_holds_nothing(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            release = hold(cluster.ps[0], v)
            freezing = asyncio.create_task(freeze(cluster))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            peers = endpoint_of(cluster.ps[0]).peers
            (peer,) = [peer for peer in peers if peer.lane == "control"]
            (await cluster.chief.links[0].peer("control")).abort()
            freezing.cancel()  # so that nobody asks again
            await until(lambda: peer.is_closed)
            release()
            await asyncio.gather(freezing, return_exceptions=True)
            await work_of(cluster.ps[0]).drain()
            assert held(cluster)["held"] == 0


@pytest.mark.asyncio
class TestWriting:
    async def test_the_same_request_again_gets_the_same_answer(self, tmp_path: Path) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.ones(LARGE, np.float32))
            state, _ = await freeze(cluster)
            path = tmp_path / "a"
            both = await asyncio.gather(write(cluster, state, path), write(cluster, state, path))
            assert both[0] == both[1] == await write(cluster, state, path)
            assert held(cluster)["written_bytes"] == path.stat().st_size

    async def test_what_cannot_be_written_is_said(self, tmp_path: Path) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.ones(3, np.float32))
            state, _ = await freeze(cluster)
            (tmp_path / "a").touch()
            with pytest.raises(CheckpointError, match="File exists"):
                await write(cluster, state, tmp_path / "a")
            order = WriteFrozen(1, str(tmp_path / "b"), "12")
            for items, named in (
                ("{}", "expected a list"),
                ('[[0, ""]]', r"\[0\]\[1\]: expected text"),
            ):
                with pytest.raises(CheckpointCorrupt, match=named):
                    await call(cluster.chief, order, [items.encode()])
            with pytest.raises(CheckpointCorrupt, match="is not JSON"):
                await call(cluster.chief, order)
            assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize("nonce", [None, "13"])
    async def test_who_does_not_see_the_directory_writes_nothing(
        self, tmp_path: Path, nonce: str | None
    ) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.ones(3, np.float32))
            await freeze(cluster)
            if nonce is not None:
                (tmp_path / "nonce").write_text(nonce)
            order = WriteFrozen(1, str(tmp_path / "a"), "12")
            answer = await call(cluster.chief, order, [b'[[0, "v@0"]]'])
            assert answer.message == Written(None)
            assert not (tmp_path / "a").exists()
            assert await read(cluster, 0, 0, 12) == np.ones(3, np.float32).tobytes()  # still held

    async def test_a_cut_that_is_dropped_meanwhile_leaves_no_file(self, tmp_path: Path) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.ones(LARGE, np.float32))
            state, _ = await freeze(cluster)
            reading = cluster.ps[0]._snapshots._frozen._cut.frozen.letting_go(0)
            next(reading)
            await call(cluster.chief, DropFrozen(1))
            with pytest.raises(CheckpointError, match="no longer held"):
                next(reading)
            with pytest.raises(CutLost):
                await write(cluster, state, tmp_path / "a")
