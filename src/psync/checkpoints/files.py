"""Checkpoint directories: layout, listing, writing, checked reading; complete or absent.

    directory/
        ckpt-00000012/
            ps-00000-of-00002.safetensors   the arrays of a ps, one slice after the other
            ps-00000-of-00002.json          the state of its snapshot, see ``store.snapshot_state``
            data-00000.safetensors          what no ps holds: computed arrays, slots before the
                                            first push; all arrays, if there is no coordinator
            manifest.json                   what lies where, states of objects without arrays
            COMMIT                          size and checksum of the manifest, written last
            LAST                            the program has declared this the last checkpoint

A checkpoint is written under a name that ends in ``.tmp`` (files, manifest, COMMIT, each one synced
to disk) and renamed when it is complete. One without COMMIT, or with ``.tmp``, does not exist. The
data files are plain safetensors, which other programs read; nothing in a checkpoint is a pickle.
The program makes the directory that ends in ``.tmp``; ps tasks that see it write their files there
themselves, and the program writes the others.

    dies while a checkpoint is written    left behind
    the program, before the rename        earlier checkpoints; a ``.tmp`` that the next save removes
    the program, after it                 the new one, complete
    a ps, or the connection to it         nothing; another cut is taken when the ps is there again
    the disk is full                      nothing; ``save`` raises, the ps goes on

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
import shutil
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from psync.checkpoints.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Place,
    Slice,
    Snapshot,
    Tensor,
    WrittenFile,
    commit_line,
    read_manifest,
)
from psync.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    PsyncError,
    check_fits,
)
from psync.numerics.memory import bytes_of
from psync.schedules import Config
from psync.specs import ShardSpec, dtype_of
from psync.store.snapshot_state import SnapshotState

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
LAST = "LAST"
NONCE = "nonce"
"""A file that is there until the checkpoint is complete: who can read it shares the directory."""

STREAM_VARIABLE = "PSYNC_CHECKPOINT_STREAM"
"""1: ps tasks read and write no files."""

READ_BYTES = 8 << 20
"""Read and checked at once."""

_NAMES = {
    "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip
"""What safetensors calls the dtypes."""


# --- the disk ------------------------------------------------------------------------------------


class Disk:
    """The operating system's. Each method raises the OSErrors of what it calls."""

    def create(self, path: Path) -> BinaryIO:
        """Make a file that is not there yet, and return it to be written."""
        return open(path, "xb")

    def sync(self, file: BinaryIO) -> None:
        """Let what was written to a file survive the machine."""
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Let the names in a directory survive the machine."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Make a directory that is not there yet; those above it are made if they are not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory another name."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with all that is in it, as far as that can be done."""
        shutil.rmtree(path, ignore_errors=True)


def regular(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a file, for ``open(…, opener=regular)``: a pipe or a device in its place is no wait.

    Raises:
        OSError: There is none, or something else than a file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "expected a regular file, got something else", path)
    return fd


current_disk: ContextVar[Disk] = ContextVar("psync_disk", default=Disk())  # noqa: B039


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the contents of a file of at most ``limit`` bytes.

    Raises:
        CheckpointCorrupt: It is longer.
        OSError: It cannot be read, or is no file.
    """
    with open(path, "rb", opener=regular) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointCorrupt(f"{path}: expected at most {limit} bytes")
    return data


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk."""
    with current_disk.get().create(path) as file:
        file.write(data)
        current_disk.get().sync(file)


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn what the operating system says into an error of ours.

    Args:
        what: Was done, and with which path.
    """
    try:
        yield
    except PsyncError:  # that of a lost connection is an OSError, too
        raise
    except OSError as exc:
        raise CheckpointError(
            f"{what}: {exc.strerror or exc}", hint=_REMEDIES.get(exc.errno or 0)
        ) from exc


_REMEDIES = {
    errno.ENOSPC: "make room on the disk, or keep fewer checkpoints: max_to_keep",
    errno.EDQUOT: "make room, or have the quota raised; max_to_keep says how many are kept",
    errno.EACCES: "this user must be allowed to read and write there",
    errno.EPERM: "this user must be allowed to read and write there",
    errno.EROFS: "the file system is read-only: the system's log says whether the disk has failed",
    errno.EIO: "the disk has failed: see the system's log",
    errno.ESTALE: "the network file system has lost it: mount it again",
}


