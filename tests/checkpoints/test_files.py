"""Checkpoints on disk: whole or not at all, and what damages them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from psync.checkpoints.files import (
    DataFile,
    Planned,
    Reader,
    checkpoints_in,
    disk_errors,
    is_complete,
    is_last,
    mark_last,
    remove,
    unmark_last,
)
from psync.checkpoints.writer import Writer
from psync.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound

W = np.arange(20, dtype=np.float32).reshape(10, 2)


def save(directory: Path, number: int = 1) -> Path:
    """A checkpoint of W in two files, and a scalar."""
    shapes = {"w": ((10, 2), "float32"), "scalar": ((), "int64")}
    writer = Writer(directory, f"ckpt-{number:08d}", number, shapes, {"epoch": 3})
    first = writer.data_file(
        "data-0.safetensors",
        [Planned("w", (4, 2), "float32", 0), Planned("scalar", (), "int64", 0)],
    )
    first.write(W[:4])
    first.write(np.array(7))
    second = writer.data_file("data-1.safetensors", [Planned("w", (6, 2), "float32", 4)])
    second.write(iter([W[4:5], W[5:]]))
    return writer.commit()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "run")


def test_any_rows_are_read_whatever_files_they_lie_in(saved: Path) -> None:
    reader = Reader(saved)
    tensor = reader.manifest.tensors["w"]
    for start in range(11):
        for stop in range(start, 11):
            np.testing.assert_array_equal(reader.read(tensor, start, stop), W[start:stop])
    assert reader.read(reader.manifest.tensors["scalar"], 0, 1) == np.int64(7)
    assert reader.manifest.states == {"epoch": 3}


def test_other_programs_read_the_files(saved: Path) -> None:
    tensors = safetensors.numpy.load_file(saved / "data-0.safetensors")
    np.testing.assert_array_equal(tensors["w@0"], W[:4])
    assert tensors["scalar@0"] == 7


def test_bfloat16_survives(tmp_path: Path) -> None:
    values = np.array([1.5, -2.0, 3e38], ml_dtypes.bfloat16)
    writer = Writer(tmp_path, "ckpt-1", 1, {"b": ((3,), "bfloat16")})
    writer.data_file("data", [Planned("b", (3,), "bfloat16", 0)]).write(values)
    reader = Reader(writer.commit())
    np.testing.assert_array_equal(reader.read(reader.manifest.tensors["b"], 0, 3), values)


def test_a_tensor_without_elements_is_one_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, {"e": ((0, 3), "float32")})
    writer.data_file("data", [Planned("e", (0, 3), "float32", 0)]).write(np.zeros((0, 3), "f4"))
    reader = Reader(writer.commit())
    assert reader.read(reader.manifest.tensors["e"], 0, 0).shape == (0, 3)


class TestCompleteOrAbsent:
    @pytest.mark.promise("checkpoints.complete-or-absent")
    def test_until_commit_there_is_none(self, tmp_path: Path) -> None:
        writer = Writer(tmp_path, "ckpt-00000002", 1)
        writer.data_file("data", [Planned("w", (10, 2), "float32", 0)]).write(W)
        assert checkpoints_in(tmp_path, "ckpt") == []
        writer.abandon()
        assert list(tmp_path.iterdir()) == []

    def test_what_an_interrupted_save_left_is_in_nobodys_way(self, tmp_path: Path) -> None:
        (tmp_path / "ckpt-00000001.tmp").mkdir()
        (tmp_path / "ckpt-00000001.tmp" / "data-0.safetensors").write_bytes(b"half")
        assert checkpoints_in(tmp_path, "ckpt") == []
        assert Reader(save(tmp_path)).manifest.number == 1

    def test_a_directory_without_commit_is_none(self, saved: Path) -> None:
        (saved / "COMMIT").unlink()
        assert checkpoints_in(saved.parent, "ckpt") == []
        with pytest.raises(CheckpointNotFound, match="never completed"):
            Reader(saved)

    def test_a_name_is_used_once(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="already exists"):
            save(saved.parent)

    def test_a_removed_one_is_gone(self, saved: Path) -> None:
        remove(saved)
        remove(saved)
        assert list(saved.parent.iterdir()) == []

    def test_they_are_listed_in_order(self, tmp_path: Path) -> None:
        for number in (2, 10, 1):
            save(tmp_path, number)
        (tmp_path / "ckpt-notes").mkdir()
        assert [number for number, _ in checkpoints_in(tmp_path, "ckpt")] == [1, 2, 10]
        assert checkpoints_in(tmp_path / "nowhere", "ckpt") == []


class TestDamage:
    def flip(self, path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    @pytest.mark.promise("checkpoints.damage-detected")
    def test_a_flipped_bit_in_the_data_is_found(self, saved: Path) -> None:
        self.flip(saved / "data-1.safetensors", -1)
        reader = Reader(saved)
        tensor = reader.manifest.tensors["w"]
        np.testing.assert_array_equal(reader.read(tensor, 0, 4), W[:4])
        with pytest.raises(CheckpointCorrupt, match=r"'w' from row 4: expected checksum"):
            reader.read(tensor, 3, 5)

    @pytest.mark.promise("checkpoints.damage-detected")
    def test_a_flipped_bit_in_the_manifest_is_found(self, saved: Path) -> None:
        self.flip(saved / "manifest.json", 30)
        with pytest.raises(CheckpointCorrupt, match="not the one that was committed"):
            Reader(saved)

    def test_a_file_that_is_too_short_is_found(self, saved: Path) -> None:
        os.truncate(saved / "data-1.safetensors", 20)
        with pytest.raises(CheckpointCorrupt, match=r"expected \d+ bytes, got 20"):
            Reader(saved)

    def test_a_file_that_ends_early_while_it_is_read_is_found(self, saved: Path) -> None:
        reader = Reader(saved)
        os.truncate(saved / "data-1.safetensors", 20)
        with pytest.raises(CheckpointCorrupt, match="expected checksum"):
            reader.read(reader.manifest.tensors["w"], 5, 6)

    def test_a_missing_file_is_named(self, saved: Path) -> None:
        (saved / "data-0.safetensors").unlink()
        with pytest.raises(CheckpointCorrupt, match=r"data-0\.safetensors: expected .* not there"):
            Reader(saved)

    def test_a_commit_file_that_is_none_is_refused(self, saved: Path) -> None:
        (saved / "COMMIT").write_bytes(b"x" * 100)
        with pytest.raises(CheckpointCorrupt, match="expected at most 64 bytes"):
            Reader(saved)


def test_the_mark_of_the_last_one_comes_and_goes_with_it(saved: Path) -> None:
    assert not is_last(saved)
    mark_last(saved)
    mark_last(saved)
    assert is_last(saved)
    assert Reader(saved).manifest.number == 1
    unmark_last(saved)
    unmark_last(saved)
    assert not is_last(saved)
    mark_last(saved)
    remove(saved)
    assert not is_last(saved)
    with pytest.raises(CheckpointError, match=r"marking .* as the last"):
        mark_last(saved)


def test_bytes_that_were_not_planned_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1)
    data_file = writer.data_file("data", [Planned("w", (10, 2), "float32", 0)])
    with pytest.raises(CheckpointError, match="expected 80 bytes, got 72"):
        data_file.write(W[:9])
    writer.abandon()


def test_a_slice_that_was_not_written_leaves_no_checkpoint(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, {"w": ((10, 2), "float32")})
    writer.data_file("data", [Planned("w", (10, 2), "float32", 0)])
    with pytest.raises(CheckpointError, match="'w' was not written"):
        writer.commit()
    writer.abandon()
    assert checkpoints_in(tmp_path, "ckpt") == []


def fill_disk(of: DataFile) -> None:
    """Let no byte more fit on the disk of a file."""
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), of._file.fileno())
    os.close(full)


@pytest.mark.promise("checkpoints.complete-or-absent")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    writer = Writer(tmp_path, "ckpt-1", 1)
    data_file = writer.data_file("data", [Planned("w", (10, 2), "float32", 0)])
    data_file.path.unlink()
    fill_disk(data_file)
    data_file.write(W)
    with pytest.raises(CheckpointError, match="No space left on device"):
        data_file.close()
    shutil.rmtree(writer.directory / "ckpt-1.tmp")


def test_what_is_left_in_memory_when_the_disk_is_full_is_no_second_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    data_file = DataFile(tmp_path / "data", [Planned("w", (10, 2), "float32", 0)])
    fill_disk(data_file)
    data_file.write(W)
    data_file.abandon()


def test_a_path_that_the_disk_refuses_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for use in (Reader, remove, is_complete, is_last, mark_last, lambda p: Writer(p, "ckpt-1", 1)):
        with pytest.raises(CheckpointError, match=f"{path}.*: File name too long"):
            use(path)


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="making"):
        Writer(tmp_path / "file" / "run", "ckpt-1", 1)


def test_the_header_is_aligned(saved: Path) -> None:
    head = (saved / "data-0.safetensors").read_bytes()
    size = int.from_bytes(head[:8], "little")
    assert size % 8 == 0
    assert json.loads(head[8 : 8 + size])["w@0"]["data_offsets"] == [0, 32]


def put(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "nothing": "x"}[kind])


@pytest.mark.promise("input.not-a-file")
@pytest.mark.parametrize("name", ["manifest.json", "COMMIT", "data-0.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "loop", "nothing"])
def test_something_else_in_the_place_of_a_file_is_an_error_at_once(
    saved: Path, kind: str, name: str
) -> None:
    put(kind, saved / name)
    with pytest.raises(CheckpointError, match=str(saved)):
        Reader(saved)


def test_a_file_that_becomes_a_pipe_is_an_error_at_once(saved: Path) -> None:
    reader = Reader(saved)
    put("pipe", saved / "data-1.safetensors")
    with pytest.raises(CheckpointError, match="expected a regular file, got something else"):
        reader.check(reader.manifest.tensors["w"])


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "make room on the disk"), (errno.EACCES, "this user must be allowed"),
        (errno.EROFS, "the file system is read-only"), (errno.EEXIST, None),
    ],
)  # fmt: skip
def test_an_error_of_the_disk_has_its_own_remedy(code: int, hint: str | None) -> None:
    with pytest.raises(CheckpointError) as caught, disk_errors("writing x"):
        raise OSError(code, os.strerror(code))
    assert caught.value.message == f"writing x: {os.strerror(code)}"
    assert (caught.value.hint or "").startswith(hint or "")
    assert (caught.value.hint is None) == (hint is None)
