"""Checkpoint directories: written, listed, removed, read; snapshots in them; a disk that fails."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from data_files import add_data
from loops import for_each
from psync.checkpoints.files import (
    DataFile,
    Disk,
    NewestCheckpoints,
    Reader,
    Writer,
    checkpoints_in,
    current_disk,
    disk_errors,
    is_complete,
    is_last,
    mark_last,
    regular,
    remove,
    stored_snapshots,
    unmark_last,
)
from psync.checkpoints.manifest import Layout, Place, Slice, Snapshot
from psync.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from psync.ps.snapshots import read_items, write_items
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.snapshot import Frozen, Loaded, freeze
from psync.store.snapshot_state import NOTHING
from psync.store.store import ShardStore
from psync.testing.sabotage import FailpointError, Failpoints, SabotagedParts

W = np.arange(20, dtype=np.float32).reshape(10, 2)


def save(directory: Path, number: int = 1) -> Path:
    """A checkpoint of W in two files, and a scalar."""
    shapes = {"w": ((10, 2), "float32"), "scalar": ((), "int64")}
    writer = Writer(directory, f"ckpt-{number:08d}", number, shapes, {"epoch": 3})
    add_data(writer, "data-0.safetensors", ("w", 0, W[:4]), ("scalar", 0, 7))
    add_data(writer, "data-1.safetensors", ("w", 4, W[4:]))
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
    add_data(writer, "data", ("b", 0, values))
    reader = Reader(writer.commit())
    np.testing.assert_array_equal(reader.read(reader.manifest.tensors["b"], 0, 3), values)


def test_a_tensor_without_elements_is_one_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, {"e": ((0, 3), "float32")})
    add_data(writer, "data", ("e", 0, np.zeros((0, 3), "f4")))
    reader = Reader(writer.commit())
    assert reader.read(reader.manifest.tensors["e"], 0, 0).shape == (0, 3)


class TestCompleteOrAbsent:
    @pytest.mark.promise("checkpoints.complete-or-absent")
    def test_until_commit_there_is_none(self, tmp_path: Path) -> None:
        writer = Writer(tmp_path, "ckpt-00000002", 1)
        add_data(writer, "data", ("w", 0, W))
        assert checkpoints_in(tmp_path) == []
        writer.abandon()
        assert list(tmp_path.iterdir()) == []

    def test_what_an_interrupted_save_left_is_in_nobodys_way(self, tmp_path: Path) -> None:
        (tmp_path / "ckpt-00000001.tmp").mkdir()
        (tmp_path / "ckpt-00000001.tmp" / "data-0.safetensors").write_bytes(b"half")
        assert checkpoints_in(tmp_path) == []
        assert Reader(save(tmp_path)).manifest.number == 1

    def test_a_directory_without_commit_is_none(self, saved: Path) -> None:
        (saved / "COMMIT").unlink()
        assert checkpoints_in(saved.parent) == []
        with pytest.raises(CheckpointNotFound, match="never completed"):
            Reader(saved)

    def test_a_name_is_used_once(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="already exists"):
            save(saved.parent)

    def test_they_are_listed_in_order(self, tmp_path: Path) -> None:
        for number in (2, 10, 1):
            save(tmp_path, number)
        (tmp_path / "ckpt-notes").mkdir()
        assert [number for number, _ in checkpoints_in(tmp_path)] == [1, 2, 10]
        assert checkpoints_in(tmp_path / "nowhere") == []


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

    def test_a_file_that_is_too_short_is_found(self, saved: Path) -> None:
        os.truncate(saved / "data-1.safetensors", 20)
        with pytest.raises(CheckpointCorrupt, match=r"expected \d+ bytes, got 20"):
            Reader(saved)

    def test_a_file_that_ends_early_while_it_is_read_is_found(self, saved: Path) -> None:
        reader = Reader(saved)
        os.truncate(saved / "data-1.safetensors", 20)
        with pytest.raises(CheckpointCorrupt, match="expected checksum"):
            reader.read(reader.manifest.tensors["w"], 5, 6)

    @pytest.mark.parametrize("name", ["data-0.safetensors", "manifest.json"])
    def test_a_missing_file_is_named(self, name: str, saved: Path) -> None:
        (saved / name).unlink()
        with pytest.raises(CheckpointCorrupt, match=f"{name}: .*it is not there"):
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
    with (
        pytest.raises(CheckpointError, match="expected 80 bytes, got 72"),
        DataFile(tmp_path / "data", {"w": ((10, 2), "float32")}) as data_file,
    ):
        data_file.write(W[:9])
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_slice_is_not_complete(tmp_path: Path) -> None:
    data_file = DataFile(tmp_path / "data", {"w": ((10, 2), "float32")})
    with pytest.raises(CheckpointError, match="'w' was not written"):
        data_file.close()


def fill_disk(of: DataFile) -> None:
    """Let no byte more fit on the disk of a file."""
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), of._opened().fileno())
    os.close(full)


@pytest.mark.promise("checkpoints.complete-or-absent")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    data_file = DataFile(tmp_path / "data", {"w": ((10, 2), "float32")})
    fill_disk(data_file)
    data_file.write(W)
    with pytest.raises(CheckpointError, match="No space left on device"):
        data_file.close()


def test_what_is_left_in_memory_when_the_disk_is_full_is_no_second_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    data_file = DataFile(tmp_path / "data", {"w": ((10, 2), "float32")})

    def fail() -> None:
        with data_file:
            fill_disk(data_file)
            data_file.write(W)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


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


@for_each("code, hint", [
        (errno.ENOSPC, "make room on the disk"), (errno.EACCES, "this user must be allowed"),
        (errno.EROFS, "the file system is read-only"), (errno.EEXIST, None),
    ])  # fmt: skip
def test_an_error_of_the_disk_has_its_own_remedy(code: int, hint: str | None) -> None:
    with pytest.raises(CheckpointError) as caught, disk_errors("writing x"):
        raise OSError(code, os.strerror(code))
    assert caught.value.message == f"writing x: {os.strerror(code)}"
    assert (caught.value.hint or "").startswith(hint or "")
    assert (caught.value.hint is None) == (hint is None)


SIX = np.arange(6, dtype=np.float32)


def written_by_another(writer: Writer, name: str, uses: int = 1) -> list[Place]:
    """Add a file of a ps: what a tensor needs, if one uses it, and what only its snapshot needs."""
    planned = dict.fromkeys(("w@0", "~/m@0"), ((6,), "float32"))
    data_file = DataFile(writer.temporary / name, planned)
    data_file.write(SIX)
    data_file.write(-SIX)
    written = data_file.close()
    writer.add_file(name, written, [("w", Slice(0, 6, name, *written.places[0]))] * uses)
    return [Place(i, *place) for i, place in enumerate(written.places)]


def test_files_of_others_are_part_of_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1, {"w": ((6,), "float32")})
    places = written_by_another(writer, "ps-0.safetensors")
    writer.add_snapshot(0, "ps-0.json", b"{}", "ps-0.safetensors", places)
    reader = Reader(writer.commit())
    np.testing.assert_array_equal(reader.read(reader.manifest.tensors["w"], 0, 6), SIX)
    assert reader.manifest.snapshots == (
        Snapshot("ps-0.json", 0xA3A6BF43, "ps-0.safetensors", tuple(places)),
    )
    assert set(reader.manifest.files) == {"ps-0.safetensors", "ps-0.json"}
    assert list(reader.manifest.tensors) == ["w"]


def test_snapshots_are_in_the_order_of_ps_tasks_whoever_was_first(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1)
    for ps in (1, 0):
        written_by_another(writer, f"ps-{ps}", uses=0)
        writer.add_snapshot(ps, f"ps-{ps}.json", b"{}", f"ps-{ps}", [])
    snapshots = Reader(writer.commit()).manifest.snapshots
    assert [snapshot.data for snapshot in snapshots] == ["ps-0", "ps-1"]


def test_a_file_that_is_not_here_as_its_writer_says_leaves_no_checkpoint(tmp_path: Path) -> None:
    for number, spoil in enumerate((os.unlink, lambda path: os.truncate(path, 100))):
        writer = Writer(tmp_path, f"ckpt-{number}", 1, {"w": ((6,), "float32")})
        written_by_another(writer, "ps-0")
        spoil(writer.temporary / "ps-0")
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
    written_by_another(writer, "ps-0")
    token = current_disk.set(NameLost())
    try:
        with pytest.raises(CheckpointError, match=r"looking at .*ps-0"):
            writer.commit()
    finally:
        current_disk.reset(token)
    assert checkpoints_in(tmp_path) == []


def test_who_comes_late_cannot_write_into_what_was_abandoned(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "ckpt-1", 1)
    data_file = DataFile(writer.temporary / "ps-0", {"w": ((6,), "float32")})
    data_file.write(SIX)
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
    assert checkpoints_in(tmp_path) == []
    assert Reader(Writer(tmp_path, "ckpt-1", 1).commit()).manifest.number == 1


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


class Recorder(Disk):
    """Notes what is done, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def create(self, path: Path) -> BinaryIO:
        self.done.append(("create", path.name))
        return super().create(path)

    def sync(self, file: BinaryIO) -> None:
        self.done.append(("sync", Path(file.name).name))
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self.done.append(("sync_directory", path.name))
        super().sync_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        self.done.append(("rename", new.name))
        super().rename(old, new)

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            self.done.append(("remove_tree", path.name))
        super().remove_tree(path)