# --- writing -------------------------------------------------------------------------------------


class DataFile:
    """A data file that is being written: arrays in the order in which they were planned.

    A context manager, which leaves nothing of the file if an error ends it.

    Args:
        path: Of the file, which is made when it is first written to.
        planned: Shape and dtype of each array that it is going to hold, by name.
    """

    def __init__(self, path: Path, planned: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self.path = path
        self._planned: list[tuple[str, int]] = []  # (name, bytes)
        self._places: list[tuple[int, int, int]] = []  # of those that are written
        entries: dict[str, Any] = {}
        at = 0
        for name, (shape, dtype) in planned.items():
            nbytes = math.prod(shape) * dtype_of(dtype).itemsize
            offsets = [at, at + nbytes]
            entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
            self._planned.append((name, nbytes))
            at += nbytes
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # so that the data are aligned
        self._header = len(text).to_bytes(8, "little") + text
        self._at = len(self._header)
        self._nbytes = self._crc = 0  # of the array that is being written
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None and self._file is not None:
            with contextlib.suppress(OSError):  # what is still buffered fails as the rest did
                self._file.close()
            with contextlib.suppress(OSError):
                current_disk.get().unlink(self.path)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = current_disk.get().create(self.path)
            self._file.write(self._header)
        return self._file

    def write(self, data: Any) -> None:
        """Write the next array: itself or a buffer of its bytes, or an iterator over such parts.

        Raises:
            CheckpointError: The disk is full, or fails; or the size is not what was planned.
        """
        for part in data if isinstance(data, Iterator) else [data]:
            self.extend(part)
        self.end_array()

    def extend(self, part: Any) -> None:
        """Write a part of the next array, which ``end_array`` ends.

        Raises:
            CheckpointError: The disk is full, or fails.
        """
        view = bytes_of(part).data
        with disk_errors(f"writing {self.path}"):
            self._crc = zlib.crc32(view, self._crc)
            self._nbytes += view.nbytes
            self._opened().write(view)

    def end_array(self) -> None:
        """Note an array, all parts of which are written.

        Raises:
            CheckpointError: The size is not what was planned.
        """
        name, nbytes = self._planned[len(self._places)]
        expected = f"{self.path}: {name!r}: expected {nbytes} bytes"
        check_fits(self._nbytes == nbytes, expected, self._nbytes, error=CheckpointError)
        self._places.append((self._at, nbytes, self._crc))
        self._at += nbytes
        self._nbytes = self._crc = 0

    def close(self) -> WrittenFile:
        """Sync the file to disk and return what it holds.

        Raises:
            CheckpointError: The disk is full, or fails; or an array was not written.
        """
        for name, _ in self._planned[len(self._places) :]:
            raise CheckpointError(f"{self.path}: {name!r} was not written")
        with disk_errors(f"writing {self.path}"), self._opened() as file:
            current_disk.get().sync(file)
        header = len(self._header), zlib.crc32(self._header)
        return WrittenFile(self._at, tuple(self._places), header)


@dataclass(slots=True)
class Writer:
    """A checkpoint that is being written.

    Args:
        directory: Of all checkpoints; made if it is not there.
        name: Of this one: "ckpt-00000012".
        number: Of the save.
        tensors: Whole shape and dtype of each tensor.
        states: Of objects without tensors.
        nonce: What to put into a file by which ps tasks see whether they share the directory; "":
            they are not asked to write.

    Raises:
        CheckpointError: There is one of this name; or the disk is full, or fails.
    """

    directory: Path
    name: str
    number: int
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""
    _sizes: dict[str, int] = field(default_factory=dict)  # of complete files
    _headers: dict[str, tuple[int, int]] = field(default_factory=dict)  # of those with arrays
    _slices: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))  # by tensor
    _snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by ps

    def __post_init__(self) -> None:
        with disk_errors(f"making {self.temporary}"):
            # Not Path.exists, which takes what cannot be read for absent.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.directory / self.name).stat()
                hint = "save under another number, or move it away"
                raise CheckpointError(f"{self.directory / self.name}: already exists", hint=hint)
            self._throw_away()  # what a save has left that was interrupted
            current_disk.get().make_directory(self.temporary)
            if self.nonce:
                try:
                    write_synced(self.temporary / NONCE, self.nonce.encode())
                except BaseException:  # nobody has this writer yet, who could abandon it
                    self.abandon()
                    raise

    @property
    def temporary(self) -> Path:
        """The directory in which files are written."""
        return self.directory / f"{self.name}.tmp"

    def remove_nonce(self) -> None:
        """Remove that file."""
        with contextlib.suppress(OSError):
            current_disk.get().unlink(self.temporary / NONCE)

    def add_file(
        self, name: str, written: WrittenFile, slices: Sequence[tuple[str, Slice]]
    ) -> None:
        """Note a data file that is complete; ``commit`` looks whether it is there.

        Args:
            name: In the directory.
            written: What its writer says.
            slices: What lies in it of tensors, with their names.
        """
        self._sizes[name], self._headers[name] = written.size, written.header
        for tensor, piece in slices:
            self._slices[tensor].append(piece)

    def add_snapshot(
        self, ps: int, name: str, state: bytes, data: str, places: list[Place]
    ) -> None:
        """Write the state of what a ps holds.

        Args:
            ps: Its index.
            name: Of the file that is made.
            state: What is in it.
            data: Name of the file with its arrays.
            places: Of these.

        Raises:
            CheckpointError: The disk is full, or fails.
        """
        with disk_errors(f"writing {self.temporary / name}"):
            write_synced(self.temporary / name, state)
        self._sizes[name] = len(state)
        self._snapshots[ps] = Snapshot(name, zlib.crc32(state), data, tuple(places))

    def commit(self) -> Path:
        """Complete the checkpoint and return its path; from here on it exists.

        Raises:
            CheckpointError: The disk is full, or fails; nothing that was there before has changed.
        """
        data = self._manifest().to_bytes()
        final = self.directory / self.name
        self.remove_nonce()
        with disk_errors(f"writing {final}"):
            write_synced(self.temporary / MANIFEST, data)
            self._mark_complete(data)
            self._look_at_files()  # only now: a machine that dies no longer takes a name with it
            self._rename_to(final)
        return final

    def _mark_complete(self, manifest: bytes) -> None:
        write_synced(self.temporary / COMMIT, commit_line(manifest))
        current_disk.get().sync_directory(self.temporary)

    def _rename_to(self, final: Path) -> None:
        disk = current_disk.get()
        disk.rename(self.temporary, final)
        disk.sync_directory(self.directory)

    def _look_at_files(self) -> None:
        """Refuse a checkpoint of which somebody else's file is not what it was said to be."""
        for name, size in self._sizes.items():
            path = self.temporary / name
            with disk_errors(f"looking at {path}"):
                found = path.stat().st_size
            if found != size:
                raise CheckpointError(
                    f"{path}: {size} bytes were written by the ps, {found} are visible here"
                )

    def _manifest(self) -> Manifest:
        tensors = {
            name: Tensor(name, shape, dtype, tuple(sorted(self._slices[name])))  # by their offsets
            for name, (shape, dtype) in self.tensors.items()
        }
        snapshots = tuple(self._snapshots[ps] for ps in sorted(self._snapshots))
        return Manifest(self.number, tensors, self.states, self._sizes, snapshots, self._headers)

    def abandon(self) -> None:
        """Throw away what was written."""
        with contextlib.suppress(OSError):
            self._throw_away()

    def _throw_away(self) -> None:
        """Remove the directory; a ps that is about to make a file in it cannot any more.

        Raises:
            OSError: It is still there.
        """
        doomed = self.directory / f"{self.name}.abandoned.tmp"
        disk = current_disk.get()
        disk.remove_tree(doomed)
        with contextlib.suppress(FileNotFoundError):
            disk.rename(self.temporary, doomed)
        disk.remove_tree(doomed)


