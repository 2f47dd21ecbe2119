"""A checkpoint that is being written: by whom, and what becomes of it if that ends early."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from psync.checkpoints.disk import Disk, current_disk
from psync.checkpoints.files import DataFile, Reader, checkpoints_in
from psync.checkpoints.manifest import Place, Planned, Snapshot
from psync.checkpoints.writer import Writer, streamed_by_environ
from psync.errors import CheckpointError, ConfigurationError
from psync.testing.sabotage import FailpointError, Failpoints, SabotagedParts

W = np.arange(6, dtype=np.float32)


def written_by_another(writer: Writer, name: str) -> DataFile:
    """A file that a ps has written: what a tensor needs, and what only the snapshot needs."""
    planned = [Planned("w", (6,), "float32", 0), Planned("~/m", (6,), "float32", 0)]
    data_file = DataFile(writer.temporary / name, planned)
    data_file.write(W)
    data_file.write(-W)
    return data_file


def test_files_of_others_are_part_of_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, {"w": ((6,), "float32")})
    data_file = written_by_another(writer, "ps-0.safetensors")
    writer.add_file("ps-0.safetensors", data_file.close(), data_file.slices[:1])
    places = [Place(i, piece.start, piece.nbytes, piece.crc32) for i, (_, piece) in
              enumerate(data_file.slices)]  # fmt: skip
    writer.add_snapshot(0, "ps-0.json", b"{}", "ps-0.safetensors", places)
    reader = Reader(writer.commit())
    np.testing.assert_array_equal(reader.read(reader.manifest.tensors["w"], 0, 6), W)
    assert reader.manifest.snapshots == (
        Snapshot("ps-0.json", 0xA3A6BF43, "ps-0.safetensors", tuple(places)),
    )
    assert set(reader.manifest.files) == {"ps-0.safetensors", "ps-0.json"}
    assert list(reader.manifest.tensors) == ["w"]


def test_snapshots_are_in_the_order_of_ps_tasks_whoever_was_first(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1)
    for ps in (1, 0):
        data_file = written_by_another(writer, f"ps-{ps}")
        writer.add_file(f"ps-{ps}", data_file.close(), [])
        writer.add_snapshot(ps, f"ps-{ps}.json", b"{}", f"ps-{ps}", [])
    snapshots = Reader(writer.commit()).manifest.snapshots
    assert [snapshot.data for snapshot in snapshots] == ["ps-0", "ps-1"]


def test_a_file_that_is_not_here_as_its_writer_says_leaves_no_checkpoint(tmp_path: Path) -> None:
    for number, spoil in enumerate((os.unlink, lambda path: os.truncate(path, 100))):
        writer = Writer(tmp_path, f"ckpt-{number}", 1, {"w": ((6,), "float32")})
        data_file = written_by_another(writer, "ps-0")
        writer.add_file("ps-0", data_file.close(), data_file.slices[:1])
        spoil(data_file.path)
        with pytest.raises(
            CheckpointError, match=r"looking at .*ps-0|were written by the ps, 100 are"
        ):
            writer.commit()
        writer.abandon()
    assert list(tmp_path.iterdir()) == []


class NameLost(Disk):
    """A machine dies before the name of the file that it has written is on the disk."""

    def sync_directory(self, path: Path) -> None:
        (path / "ps-0").unlink(missing_ok=True)
        super().sync_directory(path)


def test_a_file_whose_machine_dies_before_its_name_is_synced_leaves_no_checkpoint(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, {"w": ((6,), "float32")})
    data_file = written_by_another(writer, "ps-0")
    writer.add_file("ps-0", data_file.close(), data_file.slices[:1])
    token = current_disk.set(NameLost())
    try:
        with pytest.raises(CheckpointError, match=r"looking at .*ps-0"):
            writer.commit()
    finally:
        current_disk.reset(token)
    assert checkpoints_in(tmp_path, "ckpt") == []


def test_who_comes_late_cannot_write_into_what_was_abandoned(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1)
    data_file = written_by_another(writer, "ps-0")
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="No such file or directory"):
        written_by_another(writer, "ps-1")
    data_file.close()
    assert list(tmp_path.iterdir()) == []


def test_the_nonce_is_no_part_of_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, nonce="abc")
    assert (writer.temporary / "nonce").read_text() == "abc"
    path = writer.commit()
    assert sorted(found.name for found in path.iterdir()) == ["COMMIT", "manifest.json"]


class Full(Disk):
    """A disk that has room for names, and for nothing in files."""

    def sync(self, file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_without_room_for_the_nonce_keeps_nothing(tmp_path: Path) -> None:
    token = current_disk.set(Full())
    try:
        with pytest.raises(CheckpointError, match="No space left on device"):
            Writer(tmp_path, "ckpt-1", 1, nonce="abc")
    finally:
        current_disk.reset(token)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["checkpoint.before_commit", "checkpoint.before_rename"])
def test_until_it_has_its_name_it_does_not_exist(tmp_path: Path, place: str) -> None:
    writer = SabotagedParts(Failpoints(f"{place}=error")).of(Writer)(tmp_path, "ckpt-1", 1)
    with pytest.raises(FailpointError, match=place):
        writer.commit()
    assert checkpoints_in(tmp_path, "ckpt") == []
    assert Reader(Writer(tmp_path, "ckpt-1", 1).commit()).manifest.number == 1


def test_the_environment_may_say_that_ps_tasks_write_nothing() -> None:
    assert [streamed_by_environ({"PSYNC_CHECKPOINT_STREAM": v}) for v in ("1", "0", "")] == [
        True, False, False,
    ]  # fmt: skip
    assert not streamed_by_environ({})
    with pytest.raises(ConfigurationError, match="expected 0 or 1, got 'yes'"):
        streamed_by_environ({"PSYNC_CHECKPOINT_STREAM": "yes"})


class ReadOnly(Disk):
    """A disk to which nothing is written any more."""

    def make_directory(self, path: Path) -> None:
        raise OSError(errno.EEXIST if path.exists() else errno.EROFS, "as mkdir says")

    def rename(self, old: Path, new: Path) -> None:
        os.stat(old)
        raise OSError(errno.EROFS, "Read-only file system")

    def remove_tree(self, path: Path) -> None: ...


def test_what_was_left_on_a_disk_that_is_read_only_now_does_not_hide_why(tmp_path: Path) -> None:
    left = Writer(tmp_path, "ckpt-1", 1)
    token = current_disk.set(ReadOnly())
    try:
        with pytest.raises(CheckpointError, match=r"ckpt-1\.tmp: Read-only file system") as caught:
            Writer(tmp_path, "ckpt-1", 1)
    finally:
        current_disk.reset(token)
    assert "the file system is read-only" in str(caught.value.hint)
    left.abandon()
