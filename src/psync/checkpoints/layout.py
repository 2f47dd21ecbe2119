"""Layout of snapshots in a checkpoint: array names, and the tensor slices that they are.

Each ps writes all its arrays into one file. What the user asked to save is called as its slice of a
tensor, "model/w@0". The rest is needed only to bring a ps back as it was: it is called
"~/<variable>/…", and no tensor of the manifest names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psync.checkpoints.manifest import Place, Planned, Slice
from psync.schedules import Config
from psync.specs import count_of
from psync.store.push_counts import PushCount, total_of
from psync.store.shards import Key
from psync.store.snapshot_state import SnapshotItem, SnapshotState

Written = Sequence[tuple[int, int, int]]
"""First byte, bytes and crc32 of each array of a file, in the order of ``Layout.arrays``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Planned):
    """A slice of a tensor that is an array of a snapshot."""

    key: Key  # of the shard
    optimizer: int = -1  # whose slot it is
    slot: str = ""


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
            found = self.find(slice_)
            if found is not None:
                self._users.setdefault(found, []).append(slice_)
        self.arrays = [self._arrays(ps) for ps in range(len(snapshots))]

    def find(self, wanted: Wanted) -> tuple[int, int] | None:
        """Return (ps, item) of an array, or None: no snapshot has it.

        A slot is there once it was updated, or read.
        """
        return self._found.get((wanted.key, wanted.optimizer, wanted.slot))

    def slices(self, ps: int, file: str, written: Written) -> list[tuple[str, Slice]]:
        """Return what lies in the file of a ps of tensors, with their names."""
        return [
            (user.tensor, Slice(user.offset, user.rows, file, start, nbytes, crc32))
            for (item, _), (start, nbytes, crc32) in zip(self.arrays[ps], written, strict=True)
            for user in self._users.get((ps, item), ())
        ]

    def places(self, ps: int, written: Written) -> list[Place]:
        """Return where the arrays of a snapshot lie; constant ones are part of its state."""
        return [
            Place(item, *place)
            for (item, _), place in zip(self.arrays[ps], written, strict=True)
            if not self._snapshots[ps].items[item].is_constant
        ]

    def _arrays(self, ps: int) -> list[tuple[int, str]]:
        snapshot = self._snapshots[ps]
        specs = {spec.key: spec for spec in snapshot.shards}
        arrays = []
        for number, item in enumerate(snapshot.items):
            users = self._users.get((ps, number))
            if users:
                arrays.append((number, f"{users[0].tensor}@{users[0].offset}"))
            elif not item.is_constant:
                spec = specs[item.key]
                arrays.append((number, f"~/{spec.variable}/{_kind(item)}@{spec.offset}"))
        return arrays


def _kind(item: SnapshotItem) -> str:
    return f"{item.optimizer}-{item.slot}" if item.slot else "value"


def step_of(snapshots: Sequence[SnapshotState], optimizer: int) -> int:
    """Return how many pushes an optimizer has applied."""
    states = [each.optimizers[optimizer].count for each in _knowing(snapshots, optimizer)]
    return count_of(total_of(PushCount.of(state).counts for state in states))


def changed_rate(snapshots: Sequence[SnapshotState], optimizer: int) -> Config | None:
    """Return the learning rate that an optimizer was given later; None: it has its first one."""
    for snapshot in _knowing(snapshots, optimizer):
        known = snapshot.optimizers[optimizer]
        if known.learning_rate != known.config.get("learning_rate"):
            return known.learning_rate
    return None


def _knowing(snapshots: Sequence[SnapshotState], optimizer: int) -> list[SnapshotState]:
    return [snapshot for snapshot in snapshots if optimizer in snapshot.optimizers]
