"""Reattachment: matching what ps tasks still hold with what the new program declares.

Variables are known by their names, optimizers by their configurations: the numbers that the wire
has for both are each program's own. Nothing is decided for one ps alone: all say what they hold,
then it is clear what fits, and then each is told what to do.

    what is declared          what the ps tasks hold         then
    a variable                the same shards in the same    they are adopted
                              places
                              some of them                   its program died while it was created:
                                                             they are dropped, it is created
                              none                           it is created
                              something else                 AttachError, which names all such
    an optimizer              one of that configuration      its steps, rate and slots are adopted
                              several                        by their numbers, if these are the
                                                             same; else AttachError
    nothing                   a variable                     it is dropped, at last
                              an optimizer that was used     AttachError, at last

All ps tasks must have the same *lineage*: the incarnation of the coordinator under which the store
began, or was rolled back to a cut. A ps that was restarted since then has lost its part, whatever
the others hold: its lineage is 0. So is that of a ps that was rolled back by a program that died
before it got the RollbackEvent, and of ps 0 if a step that it had decided could not be applied
everywhere. "Never created" and "lost" are told apart by this: the first is created, the second is
an AttachError.

On a ps (``FormerStore``), shards and optimizers move as they are, with their blocks, slots and
steps: nothing is copied. A shard may be adopted before the optimizers whose slots lie beside it;
these slots wait.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from psync.errors import AttachError, PartitionError, UnknownVariableError, UsageError
from psync.numerics.memory import BlockArray
from psync.specs import ShardSpec, VariableSpec
from psync.store.ledger import HeldUpdates, Ledger
from psync.store.shards import Optimizer
from psync.store.snapshot_state import NewOptimizer, described
from psync.store.store import ShardStore
from psync.store.untrusted_json import Text, Whole
from psync.store.work import Shard
from psync.wire.closure_numbers import Finality, call_of

Place = tuple[Text, Whole]
"""A shard: (name of the variable, index of the shard)."""

Identity = tuple[Whole, Whole]
"""An optimizer: (lineage in which it was made known, its number then); the same on all ps tasks."""

BACK = "pass attach=False to start again from the last checkpoint"


class HeldOptimizer(NamedTuple):
    """An optimizer that nobody has adopted."""

    identity: Identity
    config: dict[str, Any]
    learning_rate: dict[str, Any]  # config of the schedule that it has now
    was_used: bool  # anything would be lost with it


class Holding(NamedTuple):
    """What one ps holds that nobody has adopted."""

    lineage: Whole  # 0: none
    shards: tuple[ShardSpec, ...] = ()  # as the earlier program had them
    optimizers: tuple[HeldOptimizer, ...] = ()
    updates: tuple[HeldUpdates, ...] = ()  # one for each coordinator; since shards were adopted


class Orders(NamedTuple):
    """What one ps is to do with what it holds; all of it or nothing."""

    shards: tuple[
        tuple[Text, Whole, Whole], ...
    ] = ()  # (name, index, id of the variable from now on)
    dropped: tuple[Place, ...] = ()
    optimizers: tuple[tuple[Whole, Whole, Whole], ...] = ()  # (*identity, number from now on)


@dataclass(slots=True)
class Decision:
    """What follows from a comparison."""

    orders: list[Orders]  # for each ps
    adopted: list[VariableSpec] = field(default_factory=list)
    missing: list[VariableSpec] = field(default_factory=list)  # that are to be created
    extra: list[str] = field(default_factory=list)  # names of variables that will be dropped
    optimizers: dict[Identity, int] = field(default_factory=dict)  # adopted: number from now on


class Adoption:
    """What has not been adopted yet, of all ps tasks. Single owner; never blocks.

    Args:
        holdings: Of each ps.

    Raises:
        AttachError: Some ps tasks hold variables, and others have lost their part.
    """

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._num_ps = len(holdings)
        self._shards: dict[str, list[tuple[int, ShardSpec]]] = defaultdict(list)
        # By ps, as that knows it. Where it was not used, it may be as it was made.
        self._optimizers: dict[Identity, dict[int, HeldOptimizer]] = defaultdict(dict)
        _check_lives(holdings)
        for ps, holding in enumerate(holdings):
            for shard in holding.shards:
                self._shards[shard.variable].append((ps, shard))
            for optimizer in holding.optimizers:
                self._optimizers[optimizer.identity][ps] = optimizer

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing: no program has got so far as to create a variable."""
        return not self._shards

    def rate_of(self, identity: Identity) -> Mapping[str, Any]:
        """Return the learning rate that an optimizer has now, as the config of a schedule."""
        *_, held = self._used(identity).values()
        return held.learning_rate

    def _used(self, identity: Identity) -> dict[int, HeldOptimizer]:
        return {ps: held for ps, held in self._optimizers[identity].items() if held.was_used}

    def compare(
        self,
        declared: Sequence[VariableSpec],
        optimizers: Sequence[NewOptimizer],
        *,
        last: bool,
    ) -> Decision:
        """Return what to do for these; nothing is noted yet, see ``done``.

        Args:
            declared: Variables that are not created yet.
            optimizers: All that the present program has, and that have adopted nothing yet.
            last: Whether no others are to come, and what is left is dropped.

        Raises:
            AttachError: Something does not fit; names all of it.
        """
        decision = Decision([])
        misfits: list[str] = []
        shards: list[list[tuple[str, int, int]]] = [[] for _ in range(self._num_ps)]
        dropped: list[list[Place]] = [[] for _ in range(self._num_ps)]
        for spec in declared:
            held = self._shards.get(spec.name, [])
            fits = [_fits(each, spec.shards) for each in held]
            if not all(fits):
                misfits.append(f"{_declared(spec)}; the ps tasks hold {_held(held)}")
            elif len(held) == len(spec.shards):
                decision.adopted.append(spec)
                for ps, shard in held:
                    shards[ps].append((spec.name, shard.index, spec.variable_id))
            else:
                decision.missing.append(spec)
                for ps, shard in held:
                    dropped[ps].append((shard.variable, shard.index))
        decision.optimizers = self._match(optimizers, misfits, last=last)
        if misfits:
            lines = "".join(f"\n  {misfit}" for misfit in misfits)
            raise AttachError(
                "the program does not match the variables on the ps tasks; nothing was "
                f"changed:{lines}",
                hint=f"declare the same variables as the previous program; or {BACK}",
            )
        if last:
            decision.extra = sorted(self._shards.keys() - {spec.name for spec in declared})
        times = Counter(decision.optimizers.values())
        for ps in range(self._num_ps):
            numbers = tuple(
                (*identity, number)
                for identity, number in decision.optimizers.items()
                if ps in self._used(identity)
                or (times[number] == 1 and ps in self._optimizers[identity])
            )
            decision.orders.append(Orders(tuple(shards[ps]), tuple(dropped[ps]), numbers))
        return decision

    def done(self, decision: Decision) -> None:
        """All ps tasks have done what was decided."""
        known = [spec.name for spec in (*decision.adopted, *decision.missing)]
        for name in known + decision.extra:
            self._shards.pop(name, None)
        for identity in decision.optimizers:
            del self._optimizers[identity]

    def _match(
        self, optimizers: Sequence[NewOptimizer], misfits: list[str], *, last: bool
    ) -> dict[Identity, int]:
        """Return which optimizer is which; what is left is a misfit, at last."""
        groups: dict[str, tuple[list[HeldOptimizer], list[NewOptimizer]]] = {}
        for identity in self._optimizers:
            if used := self._used(identity):
                *_, held = used.values()
                groups.setdefault(_key(held.config), ([], []))[0].append(held)
        for new in optimizers:
            if (group := groups.get(_key(new.config))) is not None:
                group[1].append(new)
        matched: dict[Identity, int] = {}
        for olds, news in groups.values():
            by_number: dict[int, list[HeldOptimizer]] = {}
            for held in olds:
                by_number.setdefault(held.identity[1], []).append(held)
            if len(news) == 1 and self._are_one(olds):
                matched.update({held.identity: news[0].number for held in olds})
            elif by_number.keys() == {new.number for new in news} and all(
                map(self._are_one, by_number.values())
            ):
                matched.update({held.identity: held.identity[1] for held in olds})
            elif last:
                misfits.append(_unmatched(olds, news, optimizers))
        return matched

    def _are_one(self, olds: Sequence[HeldOptimizer]) -> bool:
        """Whether these are one optimizer, which some ps tasks had adopted when a program died."""
        users = [ps for held in olds for ps in self._used(held.identity)]
        lineages = {held.identity[0] for held in olds}
        return len(olds) == 1 or (len(users) == len(set(users)) and len(lineages) == len(olds))


