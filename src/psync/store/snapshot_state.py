"""The state of a snapshot: JSON for everything that a ps holds at a cut except array bytes.

A snapshot is a state and *items*, the arrays that the state names. The state is read back from
disks and from the network, so nothing in it is trusted: whatever does not fit is a
CheckpointCorrupt that names it. The bytes of items have checksums of their own.

An array to which nothing was ever written, such as a large table that was declared constant, is a
*constant* item: the state holds its one element, and no bytes are stored or sent.

    of a ps                       in its snapshot
    shards, slots                 the bytes of each; counts of updates and of accumulated gradients
    optimizers                    the configuration of the definition, learning rate, step
    ledger                        fences, unacknowledged answers, calls, the low-water mark; what
                                  rules of users have raised
    synchronous groups            configurations; on ps 0 the calls in steps that were applied. A
                                  step that is open is not there: its pushes are *pending*, and
                                  count again when their closures run again
    conditional accumulators      definitions and steps
    locks, clocks, requests
    that wait                     nothing

What a backup gets beside a snapshot, as entries: staged parts, the state of the rule of synchronous
steps, contents and takes of accumulators (``backups.service``, ``Section.entries``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

from psync import schedules
from psync.errors import ConfigurationError, PartitionError, ValueMismatchError
from psync.numerics.rules import UpdateRule, rule_from_config, slot_dtype, unknown_in
from psync.schedules import OR_OWN, Config
from psync.specs import STEP_BITS, ShardSpec, dtype_name, dtype_of
from psync.store.ledger_snapshot import LedgerState, SenderState
from psync.store.push_counts import CountState, PushCount
from psync.store.reattach import NewOptimizer
from psync.store.shards import Key
from psync.store.sync_config import SyncConfig
from psync.store.untrusted_json import Signed, read_json, to_json, wrong

FORMAT = "psync image"
"""What the first line of files on disk says: checkpoints of every version are read."""

VERSION = 1

MAX_ITEM_BYTES = 1 << 42
"""More than any machine has: a damaged shape must not make a list of endless blocks."""


@dataclass(frozen=True, slots=True)
class SnapshotItem:
    """One array of a snapshot: a shard's value, or one of its slots."""

    key: Key  # of the shard: (variable id, shard index)
    optimizer: int  # -1: the shard's value
    slot: str  # "" for the value
    shape: tuple[int, ...]  # of the shard
    dtype: str  # of the array
    fill: bytes | None = None  # what each element is, if the array is constant

    @property
    def is_constant(self) -> bool:
        """Whether nothing of it was ever written; then no bytes are needed to bring it back."""
        return self.fill is not None

    @property
    def nbytes(self) -> int:
        """Size in bytes, if all elements are written out."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def __str__(self) -> str:
        of = f"slot {self.slot!r} of optimizer {self.optimizer}" if self.slot else "the value"
        return f"{of} of shard {self.key[1]} of variable {self.key[0]}"


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """An optimizer at a cut."""

    config: Config  # with which it was defined
    learning_rate: Config  # that it has now
    count: CountState  # of its pushes


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """What a ps holds at a cut."""

    shards: tuple[ShardSpec, ...]  # in the order of their creation
    items: tuple[SnapshotItem, ...]  # each shard's value, then its slots that exist; shard by shard
    versions: Mapping[Key, int]  # finished updates
    pushes: Mapping[Key, Mapping[int, int]]  # by optimizer, where gradients are accumulated
    optimizers: Mapping[int, OptimizerSnapshot]
    ledger: LedgerState
    accumulators: tuple[tuple[bytes, int], ...] = ()
    """(definition, global step) of each conditional accumulator: what is in them is not kept."""
    groups: Mapping[int, Config] = field(default_factory=dict)
    """Configuration of each synchronous group that is known here."""
    counted: tuple[tuple[int, int, int, bytes], ...] = ()
    """On ps 0: (group, closure, ordinal, digest of its variables) of each call that was counted in
    a step that has been applied."""
    pending: tuple[int, ...] = ()
    """On ps 0: closures that were counted in a step that has not been applied."""

    @property
    def iterations(self) -> int:
        """The most updates that an optimizer has made."""
        return max(
            (rule_from_config(each.config).iteration(PushCount.of(each.count).known)
             for each in self.optimizers.values()),
            default=0,
        )  # fmt: skip

    def for_coordinator(self, coordinator: int) -> SnapshotState:
        """Return it without what it knows of another coordinator's closures and clients.

        Closures have the same numbers in each life of a program, and are others each time.
        """
        if self.ledger.coordinator in (0, coordinator):
            return self
        return replace(self, ledger=LedgerState(coordinator=coordinator), counted=(), pending=())

    def with_rates(self, optimizers: Iterable[NewOptimizer]) -> SnapshotState:
        """Return it with the learning rates that a program has set since."""
        known = dict(self.optimizers)
        for each in optimizers:
            if (held := known.get(each.number)) is not None and held.config == each.config:
                known[each.number] = replace(held, learning_rate=dict(each.learning_rate))
        return replace(self, optimizers=known)

    def to_bytes(self) -> bytes:
        """Return the state as it is stored."""
        sets: dict[tuple[int, tuple[str, ...]], int] = {}
        calls = [
            (closure, ordinal, sets.setdefault((digest, names), len(sets)))
            for closure, ordinal, digest, names in self.ledger.calls
        ]
        items: dict[Key, list[SnapshotItem]] = {}  # in the order of the shards
        for item in self.items:
            items.setdefault(item.key, []).append(item)
        shards = zip(self.shards, items.items(), strict=True)
        stored = _Stored(
            format=FORMAT,
            version=VERSION,
            shards=[self._shard(spec, key, *of) for spec, (key, of) in shards],
            optimizers=[
                (
                    number,
                    dict(each.config),
                    dict(each.learning_rate),
                    PushCount.of(each.count).marked,
                )
                for number, each in self.optimizers.items()
            ],
            counts=[(number, each.count) for number, each in self.optimizers.items()],
            senders=self.ledger.senders,
            variable_sets=[(Signed(digest), names) for digest, names in sets],
            calls=calls,
            final_below=self.ledger.final_below,
            kept=self.ledger.kept,
            coordinator=self.ledger.coordinator,
            parts=self.ledger.parts,
            accumulators=tuple((packed, Signed(step)) for packed, step in self.accumulators),
            groups=[(number, dict(config)) for number, config in self.groups.items()],
            counted=self.counted,
            pending=self.pending,
            failures=self.ledger.failures,
        )
        return to_json(stored)

    def _shard(
        self, spec: ShardSpec, key: Key, value: SnapshotItem, *slots: SnapshotItem
    ) -> _StoredShard:
        return _StoredShard(
            variable=spec.variable, id=spec.variable_id, index=spec.index, offset=spec.offset,
            shape=spec.shape, dtype=spec.dtype, ps=spec.ps, version=self.versions[key],
            fill=value.fill,
            slots=[(slot.optimizer, slot.slot, slot.fill) for slot in slots],
            pushes=list(self.pushes.get(key, {}).items()),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SnapshotState:
        """Return the state that ``to_bytes`` stored.

        Args:
            data: Whatever was read; nothing in it is trusted.
            where: For messages: the file, or what is in it.

        Raises:
            CheckpointCorrupt: It is not the state of a snapshot.
            CheckpointError: It is of a newer version.
            ConfigurationError: It has an optimizer whose rule or schedule is not known here.
        """
        stored = read_json(data, _Stored, where, (FORMAT, VERSION))
        return _Checks(where).state_of(stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredShard:
    """A shard, as JSON."""

    variable: str
    id: int
    index: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    ps: int
    version: int
    fill: bytes | None = None
    slots: list[tuple[int, str, bytes | None]]
    pushes: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The state, as JSON. The names of variables in calls are there once."""

    format: str
    version: int
    shards: list[_StoredShard]
    optimizers: list[tuple[int, dict[str, Any], dict[str, Any], int]]
    # Of each optimizer; older files have the number that was known, in ``optimizers``, alone.
    counts: list[tuple[int, CountState]] = field(default_factory=list)
    senders: tuple[SenderState, ...]
    variable_sets: list[tuple[Signed, tuple[str, ...]]]
    calls: list[tuple[int, int, int]]  # the last: the place of a variable set
    final_below: int
    kept: tuple[tuple[int, int], ...] = ()
    coordinator: int = 0
    parts: tuple[tuple[int, int, int], ...] = ()
    accumulators: tuple[tuple[bytes, Signed], ...]
    groups: list[tuple[int, dict[str, Any]]]
    counted: tuple[tuple[int, int, int, bytes], ...]
    pending: tuple[int, ...] = ()
    failures: tuple[tuple[str, int, int, bytes], ...] = ()


