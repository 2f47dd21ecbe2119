"""Snapshots of a cluster's ps tasks in files, for tests that do without checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psync
from inside import chief_of
from psync.chief.consistent_cut import Cut


@dataclass(frozen=True)
class KeptSnapshot:
    state: bytes
    file: Path
    places: Sequence[tuple[int, int, int, int]]


async def keep_snapshots(coordinator: psync.ClusterCoordinator, folder: Path) -> list[KeptSnapshot]:
    """Take a cut, let each ps write its snapshot, and let the coordinator recover from these."""
    inner = chief_of(coordinator)
    async with inner.cuts.take() as cut:
        kept = [await _kept(cut, ps, folder) for ps in range(len(cut.snapshots))]
        cut.check_present()
    inner.recovery.source = lambda: kept
    return kept


async def _kept(cut: Cut, ps: int, folder: Path) -> KeptSnapshot:
    state = cut.snapshots[ps]
    items = [(i, f"item-{i}") for i, item in enumerate(state.items) if not item.is_constant]
    file = folder / f"ps-{ps}-{cut.number}.safetensors"
    file.with_name("nonce").write_text("12")
    written = await cut.write(ps, str(file), "12", items)
    assert written is not None
    places = [(i, *place) for (i, _), place in zip(items, written.places, strict=True)]
    return KeptSnapshot(state.to_bytes(), file, places)