def partial_updates(holdings: Sequence[Holding]) -> int:
    """Return how many updates some of their ps tasks have applied, and others will never apply.

    Args:
        holdings: Of each ps.
    """
    lives: dict[int, dict[int, HeldUpdates]] = defaultdict(dict)  # by coordinator, by ps
    for ps, holding in enumerate(holdings):
        for held in holding.updates:
            lives[held.coordinator][ps] = held
    return sum(
        _partial_calls(life.values()) + _partial_messages(life)
        for life in lives.values()
        if len(life) == len(holdings)  # else it was over when a program adopted all, and counted
    )


def _partial_calls(life: Collection[HeldUpdates]) -> int:
    finals = [Finality(held.final_below, held.kept) for held in life]
    messages = Counter(
        (closure, call_of(ordinal), parts)
        for held in life
        for closure, ordinal, parts in held.calls
    )
    return sum(
        1
        for (closure, _, parts), found in messages.items()
        # When one ps has forgotten a closure, all its updates have ended.
        if found < parts and not any(final.is_over(closure) for final in finals)
    )


def _partial_messages(life: Mapping[int, HeldUpdates]) -> int:
    acked = {
        (ps, task, incarnation): below
        for ps, held in life.items()
        for task, incarnation, below in held.acked
    }
    known = {
        (ps, task, incarnation, sequence): others
        for ps, held in life.items()
        for task, incarnation, sequence, others in held.messages
    }
    partial = set()  # each by its first part
    for first, others in known.items():
        parts = [first, *((ps, *first[1:3], sequence) for ps, sequence in others)]
        if any(part not in known and part[3] >= acked.get(part[:3], 0) for part in parts):
            partial.add(min(parts))
    return len(partial)