@pytest.fixture
def disk() -> Recorder:
    return Recorder()


def save_small(directory: Path) -> Path:
    writer = Writer(directory, "ckpt-00000001", 1, {"a": ((2,), "float32")})
    add_data(writer, "data.safetensors", ("a", 0, np.zeros(2, np.float32)))
    return writer.commit()


def test_all_that_is_in_a_checkpoint_is_synced_before_it_gets_its_name(
    tmp_path: Path, disk: Recorder
) -> None:
    token = current_disk.set(disk)
    try:
        save_small(tmp_path)
    finally:
        current_disk.reset(token)
    named = disk.done.index(("rename", "ckpt-00000001"))
    before = disk.done[:named]
    made = {name for what, name in before if what == "create"}
    assert made == {"data.safetensors", "manifest.json", "COMMIT"}
    assert {name for what, name in before if what == "sync"} == made
    assert before[-1] == ("sync_directory", "ckpt-00000001.tmp")
    assert disk.done[named + 1 :] == [("sync_directory", tmp_path.name)]


def test_one_that_is_removed_cannot_come_back_without_its_files(
    tmp_path: Path, disk: Recorder
) -> None:
    path = save_small(tmp_path)
    token = current_disk.set(disk)
    try:
        remove(path)
    finally:
        current_disk.reset(token)
    doomed = f"{path.name}.tmp"
    assert disk.done == [
        ("rename", doomed), ("sync_directory", tmp_path.name), ("remove_tree", doomed)
    ]  # fmt: skip
    assert checkpoints_in(tmp_path) == []


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="expected a regular file, got something else"):
            open(path, "rb", opener=regular)
    with open(tmp_path / "new", "wb", opener=regular) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


