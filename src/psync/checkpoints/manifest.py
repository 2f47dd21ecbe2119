"""The manifest of a checkpoint: its tensors, and the files and rows where their slices lie.

The manifest is JSON. It is read before anything else of a checkpoint, so nothing in it is
trusted: whatever is not as it must be is a CheckpointCorrupt that names it.

A tensor is a logical array. Its rows may be spread over several files, as they were over ps
tasks when it was saved; ``rows_in`` says where to find any range of them. So it can be restored
into any number of shards.

It also lists *snapshots*: the snapshot of each ps, to which the same program rolls back if a ps is
lost. Their arrays are the same bytes in the same files: each ps writes all its arrays into one
file. What the user asked to save is called as its slice of a tensor, "model/w@0". The rest is
needed only to bring a ps back as it was: it is called "~/<variable>/…", and no tensor of the
manifest names it.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psync.errors import CheckpointCorrupt, CheckpointError, PartitionError
from psync.schedules import Config
from psync.specs import count_of, dtype_of, shortened
from psync.store.push_counts import PushCount, total_of
from psync.store.shards import Key
from psync.store.snapshot_state import SnapshotState
from psync.store.untrusted_json import Text, Whole, read_json, to_json, wrong

FORMAT = "psync checkpoint"
VERSION = 1

MAX_LEVELS = 100
"""Of nesting in a state: far from where Python can nest calls no deeper."""

MAX_MANIFEST_BYTES = 256 << 20
"""Far more than a million shards need."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slice of a tensor: the value of a shard, or a slot of it."""

    tensor: str
    shape: tuple[int, ...]  # of the slice
    dtype: str
    offset: int  # first row
    key: Key  # of the shard
    optimizer: int = -1  # whose slot it is
    slot: str = ""

    @property
    def label(self) -> str:
        """Its name in a data file."""
        return f"{self.tensor}@{self.offset}"

    @property
    def rows(self) -> int:
        """Length of axis 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def slice_in(self, file: str, place: tuple[int, int, int]) -> tuple[str, Slice]:
        """Return the name of its tensor, and where it lies: (first byte, bytes, crc32)."""
        return self.tensor, Slice(self.offset, self.rows, file, *place)


class Slice(NamedTuple):
    """Consecutive rows of a tensor, in one file. Of a scalar: one "row"."""

    offset: Whole  # first row
    rows: Whole
    file: Text  # name in the checkpoint's directory
    start: Whole  # first byte in the file
    nbytes: Whole
    crc32: Whole  # of these bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical array of the checkpoint."""

    name: Text  # path of the object that it is the value of: "model/dense/w"
    shape: tuple[Whole, ...]
    dtype: Text  # one of ``specs.DTYPE_NAMES``
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


class WrittenFile(NamedTuple):
    """A data file that is complete."""

    size: Whole  # in bytes
    places: tuple[tuple[Whole, Whole, Whole], ...]  # first byte, bytes, crc32 of each array
    header: tuple[Whole, Whole] = (0, 0)  # bytes, crc32 of what precedes the first array


class Place(NamedTuple):
    """Where an array of a snapshot lies."""

    item: Whole  # its place in the snapshot's state
    start: Whole  # first byte in the file
    nbytes: Whole
    crc32: Whole  # of these bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where to find what one ps held."""

    state: Text  # name of the file with everything but the arrays: JSON
    crc32: Whole  # of that file
    data: Text  # name of the file with the arrays
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors."""

    number: int  # of the save, from 1
    tensors: Mapping[str, Tensor]  # by name
    states: Mapping[str, Any] = field(default_factory=dict)  # of objects without tensors: JSON
    files: Mapping[str, int] = field(default_factory=dict)  # name → size in bytes
    snapshots: tuple[Snapshot, ...] = ()  # of each ps, or none
    headers: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # see ``WrittenFile``

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored."""
        stored = _Stored(
            FORMAT, VERSION, self.number, tuple(self.tensors.values()), dict(self.states),
            dict(self.files), self.snapshots, dict(self.headers),
        )  # fmt: skip
        return to_json(stored, indent=1)  # states come back in the order that they have


@dataclass(frozen=True, slots=True)
class _Stored:
    """The manifest, as JSON."""

    format: Text
    version: Whole
    number: Whole
    tensors: tuple[Tensor, ...]
    states: dict[str, Any]
    files: dict[Text, Whole]
    # Older ones do not have these.
    images: tuple[Snapshot, ...] = ()
    headers: dict[str, tuple[Whole, Whole]] = field(default_factory=dict)


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
    if re.fullmatch(rb"\d+ [0-9a-f]{8}\n", commit) is None:
        raise CheckpointCorrupt(
            f"{where}/COMMIT: expected size and checksum of the manifest, got {shortened(commit)}"
        )
    if commit != commit_line(data):
        expected, found = (line.decode().strip() for line in (commit, commit_line(data)))
        raise CheckpointCorrupt(
            f"{where}/manifest.json: not the one that was committed: expected size and checksum "
            f"{expected}, as COMMIT says, got {found}; one of these two files is damaged"
        )
    subject = f"{where}: the manifest"
    stored = read_json(data, _Stored, subject, (FORMAT, VERSION))
    for name in stored.files:  # none is a path out of the directory
        is_plain = all(char.isascii() and (char.isalnum() or char in "-_.") for char in name)
        if not is_plain or not name or name.startswith("."):
            raise wrong(subject, "name of a file", "letters, digits, - _ .", name)
    tensors: dict[str, Tensor] = {}
    for tensor in stored.tensors:
        _check_slices(tensor, stored.files, where)
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise CheckpointCorrupt(f"{where}: tensor {tensor.name!r} occurs twice")
    for snapshot in stored.images:
        for file in (snapshot.state, snapshot.data):
            if file not in stored.files:
                raise wrong(subject, "file of a snapshot", "one that is listed", file)
        size = stored.files[snapshot.data]
        for place in snapshot.places:
            if place.start + place.nbytes > size:
                what = f"a place in {snapshot.data!r}"
                raise wrong(subject, what, f"one within {size} bytes", tuple(place))
    return Manifest(
        stored.number, tensors, stored.states, stored.files, stored.images, stored.headers
    )