# --- reading -------------------------------------------------------------------------------------


def read_pieces(
    path: Path, start: int, nbytes: int, what: str, crc32: int, *, whole: bool = True
) -> Iterator[np.ndarray]:
    """Yield bytes of a file; each piece is valid until the next one.

    Args:
        path: Of the file.
        start: The first byte.
        nbytes: How many.
        what: Lies there, for messages.
        crc32: Its checksum.
        whole: Whether the bytes are all of it, so that they have this checksum.

    Raises:
        CheckpointCorrupt: The file is too short, or the checksum another one.
        CheckpointError: It cannot be read.
    """
    buffer, crc, left = np.empty(min(READ_BYTES, nbytes), np.uint8), 0, nbytes
    with disk_errors(f"reading {path}"), open(path, "rb", opener=regular) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[:left].data)):
            crc, left = zlib.crc32(buffer[:count].data, crc), left - count
            yield buffer[:count]
    if left or (whole and crc != crc32):
        raise CheckpointCorrupt(f"{path}: {what}: expected checksum {crc32:08x}, got {crc:08x}")


def _read_whole(path: Path, limit: int) -> bytes:
    """As ``read_bounded``, of a file that a checkpoint must have."""
    with disk_errors(f"reading {path}"):
        try:
            return read_bounded(path, limit)
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{path}: it is not there") from None


