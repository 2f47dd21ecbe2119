"""Shards, slots and optimizers go from one program to the next as they are."""

from __future__ import annotations

import numpy as np
import pytest

from psync.errors import PartitionError
from psync.numerics.rules import Adam, RuleOptions
from psync.schedules import Constant
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.reattach import FormerStore, Orders, Progress
from psync.store.snapshot import freeze
from psync.store.snapshot_state import NOTHING
from psync.store.store import ShardStore

TASK = "/job:ps/task:0"
ADAM = Adam(0.1).to_config()


def spec(name: str, number: int, index: int = 0) -> ShardSpec:
    return ShardSpec(name, number, index, index * 2, (2,), "float32", 0)


def store_of(*names: str) -> ShardStore:
    store = ShardStore(TASK)
    for number, name in enumerate(names):
        store.create(spec(name, number), np.full(2, number, np.float32))
    return store


def push(store: ShardStore, number: int, optimizer: int = 1) -> None:
    step = store.begin_push(optimizer, 0)
    for _ in store.apply_checked(optimizer, (number, 0), np.ones(2, np.float32), step):
        pass


def value(store: ShardStore, number: int) -> list[float]:
    return list(np.frombuffer(b"".join(store.read((number, 0))), np.float32))


def slot(store: ShardStore, number: int, optimizer: int, name: str = "m") -> list[float]:
    return list(np.frombuffer(b"".join(store.read_slot((number, 0), optimizer, name)), np.float32))


def former_of(store: ShardStore, life: int = 5) -> FormerStore:
    former = FormerStore(TASK)
    former.take(store, Ledger(), life, Progress.UPDATED)
    former.lineage = life
    return former


def test_values_slots_steps_and_rates_are_adopted_under_new_numbers() -> None:
    old = store_of("w", "b")
    old.define_optimizer(1, ADAM)
    push(old, 0)
    push(old, 0)
    old.set_learning_rate(1, Constant(0.5).to_config())
    before, momentum, version = value(old, 0), slot(old, 0, 1), old.version((0, 0))
    former = former_of(old)
    assert old.keys() == []
    new = ShardStore(TASK)
    former.adopt(Orders((("w", 3), ("b", 0)), (), (((5, 1), 7),)), new)
    assert new.keys() == [(3, 0), (0, 0)]
    assert str(new.spec((3, 0))) == '"w/part_0"'
    assert value(new, 3) == before
    assert slot(new, 3, 7) == momentum
    assert new.version((3, 0)) == version
    assert new.push_count(7).marked == 2
    assert new.rule(7).learning_rate == Constant(0.5)
    new.define_optimizer(7, ADAM)  # as the program's first push does it
    assert former.describe().shards == former.describe().optimizers == ()


def test_what_is_held_is_described() -> None:
    old = store_of("w", "b")
    old.define_optimizer(1, ADAM)
    old.define_optimizer(2, ADAM)
    push(old, 0)
    holding = former_of(old).describe()
    assert holding.lineage == 5
    assert [(shard.variable, shard.index, shard.shape) for shard in holding.shards] == [
        ("w", 0, (2,)),
        ("b", 0, (2,)),
    ]
    assert [held.identity for held in holding.optimizers] == [(5, 1)], "the other was not used"


def test_a_learning_rate_that_was_set_is_use_and_so_are_slots_and_pushes() -> None:
    old = store_of("w")
    for number in range(1, 5):
        old.define_optimizer(number, ADAM)
    push(old, 0)
    old.set_learning_rate(2, Constant(0.5).to_config())
    old.set_count(3, 1)
    held = former_of(old).describe().optimizers
    assert [each.identity for each in held] == [(5, 1), (5, 2), (5, 3)]


def test_slots_wait_for_their_optimizer() -> None:
    old = store_of("w")
    old.define_optimizer(1, ADAM)
    push(old, 0)
    momentum = slot(old, 0, 1)
    former, new = former_of(old), ShardStore(TASK)
    former.adopt(Orders((("w", 0),)), new)
    new.define_optimizer(1, Adam(9.0).to_config())  # another one has its number
    assert slot(new, 0, 1) == [0.0, 0.0]
    assert [held.identity for held in former.describe().optimizers] == [(5, 1)]
    assert {each[0] for each in freeze(new, NOTHING).state.shards[0].slots} == {1}
    new.define_optimizer(2, ADAM)
    new.hear_count(2, 1, 0, [(0, 4)], 0)
    former.adopt(Orders((), (), (((5, 1), 2),)), new)
    assert slot(new, 0, 2) == momentum
    assert new.push_count(2).known == 1 + 4, "what was told of its pushes meanwhile is kept"


