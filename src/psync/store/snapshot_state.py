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

What a backup gets beside a snapshot: staged parts, the state of the rule of synchronous steps,
contents and takes of accumulators (``backups.primary``, ``Section.live``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from psync import schedules
from psync.errors import (
    CheckpointCorrupt,
    ConfigurationError,
    PartitionError,
    RemoteProtocolError,
    ValueMismatchError,
)
from psync.numerics.rules import UpdateRule, rule_from_config, slot_dtype, unknown_in
from psync.schedules import OR_OWN
from psync.specs import STEP_BITS, ShardSpec, count_of, dtype_name, dtype_of
from psync.store.push_counts import CountState, PushCount
from psync.store.shards import Key
from psync.store.sync_config import SyncConfig
from psync.store.untrusted_json import Hex, Signed, Text, Whole, read_json, to_json, wrong
from psync.wire.closure_numbers import Finality
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import Pushed

M = TypeVar("M", bound=Message)

FORMAT = "psync image"
"""What the first line of files on disk says: checkpoints of every version are read."""

VERSION = 1

MAX_ITEM_BYTES = 1 << 42
"""More than any machine has: a damaged shape must not make a list of endless blocks."""


@dataclass(frozen=True, slots=True)
class SnapshotItem:
    """One array of a snapshot: a shard's value, or one of its slots."""

    shard: str  # its name
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
        return f"{of} of {self.shard}"


@dataclass(frozen=True, kw_only=True)
class ShardSnapshot:
    """A shard at a cut."""

    variable: Text
    id: Whole
    index: Whole
    offset: Whole
    shape: tuple[Whole, ...]
    dtype: Text
    ps: Whole
    version: Whole  # finished updates
    fill: Hex | None = None  # of its value, as in ``SnapshotItem``
    slots: tuple[tuple[Whole, Text, Hex | None], ...]  # (optimizer, name, fill) of those that exist
    pushes: tuple[tuple[Whole, Whole], ...]  # (optimizer, accumulated gradients), where they are

    @property
    def spec(self) -> ShardSpec:
        """The shard."""
        return ShardSpec(
            self.variable, self.id, self.index, self.offset, self.shape, self.dtype, self.ps
        )

    @functools.cached_property
    def items(self) -> list[SnapshotItem]:
        """Its value, then its slots."""
        name, key, shape = str(self.spec), (self.id, self.index), self.shape
        items = [SnapshotItem(name, key, -1, "", shape, self.dtype, self.fill)]
        for optimizer, slot, fill in self.slots:
            dtype = dtype_name(slot_dtype(dtype_of(self.dtype)))
            items.append(SnapshotItem(name, key, optimizer, slot, shape, dtype, fill))
        return items


class OptimizerSnapshot(NamedTuple):
    """An optimizer at a cut."""

    number: Whole
    config: dict[str, Any]  # with which it was defined
    learning_rate: dict[str, Any]  # that it has now
    known: Whole  # number of its pushes, marked


@dataclass(frozen=True, slots=True)
class NewOptimizer:
    """An optimizer of the present program."""

    number: int
    name: str
    config: Mapping[str, Any]  # with which it was made
    learning_rate: Mapping[str, Any] = field(default_factory=dict)  # that it has now

    def __str__(self) -> str:
        return f'"{self.name}" ({described(self.config)})'


class SenderState(NamedTuple):
    """A task that has sent updates, or was fenced."""

    task: Text
    incarnation: Whole  # the lowest one served
    acked_below: Whole  # it has the answers to all sequences below
    answers: tuple[tuple[Whole, tuple[Whole, Whole] | None, Hex], ...]  # (sequence, call, answer)


@dataclass(frozen=True, kw_only=True)
class SnapshotState:
    """The state of a ps at a cut, as the JSON has it. ``NOTHING`` is that of an empty one."""

    format: Text = FORMAT
    version: Whole = VERSION
    shards: tuple[ShardSnapshot, ...]  # in the order of their creation
    optimizers: tuple[OptimizerSnapshot, ...]
    counts: tuple[tuple[Whole, CountState], ...] = ()
    """(optimizer, count of its pushes) of each. Older files have ``OptimizerSnapshot.known``
    alone."""
    senders: tuple[SenderState, ...]
    variable_sets: tuple[tuple[Signed, tuple[Text, ...]], ...]
    """(hash of the variables, their names) of calls, each once."""
    calls: tuple[tuple[Whole, Whole, Whole], ...]
    """(closure, ordinal, place of its variable set) of each call that was applied."""
    final_below: Whole  # closures below are final
    kept: tuple[tuple[Whole, Whole], ...] = ()
    """(closure, run) of those below ``final_below`` that may come again, as in ``Finality``."""
    coordinator: Whole = 0  # whose closures these numbers are; 0: it is not known
    parts: tuple[tuple[Whole, Whole, Whole], ...] = ()
    """(closure, ordinal, parts of the update on all ps tasks) of each call that has several."""
    accumulators: tuple[tuple[Hex, Signed], ...]
    """(definition, global step) of each conditional accumulator: what is in them is not kept."""
    groups: tuple[tuple[Whole, dict[str, Any]], ...]
    """(number, configuration) of each synchronous group that is known here."""
    counted: tuple[tuple[Whole, Whole, Whole, Hex], ...]
    """On ps 0: (group, closure, ordinal, digest of its variables) of each call that was counted in
    a step that has been applied."""
    pending: tuple[Whole, ...] = ()
    """On ps 0: closures that were counted in a step that has not been applied."""
    failures: tuple[tuple[Text, Whole, Whole, Hex], ...] = ()
    """Of updates that failed while they were computed, by ``FailureKey``, what is answered."""

    @functools.cached_property
    def items(self) -> tuple[SnapshotItem, ...]:
        """Each shard's value, then its slots that exist; shard by shard."""
        return tuple(item for shard in self.shards for item in shard.items)

    @functools.cached_property
    def specs(self) -> dict[Key, ShardSpec]:
        """The shards, by their keys."""
        return {(shard.id, shard.index): shard.spec for shard in self.shards}

    @property
    def final(self) -> Finality:
        """Which closures are final."""
        return Finality(self.final_below, self.kept)

    @property
    def iterations(self) -> int:
        """The most updates that an optimizer has made."""
        return max(
            (rule_from_config(each.config).iteration(count_of(each.known))
             for each in self.optimizers),
            default=0,
        )  # fmt: skip

    def for_coordinator(self, coordinator: int) -> SnapshotState:
        """Return it without what it knows of another coordinator's closures and clients.

        Closures have the same numbers in each life of a program, and are others each time.
        """
        if self.coordinator in (0, coordinator):
            return self
        return replace(
            NOTHING, shards=self.shards, optimizers=self.optimizers, counts=self.counts,
            coordinator=coordinator, accumulators=self.accumulators, groups=self.groups,
        )  # fmt: skip

    def with_rates(self, optimizers: Sequence[NewOptimizer]) -> SnapshotState:
        """Return it with the learning rates that a program has set since."""
        rates = {each.number: (each.config, each.learning_rate) for each in optimizers}
        rated = []
        for held in self.optimizers:
            config, rate = rates.get(held.number, (None, {}))
            same = config == held.config
            rated.append(held._replace(learning_rate=dict(rate)) if same else held)
        return replace(self, optimizers=tuple(rated))

    def to_bytes(self) -> bytes:
        """Return the state as it is stored."""
        return to_json(self)

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
        state = read_json(data, cls, where, (FORMAT, VERSION))
        misfit = functools.partial(wrong, where)
        for what, keys in _unique(state):
            if len(keys) != len(set(keys)):
                raise misfit(what, "each once", f"{len(keys)} of {len(set(keys))}")
        counts = dict(state.counts)
        rules = {each.number: _rule_of(each, where) for each in state.optimizers}
        if unknown := counts.keys() - rules.keys():
            raise misfit("a count", "of an optimizer that is there", sorted(unknown))
        for each in state.optimizers:
            _check_count(counts.setdefault(each.number, PushCount(each.known).state), each, misfit)
        for shard in state.shards:
            _check_shard(shard, rules, misfit)
        for number, config in state.groups:
            try:
                SyncConfig.from_config(config)
            except (ConfigurationError, OverflowError) as exc:
                raise misfit(f"group {number}", f"what fits: {exc}", config) from exc
        for call in state.calls:
            if call[2] >= len(state.variable_sets):
                raise misfit("a call", "the place of a variable set", call)
        configured = (
            each._replace(config=rules[each.number].to_config()) for each in state.optimizers
        )
        return replace(state, optimizers=tuple(configured), counts=tuple(counts.items()))


NOTHING = SnapshotState(
    shards=(), optimizers=(), senders=(), variable_sets=(), calls=(), final_below=0,
    accumulators=(), groups=(), counted=(),
)  # fmt: skip


def described(config: Mapping[str, Any]) -> str:
    """Return an optimizer's configuration as text, for messages."""
    return ", ".join(f"{key}={value}" for key, value in config.items() if value not in (None, []))


# What a type does not say of a state.

_Misfit = Callable[[str, str, object], CheckpointCorrupt]


def _unique(state: SnapshotState) -> Iterator[tuple[str, Collection[object]]]:
    """Yield what must not be there twice: its name, and all that are there."""
    yield "a count", [number for number, _ in state.counts]
    yield "an optimizer", [each.number for each in state.optimizers]
    yield "a shard", [(each.id, each.index) for each in state.shards]
    yield "a group", [number for number, _ in state.groups]
    yield "a sender", [each.task for each in state.senders]
    yield "a call", [call[:2] for call in state.calls]
    for sender in state.senders:
        yield f"an answer to {sender.task}", [answer[0] for answer in sender.answers]
    for shard in state.shards:
        yield f"a slot of {shard.spec}", [slot[:2] for slot in shard.slots]
    for number, (*_, own, told) in state.counts:
        for rows in (own, told, *(row for _, row in told)):
            yield f"pushes of optimizer {number}", [row[0] for row in rows]


def _rule_of(optimizer: OptimizerSnapshot, where: str) -> UpdateRule:
    number, config, rate, _ = optimizer
    if unknown := unknown_in(config) or unknown_in({"learning_rate": rate}):
        raise ConfigurationError(
            f"{where}: optimizer {number} has the {unknown}, which is not known here",
            hint=OR_OWN.removeprefix("or "),
        )
    try:
        schedules.from_config(rate)
        return rule_from_config(config)
    except (ConfigurationError, OverflowError) as exc:
        raise wrong(where, f"optimizer {number}", f"what fits: {exc}", config) from exc


def _check_count(count: CountState, optimizer: OptimizerSnapshot, misfit: _Misfit) -> None:
    """Check a count. The number of ps tasks is not known here, so indexes are not bounded."""
    made = PushCount.of(count)
    most = max(
        made.known, sum(made.own.values()), *(sum(row.values()) for row in made.told.values())
    )
    what = f"pushes of optimizer {optimizer.number}"
    if most >= 1 << STEP_BITS:
        raise misfit(what, f"sums below {1 << STEP_BITS}", most)
    if made.marked != optimizer.known:
        raise misfit(what, f"{optimizer.known}, as beside its configuration", made.marked)


def _check_shard(shard: ShardSnapshot, rules: dict[int, UpdateRule], misfit: _Misfit) -> None:
    spec = shard.spec
    try:
        nbytes = spec.nbytes
    except PartitionError as exc:
        raise misfit(f"dtype of {spec.variable!r}", exc.message, spec.dtype) from exc
    if nbytes > MAX_ITEM_BYTES:
        raise misfit(f"shape of a shard of {spec.variable!r}", "what fits a machine", spec.shape)
    for slot in shard.slots:
        if slot[0] not in rules or slot[1] not in rules[slot[0]].slot_names():
            raise misfit(f"a slot of {spec}", "one that its optimizer has", slot)
    try:
        items = shard.items
    except ValueMismatchError as exc:
        raise misfit(f"a slot of {spec}", f"none: {exc.message}", shard.slots[0]) from exc
    for item in items:
        fill = item.fill
        if fill is None:
            continue
        if len(fill) != dtype_of(item.dtype).itemsize or (item.dtype == "bool" and fill[0] > 1):
            what = f"the element of {f'slot {item.slot!r} of ' if item.slot else ''}{spec}"
            raise misfit(what, f"one of {item.dtype}", fill.hex())
    for push in shard.pushes:
        if push[0] not in rules:
            raise misfit(f"pushes to {spec}", "of an optimizer that is there", push)


# Messages in a state.


def pack_answer(answer: object) -> bytes | None:
    """Return how a snapshot keeps the answer to an update; None: it does not."""
    return encode(answer) if isinstance(answer, Pushed) else None


def unpack_answer(data: bytes) -> Pushed:
    """Return what ``pack_answer`` packed.

    Raises:
        CheckpointCorrupt: It is no such answer.
    """
    return unpack(data, Pushed, "an answer")


def unpack(data: bytes, kind: type[M], what: str) -> M:
    """Return a message that a snapshot has kept.

    Raises:
        CheckpointCorrupt: It is no such message; ``what`` is its name there.
    """
    try:
        message = decode(data)
    except RemoteProtocolError as exc:
        raise CheckpointCorrupt(f"{what} in a snapshot is damaged: {exc.message}") from exc
    if not isinstance(message, kind):
        raise CheckpointCorrupt(f"{what} in a snapshot is a {type(message).__name__}")
    return message