class Reader:
    """A complete checkpoint.

    Args:
        path: Its directory.

    Raises:
        CheckpointNotFound: There is none, or it was never completed.
        CheckpointCorrupt: Its manifest or the header of a data file is damaged, or a file is
            missing or too short.
        CheckpointError: It is of a newer version, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: set[Slice] = set()
        with disk_errors(f"reading {path}"):
            if not is_complete(path):
                unfinished = ", or one that was never completed: COMMIT is not there"
                raise CheckpointNotFound(
                    f"{path}: no checkpoint here" + (unfinished if path.is_dir() else ""),
                    hint="psync.latest_checkpoint(directory) returns the newest one",
                )
            commit = _read_whole(path / COMMIT, 64)
            data = _read_whole(path / MANIFEST, MAX_MANIFEST_BYTES)
            self.manifest = read_manifest(data, commit, str(path))
            for name, size in self.manifest.files.items():
                found = _size_of(path / name)
                if found != size:
                    raise CheckpointCorrupt(
                        f"{path / name}: expected {size} bytes, "
                        + ("it is not there" if found is None else f"got {found}")
                    )
                nbytes, crc32 = self.manifest.headers.get(name, (0, 0))
                for _ in read_pieces(path / name, 0, nbytes, "its header", crc32):
                    pass

    def check(self, tensor: Tensor) -> None:
        """Read a tensor, where that was not done yet, and keep nothing of it.

        Raises:
            CheckpointCorrupt, CheckpointError: As ``read``.
        """
        nothing = np.empty(0, np.uint8)
        for piece in tensor.slices:
            if piece not in self._checked:
                self._read_slice(tensor, piece, 0, nothing)

    def read(self, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop`` of a tensor, a new array; of a scalar: the scalar.

        Each slice that is not checked yet is read whole, and is checked.

        Raises:
            CheckpointCorrupt: Its checksum is wrong.
            CheckpointError: It cannot be read.
        """
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        result = np.empty(shape, dtype_of(tensor.dtype))
        flat = result.reshape(-1).view(np.uint8)
        row_bytes = tensor.row_bytes
        for piece, first, count in tensor.rows_in(start, stop):
            at = (piece.offset + first - start) * row_bytes
            target = flat[at : at + count * row_bytes]
            self._read_slice(tensor, piece, first * row_bytes, target)
        return result

    def _read_slice(self, tensor: Tensor, piece: Slice, start: int, target: np.ndarray) -> None:
        """Copy bytes of a slice from ``start`` on."""
        is_checked, stop = piece in self._checked, start + target.size
        at, nbytes = (start, target.size) if is_checked else (0, piece.nbytes)
        what = f"tensor {tensor.name!r} from row {piece.offset}"
        for read in read_pieces(
            self.path / piece.file, piece.start + at, nbytes, what, piece.crc32,
            whole=not is_checked,
        ):  # fmt: skip
            low, high = max(start, at), min(stop, at + read.size)
            if low < high:
                target[low - start : high - start] = read[low - at : high - at]
            at += read.size
        self._checked.add(piece)

    def snapshots(self) -> list[StoredSnapshot]:
        """Return the snapshot of each ps; none, if it does not say. Bytes of arrays are not read.

        Raises:
            CheckpointCorrupt: One is damaged.
            CheckpointError: It is of a newer version, or cannot be read.
        """
        return [self._stored(snapshot) for snapshot in self.manifest.snapshots]

    def _stored(self, snapshot: Snapshot) -> StoredSnapshot:
        path = self.path.absolute()
        where = path / snapshot.state
        data = _read_whole(where, self.manifest.files[snapshot.state])
        if zlib.crc32(data) != snapshot.crc32:
            raise CheckpointCorrupt(
                f"{where}: expected checksum {snapshot.crc32:08x}, got {zlib.crc32(data):08x}"
            )
        state = SnapshotState.from_bytes(data, str(where))
        needed = {i: item.nbytes for i, item in enumerate(state.items) if not item.is_constant}
        there = {place.item: place.nbytes for place in snapshot.places}
        if there != needed or len(snapshot.places) != len(there):
            wrong = sorted(i for i in needed if there.get(i) != needed[i])
            named = str(state.items[wrong[0]]) if wrong else "an item"
            raise CheckpointCorrupt(f"{where}: {named} is not once, and whole, in {snapshot.data}")
        return StoredSnapshot(state, path / snapshot.data, snapshot.places)


