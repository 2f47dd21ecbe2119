"""What each ps held, read out of a checkpoint and checked."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from psync.checkpoints.files import remove
from psync.checkpoints.layout import Layout
from psync.checkpoints.stored_snapshots import SavedSnapshots, stored_snapshots
from psync.checkpoints.writer import Writer
from psync.errors import CheckpointCorrupt, CheckpointNotFound
from psync.ps.snapshot_files import read_items, write_items
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.snapshot import Frozen, freeze, load_snapshot
from psync.store.snapshot_state import SnapshotState
from psync.store.store import ShardStore

SPECS = [ShardSpec("w", 0, ps, 3 * ps, (3, 2), "float32", ps) for ps in range(2)]
ZERO = ShardSpec("zero", 1, 0, 0, (1000, 1000), "float64", 0)


def held(ps: int, value: float) -> Frozen:
    store = ShardStore(f"/job:ps/task:{ps}")
    store.create(SPECS[ps], np.full((3, 2), value, np.float32))
    if ps == 0:
        store.create(ZERO)
    return freeze(store, Ledger(), lambda answer: None)


def save(directory: Path, number: int = 1, value: float = 1.0, drop: int = 0) -> Path:
    """A checkpoint of two ps tasks; ``drop``: so many places are left out of the manifest."""
    frozen = [held(ps, value + ps) for ps in range(2)]
    layout = Layout([each.state for each in frozen], [])
    writer = Writer(directory, f"ckpt-{number:08d}", number)
    for ps, each in enumerate(frozen):
        name = f"ps-{ps}.safetensors"
        size, written = write_items(writer.temporary / name, each, layout.arrays[ps])
        writer.add_file(name, size, [])
        places = layout.places(ps, written)[drop:]
        writer.add_snapshot(ps, f"ps-{ps}.json", each.state.to_bytes(), name, places)
    return writer.commit()


def value_of(path: Path) -> float:
    """What the second ps held of w."""
    snapshot = stored_snapshots(path)[1]
    state = SnapshotState.from_bytes(snapshot.state, "here")
    made = load_snapshot(state, ShardStore("/job:ps/task:1"), Ledger(), bytes.hex)
    read_items(snapshot.file, made, snapshot.places)
    return float(np.frombuffer(made.store.read(SPECS[1].key)[0], np.float32)[0])


def test_a_ps_can_be_made_of_what_is_there(tmp_path: Path) -> None:
    path = save(tmp_path, value=4.0)
    snapshots = stored_snapshots(path)
    assert [snapshot.file for snapshot in snapshots] == [
        path / f"ps-{ps}.safetensors" for ps in range(2)
    ]
    assert [len(snapshot.places) for snapshot in snapshots] == [1, 1]  # zeros need none
    assert value_of(path) == 5.0


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert stored_snapshots(Path("ckpt-00000001"))[0].file.is_absolute()


class TestDamage:
    def test_a_flipped_bit_in_the_state_is_found(self, tmp_path: Path) -> None:
        path = save(tmp_path)
        data = bytearray((path / "ps-1.json").read_bytes())
        data[-3] ^= 1
        (path / "ps-1.json").write_bytes(data)
        with pytest.raises(CheckpointCorrupt, match=r"ps-1\.json: expected checksum"):
            stored_snapshots(path)

    def test_a_missing_file_is_found(self, tmp_path: Path) -> None:
        path = save(tmp_path)
        (path / "ps-0.safetensors").unlink()
        with pytest.raises(CheckpointCorrupt, match=r"ps-0\.safetensors: .* it is not there"):
            stored_snapshots(path)

    def test_an_array_that_lies_nowhere_is_found(self, tmp_path: Path) -> None:
        path = save(tmp_path, drop=1)
        with pytest.raises(CheckpointCorrupt, match=r"item 0 is not once, and whole, in ps-0"):
            stored_snapshots(path)

    def test_no_checkpoint_and_one_without_snapshots_are_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFound, match="no checkpoint here"):
            stored_snapshots(tmp_path / "ckpt-1")
        path = Writer(tmp_path, "ckpt-2", 2).commit()
        with pytest.raises(CheckpointNotFound, match="does not say what each ps held"):
            stored_snapshots(path)


class TestSavedSnapshots:
    def test_the_newest_is_handed_out(self, tmp_path: Path) -> None:
        snapshots = SavedSnapshots("origin")
        assert snapshots() is None
        for number in (1, 2):
            snapshots.add(save(tmp_path, number))
        found = snapshots()
        assert found is not None
        assert found[0].file.parent == snapshots.handed == tmp_path / "ckpt-00000002"
        assert snapshots.asked == 1

    def test_what_was_saved_last_is_the_newest_whatever_its_number(self, tmp_path: Path) -> None:
        snapshots = SavedSnapshots("origin")
        for number in (7, 3):
            snapshots.add(save(tmp_path, number))
        snapshots()
        assert snapshots.handed == tmp_path / "ckpt-00000003"

    def test_one_that_is_gone_or_damaged_is_passed_over(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        snapshots = SavedSnapshots("origin")
        paths = [save(tmp_path, number) for number in range(4)]
        for path in paths:
            snapshots.add(path)
        remove(paths[3])
        (paths[2] / "ps-0.json").unlink()
        with caplog.at_level(logging.WARNING):
            snapshots()
        assert snapshots.handed == paths[1]
        assert "cannot roll back to ckpt-00000002" in caplog.text
        shutil.rmtree(tmp_path)
        assert snapshots() is None
