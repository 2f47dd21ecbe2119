from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from psync.checkpoints.manifest import Place
from psync.errors import CheckpointCorrupt, CheckpointError
from psync.numerics.memory import BLOCK_BYTES
from psync.ps.snapshots import has_text, read_items, write_items
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.snapshot import Frozen, Loaded, freeze
from psync.store.snapshot_state import NOTHING
from psync.store.store import ShardStore

W = ShardSpec("w", 0, 0, 0, (3, 4), "float32", 0)
V = ShardSpec("v", 1, 0, 0, (3, BLOCK_BYTES // 4), "float32", 0)
T = ShardSpec("t", 2, 0, 0, (1000, 1000, 1000), "float32", 0)  # constant
ITEMS = [(1, "v"), (0, "w")]


@pytest.fixture
def frozen() -> Frozen:
    store = ShardStore("/job:ps/task:0")
    store.create(W, np.arange(12, dtype=np.float32).reshape(3, 4))
    store.create(V, np.random.default_rng(3).random(V.shape, np.float32))
    store.create(T, fill=2.0)
    return freeze(store, NOTHING)


def loaded(frozen: Frozen) -> Loaded:
    return Loaded(frozen.state, ShardStore("/job:ps/task:0"), Ledger())


def written(path: Path, frozen: Frozen) -> list[Place]:
    size, places, _ = write_items(path, frozen, ITEMS)
    assert size == path.stat().st_size
    return [Place(place, *at) for (place, _), at in zip(ITEMS, places, strict=True)]


@pytest.mark.parametrize("at", [0, 1])
def test_a_damaged_byte_is_found_and_its_item_named(
    frozen: Frozen, tmp_path: Path, at: int
) -> None:
    places = written(tmp_path / "a", frozen)
    start = places[at].start
    with open(tmp_path / "a", "r+b") as file:
        file.seek(start + 5)
        byte = file.read(1)
        file.seek(start + 5)
        file.write(bytes([byte[0] ^ 1]))
    name = f'the value of "{ITEMS[at][1]}/part_0"'
    with pytest.raises(CheckpointCorrupt, match=f"a: {name}: expected checksum"):
        read_items(tmp_path / "a", loaded(frozen), places)


def test_a_file_that_is_there_is_left_alone(frozen: Frozen, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"):
        write_items(tmp_path / "a", frozen, ITEMS)
    assert (tmp_path / "a").read_text() == "mine"
    assert frozen.views(0)


@pytest.mark.parametrize("items", [[(0, "w"), (0, "again")], [(3, "x")], [(-1, "x")]])
def test_what_cannot_be_written_leaves_no_file(
    frozen: Frozen, tmp_path: Path, items: list[tuple[int, str]]
) -> None:
    with pytest.raises(CheckpointError):
        write_items(tmp_path / "a", frozen, items)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_a_text_is_told_from_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("nonce")
    assert has_text(tmp_path / "a", "nonce")
    assert not has_text(tmp_path / "a", "nonc")
    assert not has_text(tmp_path / "a", "nonce2")
    assert not has_text(tmp_path / "a", "nonCe")
    assert not has_text(tmp_path / "b", "nonce")
    assert not has_text(tmp_path, "")
    os.mkfifo(tmp_path / "pipe")  # nobody waits for whoever writes into it
    assert not has_text(tmp_path / "pipe", "")
    assert not has_text(tmp_path / ("x" * 300), "nonce")