# --- directories ---------------------------------------------------------------------------------


def checkpoints_in(directory: Path, *, damaged: bool = False) -> list[tuple[int, Path]]:
    """Return (number, path) of the complete checkpoints in a directory, the oldest first.

    Args:
        damaged: Also those that have lost what says that they are complete.

    Raises:
        CheckpointError: The directory is none, or cannot be read. If it is not there it is empty.
    """
    found = []
    with (
        disk_errors(f"looking for checkpoints in {directory}"),
        contextlib.suppress(FileNotFoundError),
        os.scandir(directory) as entries,
    ):
        for entry in entries:
            match = re.fullmatch(r"ckpt-(\d{1,18})", entry.name)
            if match and (damaged or is_complete(Path(entry.path))):
                found.append((int(match[1]), Path(entry.path)))
    return sorted(found)


def _size_of(path: Path) -> int | None:
    """Return the bytes of a file; None if there is none.

    ``Path.is_file`` says so from Python 3.14 on also of one that the disk does not tell about: what
    cannot be read would pass for absent, and training would begin from nothing.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_complete(path: Path) -> bool:
    """Return whether there is a checkpoint: False also once it has been removed.

    Raises:
        CheckpointError: The disk does not tell.
    """
    with disk_errors(f"looking at {path}"):
        return _size_of(path / COMMIT) is not None


def mark_last(path: Path) -> None:
    """Note that no other checkpoint follows this one.

    Raises:
        CheckpointError: It cannot be written, or the checkpoint has been removed.
    """
    with disk_errors(f"marking {path} as the last"):
        (path / LAST).touch()
        current_disk.get().sync_directory(path)


def unmark_last(path: Path) -> None:
    """Take that back; where nothing may be written, it stays."""
    with contextlib.suppress(OSError):
        current_disk.get().unlink(path / LAST)


def is_last(path: Path) -> bool:
    """Return whether the program has said that no other checkpoint follows this one.

    Raises:
        CheckpointError: The disk does not tell.
    """
    with disk_errors(f"looking at {path}"):
        return _size_of(path / LAST) is not None


def remove(path: Path) -> None:
    """Remove a checkpoint; it ceases to exist at once, and its files go then.

    Raises:
        CheckpointError: It cannot be removed.
    """
    doomed = path.with_name(path.name + ".tmp")
    with disk_errors(f"removing {path}"), contextlib.suppress(FileNotFoundError):
        current_disk.get().rename(path, doomed)
        current_disk.get().sync_directory(path.parent)  # or it might come back, without its files
    current_disk.get().remove_tree(doomed)


def remove_leftovers(directory: Path, below: int) -> None:
    """Remove what is left of checkpoints whose program died while it wrote or removed them.

    Args:
        directory: Where they are.
        below: Only those with lower numbers, which nobody writes any more.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    with disk_errors(f"looking for leftovers in {directory}"):
        names = sorted(os.listdir(directory))
    for name in names:
        match = re.fullmatch(r"ckpt-(\d{1,18})(\.abandoned)?\.tmp", name)
        if match and int(match[1]) < below:
            current_disk.get().remove_tree(directory / name)


