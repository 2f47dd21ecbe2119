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

Then *progress* says whether there is anything to go on with: an update of any shard since these
were made. Those of a restore are none, and once one has begun that has not ended, the values are a
mixture. In both cases the program starts as if the ps tasks held nothing.

On a ps (``FormerStore``), shards and optimizers move as they are, with their blocks, slots and
steps: nothing is copied. A shard may be adopted before the optimizers whose slots it has; these
slots wait.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

from psync.errors import AttachError, PartitionError
from psync.specs import ShardSpec, VariableSpec
from psync.store.ledger import HeldUpdates, Ledger
from psync.store.shards import Optimizer
from psync.store.snapshot_state import NewOptimizer, described
from psync.store.store import ShardStore
from psync.store.untrusted_json import Text, Whole
from psync.store.work import Shard
from psync.wire.closure_numbers import Finality, call_of


class Progress(IntEnum):
    """How far values have come; of several stores, or ps tasks, the highest counts."""

    INITIAL = 0  # nothing was updated since they were made, or restored
    UPDATED = 1
    TORN = 2  # a restore has begun, and not ended


Identity = tuple[Whole, Whole]
"""An optimizer: (lineage in which it was made known, its number then); the same on all ps tasks."""

BACK = "pass attach=False to start again from the last checkpoint"


class HeldOptimizer(NamedTuple):
    """An optimizer that nobody has adopted, and with which something would be lost."""

    identity: Identity
    config: dict[str, Any]
    learning_rate: dict[str, Any]  # config of the schedule that it has now


class Holding(NamedTuple):
    """What one ps holds that nobody has adopted."""

    lineage: Whole  # 0: none
    shards: tuple[ShardSpec, ...] = ()  # as the earlier program had them
    optimizers: tuple[HeldOptimizer, ...] = ()
    updates: tuple[HeldUpdates, ...] = ()  # one for each coordinator; since shards were adopted
    progress: Whole = Progress.INITIAL


class Orders(NamedTuple):
    """What all ps tasks are to do, each with what it holds of it."""

    adopted: tuple[tuple[Text, Whole], ...] = ()  # (name, id of the variable from now on)
    dropped: tuple[Text, ...] = ()  # names of variables
    optimizers: tuple[tuple[Identity, Whole], ...] = ()  # (identity, number from now on)


class Decision(NamedTuple):
    """What follows from a comparison."""

    orders: Orders
    missing: list[VariableSpec]  # that are to be created
    extra: list[str]  # names of variables that will be dropped


class Adoption:
    """What has not been adopted yet, of all ps tasks. Single owner; never blocks.

    Args:
        holdings: Of each ps.

    Raises:
        AttachError: Some ps tasks hold variables, and others have lost their part.
    """

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._shards: dict[str, list[ShardSpec]] = defaultdict(list)
        self._optimizers: dict[Identity, HeldOptimizer] = {}
        self._users: dict[Identity, list[int]] = defaultdict(list)  # the ps tasks that hold it
        _check_lives(holdings)
        for ps, holding in enumerate(holdings):
            for shard in holding.shards:
                self._shards[shard.variable].append(shard)
            for optimizer in holding.optimizers:
                self._optimizers[optimizer.identity] = optimizer
                self._users[optimizer.identity].append(ps)

    def rate_of(self, identity: Identity) -> Mapping[str, Any]:
        """Return the learning rate that an optimizer has now, as the config of a schedule."""
        return self._optimizers[identity].learning_rate

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
        misfits: list[str] = []
        adopted, dropped, missing = list[tuple[str, int]](), list[str](), list[VariableSpec]()
        for spec in declared:
            held = self._shards.get(spec.name, [])
            if not {replace(each, variable_id=spec.variable_id) for each in held} <= {*spec.shards}:
                misfits.append(f"{_declared(spec)}; the ps tasks hold {_held(held)}")
            elif len(held) == len(spec.shards):
                adopted.append((spec.name, spec.variable_id))
            else:
                missing.append(spec)
                if held:
                    dropped.append(spec.name)
        matched = self._match(optimizers, misfits, last=last)
        if misfits:
            lines = "".join(f"\n  {misfit}" for misfit in misfits)
            raise AttachError(
                "the program does not match the variables on the ps tasks; nothing was "
                f"changed:{lines}",
                hint=f"declare the same variables as the previous program; or {BACK}",
            )
        orders = Orders(tuple(adopted), tuple(dropped), tuple(matched.items()))
        extra = self._shards.keys() - {spec.name for spec in declared} if last else ()
        return Decision(orders, missing, sorted(extra))

    def done(self, orders: Orders) -> None:
        """All ps tasks have done this; what is left at last is no more."""
        for name in (*dict(orders.adopted), *orders.dropped):
            del self._shards[name]
        for identity, _ in orders.optimizers:
            del self._optimizers[identity]

    def _match(
        self, optimizers: Sequence[NewOptimizer], misfits: list[str], *, last: bool
    ) -> dict[Identity, int]:
        """Return which optimizer is which; what is left is a misfit, at last."""
        groups: dict[str, list[HeldOptimizer]] = defaultdict(list)
        for held in self._optimizers.values():
            groups[_key(held.config)].append(held)
        matched: dict[Identity, int] = {}
        for key, olds in groups.items():
            news = [new for new in optimizers if _key(new.config) == key]
            by_number: dict[int, list[HeldOptimizer]] = defaultdict(list)
            for held in olds:
                by_number[held.identity[1]].append(held)
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
        users = [ps for held in olds for ps in self._users[held.identity]]
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