def test_slots_that_wait_when_yet_another_program_comes_are_not_lost() -> None:
    old = store_of("w")
    old.define_optimizer(1, ADAM)
    push(old, 0)
    momentum = slot(old, 0, 1)
    former, second = former_of(old), ShardStore(TASK)
    former.adopt(Orders((("w", 0),)), second)
    second.define_optimizer(1, Adam(9.0).to_config())
    push(second, 0)
    former.take(second, Ledger(), 6, Progress.INITIAL)
    identities = [held.identity for held in former.describe().optimizers]
    assert identities == [(5, 1), (6, 1)]
    third = ShardStore(TASK)
    former.adopt(Orders((("w", 4),), (), (((5, 1), 1), ((6, 1), 2))), third)
    assert slot(third, 4, 1) == momentum
    assert third.push_count(2).marked == 1


def test_a_repetition_changes_nothing() -> None:
    old = store_of("w")
    old.define_optimizer(1, ADAM)
    push(old, 0)
    former, new = former_of(old), ShardStore(TASK)
    orders = Orders((("w", 2),), ("gone",), (((5, 1), 1),))
    former.adopt(orders, new)
    push(new, 2)
    after, momentum = value(new, 2), slot(new, 2, 1)
    former.adopt(orders, new)
    assert (value(new, 2), slot(new, 2, 1)) == (after, momentum)
    assert new.push_count(1).marked == 2


def test_a_number_that_is_taken_is_told_and_nothing_has_changed() -> None:
    former, new = former_of(store_of("w")), store_of("v")
    former.adopt(Orders((("x", 3),), ("y",), (((5, 3), 1),)), new)  # what other ps tasks hold
    with pytest.raises(PartitionError, match='"w" as variable 0, which is "v"'):
        former.adopt(Orders((("w", 0),)), new)
    assert [shard.variable for shard in former.describe().shards] == ["w"]
    assert new.keys() == [(0, 0)]


def test_what_is_dropped_is_held_no_more() -> None:
    old = store_of("w", "b", "v")
    old.define_optimizer(1, ADAM)
    push(old, 0)
    former, new = former_of(old), ShardStore(TASK)
    former.adopt(Orders((("w", 0),), ("b",), (((5, 1), 1),)), new)
    assert [shard.variable for shard in former.describe().shards] == ["v"]
    former.drop(new)
    holding = former.describe()
    assert (holding.shards, holding.optimizers, holding.updates) == ((), (), ())
    assert new.keys() == [(0, 0)], "what was adopted stays with its program"
    assert slot(new, 0, 1) != [0.0, 0.0]


def test_slots_that_wait_are_dropped_with_the_rest() -> None:
    old = store_of("w")
    old.define_optimizer(1, ADAM)
    push(old, 0)
    former, new = former_of(old), ShardStore(TASK)
    former.adopt(Orders((("w", 0),)), new)
    former.drop(new)
    assert new.statistics()["slot_bytes"] == 0


def test_what_no_coordinator_was_served_with_has_no_updates() -> None:
    assert former_of(store_of("w"), 0).describe().updates == ()
    assert [held.coordinator for held in former_of(store_of("w"), 5).describe().updates] == [5]


def test_an_optimizer_that_is_known_by_hearsay_is_not_held() -> None:
    """The real one waits, where the life before has died before all ps tasks had adopted it."""
    first, second = store_of("w"), store_of("v")
    first.define_optimizer(1, ADAM)
    push(first, 0)
    former = former_of(first, 5)
    second.define_optimizer(3, ADAM)
    second.hear_count(3, 0, 0, [(1, 7)], 1)
    former.take(second, Ledger(), 6, Progress.INITIAL)
    assert [each.identity for each in former.describe().optimizers] == [(5, 1)]


def test_what_was_accumulated_goes_on() -> None:
    old = store_of("w")
    rule = Adam(0.1).with_options(RuleOptions(gradient_accumulation_steps=2))
    old.define_optimizer(1, rule.to_config())
    push(old, 0)
    assert value(old, 0) == [0.0, 0.0]  # half an update
    former, new = former_of(old), ShardStore(TASK)
    former.adopt(Orders((("w", 0),), (), (((5, 1), 1),)), new)
    push(new, 0)
    assert value(new, 0) != [0.0, 0.0]
