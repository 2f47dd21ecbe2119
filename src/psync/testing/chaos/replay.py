"""Replay of the apply logs of ps tasks in one process, which must give the same bits.

A log is the calls that changed a store (``sabotage.apply_log``). The model is small: all of them
are made again, one after the other. Looked at on the way:

- a store that is frozen for a cut is what its log makes of it;
- a snapshot to which a ps goes back is what some ps has frozen before: nothing is in it twice;
- of the calls of a closure none was applied twice, also across going back;
- a backup that came to serve has applied, since its snapshot, all that the ps had applied that it
  took the place of, in the same order;
- the store that was served last, of each ps, is what the program has pulled at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from psync.specs import ShardSpec
from psync.store.store import ShardStore
from psync.testing.sabotage.apply_log import digest, read_log

Applied = tuple[int, int]  # closure, ordinal


@dataclass
class Part:
    """What a log says from one beginning, or snapshot, to the next."""

    snapshot: int = 0  # digest of what was there at first; 0: nothing
    applied: list[str] = field(default_factory=list)  # whose update, in order
    cuts: list[tuple[int, int]] = field(default_factory=list)  # digest, updates before it
    served_at: int = 0  # when it began to be served, nanoseconds; 0: it never was
    promoted: bool = False  # a backup's, until it came to serve


@dataclass
class Replayed:
    """What came of a log."""

    path: Path
    store: ShardStore
    cuts: set[int] = field(default_factory=set)  # digests of what was frozen
    snapshots: list[int] = field(default_factory=list)  # digests of what was gone back to
    updates: int = 0  # messages that were applied
    parts: list[Part] = field(default_factory=list)

    @property
    def served_at(self) -> int:
        """When the last part began to be served; 0: it never was."""
        return self.parts[-1].served_at if self.parts else 0

    faults: list[str] = field(default_factory=list)


def replay(path: Path) -> Replayed:
    """Make every call of a log again."""
    replayed = Replayed(path, ShardStore("replay"))
    applied: dict[Applied, Any] = {}
    for name, arguments, options in read_log(path):
        match name:
            case "begin":
                replayed.store, applied = ShardStore("replay"), {}
                replayed.parts.append(Part())
            case "snapshot" | "adopted":
                held, found = arguments
                replayed.store = store_of(held)
                if name == "snapshot":
                    replayed.snapshots.append(found)
                    replayed.parts.append(Part(found))
                # What the snapshot's ledger knows is not written down: what it lacks runs again.
                applied = {}
                if digest(replayed.store) != found:
                    replayed.faults.append(f"{path.name}: {name}: not what it says")
            case "cut":
                replayed.cuts.add(arguments[0])
                part = replayed.parts[-1]
                part.cuts.append((arguments[0], len(part.applied)))
                if digest(replayed.store) != arguments[0]:
                    replayed.faults.append(
                        f"{path.name}: what was frozen after {replayed.updates} updates is not "
                        "what was applied until then"
                    )
            case "applied":
                replayed.updates += 1
                task, _, sequence, closure, ordinal, kind, _ = arguments
                if closure >= 0 and (closure, ordinal) in applied:
                    replayed.faults.append(
                        f"{path.name}: closure {closure}, call {ordinal} was applied for {task} "
                        f"(update {sequence}, {kind}), and before for "
                        f"{applied[closure, ordinal]}"
                    )
                applied[closure, ordinal] = f"{task} (update {sequence}, {kind})"
                replayed.parts[-1].applied.append(f"{arguments[:-1]}")
            case "serves":
                part = replayed.parts[-1]
                part.served_at, part.promoted = arguments
            case _:
                _call(replayed.store, name, arguments, options)
    return replayed


def _call(
    store: ShardStore, name: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    work = getattr(store, name)(*arguments, **options)
    if hasattr(work, "__next__"):
        for _ in work:
            pass


def store_of(held: Mapping[str, Any], make: type[ShardStore] = ShardStore) -> ShardStore:
    """Return a store with the contents that ``apply_log.contents`` has returned."""
    store = make("replay")
    for state in held["optimizers"]:
        _define(store, *state)
    for shard in held["shards"]:
        _take_up(store, shard)
    return store


def _define(
    store: ShardStore, number: int, config: object, rate: object, count: Sequence[Any]
) -> None:
    store.define_optimizer(number, config)
    store.set_learning_rate(number, rate)
    *numbers, own, told = count
    own = tuple((tuple(others), pushes) for others, pushes in own)
    told = tuple((ps, tuple(map(tuple, row))) for ps, row in told)
    store.restore_count(number, (*numbers, own, told))


def _take_up(store: ShardStore, shard: Sequence[Any]) -> None:
    spec, value, slots, _, pushes = shard
    store.create(spec, value)
    for number, slot, data in slots:
        for _ in store.load_slot(spec.key, number, slot, data):
            pass
    store.shards()[spec.key].pushes.update(pushes)


def check(logs: Path, arrays: Mapping[str, np.ndarray]) -> tuple[list[str], str]:
    """Return what is wrong, and what was looked at.

    Args:
        logs: Directory with the logs of all ps tasks, in all their lives.
        arrays: What the program has pulled at its end, by the names of the variables.
    """
    paths = sorted(logs.glob("*.applies"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    faults: list[str] = []
    by_ps: dict[str, list[Replayed]] = {}
    cuts: set[int] = set()
    snapshots: list[tuple[str, int]] = []
    updates = 0
    for path in paths:
        replayed = replay(path)
        faults += replayed.faults
        cuts |= replayed.cuts
        snapshots += [(path.name, snapshot) for snapshot in replayed.snapshots]
        updates += replayed.updates
        by_ps.setdefault(path.name.partition(".")[0], []).append(replayed)
    for name, snapshot in snapshots:
        if snapshot not in cuts:
            faults.append(f"{name}: it rolled back to a snapshot that nobody had frozen")
    promoted = sum(_follow(name, lives, faults) for name, lives in by_ps.items())
    count = 0
    for lives in by_ps.values():
        replayed = max(reversed(lives), key=lambda each: each.served_at)
        for shard in replayed.store.shards().values():
            count += _differs(replayed, shard.spec, arrays, faults)
    return faults, (
        f"{updates} updates in {len(paths)} logs replayed: {count} shards, bit for bit; "
        f"{len(cuts)} cuts, {len(snapshots)} snapshots"
        + (f", {promoted} backups that came to serve" if promoted else "")
    )


def _follow(name: str, lives: Sequence[Replayed], faults: list[str]) -> int:
    """Compare backups that came to serve with whom they followed; return how many there are."""
    served = [part for life in lives for part in life.parts if part.served_at]
    served.sort(key=lambda part: part.served_at)
    count = 0
    for before, part in zip([None, *served], served, strict=False):
        if not part.promoted:
            continue
        count += 1
        theirs = (
            []
            if before is None
            else [
                before.applied[number:] for digest, number in before.cuts if digest == part.snapshot
            ]
        )
        # In which order those of different shards were computed says nothing.
        if not any(Counter(each) <= Counter(part.applied) for each in theirs):
            faults.append(
                f"{name}: backup {count} that came to serve lacks something that had been applied "
                "by whom it followed"
            )
    return count


def _differs(
    replayed: Replayed, spec: ShardSpec, arrays: Mapping[str, np.ndarray], faults: list[str]
) -> bool:
    """Compare a shard with what was pulled; return whether that was possible."""
    name = spec.variable
    if name not in arrays:
        return False
    data = b"".join(replayed.store.read(spec.key))
    rows = spec.shape[0] if spec.shape else 1
    found = arrays[name][spec.offset : spec.offset + rows] if spec.shape else arrays[name]
    if np.ascontiguousarray(found).data.cast("B") != data:
        faults.append(f"{replayed.path.name}: {spec} is not what the log makes of it, bit for bit")
    return True