SPECS = [ShardSpec("w", 0, ps, 3 * ps, (3, 2), "float32", ps) for ps in range(2)]
ZERO = ShardSpec("zero", 1, 0, 0, (1000, 1000), "float64", 0)


def held(ps: int, value: float) -> Frozen:
    store = ShardStore(f"/job:ps/task:{ps}")
    store.create(SPECS[ps], np.full((3, 2), value, np.float32))
    if ps == 0:
        store.create(ZERO)
    return freeze(store, NOTHING)


def save_snapshots(
    directory: Path, number: int = 1, value: float = 1.0, drop: int = 0, *, also: bool = False
) -> Path:
    """A checkpoint of two ps tasks; ``drop``: so many places are left out of the manifest.

    With ``also``, the program has written a scalar and a state.
    """
    frozen = [held(ps, value + ps) for ps in range(2)]
    layout = Layout([each.state for each in frozen], [])
    shapes = {"scalar": ((), "int64")} if also else {}
    writer = Writer(directory, f"ckpt-{number:08d}", number, shapes, {"epoch": 3})
    if also:
        add_data(writer, "data.safetensors", ("scalar", 0, 7))
    for ps, each in enumerate(frozen):
        name = f"ps-{ps}.safetensors"
        written = write_items(writer.temporary / name, each, layout.arrays[ps])
        slices, places = layout.lying_in(ps, name, written)
        writer.add_file(name, written, slices)
        writer.add_snapshot(ps, f"ps-{ps}.json", each.state.to_bytes(), name, places[drop:])
    return writer.commit()


