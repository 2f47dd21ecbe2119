"""Snapshots on a real ps, asked for by a real coordinator's links."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inside import accumulators_of, sync_of, work_of
from memory_cluster import until
from ps_cluster import CHIEF, RATE, WORKER, PsCluster, assign, hold, pull, push
from psync.errors import (
    CheckpointCorrupt,
    FencedError,
    RemoteProtocolError,
    UnknownVariableError,
    UsageError,
)
from psync.numerics.rules import Adam
from psync.ps.snapshots import (
    pack_accumulators,
    unpack_accumulators,
    unpack_answer,
)
from psync.specs import VariableSpec
from psync.store.ledger_snapshot import LedgerState, SenderState
from psync.store.snapshot import SnapshotState
from psync.wire.codec import Message, encode
from psync.wire.messages import (
    AccumulatorState,
    Admit,
    AskAccumulator,
    AskOptimizer,
    AskStatistics,
    CloseStep,
    DefineAccumulator,
    Done,
    DropFrozen,
    Fence,
    FillSnapshot,
    Freeze,
    Gate,
    OpenGate,
    OptimizerState,
    PrepareSnapshot,
    ReadFrozen,
    RestoreSnapshot,
    WriteFrozen,
)
from snapshot_tools import call, fill, freeze, prepare, read_all, take, write
from sync_cluster import GROUP, SyncCluster

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


class TestWho:
    @pytest.mark.parametrize(
        "message",
        [Freeze(1), DropFrozen(1), WriteFrozen(1, "/", ""), ReadFrozen(1, 0, 0, 1),
         PrepareSnapshot(1, ""), FillSnapshot(1, 0, 0), RestoreSnapshot(1, 1, []),
         Gate(1), Admit(1, []), OpenGate(1)],  # with which a cut begins
        ids=lambda message: type(message).__name__,
    )  # fmt: skip
    async def test_only_the_coordinator_that_is_served_may_ask(self, message: Message) -> None:
        async with PsCluster() as cluster:
            await freeze(cluster)
            with pytest.raises(UsageError, match="is not a coordinator"):
                await call(cluster.client(WORKER), message)
            with pytest.raises(FencedError, match="not the coordinator that it serves"):
                await call(cluster.client(CHIEF, 200), message)


@pytest.mark.asyncio
class TestGoingBack:
    async def test_an_empty_ps_takes_up_what_another_one_held(self, tmp_path: Path) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(LARGE, np.float32))
            w = await cluster.create("w", np.arange(3, dtype=np.int64))
            await adam(cluster, v, 1.0)
            state, _ = await freeze(cluster)
            places = await write(cluster, state, tmp_path / "a")
            expected = await everything(cluster, v)
        async with PsCluster() as other:
            await prepare(other, state, tmp_path / "a", places)
            with pytest.raises(UnknownVariableError):
                await pull(other.chief, v)
            await take(other)
            assert await everything(other, v) == expected
            (got,) = await pull(other.client(), w)
            assert got.tolist() == [0, 1, 2]
            received = await call(other.chief, AskOptimizer(1, ADAM))
            assert received.message == OptimizerState(0, 1, 0)

    async def test_bytes_may_come_over_the_network(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.arange(LARGE, dtype=np.float32))
            await adam(cluster, v, 1.0)
            state, _ = await freeze(cluster)
            items = await read_all(cluster, state)
            expected = await everything(cluster, v)
            await adam(cluster, v, 1.0)
            await prepare(cluster, state)
            half = MiB + 12
            for place, data in enumerate(items):
                with pytest.raises(UsageError, match=f"incomplete.* variable {v.variable_id} is"):
                    await take(cluster)
                await fill(cluster, place, data[half:], start=half)
                await fill(cluster, place, data[:half])
            await take(cluster)
            assert await everything(cluster, v) == expected

    async def test_repetitions_change_nothing(self, tmp_path: Path) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(LARGE, np.float32))
            state, _ = await freeze(cluster)
            places = await write(cluster, state, tmp_path / "a")
            await asyncio.gather(
                prepare(cluster, state, tmp_path / "a", places),
                prepare(cluster, state, tmp_path / "a", places),
            )
            assert held(cluster)["loads"] == 1
            await take(cluster)
            await assign(cluster.chief, v, np.ones(LARGE, np.float32))
            await take(cluster)
            (got,) = await pull(cluster.chief, v)
            assert (got == 1).all()
            assert (held(cluster)["taken"], held(cluster)["timeline"]) == (1, 1)
            assert held(cluster)["held"] == 0  # a cut of what was served before
            with pytest.raises(UsageError, match="load 1 was cancelled"):
                await prepare(cluster, state, tmp_path / "a", places)

    async def test_a_newer_load_gives_up_the_one_before(self, tmp_path: Path) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            state, _ = await freeze(cluster)
            places = await write(cluster, state, tmp_path / "a")
            await assign(cluster.chief, v, np.ones(3, np.float32))
            await prepare(cluster, state)
            await prepare(cluster, state, tmp_path / "a", places, load=2)
            with pytest.raises(UsageError, match="snapshot 1 is not being prepared"):
                await fill(cluster, 0, bytes(12))
            with pytest.raises(UsageError, match="snapshot 1 is not being prepared"):
                await take(cluster)
            with pytest.raises(UsageError, match="load 1 was cancelled"):
                await prepare(cluster, state)
            await take(cluster, load=2)
            (got,) = await pull(cluster.chief, v)
            assert (got == 0).all()

    async def test_what_is_damaged_is_refused_and_what_is_served_stays(
        self, tmp_path: Path
    ) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(LARGE, np.float32))
            state, _ = await freeze(cluster)
            path = tmp_path / "a"
            ((item, start, nbytes, crc),) = await write(cluster, state, path)
            await assign(cluster.chief, v, np.full(LARGE, 2, np.float32))
            good, data = [(item, start, nbytes, crc)], bytearray(path.read_bytes())
            data[start + 2 * MiB] ^= 1
            path.write_bytes(data)
            for places, named in (
                (good, "the value of shard 0 of variable 0: expected checksum"),
                ([(item, start, nbytes - 4, crc)], "expected 3145728 bytes, got 3145724"),
                ([], "variable 0 is not in the file"),
                ([(item, -1, nbytes, crc)], r"\[0\].start: expected a whole number from 0"),
                ([(item, start)], "a list of 4 entries"),
            ):
                with pytest.raises(CheckpointCorrupt, match=named):
                    await prepare(cluster, state, path, places)
                with pytest.raises(UsageError, match="is not being prepared"):
                    await take(cluster)
            for broken in (
                dataclasses.replace(state, accumulators=((encode(Done()), 0),)),
                dataclasses.replace(state, ledger=LedgerState((sender(b"\x90"),))),
            ):
                with pytest.raises(CheckpointCorrupt):
                    await prepare(cluster, broken, path, good)
            with pytest.raises(CheckpointCorrupt, match="snapshot 1: damaged: it is not JSON"):
                await call(cluster.chief, PrepareSnapshot(1, ""), [b"{"])
            with pytest.raises(RemoteProtocolError, match="2 segments"):
                await call(cluster.chief, PrepareSnapshot(1, ""), [b"{}", b"[]"])
            (got,) = await pull(cluster.chief, v)
            assert (got == 2).all()
            data[start + 2 * MiB] ^= 1
            path.write_bytes(data)
            await prepare(cluster, state, path, good)  # under the same number
            await take(cluster)

    async def test_an_update_under_way_ends_with_what_it_began_on(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            state, _ = await freeze(cluster)
            await prepare(cluster, state)
            await fill(cluster, 0, bytes(12))
            release = hold(cluster.ps[0], v)
            pushing = asyncio.create_task(push(cluster.client(WORKER, 1000), (v,), (1.0,)))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            await take(cluster, fences=[(WORKER, 1001)])
            release()
            with pytest.raises(FencedError):  # whoever sent it is cut off
                await pushing
            (got,) = await pull(cluster.chief, v)
            assert (got == 0).all()

    async def test_what_clients_take_for_known_stays_known(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            accumulator = DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0)
            await call(cluster.chief, accumulator)
            accumulators_of(cluster.ps[0]).hosted["g"].rule.set_global_step(3)
            state, _ = await freeze(cluster)
            late = dataclasses.replace(accumulator, name="late")
            await call(cluster.chief, late)
            await adam(cluster, v, 1.0)  # the ps knows the optimizer from now on
            plan = cluster.chief.plan((v,))
            await prepare(cluster, state)
            await fill(cluster, 0, bytes(12))
            await take(cluster)
            for name, step in (("g", 3), ("late", 0)):
                received = await call(cluster.chief, AskAccumulator(name))
                assert received.message == AccumulatorState(0, step)
            assert await adam(cluster, v, 1.0, plan=plan) == ["accepted"]
            received = await call(cluster.chief, AskOptimizer(1, ADAM))
            assert received.message == OptimizerState(0, 1, 0)

    async def test_a_newer_coordinator_forgets_what_was_frozen_and_prepared(self) -> None:
        async with PsCluster() as cluster:
            await cluster.create("v", np.zeros(3, np.float32))
            state, _ = await freeze(cluster)
            await prepare(cluster, state)
            await fill(cluster, 0, bytes(12))
            newer = cluster.client(CHIEF, 200)
            await cluster.attach(newer, 200)
            assert (held(cluster)["held"], held(cluster)["preparing"]) == (0, 0)
            with pytest.raises(UsageError, match="snapshot 1 is not being prepared"):
                await call(newer, RestoreSnapshot(1, 1, []))


def sender(answer: bytes) -> SenderState:
    return SenderState(WORKER, 1, 0, ((0, None, answer),))


class TestPacking:
    @pytest.mark.parametrize("data", [b"", b"\x91\x01\x02", encode(Done())])
    def test_what_is_no_answer_is_corrupt(self, data: bytes) -> None:
        with pytest.raises(CheckpointCorrupt, match="an answer in a snapshot"):
            unpack_answer(data)

    def test_accumulators(self) -> None:
        definition = DefineAccumulator("g", "dense", "float32", [2], "MEAN", "", False, 0)
        assert unpack_accumulators(pack_accumulators([(definition, 3)])) == [(definition, 3)]
        wrong = dataclasses.replace(definition, kind="other")
        for broken in (encode(Done()), b"", encode(wrong)):
            with pytest.raises(CheckpointCorrupt, match="an accumulator"):
                unpack_accumulators([(broken, 0)])


@pytest.mark.asyncio
class TestSynchronousSteps:
    async def go_back(
        self, cluster: SyncCluster, snapshots: list[SnapshotState], path: Path
    ) -> None:
        for ps, state in enumerate(snapshots):
            places = await write(cluster, state, path / str(ps), ps=ps)
            await prepare(cluster, state, path / str(ps), places, ps=ps)
        fences = [(f"/job:worker/task:{index}", 2000) for index in range(2)]
        for ps in range(len(snapshots)):
            await take(cluster, fences=fences, ps=ps)

    async def test_ps_0_of_an_older_timeline_closes_no_step(self, tmp_path: Path) -> None:
        async with SyncCluster(2) as cluster:
            w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
            snapshots = [(await freeze(cluster, ps=ps))[0] for ps in range(2)]
            assert w.shards[0].ps == 1
            release = hold(cluster.ps[1], w)
            pushes = [
                asyncio.create_task(cluster.replica(index, 1000).push((w,), (1.0,)))
                for index in range(2)
            ]
            await until(lambda: sync_of(cluster.ps[0]).steps() and work_of(cluster.ps[1]).waiting)
            late = cluster.client("/job:ps/task:0", 100)  # says what was in flight
            await call(late, AskStatistics(), ps=1)
            await self.go_back(cluster, snapshots, tmp_path)
            release()
            for answer in await asyncio.gather(*pushes, return_exceptions=True):
                assert isinstance(answer, FencedError)
            (got,) = await pull(cluster.chief, w)
            assert (got == 1).all()
            assert sync_of(cluster.ps[1]).steps() == []
            with pytest.raises(FencedError, match="incarnation 100 of /job:ps/task:0 has been"):
                await call(late, CloseStep(GROUP, cluster.config, 0, []), ps=1)
            with pytest.raises(UsageError, match="task:0 is not a coordinator"):
                await call(late, Fence(WORKER, 5000), ps=1)
            pushes = [
                asyncio.create_task(cluster.replica(index, 2000).push((w,), (1.0,)))
                for index in range(2)
            ]
            for answer in await asyncio.gather(*pushes):
                assert answer.outcome == "accepted"
            (got,) = await pull(cluster.chief, w)
            assert (got == 1 - RATE).all()
            assert sync_of(cluster.ps[1]).steps() == [(GROUP, 1)]
