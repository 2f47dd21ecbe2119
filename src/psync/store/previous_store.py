"""The previous store of a ps: shards and optimizers of earlier programs, to be adopted or dropped.

Shards and optimizers move as they are, with their blocks, slots and steps: nothing is copied. A
shard may be adopted before the optimizers whose slots lie beside it; these slots wait.
"""

from __future__ import annotations

import dataclasses

from psync.errors import PartitionError, UnknownVariableError, UsageError
from psync.numerics.memory import BlockArray
from psync.store.ledger import Ledger
from psync.store.reattach import (
    HeldOptimizer,
    HeldUpdates,
    Holding,
    Identity,
    Orders,
    Place,
)
from psync.store.shards import Optimizer
from psync.store.store import ShardStore
from psync.store.work import Shard


@dataclasses.dataclass(slots=True)
class _Beside:
    """What an optimizer keeps beside a shard."""

    slots: dict[str, BlockArray] = dataclasses.field(default_factory=dict)
    pushes: int | None = None  # that are accumulated, if the optimizer does so


class FormerStore:
    """What nobody has adopted yet. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages.
    """

    def __init__(self, task: str) -> None:
        self.lineage = 0  # of what is held here and in the store; see ``reattach``
        self._task = task
        self._shards: dict[Place, Shard] = {}
        self._beside: dict[Place, dict[Identity, _Beside]] = {}  # also of adopted shards
        self._adopted: dict[Place, Shard] = {}  # with something in ``_beside``
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
            beside = self._beside.setdefault(place, {})  # with what still waits
            for (number, name), slot in shard.slots.items():
                beside.setdefault((lineage, number), _Beside()).slots[name] = slot
            for number, count in shard.pushes.items():
                beside.setdefault((lineage, number), _Beside()).pushes = count
            shard.slots, shard.pushes = {}, {}

    def describe(self) -> Holding:
        """Return what is here."""
        with_slots = {identity for beside in self._beside.values() for identity in beside}
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
            self._beside.pop(place, None)
        for name, index, variable_id in orders.shards:
            shard = self._shards.pop((name, index), None)
            if shard is not None:
                shard.spec = dataclasses.replace(shard.spec, variable_id=variable_id)
                store.take_up(shard)
                self._adopted[name, index] = shard
        for lineage, old, new in orders.optimizers:
            optimizer = self._optimizers.pop((lineage, old), None)
            if optimizer is not None:
                store.take_up_optimizer(new, optimizer)
                self._numbers[lineage, old] = new
        for place, shard in self._adopted.items():
            self._put_beside(shard, self._beside.get(place, {}))

    def drop(self) -> None:
        """Drop all that is here."""
        self._shards.clear()
        self._beside.clear()
        self._adopted.clear()
        self._optimizers.clear()
        self._updates.clear()

    def _put_beside(self, shard: Shard, waiting: dict[Identity, _Beside]) -> None:
        """Give a shard the slots of the optimizers that are adopted."""
        for identity in [identity for identity in waiting if identity in self._numbers]:
            number, beside = self._numbers[identity], waiting.pop(identity)
            for name, slot in beside.slots.items():
                shard.slots[number, name] = slot
            if beside.pushes is not None:
                shard.pushes[number] = beside.pushes

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
