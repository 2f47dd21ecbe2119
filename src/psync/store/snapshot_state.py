"""The state of a snapshot: JSON for everything that a ps holds at a cut except array bytes.

A snapshot is a state and *items*, the arrays that the state names. The state is read back from
disks and from the network, so nothing in it is trusted: whatever does not fit is a
CheckpointCorrupt that names it. The bytes of items have checksums of their own.

An array to which nothing was ever written, such as a large table that was declared constant, is a
*constant* item: the state holds its one element, and no bytes are stored or sent.

    of a ps                       in its snapshot
    shards, slots                 the bytes of each; counts of updates and of accumulated gradients
    optimizers                    the configuration of the definition, learning rate, step
    ledger                        fences, unacknowledged answers, calls, the low-water mark
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

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psync import schedules
from psync.errors import CheckpointError, ConfigurationError, GradientError, PartitionError
from psync.numerics.rule_configs import rule_from_config, unknown_in
from psync.numerics.update_rule import UpdateRule, slot_dtype
from psync.schedules import OR_OWN, Config
from psync.specs import ShardSpec, dtype_name, dtype_of
from psync.store.ledger import Call, FailureKey
from psync.store.ledger_snapshot import LedgerState, SenderState
from psync.store.shards import Key
from psync.store.sync_config import SyncConfig
from psync.store.untrusted_json import UntrustedJson

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
    step: int  # the lowest that its next push may have


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
            (rule_from_config(each.config).iteration(each.step)
             for each in self.optimizers.values()),
            default=0,
        )  # fmt: skip

    @property
    def calls(self) -> Mapping[int, int]:
        """How many calls of each closure, by its number, have been applied."""
        return Counter(closure for closure, *_ in self.ledger.calls)

    def for_coordinator(self, coordinator: int) -> SnapshotState:
        """Return it without what it knows of another coordinator's closures and clients.

        Closures have the same numbers in each life of a program, and are others each time.
        """
        if self.ledger.coordinator in (0, coordinator):
            return self
        return replace(self, ledger=LedgerState(coordinator=coordinator), counted=(), pending=())

    def to_bytes(self) -> bytes:
        """Return the state as it is stored."""
        sets: dict[tuple[int, tuple[str, ...]], int] = {}
        calls = [
            [closure, ordinal, sets.setdefault((digest, names), len(sets))]
            for closure, ordinal, digest, names in self.ledger.calls
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "shards": self._shards_as_json(),
                "optimizers": [
                    [number, dict(each.config), each.learning_rate, each.step]
                    for number, each in self.optimizers.items()
                ],
                "senders": [_sender_as_json(sender) for sender in self.ledger.senders],
                "variable_sets": list(sets),
                "calls": calls,
                "final_below": self.ledger.final_below,
                "coordinator": self.ledger.coordinator,
                "parts": list(self.ledger.parts),
                "accumulators": [[packed.hex(), step] for packed, step in self.accumulators],
                "groups": list(self.groups.items()),
                "counted": [[*call, digest.hex()] for *call, digest in self.counted],
                "pending": list(self.pending),
                **_failures_as_json(self.ledger),
            },
            separators=(",", ":"),
        ).encode()

    def _shards_as_json(self) -> list[dict[str, Any]]:
        items: dict[Key, list[SnapshotItem]] = {}
        for item in self.items:
            items.setdefault(item.key, []).append(item)
        made = []
        for spec in self.shards:
            value, *slots = items[spec.key]
            made.append(
                {
                    "variable": spec.variable, "id": spec.variable_id, "index": spec.index,
                    "offset": spec.offset, "shape": spec.shape, "dtype": spec.dtype,
                    "ps": spec.ps, "version": self.versions[spec.key],
                    "fill": _hex(value.fill),
                    "slots": [[slot.optimizer, slot.slot, _hex(slot.fill)] for slot in slots],
                    "pushes": list(self.pushes.get(spec.key, {}).items()),
                }
            )  # fmt: skip
        return made

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
        return _StateReader(UntrustedJson(where)).read(data)


def _hex(fill: bytes | None) -> str | None:
    return None if fill is None else fill.hex()


def _sender_as_json(sender: SenderState) -> list[Any]:
    answers = [[sequence, call, answer.hex()] for sequence, call, answer in sender.answers]
    return [sender.task, sender.incarnation, sender.acked_below, answers]


def _failures_as_json(ledger: LedgerState) -> dict[str, Any]:
    failures = [[key, failure.hex()] for key, failure in ledger.failures]
    return {"failures": failures} if failures else {}


class _StateReader:
    """Reads one state."""

    def __init__(self, take: UntrustedJson) -> None:
        self._take = take
        self._rules: dict[int, UpdateRule] = {}

    def read(self, data: bytes) -> SnapshotState:
        take = self._take
        top = take.parse(data)
        if top.get("format") != FORMAT:
            raise take.wrong("format", repr(FORMAT), top.get("format"))
        version = take.number(top.get("version"), "version")
        if version != VERSION:
            raise CheckpointError(
                f"{take.where}: format version {version}, this psync reads {VERSION}",
                hint="install a newer psync",
            )
        optimizers = dict(map(self._optimizer, take.sequence(top.get("optimizers"), "optimizers")))
        self._once(optimizers, top["optimizers"], "an optimizer")
        shards: list[ShardSpec] = []
        items: list[SnapshotItem] = []
        versions: dict[Key, int] = {}
        pushes: dict[Key, dict[int, int]] = {}
        for entry in take.sequence(top.get("shards"), "shards"):
            shard = take.mapping(entry, "a shard")
            spec = self._spec(shard)
            shards.append(spec)
            versions[spec.key] = take.number(shard.get("version"), f"version of {spec}")
            items += self._items(spec, shard)
            pushes[spec.key] = self._pushes(spec, shard)
        self._once(versions, shards, "a shard")
        accumulators = tuple(
            map(self._accumulator, take.sequence(top.get("accumulators"), "accumulators"))
        )
        listed = take.sequence(top.get("groups"), "groups")
        groups = dict(map(self._group, listed))
        self._once(groups, listed, "a group")
        counted = tuple(map(self._counted, take.sequence(top.get("counted"), "counted")))
        pending = tuple(take.numbers(top.get("pending", []), "pending closures"))
        return SnapshotState(
            tuple(shards), tuple(items), versions,
            {key: counts for key, counts in pushes.items() if counts}, optimizers,
            self._ledger(top), accumulators, groups, counted, pending,
        )  # fmt: skip

    def _once(self, by_key: Mapping[Any, Any], listed: Sequence[Any], what: str) -> None:
        if len(by_key) != len(listed):
            raise self._take.wrong(what, "each once", f"{len(listed)} of {len(by_key)}")

    def _optimizer(self, entry: Any) -> tuple[int, OptimizerSnapshot]:
        take = self._take
        number, config, rate, step = take.sequence(entry, "an optimizer", 4)
        number = take.number(number, "number of an optimizer")
        if unknown := unknown_in(config):
            raise ConfigurationError(
                f"{take.where}: optimizer {number} has the {unknown}, which is not known here",
                hint=OR_OWN.removeprefix("or "),
            )
        try:
            rule = self._rules[number] = rule_from_config(config)
            schedules.from_config(rate)
        except (ConfigurationError, OverflowError) as exc:
            raise take.wrong(f"optimizer {number}", f"what fits: {exc}", config) from exc
        step = take.number(step, f"step of optimizer {number}")
        return number, OptimizerSnapshot(rule.to_config(), rate, step)

    def _spec(self, shard: Mapping[str, Any]) -> ShardSpec:
        take = self._take
        name = take.text(shard.get("variable"), "name of a variable")
        number, index, offset, ps = (
            take.number(shard.get(field), f"{field} of a shard of {name!r}")
            for field in ("id", "index", "offset", "ps")
        )
        shape = tuple(take.numbers(shard.get("shape"), f"shape of a shard of {name!r}"))
        dtype = take.text(shard.get("dtype"), f"dtype of {name!r}")
        try:
            size = dtype_of(dtype).itemsize * math.prod(shape)
        except PartitionError as exc:
            raise take.wrong(f"dtype of {name!r}", exc.message, dtype) from exc
        if size > MAX_ITEM_BYTES:
            raise take.wrong(f"shape of a shard of {name!r}", "what fits a machine", shape)
        return ShardSpec(name, number, index, offset, shape, dtype, ps)

    def _items(self, spec: ShardSpec, shard: Mapping[str, Any]) -> list[SnapshotItem]:
        take = self._take
        fill = self._fill(shard.get("fill"), spec.dtype, f"the element of {spec}")
        items = [SnapshotItem(spec.key, -1, "", spec.shape, spec.dtype, fill)]
        for entry in take.sequence(shard.get("slots"), f"slots of {spec}"):
            number, slot, element = take.sequence(entry, f"a slot of {spec}", 3)
            rule = self._rules.get(take.number(number, f"an optimizer of {spec}"))
            if rule is None or slot not in rule.slot_names():
                raise take.wrong(f"a slot of {spec}", "one that its optimizer has", entry)
            try:
                dtype = dtype_name(slot_dtype(dtype_of(spec.dtype)))
            except GradientError as exc:
                raise take.wrong(f"a slot of {spec}", f"none: {exc.message}", entry) from exc
            fill = self._fill(element, dtype, f"the element of slot {slot!r} of {spec}")
            items.append(SnapshotItem(spec.key, number, slot, spec.shape, dtype, fill))
        self._once({(item.optimizer, item.slot): 0 for item in items}, items, f"a slot of {spec}")
        return items

    def _fill(self, value: Any, dtype: str, what: str) -> bytes | None:
        if value is None:
            return None
        fill = self._take.hex(value, what)
        if len(fill) != dtype_of(dtype).itemsize or (dtype == "bool" and fill[0] > 1):
            raise self._take.wrong(what, f"one of {dtype}", value)
        return fill

    def _pushes(self, spec: ShardSpec, shard: Mapping[str, Any]) -> dict[int, int]:
        take, counts = self._take, dict[int, int]()
        for entry in take.sequence(shard.get("pushes"), f"pushes to {spec}"):
            number, count = take.numbers(entry, f"pushes to {spec}", 2)
            if number not in self._rules:
                raise take.wrong(f"pushes to {spec}", "of an optimizer that is there", entry)
            counts[number] = count
        return counts

    def _ledger(self, top: Mapping[str, Any]) -> LedgerState:
        take = self._take
        senders = tuple(map(self._sender, take.sequence(top.get("senders"), "senders")))
        self._once({sender.task: 0 for sender in senders}, senders, "a sender")
        sets = list(map(self._set, take.sequence(top.get("variable_sets"), "variable_sets")))
        calls = []
        for entry in take.sequence(top.get("calls"), "calls"):
            closure, ordinal, place = take.numbers(entry, "a call", 3)
            if place >= len(sets):
                raise take.wrong("a call", "the place of a variable set", entry)
            calls.append((closure, ordinal, *sets[place]))
        self._once({(closure, ordinal): 0 for closure, ordinal, *_ in calls}, calls, "a call")
        return LedgerState(
            senders,
            tuple(calls),
            take.number(top.get("final_below"), "final_below"),
            take.number(top.get("coordinator", 0), "coordinator"),
            self._parts(top),
            tuple(map(self._failure, take.sequence(top.get("failures", []), "failed updates"))),
        )

    def _failure(self, entry: Any) -> tuple[FailureKey, bytes]:
        take, what = self._take, "a failed update"
        key, data = take.sequence(entry, what, 2)
        failure = take.hex(data, what)
        if len(listed := take.sequence(key, what)) == 2:
            closure, ordinal = take.numbers(listed, what, 2)
            return (closure, ordinal), failure
        task, *numbers = take.sequence(listed, what, 3)
        incarnation, sequence = take.numbers(numbers, what, 2)
        return (take.text(task, what), incarnation, sequence), failure

    def _parts(self, top: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
        take, parts = self._take, []
        for entry in take.sequence(top.get("parts", []), "parts of calls"):
            closure, ordinal, count = take.numbers(entry, "parts of a call", 3)
            parts.append((closure, ordinal, count))
        return tuple(parts)

    def _sender(self, entry: Any) -> SenderState:
        take = self._take
        task, incarnation, acked_below, listed = take.sequence(entry, "a sender", 4)
        task = take.text(task, "name of a sender")
        answers: dict[int, tuple[int, Call | None, bytes]] = {}
        for answer in take.sequence(listed, f"answers to {task}"):
            sequence, call, data = take.sequence(answer, f"an answer to {task}", 3)
            sequence = take.number(sequence, f"an answer to {task}")
            if call is not None:
                closure, ordinal = take.numbers(call, f"a call of {task}", 2)
                call = closure, ordinal
            answers[sequence] = (sequence, call, take.hex(data, f"an answer to {task}"))
        self._once(answers, listed, f"an answer to {task}")
        return SenderState(
            task,
            take.number(incarnation, f"incarnation of {task}"),
            take.number(acked_below, f"acknowledgement of {task}"),
            tuple(answers.values()),
        )

    def _set(self, entry: Any) -> tuple[int, tuple[str, ...]]:
        take = self._take
        digest, names = take.sequence(entry, "a variable set", 2)
        listed = take.sequence(names, "names of a variable set")
        return (
            take.integer(digest, "a variable set"),
            tuple(take.text(name, "name in a variable set") for name in listed),
        )

    def _accumulator(self, entry: Any) -> tuple[bytes, int]:
        take = self._take
        packed, step = take.sequence(entry, "an accumulator", 2)
        return take.hex(packed, "an accumulator"), take.number(step, "step of an accumulator")

    def _group(self, entry: Any) -> tuple[int, Config]:
        take = self._take
        number, raw = take.sequence(entry, "a group", 2)
        number = take.number(number, "number of a group")
        raw = take.mapping(raw, f"group {number}")
        try:
            SyncConfig.from_config(raw)
        except (ConfigurationError, OverflowError) as exc:
            raise take.wrong(f"group {number}", f"what fits: {exc}", raw) from exc
        return number, dict(raw)

    def _counted(self, entry: Any) -> tuple[int, int, int, bytes]:
        take, what = self._take, "a call that was counted"
        *numbers, digest = take.sequence(entry, what, 4)
        group, closure, ordinal = take.numbers(numbers, what)
        return group, closure, ordinal, take.hex(digest, what)