def value_of(path: Path, ps: int = 1) -> float:
    """What a ps held of w."""
    snapshot = stored_snapshots(path)[ps]
    made = Loaded(snapshot.state, ShardStore(f"/job:ps/task:{ps}"), Ledger())
    read_items(snapshot.file, made, snapshot.places)
    return float(np.frombuffer(made.store.read(SPECS[ps].key)[0], np.float32)[0])


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_snapshots(tmp_path_factory.mktemp("run"), also=True)


def everything_in(path: Path) -> str:
    """What a restore and a rollback take from a checkpoint, or the error that they raise."""
    try:
        reader = Reader(path)
        tensors = reader.manifest.tensors.values()
        values = [reader.read(each, 0, each.rows).tolist() for each in tensors]
        return str(
            (reader.manifest, values, stored_snapshots(path), value_of(path, 0), value_of(path))
        )
    except CheckpointError as exc:
        return str(exc)


def test_a_ps_can_be_made_of_what_is_there(tmp_path: Path) -> None:
    path = save_snapshots(tmp_path, value=4.0)
    snapshots = stored_snapshots(path)
    assert [snapshot.file for snapshot in snapshots] == [
        path / f"ps-{ps}.safetensors" for ps in range(2)
    ]
    assert [len(snapshot.places) for snapshot in snapshots] == [1, 1]  # zeros need none
    assert value_of(path) == 5.0


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_snapshots(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert stored_snapshots(Path("ckpt-00000001"))[0].file.is_absolute()


class TestDamageOfSnapshots:
    @pytest.mark.promise("checkpoints.damage-changes-nothing")
    @given(st.integers(0, 5), st.integers(0), st.integers(0, 7))
    def test_a_flipped_bit_anywhere_is_found(
        self, snapshots: Path, file: int, at: int, bit: int
    ) -> None:
        path = sorted(snapshots.iterdir())[file]
        whole = path.read_bytes()
        at %= len(whole)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        after = everything_in(snapshots)
        path.write_bytes(whole)
        assert path.name in after

    def test_an_array_that_lies_nowhere_is_found(self, tmp_path: Path) -> None:
        path = save_snapshots(tmp_path, drop=1)
        with pytest.raises(
            CheckpointCorrupt, match=r'value of "w/part_0" is not once, and whole, in ps-0'
        ):
            stored_snapshots(path)

    def test_no_checkpoint_and_one_without_snapshots_are_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFound, match="no checkpoint here"):
            stored_snapshots(tmp_path / "ckpt-1")
        path = Writer(tmp_path, "ckpt-2", 2).commit()
        with pytest.raises(CheckpointNotFound, match="does not say what each ps held"):
            stored_snapshots(path)


class TestNewestCheckpoints:
    def test_the_last_ones_that_are_there_are_kept_whatever_their_numbers(self) -> None:
        newest = NewestCheckpoints()
        paths = [Path(f"ckpt-{number}") for number in (5, 7, 9, 3, 4, 1)]
        for path in paths:
            newest.add(path)
        assert newest.paths == paths[1:]
        newest.remove(paths[2])
        newest.remove(paths[1])
        assert newest.paths == paths[3:], "closures that the others lack are not remembered"
        assert newest.use_newest() == newest.in_use == Path("ckpt-1")
        for _ in range(6):  # it is restored
            newest.add(Path("ckpt-1"))
        assert newest.paths == paths[3:]
        newest.remove(paths[4])
        newest.add(paths[3])
        assert [*filter(None, newest.paths)] == [paths[5], paths[3]]

    def test_one_that_is_passed_over_is_not_used_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        newest = NewestCheckpoints()
        for number in range(4):
            newest.add(Path(f"ckpt-{number}"))
        for number in (3, 2, 1, 0):
            assert newest.use_newest() == Path(f"ckpt-{number}")
            newest.pass_over(CheckpointCorrupt(f"ckpt-{number}/data: expected 1, got 2"))
        assert "passes over ckpt-2: ckpt-2/data: expected 1, got 2" in caplog.text
        with pytest.raises(
            CheckpointError, match=r"ckpt-3/.*; ckpt-2/.*; ckpt-1/.*; ckpt-0/"
        ) as caught:
            newest.use_newest()
        assert str(caught.value.hint).startswith("psync checkpoint inspect PATH")
        newest.add(Path("ckpt-4"))
        assert newest.paths == [Path("ckpt-4")]
