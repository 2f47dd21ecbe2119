"""What a coordinator says to a ps about snapshots, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ps_cluster import PsCluster
from psync.client.ps import PsClient
from psync.store.snapshot import SnapshotState
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import (
    Done,
    FillSnapshot,
    Freeze,
    Frozen,
    Gate,
    OpenGate,
    PrepareSnapshot,
    ReadFrozen,
    RestoreSnapshot,
    WriteFrozen,
    Written,
)


async def call(
    client: PsClient, message: Message, segments: Sequence[Any] = (), ps: int = 0
) -> Frame:
    return await client.links[ps].call(lambda _: message, segments)


async def freeze(
    cluster: PsCluster, cut: int = 1, *, ps: int = 0, client: PsClient | None = None
) -> tuple[SnapshotState, list[int]]:
    """Hold what a ps has; return the state and the closures that are pending."""
    await call(client or cluster.chief, Gate(cut), ps=ps)
    received = await call(client or cluster.chief, Freeze(cut), ps=ps)
    await call(client or cluster.chief, OpenGate(cut), ps=ps)
    assert isinstance(received.message, Frozen)
    (state,) = received.segments
    return SnapshotState.from_bytes(bytes(state), "frozen"), received.message.pending


async def read(
    cluster: PsCluster, place: int, start: int, stop: int, *, cut: int = 1, ps: int = 0
) -> bytes:
    received = await call(cluster.chief, ReadFrozen(cut, place, start, stop), ps=ps)
    return b"".join(map(bytes, received.segments))


async def read_all(cluster: PsCluster, state: SnapshotState, *, ps: int = 0) -> list[bytes]:
    """All items, whole."""
    items = enumerate(state.items)
    return [await read(cluster, place, 0, item.nbytes, ps=ps) for place, item in items]


async def write(
    cluster: PsCluster, state: SnapshotState, path: Path, *, cut: int = 1, ps: int = 0
) -> list[tuple[int, int, int, int]]:
    """Write all items that are not constant; return where they lie: (item, first, bytes, crc)."""
    path.with_name("nonce").write_text("12")
    items = [[i, f"item{i}"] for i, item in enumerate(state.items) if not item.is_constant]
    received = await call(
        cluster.chief, WriteFrozen(cut, str(path), "12"), [json.dumps(items).encode()], ps
    )
    assert isinstance(received.message, Written)
    assert received.message.size == path.stat().st_size
    places = json.loads(bytes(received.segments[0]))
    return [(item, *place) for (item, _), place in zip(items, places, strict=True)]


async def prepare(
    cluster: PsCluster,
    state: SnapshotState,
    path: Path | None = None,
    places: Sequence[Any] = (),
    *,
    load: int = 1,
    ps: int = 0,
) -> None:
    segments = [state.to_bytes()]
    if path is not None:
        segments.append(json.dumps(places).encode())
    message = PrepareSnapshot(load, "" if path is None else str(path))
    assert (await call(cluster.chief, message, segments, ps)).message == Done()


async def fill(
    cluster: PsCluster, place: int, data: bytes, *, start: int = 0, load: int = 1, ps: int = 0
) -> None:
    await call(cluster.chief, FillSnapshot(load, place, start), [data], ps)


async def take(
    cluster: PsCluster,
    *,
    load: int = 1,
    timeline: int = 1,
    fences: Sequence[tuple[str, int]] = (),
    ps: int = 0,
) -> None:
    message = RestoreSnapshot(load, timeline, list(fences))
    assert (await call(cluster.chief, message, ps=ps)).message == Done()