def _check_slices(tensor: Tensor, files: Mapping[str, int], where: str) -> None:
    """Refuse slices that do not cover the tensor exactly once, or lie outside of their files."""
    try:
        dtype_of(tensor.dtype)
    except PartitionError as exc:
        raise CheckpointCorrupt(f"{where}: tensor {tensor.name!r}: {exc.message}") from exc

    def corrupt(text: str) -> CheckpointCorrupt:
        subject = f"{where}: tensor {tensor.name!r} {tensor.shape} {tensor.dtype}"
        return CheckpointCorrupt(f"{subject}: {text}")

    row = 0
    for piece in tensor.slices:
        nbytes = piece.rows * tensor.row_bytes
        if piece.offset != row:
            raise corrupt(f"expected a slice from row {row}, got {piece.offset}")
        if piece.nbytes != nbytes:
            raise corrupt(f"expected {nbytes} bytes for {piece.rows} rows, got {piece.nbytes}")
        if piece.start + piece.nbytes > files.get(piece.file, -1):
            raise corrupt(f"{piece.file!r} is not that large, or is not listed")
        row += piece.rows
    if row != tensor.rows:
        raise corrupt(f"expected {tensor.rows} rows, got {row}")


def check_state(name: str, state: Any) -> None:
    """Refuse a state that would not come back from JSON as it is.

    Raises:
        CheckpointError: It would not; says what it may hold.
    """
    try:
        json.dumps(state)
        said = "" if _comes_back(state) else "it would be restored differently"
    except (TypeError, ValueError, RecursionError) as exc:
        said = str(exc)
    if said:
        raise CheckpointError(
            f"checkpoint: the state of {name!r} cannot be saved: {said}",
            hint="use numbers, strings, None, lists instead of tuples, dicts with strings as keys, "
            f"and at most {MAX_LEVELS} levels of nesting",
        )


def _comes_back(state: Any, levels: int = MAX_LEVELS) -> bool:
    """Return whether JSON, which takes it, keeps a state: others than these become one of them."""
    if not levels:
        return False
    if isinstance(state, dict):
        return all(
            isinstance(key, str) and _comes_back(value, levels - 1) for key, value in state.items()
        )
    return not isinstance(state, tuple) and (
        not isinstance(state, list) or all(_comes_back(value, levels - 1) for value in state)
    )


# --- layout of snapshots ----------------------------------------------------------------------


class Layout:
    """Where everything lies.

    Args:
        snapshots: Of all ps tasks, at one cut.
        wanted: What tensors are made of.

    Attributes:
        arrays: For each ps the arrays that its file holds: (item, name in the file).
    """

    def __init__(self, snapshots: Sequence[SnapshotState], wanted: Iterable[Wanted]) -> None:
        self._snapshots = snapshots
        self._found = {
            (item.key, item.optimizer, item.slot): (ps, number)
            for ps, snapshot in enumerate(snapshots)
            for number, item in enumerate(snapshot.items)
        }
        self._users: dict[tuple[int, int], list[Wanted]] = {}
        for slice_ in wanted:
            if (found := self.find(slice_)) is not None:
                self._users.setdefault(found, []).append(slice_)
        self.arrays = [self._arrays(ps) for ps in range(len(snapshots))]

    def find(self, wanted: Wanted) -> tuple[int, int] | None:
        """Return (ps, item) of an array, or None: no snapshot has it.

        A slot is there once it was updated, or read.
        """
        return self._found.get((wanted.key, wanted.optimizer, wanted.slot))

    def lying_in(
        self, ps: int, file: str, written: WrittenFile
    ) -> tuple[list[tuple[str, Slice]], list[Place]]:
        """Return what lies in the file of a ps.

        Returns:
            Slices of tensors, with their names; and arrays of the snapshot, but for constant ones,
            which are part of its state.
        """
        slices: list[tuple[str, Slice]] = []
        places = []
        for (item, _), place in zip(self.arrays[ps], written.places, strict=True):
            slices += [user.slice_in(file, place) for user in self._users.get((ps, item), ())]
            if not self._snapshots[ps].items[item].is_constant:
                places.append(Place(item, *place))
        return slices, places

    def _arrays(self, ps: int) -> list[tuple[int, str]]:
        snapshot = self._snapshots[ps]
        arrays = []
        for number, item in enumerate(snapshot.items):
            if users := self._users.get((ps, number)):
                arrays.append((number, users[0].label))
            elif not item.is_constant:
                spec = snapshot.specs[item.key]
                kind = f"{item.optimizer}-{item.slot}" if item.slot else "value"
                arrays.append((number, f"~/{spec.variable}/{kind}@{spec.offset}"))
        return arrays


def step_of(snapshots: Sequence[SnapshotState], optimizer: int) -> int:
    """Return how many pushes an optimizer has applied."""
    counts = [count for each in snapshots for number, count in each.counts if number == optimizer]
    return count_of(total_of(PushCount.of(count).counts for count in counts))


def changed_rate(snapshots: Sequence[SnapshotState], optimizer: int) -> Config | None:
    """Return the learning rate that an optimizer was given later; None: it has its first one."""
    for snapshot in snapshots:
        for number, config, rate, _ in snapshot.optimizers:
            if number == optimizer and rate != config.get("learning_rate"):
                return rate
    return None