class _Checks:
    """Checks what a type does not say of a state."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._wrong = functools.partial(wrong, where)
        self._rules: dict[int, UpdateRule] = {}

    def state_of(self, stored: _Stored) -> SnapshotState:
        """Return what was stored.

        Raises:
            CheckpointCorrupt: Something contradicts itself.
        """
        counts = dict(stored.counts)
        self._once(stored.counts, counts, "a count")
        optimizers = {
            each[0]: self._optimizer(*each, counts.get(each[0])) for each in stored.optimizers
        }
        self._once(stored.optimizers, optimizers, "an optimizer")
        if unknown := counts.keys() - optimizers.keys():
            raise self._wrong("a count", "of an optimizer that is there", sorted(unknown))
        shards = {(each.id, each.index): each for each in stored.shards}
        self._once(stored.shards, shards, "a shard")
        specs = {key: self._spec(shard) for key, shard in shards.items()}
        items = [
            item for key, spec in specs.items() for item in self._items(spec, key, shards[key])
        ]
        for number, config in stored.groups:
            try:
                SyncConfig.from_config(config)
            except (ConfigurationError, OverflowError) as exc:
                raise self._wrong(f"group {number}", f"what fits: {exc}", config) from exc
        groups = dict(stored.groups)
        self._once(stored.groups, groups, "a group")
        return SnapshotState(
            tuple(specs.values()), tuple(items),
            {key: shard.version for key, shard in shards.items()},
            {key: dict(shard.pushes) for key, shard in shards.items() if shard.pushes},
            optimizers, self._ledger(stored), stored.accumulators, groups, stored.counted,
            stored.pending,
        )  # fmt: skip

    def _once(self, listed: Sized, different: Sized, *what: object) -> None:
        if len(different) != len(listed):
            got = f"{len(listed)} of {len(different)}"
            raise self._wrong(" ".join(map(str, what)), "each once", got)

    def _optimizer(
        self, number: int, config: Config, rate: Config, known: int, count: CountState | None
    ) -> OptimizerSnapshot:
        if unknown := unknown_in(config) or unknown_in({"learning_rate": rate}):
            raise ConfigurationError(
                f"{self._where}: optimizer {number} has the {unknown}, which is not known here",
                hint=OR_OWN.removeprefix("or "),
            )
        try:
            rule = self._rules[number] = rule_from_config(config)
            schedules.from_config(rate)
        except (ConfigurationError, OverflowError) as exc:
            raise self._wrong(f"optimizer {number}", f"what fits: {exc}", config) from exc
        if count is None:
            return OptimizerSnapshot(rule.to_config(), rate, PushCount(known).state)
        return OptimizerSnapshot(rule.to_config(), rate, self._count(number, known, count))

    def _count(self, number: int, known: int, count: CountState) -> CountState:
        """Check a count. The number of ps tasks is not known here, so indexes are not bounded."""
        *_, own, told = count
        what = f"pushes of optimizer {number}"
        for listed in (own, told, *(row for _, row in told)):
            self._once(listed, dict(listed), what)
        made = PushCount.of(count)
        sums = (
            made.known,
            sum(made.own.values()),
            *(sum(row.values()) for row in made.told.values()),
        )
        if max(sums) >= 1 << STEP_BITS:
            raise self._wrong(what, f"sums below {1 << STEP_BITS}", max(sums))
        if made.marked != known:
            raise self._wrong(what, f"{known}, as beside its configuration", made.marked)
        return count

    def _spec(self, shard: _StoredShard) -> ShardSpec:
        try:
            size = dtype_of(shard.dtype).itemsize * math.prod(shard.shape)
        except PartitionError as exc:
            raise self._wrong(f"dtype of {shard.variable!r}", exc.message, shard.dtype) from exc
        if size > MAX_ITEM_BYTES:
            what = f"shape of a shard of {shard.variable!r}"
            raise self._wrong(what, "what fits a machine", shard.shape)
        return ShardSpec(
            shard.variable, shard.id, shard.index, shard.offset, shard.shape, shard.dtype, shard.ps
        )

    def _items(self, spec: ShardSpec, key: Key, shard: _StoredShard) -> list[SnapshotItem]:
        """Return the value and the slots of a shard."""
        items = [SnapshotItem(key, -1, "", spec.shape, spec.dtype, shard.fill)]
        for entry in shard.slots:
            number, slot, fill = entry
            rule = self._rules.get(number)
            if rule is None or slot not in rule.slot_names():
                raise self._wrong(f"a slot of {spec}", "one that its optimizer has", entry)
            try:
                dtype = dtype_name(slot_dtype(dtype_of(spec.dtype)))
            except ValueMismatchError as exc:
                raise self._wrong(f"a slot of {spec}", f"none: {exc.message}", entry) from exc
            items.append(SnapshotItem(key, number, slot, spec.shape, dtype, fill))
        self._once(items, {(item.optimizer, item.slot) for item in items}, "a slot of", spec)
        for item in items:
            if (fill := item.fill) is None:
                continue
            if len(fill) != dtype_of(item.dtype).itemsize or (item.dtype == "bool" and fill[0] > 1):
                what = f"the element of {f'slot {item.slot!r} of ' if item.slot else ''}{spec}"
                raise self._wrong(what, f"one of {item.dtype}", fill.hex())
        for number, count in shard.pushes:
            if number not in self._rules:
                what, got = f"pushes to {spec}", (number, count)
                raise self._wrong(what, "of an optimizer that is there", got)
        return items

    def _ledger(self, stored: _Stored) -> LedgerState:
        self._once(stored.senders, {sender.task for sender in stored.senders}, "a sender")
        for sender in stored.senders:
            sequences = {sequence for sequence, *_ in sender.answers}
            self._once(sender.answers, sequences, "an answer to", sender.task)
        calls = []
        for closure, ordinal, place in stored.calls:
            if place >= len(stored.variable_sets):
                got = (closure, ordinal, place)
                raise self._wrong("a call", "the place of a variable set", got)
            calls.append((closure, ordinal, *stored.variable_sets[place]))
        self._once(calls, {(closure, ordinal) for closure, ordinal, *_ in calls}, "a call")
        return LedgerState(
            stored.senders, tuple(calls), stored.final_below, stored.coordinator, stored.parts,
            stored.failures, stored.kept,
        )  # fmt: skip
