"""Checkpoint directories: their layout, listing, and checked reading of row ranges.

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
``writer`` writes one.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from psync.checkpoints.disk import current_disk, regular
from psync.checkpoints.manifest import (
    MAX_MANIFEST_BYTES,
    Planned,
    Slice,
    Tensor,
    read_manifest,
)
from psync.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, PsyncError
from psync.numerics.blocks import bytes_of
from psync.specs import dtype_of

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
LAST = "LAST"
READ_BYTES = 8 << 20
"""Read and checked at once."""

_NAMES = {
    "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip
"""What safetensors calls the dtypes."""


class DataFile:
    """A data file that is being written: slices in the order in which they were planned.

    Args:
        path: Of the file, which is made.
        planned: What it is going to hold.

    Raises:
        CheckpointError: It cannot be written.
    """

    def __init__(self, path: Path, planned: Sequence[Planned]) -> None:
        self.path = path
        self._planned = list(planned)
        self.slices: list[tuple[str, Slice]] = []  # written, with their tensors' names
        header = _header(self._planned)
        self._at = len(header)
        self._nbytes = self._crc = 0  # of the slice that is being written
        with disk_errors(f"writing {path}"):
            self._file: BinaryIO = current_disk.get().create(path)
            try:
                self._file.write(header)
            except OSError:
                self.abandon()
                raise

    def write(self, data: Any) -> None:
        """Write the next slice: an array or a buffer of its bytes, or an iterator over such parts.

        Raises:
            CheckpointError: The disk is full, or fails; or the size is not what was planned.
        """
        for part in data if isinstance(data, Iterator) else [data]:
            self.extend(part)
        self.end_slice()

    def extend(self, part: Any) -> None:
        """Write a part of the next slice, which ``end_slice`` ends.

        Raises:
            CheckpointError: The disk is full, or fails.
        """
        view = bytes_of(part).data
        with disk_errors(f"writing {self.path}"):
            self._crc = zlib.crc32(view, self._crc)
            self._nbytes += view.nbytes
            self._file.write(view)

    def end_slice(self) -> None:
        """Note a slice, all parts of which are written.

        Raises:
            CheckpointError: The size is not what was planned.
        """
        piece = self._planned[len(self.slices)]
        if self._nbytes != piece.nbytes:
            raise CheckpointError(
                f"{self.path}: {piece.tensor!r} from row {piece.offset}: expected {piece.nbytes} "
                f"bytes, got {self._nbytes}"
            )
        written = Slice(piece.offset, piece.rows, self.path.name, self._at, self._nbytes, self._crc)
        self.slices.append((piece.tensor, written))
        self._at += self._nbytes
        self._nbytes = self._crc = 0

    def close(self) -> int:
        """Sync the file to disk and return its size in bytes.

        Raises:
            CheckpointError: The disk is full, or fails; or a slice was not written.
        """
        if len(self.slices) < len(self._planned):
            raise CheckpointError(
                f"{self.path}: {self._planned[len(self.slices)].tensor!r} was not written"
            )
        with disk_errors(f"writing {self.path}"), self._file:
            current_disk.get().sync(self._file)
        return self._at

    def abandon(self) -> None:
        """Close the file, whatever is in it."""
        with contextlib.suppress(OSError):  # what is still buffered fails as what was written did
            self._file.close()


def _header(planned: Sequence[Planned]) -> bytes:
    """Return the head of a safetensors file."""
    entries: dict[str, Any] = {}
    at = 0
    for piece in planned:
        entries[piece.label or f"{piece.tensor}@{piece.offset}"] = {
            "dtype": _NAMES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return len(text).to_bytes(8, "little") + text


class Reader:
    """A complete checkpoint.

    Args:
        path: Its directory.

    Raises:
        CheckpointNotFound: There is none, or it was never completed.
        CheckpointCorrupt: Its manifest is damaged, or a file is missing or too short.
        CheckpointError: It is of a newer version, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: set[Slice] = set()
        with disk_errors(f"reading {path}"):
            if not is_complete(path):
                raise CheckpointNotFound(
                    f"{path}: no checkpoint here"
                    + (", or one that was never completed" if path.is_dir() else ""),
                    hint="psync.latest_checkpoint(directory) returns the newest one",
                )
            commit = read_bounded(path / COMMIT, 64)
            data = read_bounded(path / MANIFEST, MAX_MANIFEST_BYTES)
            self.manifest = read_manifest(data, commit, str(path))
            for name, size in self.manifest.files.items():
                found = _size_of(path / name)
                if found != size:
                    raise CheckpointCorrupt(
                        f"{path / name}: expected {size} bytes, "
                        + ("it is not there" if found is None else f"got {found}"),
                        hint="restore an older checkpoint",
                    )

    def check(self, tensor: Tensor) -> None:
        """Read a tensor, where that was not done yet, and keep nothing of it.

        Raises:
            CheckpointCorrupt, CheckpointError: As ``read``.
        """
        nothing = np.empty(0, np.uint8)
        for piece in tensor.slices:
            if piece not in self._checked:
                self._read_slice(tensor, piece, (0, 0), nothing)

    def read(self, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop`` of a tensor, a new array; of a scalar: the scalar.

        Each slice that is not checked yet is read whole, and is checked.

        Raises:
            CheckpointCorrupt: Its checksum is wrong.
            CheckpointError: It cannot be read.
        """
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        result = np.empty(shape, dtype_of(tensor.dtype))
        if not result.nbytes:
            return result
        flat = result.reshape(-1).view(np.uint8)
        row_bytes = tensor.row_bytes
        for piece, first, count in tensor.rows_in(start, stop):
            wanted = (first * row_bytes, (first + count) * row_bytes)
            at = (piece.offset + first - start) * row_bytes
            self._read_slice(tensor, piece, wanted, flat[at : at + count * row_bytes])
        return result

    def _read_slice(
        self, tensor: Tensor, piece: Slice, wanted: tuple[int, int], target: np.ndarray
    ) -> None:
        """Copy the bytes from ``wanted[0]`` to ``wanted[1]`` of a slice."""
        first, last = wanted
        start, stop = wanted if piece in self._checked else (0, piece.nbytes)
        crc = 0
        buffer = np.empty(min(READ_BYTES, piece.nbytes), np.uint8)
        with (
            disk_errors(f"reading {self.path / piece.file}"),
            open(self.path / piece.file, "rb", opener=regular) as file,
        ):
            file.seek(piece.start + start)
            while start < stop and (count := file.readinto(buffer[: stop - start].data)):
                crc = zlib.crc32(buffer[:count].data, crc)
                low, high = max(first, start), min(last, start + count)
                if low < high:
                    target[low - first : high - first] = buffer[low - start : high - start]
                start += count
        if start != stop or (piece not in self._checked and crc != piece.crc32):
            raise CheckpointCorrupt(
                f"{self.path / piece.file}: tensor {tensor.name!r} from row {piece.offset}: "
                f"expected checksum {piece.crc32:08x}, got {crc:08x}",
                hint="restore an older checkpoint; this one was changed or damaged after saving",
            )
        self._checked.add(piece)


def checkpoints_in(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return (number, path) of the complete checkpoints in a directory, the oldest first.

    Raises:
        CheckpointError: The directory is none, or cannot be read. If it is not there it is empty.
    """
    pattern = re.compile(re.escape(prefix) + r"-(\d{1,18})")
    found = []
    with (
        disk_errors(f"looking for checkpoints in {directory}"),
        contextlib.suppress(FileNotFoundError),
        os.scandir(directory) as entries,
    ):
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and is_complete(Path(entry.path)):
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


def remove_leftovers(directory: Path, prefix: str, below: int) -> None:
    """Remove what is left of checkpoints whose program died while it wrote or removed them.

    Args:
        directory: Where they are.
        prefix: Of their names.
        below: Only those with lower numbers, which nobody writes any more.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    pattern = re.compile(re.escape(prefix) + r"-(\d{1,18})(\.abandoned)?\.tmp")
    with disk_errors(f"looking for leftovers in {directory}"):
        names = sorted(os.listdir(directory))
    for name in names:
        match = pattern.fullmatch(name)
        if match and int(match[1]) < below:
            current_disk.get().remove_tree(directory / name)


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