def _check_lives(holdings: Sequence[Holding]) -> None:
    """Raise AttachError if what the ps tasks hold is not of one piece."""
    lives = {holding.lineage for holding in holdings if holding.shards}
    if not lives:
        return
    began = min(lives - {0}, default=0)
    others = [(ps, holding) for ps, holding in enumerate(holdings) if holding.lineage != began]
    lost = [f"/job:ps/task:{ps}" for ps, holding in others if holding.lineage or not holding.shards]
    if lost:
        raise AttachError(
            f"cannot attach to living variables: {', '.join(lost)} has lost its shards, because it "
            "was restarted or another program has started there, while other ps tasks still hold "
            "theirs",
            hint=BACK,
        )
    if 0 in lives:
        half = [f"/job:ps/task:{ps}" for ps, holding in enumerate(holdings) if not holding.lineage]
        raise AttachError(
            f"cannot attach to living variables: the shards of {', '.join(half)} may be "
            "inconsistent, because the earlier program died during a rollback, or after a "
            "synchronous step was not applied on all ps tasks, or because the ps was restarted",
            hint=BACK,
        )


def _fits(held: tuple[int, ShardSpec], shards: Sequence[ShardSpec]) -> bool:
    ps, shard = held
    if not 0 <= shard.index < len(shards):
        return False
    spec = shards[shard.index]
    return (ps, shard.offset, shard.shape, shard.dtype) == (
        spec.ps, spec.offset, spec.shape, spec.dtype,
    )  # fmt: skip


def _declared(spec: VariableSpec) -> str:
    places = ", ".join(f"{shard.shape} on ps {shard.ps}" for shard in spec.shards[:4])
    more = ", …" if len(spec.shards) > 4 else ""
    return f'variable "{spec.name}" declared at {spec.declared_at}: {spec.dtype} {places}{more}'


def _held(held: Sequence[tuple[int, ShardSpec]]) -> str:
    ordered = sorted(held, key=lambda each: each[1].index)
    places = ", ".join(f"{shard.dtype} {shard.shape} on ps {ps}" for ps, shard in ordered[:4])
    return places + (", …" if len(ordered) > 4 else "")


def _unmatched(
    olds: Sequence[HeldOptimizer], news: Sequence[NewOptimizer], optimizers: Sequence[NewOptimizer]
) -> str:
    what = described(olds[0].config)
    numbers = ", ".join(str(held.identity[1]) for held in olds)
    if news:
        these = ", ".join(f'"{new.name}" (number {new.number})' for new in news)
        return (
            f"{len(olds)} optimizers {what} were used (numbers {numbers}), and the program has "
            f"{len(news)} of that configuration: {these}; which is which cannot be told"
        )
    others = "; ".join(map(str, optimizers)) or "no other optimizer"
    return f"optimizer {numbers}, {what}, was used, and the program has none like it, but {others}"


def _key(config: Mapping[str, Any]) -> str:
    """Return what is the same for equal configurations, also if one has travelled."""
    return json.dumps(config, sort_keys=True)


# On one ps.


