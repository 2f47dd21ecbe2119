"""The manifest of a checkpoint: its tensors, and the files and rows where their slices lie.

The manifest is JSON. It is read before anything else of a checkpoint, so nothing in it is
trusted: whatever is not as it must be is a CheckpointCorrupt that names it.

A tensor is a logical array. Its rows may be spread over several files, as they were over ps
tasks when it was saved; ``rows_in`` says where to find any range of them. So it can be restored
into any number of shards.

It also lists *snapshots*: the snapshot of each ps, to which the same program rolls back if a ps is
lost. Their arrays are the same bytes in the same files.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psync.errors import CheckpointCorrupt, CheckpointError, PartitionError
from psync.specs import dtype_of
from psync.store.untrusted_json import UntrustedJson

FORMAT = "psync checkpoint"
VERSION = 1

MAX_MANIFEST_BYTES = 256 << 20
"""Far more than a million shards need."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A slice that a data file is going to hold."""

    tensor: str
    shape: tuple[int, ...]  # of the slice
    dtype: str
    offset: int  # first row
    label: str = ""  # in the file; default: "tensor@offset"

    @property
    def rows(self) -> int:
        """Length of axis 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Slice(NamedTuple):
    """Consecutive rows of a tensor, in one file. Of a scalar: one "row"."""

    offset: int  # first row
    rows: int
    file: str  # name in the checkpoint's directory
    start: int  # first byte in the file
    nbytes: int
    crc32: int  # of these bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical array of the checkpoint."""

    name: str  # path of the object that it is the value of: "model/dense/w"
    shape: tuple[int, ...]
    dtype: str  # one of ``specs.DTYPE_NAMES``
    slices: tuple[Slice, ...]  # in order of their offset; they cover axis 0 exactly once

    @property
    def rows(self) -> int:
        """Length of axis 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * dtype_of(self.dtype).itemsize

    def rows_in(self, start: int, stop: int) -> Iterator[tuple[Slice, int, int]]:
        """Yield (slice, first row within it, number of rows) for rows ``start`` to ``stop``."""
        for piece in self.slices:
            first, last = max(start, piece.offset), min(stop, piece.offset + piece.rows)
            if first < last:
                yield piece, first - piece.offset, last - first


class Place(NamedTuple):
    """Where an array of a snapshot lies."""

    item: int  # its place in the snapshot's state
    start: int  # first byte in the file
    nbytes: int
    crc32: int  # of these bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where to find what one ps held."""

    state: str  # name of the file with everything but the arrays: JSON
    crc32: int  # of that file
    data: str  # name of the file with the arrays
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors."""

    number: int  # of the save, from 1
    tensors: Mapping[str, Tensor]  # by name
    states: Mapping[str, Any] = field(default_factory=dict)  # of objects without tensors: JSON
    files: Mapping[str, int] = field(default_factory=dict)  # name → size in bytes
    snapshots: tuple[Snapshot, ...] = ()  # of each ps, or none

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "number": self.number,
                "tensors": [
                    {
                        "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype,
                        "slices": [list(piece) for piece in tensor.slices],
                    }
                    for tensor in self.tensors.values()
                ],
                "states": self.states,
                "files": self.files,
                "images": [
                    {
                        "state": snapshot.state, "crc32": snapshot.crc32, "data": snapshot.data,
                        "places": [list(place) for place in snapshot.places],
                    }
                    for snapshot in self.snapshots
                ],
            },
            indent=1,  # in the order of the objects' own state, which comes back as it was
        ).encode()  # fmt: skip


def commit_line(manifest: bytes) -> bytes:
    """Return what the file COMMIT says: size and checksum of the manifest."""
    return b"%d %08x\n" % (len(manifest), zlib.crc32(manifest))


def read_manifest(data: bytes, commit: bytes, where: str) -> Manifest:
    """Return the manifest of a checkpoint.

    Args:
        data: The file ``manifest.json``.
        commit: The file ``COMMIT``.
        where: For messages.

    Raises:
        CheckpointCorrupt: It is none, or is not the one that was committed.
        CheckpointError: It is of a newer version.
    """
    if commit != commit_line(data):
        raise CheckpointCorrupt(
            f"{where}: the manifest is not the one that was committed "
            f"({len(data)} bytes, checksum {zlib.crc32(data):08x})",
            hint="restore an older checkpoint; this one was changed or damaged after it was saved",
        )
    read = _Reader(f"{where}: the manifest")
    top = read.parse(data)
    if top.get("format") != FORMAT:
        raise CheckpointCorrupt(f"{where}: the manifest is not one of psync")
    version = read.number(top.get("version"), "version")
    if version != VERSION:
        raise CheckpointError(
            f"{where}: format version {version}, this psync reads {VERSION}",
            hint="install a newer psync",
        )
    files = {
        read.file(name): read.number(size, f"size of {name!r}")
        for name, size in read.mapping(top.get("files"), "files").items()
    }
    tensors: dict[str, Tensor] = {}
    for entry in read.sequence(top.get("tensors"), "tensors"):
        tensor = _tensor(read, read.mapping(entry, "a tensor"), files)
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise CheckpointCorrupt(f"{where}: tensor {tensor.name!r} occurs twice")
    states = read.mapping(top.get("states"), "states")
    snapshots = tuple(
        _snapshot(read, read.mapping(entry, "a snapshot"), files)
        for entry in read.sequence(top.get("images", []), "images")  # older ones have none
    )
    return Manifest(read.number(top.get("number"), "number"), tensors, states, files, snapshots)


def _snapshot(read: _Reader, entry: Mapping[str, Any], files: Mapping[str, int]) -> Snapshot:
    state, data = read.file(entry.get("state")), read.file(entry.get("data"))
    for file in (state, data):
        if file not in files:
            raise read.wrong("file of a snapshot", "one that is listed", file)
    places = []
    for listed in read.sequence(entry.get("places"), f"places in {data!r}"):
        numbers = read.sequence(listed, f"a place in {data!r}", len(Place._fields))
        place = Place(*(read.number(number, f"a place in {data!r}") for number in numbers))
        if place.start + place.nbytes > files[data]:
            raise read.wrong(f"a place in {data!r}", f"one within {files[data]} bytes", numbers)
        places.append(place)
    return Snapshot(
        state, read.number(entry.get("crc32"), f"checksum of {state!r}"), data, tuple(places)
    )


def _tensor(read: _Reader, entry: Mapping[str, Any], files: Mapping[str, int]) -> Tensor:
    name = read.text(entry.get("name"), "name of a tensor")
    shape = tuple(
        read.number(extent, f"shape of {name!r}")
        for extent in read.sequence(entry.get("shape"), f"shape of {name!r}")
    )
    dtype = read.text(entry.get("dtype"), f"dtype of {name!r}")
    try:
        dtype_of(dtype)
    except PartitionError as exc:
        raise CheckpointCorrupt(f"{read.where}: tensor {name!r}: {exc.message}") from exc
    slices = []
    for listed in read.sequence(entry.get("slices"), f"slices of {name!r}"):
        parts = read.sequence(listed, f"a slice of {name!r}", len(Slice._fields))
        offset, rows, file, *place = parts
        begin = read.number(offset, f"offset in {name!r}"), read.number(rows, f"rows of {name!r}")
        what = (f"{each} in {name!r}" for each in ("start", "size", "checksum"))
        slices.append(Slice(*begin, read.file(file), *map(read.number, place, what)))
    tensor = Tensor(name, shape, dtype, tuple(slices))
    _check_slices(tensor, files, read.where)
    return tensor


def _check_slices(tensor: Tensor, files: Mapping[str, int], where: str) -> None:
    """Refuse slices that do not cover the tensor exactly once, or lie outside of their files."""
    subject = f"{where}: tensor {tensor.name!r} {tensor.shape} {tensor.dtype}"
    row, row_bytes = 0, tensor.row_bytes
    for piece in tensor.slices:
        if piece.offset != row:
            raise CheckpointCorrupt(
                f"{subject}: expected a slice from row {row}, got {piece.offset}"
            )
        if piece.nbytes != piece.rows * row_bytes:
            raise CheckpointCorrupt(
                f"{subject}: expected {piece.rows * row_bytes} bytes for {piece.rows} rows, got "
                f"{piece.nbytes}"
            )
        if piece.start + piece.nbytes > files.get(piece.file, -1):
            raise CheckpointCorrupt(
                f"{subject}: {piece.file!r} is not that large, or is not listed"
            )
        row += piece.rows
    if row != tensor.rows:
        raise CheckpointCorrupt(f"{subject}: expected {tensor.rows} rows, got {row}")


def check_state(name: str, state: Any) -> None:
    """Refuse a state that would not come back from JSON as it is.

    Raises:
        CheckpointError: It would not; says what it may hold.
    """
    try:
        json.dumps(state)
    except (TypeError, ValueError) as exc:
        raise CheckpointError(
            f"checkpoint: the state of {name!r} cannot be saved: {exc}",
            hint="numbers, texts, None, lists, and dicts whose keys are texts",
        ) from exc
    if not _comes_back(state):
        raise CheckpointError(
            f"checkpoint: the state of {name!r} would not come back as it is",
            hint="use lists instead of tuples, and texts as keys",
        )


def _comes_back(state: Any) -> bool:
    """Return whether JSON, which takes it, keeps a state: others than these become one of them."""
    if isinstance(state, dict):
        return all(isinstance(key, str) and _comes_back(value) for key, value in state.items())
    return not isinstance(state, tuple) and (
        not isinstance(state, list) or all(map(_comes_back, state))
    )


class Difference(NamedTuple):
    """How what is to be restored differs from what was saved."""

    missing: tuple[str, ...]  # names that the checkpoint does not have
    extra: tuple[str, ...]  # names that nobody asks for
    misshaped: tuple[str, ...]  # one text for each


def compare(
    manifest: Manifest,
    wanted: Mapping[str, tuple[tuple[int, ...], str]],
    states: Sequence[str],
    optional: Sequence[str] = (),
) -> Difference:
    """Return what does not fit.

    Args:
        manifest: Of the checkpoint.
        wanted: Shape and dtype of each tensor to restore, by name.
        states: Names of the states to restore.
        optional: Names of those that are restored if they are there.
    """
    has = {*manifest.tensors, *manifest.states}
    asked = {*wanted, *states}
    misshaped = []
    for name, (shape, dtype) in wanted.items():
        tensor = manifest.tensors.get(name)
        if tensor is not None and (tensor.shape, tensor.dtype) != (shape, dtype):
            misshaped.append(
                f"{name}: saved as {tensor.shape} {tensor.dtype}, declared as {shape} {dtype}"
            )
    return Difference(
        tuple(sorted(asked - has)), tuple(sorted(has - asked - set(optional))), tuple(misshaped)
    )


class _Reader(UntrustedJson):
    """Takes values out of a manifest that may be anything."""

    def file(self, value: Any) -> str:
        """Return the name of a file beside the manifest: never a path out of the directory."""
        name = self.text(value, "name of a file")
        if not all(char.isascii() and (char.isalnum() or char in "-_.") for char in name) or (
            name.startswith(".")
        ):
            raise self.wrong("name of a file", "letters, digits, - _ .", value)
        return name