def _declared(spec: VariableSpec) -> str:
    places = ", ".join(f"{shard.shape} on ps {shard.ps}" for shard in spec.shards[:4])
    more = ", …" if len(spec.shards) > 4 else ""
    return f'variable "{spec.name}" declared at {spec.declared_at}: {spec.dtype} {places}{more}'


def _held(held: Sequence[ShardSpec]) -> str:
    ordered = sorted(held, key=lambda shard: shard.index)
    places = ", ".join(f"{shard.dtype} {shard.shape} on ps {shard.ps}" for shard in ordered[:4])
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

    An optimizer that nobody has adopted has a number below 0 here. Shards have its slots and counts
    under that, whether they are adopted or not.

    Args:
        task: Name of the ps, for messages.
    """

    def __init__(self, task: str) -> None:
        self.lineage = 0  # of what is held here and in the store; see ``reattach``
        self._task = task
        self._shards: dict[tuple[str, int], Shard] = {}  # by variable and index
        self._optimizers: dict[int, tuple[Identity, Optimizer]] = {}
        self._numbers = itertools.count(-1, -1)
        self._updates: dict[int, HeldUpdates] = {}  # by the incarnation of their coordinator
        self._progress = Progress.INITIAL

    def take(self, store: ShardStore, ledger: Ledger, lineage: int, progress: Progress) -> None:
        """Take over all that a store holds; what was here and not adopted stays.

        Args:
            store: Is empty afterwards.
            ledger: Of the updates of the store.
            lineage: Incarnation of the coordinator under which its optimizers had their numbers.
            progress: Of the store.
        """
        self._progress = max(self._progress, progress)
        shards, optimizers = store.release()
        if lineage:  # else there was none
            self._updates[lineage] = ledger.held_updates(lineage)
        self._shards.update({(each.spec.variable, each.spec.index): each for each in shards})
        with_slots = {number for shard in self._shards.values() for number, _ in shard.slots}
        aside = {}
        for number, optimizer in optimizers.items():
            if number in with_slots or _was_used(optimizer):
                aside[number] = next(self._numbers)
                self._optimizers[aside[number]] = (lineage, number), optimizer
        _renumber(self._shards.values(), aside)

    def describe(self) -> Holding:
        """Return what is here."""
        optimizers = tuple(
            HeldOptimizer(identity, each.config, each.rule.learning_rate.to_config())
            for identity, each in self._optimizers.values()
        )
        shards = tuple(shard.spec for shard in self._shards.values())
        updates = tuple(self._updates.values())
        return Holding(self.lineage, shards, optimizers, updates, self._progress)

    def adopt(self, orders: Orders, store: ShardStore) -> None:
        """Do what was decided, all of it or nothing; what was done before changes nothing.

        Args:
            orders: What was decided.
            store: Gets what is adopted.

        Raises:
            PartitionError: The program has another variable of that number already.
        """
        adopted, numbers = dict(orders.adopted), dict(orders.optimizers)
        for name, index in self._shards:
            key = adopted.get(name, -1), index
            if key in store.shards():
                raise PartitionError(
                    f'{self._task} cannot adopt shard {index} of "{name}" as variable {key[0]}, '
                    f'which is "{store.spec(key).variable}"'
                )
        for place in [each for each in self._shards if each[0] in {*adopted, *orders.dropped}]:
            shard = self._shards.pop(place)
            if place[0] in adopted:
                shard.spec = replace(shard.spec, variable_id=adopted[place[0]])
                store.take_up(shard)
        found = {}
        for aside, (identity, optimizer) in self._optimizers.items():
            if identity in numbers:
                found[aside] = numbers[identity]
                store.take_up_optimizer(numbers[identity], optimizer)
        for aside in found:
            del self._optimizers[aside]
        _renumber((*self._shards.values(), *store.shards().values()), found)

    def drop(self, store: ShardStore) -> None:
        """Drop all that is here, and what the shards of the store have of it."""
        for shard in store.shards().values():
            shard.slots = {at: slot for at, slot in shard.slots.items() if at[0] >= 0}
            shard.pushes = {number: each for number, each in shard.pushes.items() if number >= 0}
        self._shards.clear()
        self._optimizers.clear()
        self._updates.clear()
        self._progress = Progress.INITIAL


def _was_used(optimizer: Optimizer) -> bool:
    """Return whether anything would be lost with an optimizer, beside slots.

    Of one that is known here by hearsay alone, since its adoption had not come so far, the real one
    waits, and the others tell their counts again.
    """
    count = optimizer.count
    if count.is_hearsay and count.elsewhere:
        return False
    rate = optimizer.rule.learning_rate.to_config()
    return count.known > 0 or rate != optimizer.config.get("learning_rate")


def _renumber(shards: Iterable[Shard], numbers: Mapping[int, int]) -> None:
    """Let optimizers have other numbers in all that shards have of them."""
    for shard in shards:
        for old, name in [at for at in shard.slots if at[0] in numbers]:
            shard.slots[numbers[old], name] = shard.slots.pop((old, name))
        for old in numbers.keys() & shard.pushes.keys():
            shard.pushes[numbers[old]] = shard.pushes.pop(old)