class FormerStore:
    """What nobody has adopted yet. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages.
    """

    def __init__(self, task: str) -> None:
        self.lineage = 0  # of what is held here and in the store; see ``reattach``
        self._task = task
        self._shards: dict[Place, Shard] = {}
        self._adopted: dict[Place, Shard] = {}
        # Of both, for optimizers that are not adopted.
        self._slots: dict[tuple[Place, Identity, str], BlockArray] = {}
        self._pushes: dict[tuple[Place, Identity], int] = {}  # that are accumulated
        self._optimizers: dict[Identity, Optimizer] = {}
        self._numbers: dict[Identity, int] = {}  # of those that were adopted
        self._updates: dict[int, HeldUpdates] = {}  # by the incarnation of their coordinator

    def take(self, store: ShardStore, ledger: Ledger, lineage: int) -> None:
        """Take over all that a store holds; what was here and not adopted stays.

        Args:
            store: Is empty afterwards.
            ledger: Of the updates of the store.
            lineage: Incarnation of the coordinator under which its optimizers had their numbers.
        """
        shards, optimizers = store.release()
        self._numbers.clear()
        self._adopted.clear()
        if lineage:  # else there was none
            self._updates[lineage] = ledger.held_updates(lineage)
        used = {number for shard in shards for number, _ in shard.slots}
        for number, optimizer in optimizers.items():
            # Of one that is known here by hearsay alone, since its adoption had not come so far,
            # the real one waits, and the others tell their counts again.
            if number in used or not optimizer.count.is_hearsay or not optimizer.count.elsewhere:
                self._optimizers[lineage, number] = optimizer
        for shard in shards:
            place = (shard.spec.variable, shard.spec.index)
            self._shards[place] = shard
            for (number, name), slot in shard.slots.items():
                self._slots[place, (lineage, number), name] = slot
            for number, count in shard.pushes.items():
                self._pushes[place, (lineage, number)] = count
            shard.slots, shard.pushes = {}, {}

    def describe(self) -> Holding:
        """Return what is here."""
        with_slots = {at[1] for at in (*self._slots, *self._pushes)}
        held = []
        for identity, each in self._optimizers.items():
            rate = each.rule.learning_rate.to_config()
            was_set = rate != each.config.get("learning_rate")
            was_used = each.count.known > 0 or was_set or identity in with_slots
            held.append(HeldOptimizer(identity, each.config, rate, was_used))
        shards = tuple(shard.spec for shard in self._shards.values())
        return Holding(self.lineage, shards, tuple(held), tuple(self._updates.values()))

    def adopt(self, orders: Orders, store: ShardStore) -> None:
        """Do what was decided, all of it or nothing; what was done before changes nothing.

        Args:
            orders: What was decided.
            store: Gets what is adopted.

        Raises:
            UnknownVariableError: A shard is not here.
            PartitionError: The program has another variable of that number already.
            UsageError: An optimizer is not here.
        """
        self._check(orders, store)
        for place in orders.dropped:
            self._shards.pop(place, None)
        dropped = set(orders.dropped)
        self._slots = {at: slot for at, slot in self._slots.items() if at[0] not in dropped}
        self._pushes = {at: count for at, count in self._pushes.items() if at[0] not in dropped}
        for name, index, variable_id in orders.shards:
            shard = self._shards.pop((name, index), None)
            if shard is not None:
                shard.spec = replace(shard.spec, variable_id=variable_id)
                store.take_up(shard)
                self._adopted[name, index] = shard
        for lineage, old, new in orders.optimizers:
            optimizer = self._optimizers.pop((lineage, old), None)
            if optimizer is not None:
                store.take_up_optimizer(new, optimizer)
                self._numbers[lineage, old] = new
        adopted, numbers = self._adopted, self._numbers
        for at in [at for at in self._slots if at[0] in adopted and at[1] in numbers]:
            place, identity, name = at
            adopted[place].slots[numbers[identity], name] = self._slots.pop(at)
        for each in [at for at in self._pushes if at[0] in adopted and at[1] in numbers]:
            place, identity = each
            adopted[place].pushes[numbers[identity]] = self._pushes.pop(each)

    def drop(self) -> None:
        """Drop all that is here."""
        self._shards.clear()
        self._slots.clear()
        self._pushes.clear()
        self._adopted.clear()
        self._optimizers.clear()
        self._updates.clear()

    def _check(self, orders: Orders, store: ShardStore) -> None:
        names = {key: store.spec(key).variable for key in store.keys()}
        for name, index, variable_id in orders.shards:
            there = names.get((variable_id, index))
            if (name, index) in self._shards:
                if there is not None:
                    raise PartitionError(
                        f'{self._task} cannot adopt shard {index} of "{name}" as variable '
                        f'{variable_id}, which is "{there}"'
                    )
            elif there != name:
                raise UnknownVariableError(
                    f'{self._task} holds no shard {index} of a variable "{name}" that could be '
                    "adopted"
                )
        for lineage, old, new in orders.optimizers:
            if (lineage, old) not in self._optimizers and self._numbers.get((lineage, old)) != new:
                raise UsageError(
                    f"{self._task} knows no optimizer {old} of {lineage} that could be adopted"
                )
