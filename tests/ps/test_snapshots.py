"""Snapshots on a real ps, asked for by a real coordinator's links."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_cluster import WORKER, PsCluster, assign, pull, push
from psync.errors import (
    CheckpointCorrupt,
    RemoteProtocolError,
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
from psync.wire.codec import encode
from psync.wire.messages import (
    DefineAccumulator,
    Done,
    PrepareSnapshot,
)
from snapshot_tools import call, fill, freeze, prepare, read_all, take, write

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


@pytest.mark.asyncio
class TestGoingBack:
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