# --- snapshots of ps tasks, for rollback ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """What one ps held.

    Attributes:
        state: All but its arrays.
        file: With the arrays. Absolute: on a ps it may be there, too.
        places: Of each array that is not constant: (item, first byte, bytes, crc32).
    """

    state: SnapshotState
    file: Path
    places: tuple[Place, ...]


def stored_snapshots(path: Path) -> list[StoredSnapshot]:
    """Return the snapshots in a checkpoint, one for each ps. The bytes of arrays are not read.

    Raises:
        CheckpointNotFound: There is no checkpoint, or no snapshots in it.
        CheckpointCorrupt: It is damaged.
        CheckpointError: It is of a newer version, or cannot be read.
    """
    reader = Reader(path)
    if not reader.manifest.snapshots:
        raise CheckpointNotFound(
            f"{path}: it does not say what each ps held",
            hint="it was saved without a ClusterCoordinator, or by an older psync; it can still be "
            "restored",
        )
    return reader.snapshots()


def check_places(snapshot: StoredSnapshot) -> None:
    """Read all arrays of a snapshot and compare their checksums.

    Raises:
        CheckpointCorrupt: One is not what was written.
        CheckpointError: The file cannot be read.
    """
    for item, start, nbytes, crc32 in snapshot.places:
        what = str(snapshot.state.items[item])
        for _ in read_pieces(snapshot.file, start, nbytes, what, crc32):
            pass


def why_not(
    path: Path, num_ps: int, shards: Iterable[ShardSpec], optimizers: Mapping[int, Config]
) -> str | None:
    """Return why a program cannot go back to a checkpoint of another one, or None if it can.

    Args:
        path: Of the checkpoint.
        num_ps: Of the program.
        shards: Of its variables.
        optimizers: Their configurations, by their numbers.
    """
    try:
        snapshots = stored_snapshots(path)
    except CheckpointError as exc:
        return exc.message
    if len(snapshots) != num_ps:
        return f"the checkpoint is of {len(snapshots)} ps tasks, here are {num_ps}"
    held = {spec for each in snapshots for spec in each.state.specs.values()}
    if missing := [spec for spec in shards if spec not in held]:
        return f"the checkpoint has no shard {missing[0]} as it is declared here"
    known = {each.number: each.config for one in snapshots for each in one.state.optimizers}
    for number, config in optimizers.items():
        if known.get(number) != config:
            return f"the checkpoint has another optimizer {number}"
    return None


MOST_PATHS = 5
"""To which a rollback may go. Closures are remembered since the first of them."""

NONE_IS_WHOLE = (
    "psync checkpoint inspect PATH names what is damaged in a checkpoint: move each damaged one "
    "away, or bring its files back from a copy; then restart the program, which continues from the "
    "newest that is left"
)


@dataclass(eq=False)
class NewestCheckpoints:
    """The newest checkpoints that a coordinator's program has saved or begun with.

    ps tasks roll back to the last one. If any file of it is damaged it is passed over, and they
    roll back to the one before. One that was passed over is never used again, even if it can be
    read later: what it has was undone.

    Attributes:
        in_use: Where ps tasks are rolling back to, which must not be removed; None: nowhere.
        paths: Those that may be used, the newest at the end; None: one that may not be. There is
            one for each save since the first, as ``EndedClosures`` needs it.
    """

    in_use: Path | None = None
    paths: list[Path | None] = field(default_factory=list)
    _passed_over: list[CheckpointError] = field(default_factory=list)  # since one was added

    def add(self, path: Path) -> None:
        """Note a checkpoint that is complete."""
        if path not in self.paths[-1:]:  # else it was restored
            self.remove(path)
            self.paths = [*self.paths, path][-MOST_PATHS:]
        self._passed_over = []

    def remove(self, path: Path | None) -> None:
        """Forget one that is going to be removed."""
        left = [None if each == path else each for each in self.paths]
        self.paths = [*itertools.dropwhile(lambda each: each is None, left)]

    def use_newest(self) -> Path:
        """Return the newest one that was not passed over.

        Raises:
            CheckpointError: There is none left; says why of each.
        """
        newest = next(filter(None, reversed(self.paths)), None)
        if newest is None:
            reasons = "; ".join(each.message for each in self._passed_over)
            own = [each.hint for each in self._passed_over if type(each) is CheckpointError]
            raise CheckpointError(reasons, hint=next(filter(None, own), NONE_IS_WHOLE))
        self.in_use = newest
        return newest

    def pass_over(self, error: CheckpointError) -> None:
        """Never use again the one that is in use."""
        assert self.in_use is not None, "it was to be used"
        logger.error("rollback passes over %s: %s", self.in_use.name, error.message)
        self.remove(self.in_use)
        self._passed_over.append(error)
