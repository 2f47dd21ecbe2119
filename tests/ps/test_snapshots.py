"""Snapshots on a real ps, asked for by a real coordinator's links."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_cluster import WORKER, PsCluster, assign, pull, push
from psync.errors import CheckpointCorrupt, RemoteProtocolError, UsageError
from psync.numerics.rules import Adam
from psync.ps.accumulators import unpack_accumulators
from psync.specs import VariableSpec
from psync.store.snapshot_state import (
    SenderState,
    SnapshotState,
    unpack_answer,
)
from psync.wire.codec import Message, encode, replace
from psync.wire.frames import Frame
from psync.wire.messages import (
    DefineAccumulator,
    Done,
    FillSnapshot,
    Freeze,
    Gate,
    OpenGate,
    PrepareSnapshot,
    ReadFrozen,
    RestoreSnapshot,
    WriteFrozen,
)

MiB = 1 << 20
LARGE = 3 * MiB // 4  # elements of float32: three blocks
ADAM = Adam(0.125).to_config()


async def call(cluster: PsCluster, message: Message, *segments: bytes) -> Frame:
    return await cluster.chief.links[0].call(message, segments)


async def freeze(cluster: PsCluster) -> SnapshotState:
    await call(cluster, Gate(1))
    frozen = await call(cluster, Freeze(1))
    await call(cluster, OpenGate(1, holds=True))
    return SnapshotState.from_bytes(bytes(frozen.segments[0]), "frozen")


async def prepare(cluster: PsCluster, state: SnapshotState, path: Path, places: Any) -> None:
    packed = state.to_bytes(), json.dumps(places).encode()
    await call(cluster, PrepareSnapshot(1, str(path)), *packed)


async def take(cluster: PsCluster) -> None:
    await call(cluster, RestoreSnapshot(1, 1, []))


async def step(cluster: PsCluster, v: VariableSpec) -> None:
    await push(cluster.chief, (v,), (1.0,), config=ADAM)


async def everything(cluster: PsCluster, v: VariableSpec) -> Sequence[bytes]:
    """Value and slots, as anybody reads them."""
    arrays = await pull(cluster.chief, v)
    for slot in ("m", "v"):
        arrays += await pull(cluster.chief, v, optimizer=1, slot=slot)
    return [array.tobytes() for array in arrays]


async def test_bytes_may_come_over_the_network() -> None:
    """To a ps that cannot read its file."""
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.arange(LARGE, dtype=np.float32))
        await step(cluster, v)
        state, expected = await freeze(cluster), await everything(cluster, v)
        reads = [
            await call(cluster, ReadFrozen(1, place, 0, item.nbytes))
            for place, item in enumerate(state.items)
        ]
        items = [b"".join(map(bytes, read.segments)) for read in reads]
        await step(cluster, v)
        await call(cluster, PrepareSnapshot(1, ""), state.to_bytes())
        half = MiB + 12
        for place, data in enumerate(items):
            with pytest.raises(UsageError, match=r'incomplete.* "v/part_0" is missing'):
                await take(cluster)
            with pytest.raises(UsageError, match=f"bytes from {half} on follow 0"):
                await call(cluster, FillSnapshot(0, 1, place, half), data[half:])
            await call(cluster, FillSnapshot(0, 1, place, 0), data[:half])
            await call(cluster, FillSnapshot(0, 1, place, half), data[half:])
        await take(cluster)
        assert await everything(cluster, v) == expected


async def test_what_is_damaged_is_refused_and_what_is_served_stays(tmp_path: Path) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.ones(LARGE, np.float32))
        state, path = await freeze(cluster), tmp_path / "a"
        (tmp_path / "nonce").write_text("12")
        written = await call(cluster, WriteFrozen(1, str(path), "12"), b'[[0, "item0"]]')
        size, ((start, nbytes, crc),), _ = json.loads(bytes(written.segments[0]))
        assert size == path.stat().st_size
        await assign(cluster.chief, v, np.full(LARGE, 2, np.float32))
        good, data = [(0, start, nbytes, crc)], bytearray(path.read_bytes())
        data[start + 2 * MiB] ^= 1
        path.write_bytes(data)
        for places, named in (
            (good, 'the value of "v/part_0": expected checksum'),
            ([(0, start, nbytes - 4, crc)], "expected 3145728 bytes, got 3145724"),
            ([], '"v/part_0" is not in the file'),
            ([(0, -1, nbytes, crc)], r"\[0\]\[1\]: expected `int` >= 0, got -1"),
            ([(0, start)], "`array` of length 4"),
        ):
            with pytest.raises(CheckpointCorrupt, match=named):
                await prepare(cluster, state, path, places)
            with pytest.raises(UsageError, match="is not being prepared"):
                await take(cluster)
        sender = SenderState(WORKER, 1, 0, ((0, None, b"\x90"),))
        for broken in (
            dataclasses.replace(state, accumulators=((encode(Done()), 0),)),
            dataclasses.replace(state, senders=(sender,)),
        ):
            with pytest.raises(CheckpointCorrupt):
                await prepare(cluster, broken, path, good)
        with pytest.raises(CheckpointCorrupt, match="snapshot 1: damaged: it is not JSON"):
            await call(cluster, PrepareSnapshot(1, ""), b"{")
        with pytest.raises(RemoteProtocolError, match="2 segments"):
            await call(cluster, PrepareSnapshot(1, ""), b"{}", b"[]")
        (got,) = await pull(cluster.chief, v)
        assert (got == 2).all()
        data[start + 2 * MiB] ^= 1
        path.write_bytes(data)
        await prepare(cluster, state, path, good)  # under the same number
        await take(cluster)


@pytest.mark.parametrize("data", [b"", b"\x91\x01\x02", encode(Done())])
def test_what_is_no_answer_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="an answer in a snapshot"):
        unpack_answer(data)


def test_accumulators_come_back_from_their_definitions() -> None:
    definition = DefineAccumulator("g", "dense", "float32", [2], "MEAN", "", False, 0)
    assert unpack_accumulators([(encode(definition), 3)]) == [(definition, 3)]
    wrong = replace(definition, kind="other")
    for broken in (encode(Done()), b"", encode(wrong)):
        with pytest.raises(CheckpointCorrupt, match="an accumulator"):
            unpack_accumulators([(broken, 0)])
