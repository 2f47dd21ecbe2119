"""Snapshots of ps tasks inside a checkpoint, for rollback.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psync.checkpoints.disk import regular
from psync.checkpoints.files import READ_BYTES, Reader, disk_errors, read_bounded
from psync.checkpoints.manifest import Place, Snapshot
from psync.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from psync.schedules import Config
from psync.specs import ShardSpec
from psync.store.snapshot_state import SnapshotState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """What one ps held.

    Attributes:
        state: All but its arrays, as ``SnapshotState.to_bytes`` made it. It was checked.
        file: With the arrays. Absolute: on a ps it may be there, too.
        places: Of each array that is not constant: (item, first byte, bytes, crc32).
    """

    state: bytes
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
    return [
        _stored(path.absolute(), snapshot, reader.manifest.files[snapshot.state])
        for snapshot in reader.manifest.snapshots
    ]


def _stored(path: Path, snapshot: Snapshot, size: int) -> StoredSnapshot:
    where = path / snapshot.state
    with disk_errors(f"reading {where}"):
        state = read_bounded(where, size)
    if zlib.crc32(state) != snapshot.crc32:
        raise CheckpointCorrupt(
            f"{where}: expected checksum {snapshot.crc32:08x}, got {zlib.crc32(state):08x}",
            hint="use another checkpoint; this one was changed or damaged",
        )
    items = SnapshotState.from_bytes(state, str(where)).items
    needed = {i: item.nbytes for i, item in enumerate(items) if not item.is_constant}
    there = {place.item: place.nbytes for place in snapshot.places}
    if there != needed or len(snapshot.places) != len(there):
        wrong = sorted(i for i in {*there, *needed} if there.get(i) != needed.get(i))
        named = f"item {wrong[0]}" if wrong else "an item"
        raise CheckpointCorrupt(f"{where}: {named} is not once, and whole, in {snapshot.data}")
    return StoredSnapshot(state, path / snapshot.data, snapshot.places)


def check_places(snapshot: StoredSnapshot) -> None:
    """Read all arrays of a snapshot and compare their checksums.

    Raises:
        CheckpointCorrupt: One is not what was written.
        CheckpointError: The file cannot be read.
    """
    with (
        disk_errors(f"reading {snapshot.file}"),
        open(snapshot.file, "rb", opener=regular) as file,
    ):
        for place in snapshot.places:
            file.seek(place.start)
            crc, left = 0, place.nbytes
            while left and (data := file.read(min(left, READ_BYTES))):
                crc, left = zlib.crc32(data, crc), left - len(data)
            if left or crc != place.crc32:
                raise CheckpointCorrupt(
                    f"{snapshot.file}: item {place.item}: expected checksum {place.crc32:08x}, got "
                    f"{crc:08x}"
                )


def why_not(
    snapshots: Sequence[StoredSnapshot],
    num_ps: int,
    shards: Iterable[ShardSpec],
    optimizers: Mapping[int, Config],
) -> str | None:
    """Return why a program cannot go back to snapshots of another one, or None if it can.

    Args:
        snapshots: What that one has left behind.
        num_ps: Of the program.
        shards: Of its variables.
        optimizers: Their configurations, by their numbers.
    """
    if len(snapshots) != num_ps:
        return f"the checkpoint is of {len(snapshots)} ps tasks, here are {num_ps}"
    states = [
        SnapshotState.from_bytes(snapshot.state, str(snapshot.file)) for snapshot in snapshots
    ]
    held = {spec for state in states for spec in state.shards}
    if missing := [spec for spec in shards if spec not in held]:
        return f"the checkpoint has no shard {missing[0]} as it is declared here"
    known = {number: each.config for state in states for number, each in state.optimizers.items()}
    for number, config in optimizers.items():
        if known.get(number) != config:
            return f"the checkpoint has another optimizer {number}"
    return None


@dataclass(eq=False)
class SavedSnapshots:
    """The checkpoints that one program has saved, or begun with: what ps tasks go back to.

    Attributes:
        origin: Token of the strategy whose checkpoints they are.
        asked: How often it was asked for snapshots.
        handed: The checkpoint of which it gave them last.
    """

    origin: str
    asked: int = 0
    handed: Path | None = None
    _paths: list[Path] = field(default_factory=list)  # the newest at the end

    def add(self, path: Path) -> None:
        """Note a checkpoint that is complete."""
        self._paths.append(path)

    def handed_since(self, asked: int) -> Path | None:
        """Return the checkpoint handed out last; None: none since it was asked ``asked`` times."""
        return self.handed if self.asked != asked else None

    def __call__(self) -> list[StoredSnapshot] | None:
        """Return the snapshots of the newest one that can be read; None: there is none."""
        for path in reversed(self._paths):
            try:
                snapshots = stored_snapshots(path)
            except CheckpointNotFound:  # removed meanwhile
                continue
            except CheckpointError as exc:
                logger.warning("cannot roll back to %s: %s", path.name, exc)
                continue
            self.asked, self.handed = self.asked + 1, path
            return snapshots
        return None
