"""The table of shards; what changes values is tested in test_store.py."""

from __future__ import annotations

import numpy as np
import pytest

from psync.errors import (
    BusyError,
    ConfigurationError,
    PartitionError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.memory import BLOCK_ELEMENTS, BlockPool
from psync.numerics.rules import ACCUMULATOR, SGD, Adam, RuleOptions
from psync.schedules import Constant
from psync.specs import ShardSpec, marked_after
from psync.store.shards import Key, ShardTable
from psync.store.work import BlockWork

TASK = "/job:ps/task:1"
KEY: Key = (0, 0)
NUM_BLOCKS = 3


def spec_of(size: int = NUM_BLOCKS * BLOCK_ELEMENTS, variable_id: int = 0) -> ShardSpec:
    return ShardSpec("w", variable_id, 0, 0, (size,), "float32", ps=1)


@pytest.fixture
def table() -> ShardTable:
    """A table with a shard of three blocks."""
    made = ShardTable(TASK)
    made.create(spec_of())
    return made


class TestTable:
    def test_a_shard_that_is_worked_on_is_not_read(self, table: ShardTable) -> None:
        work = BlockWork(table.shards()[KEY], lambda i: None, lambda: None)
        with pytest.raises(
            BusyError, match=r'"w/part_0" on /job:ps/task:1: an update is in progress'
        ):
            table.read(KEY)
        work.close()
        assert table.read(KEY)

    def test_knows_what_was_created(self, table: ShardTable) -> None:
        assert table.keys() == [KEY]
        assert table.spec(KEY) == spec_of()
        assert (table.busy(KEY), table.version(KEY)) == (False, 0)
        with pytest.raises(UnknownVariableError, match="/job:ps/task:1 holds no shard 0 of var"):
            table.spec((4, 0))

    def test_a_copy_is_a_value_of_its_own(self) -> None:
        table = ShardTable(TASK)
        values = np.arange(7, dtype=np.float32)
        table.create(spec_of(7), values)
        assert list(table.copy(spec_of(7, variable_id=1), KEY)) == []
        (first,), (second,) = table.read(KEY), table.read((1, 0))
        assert np.array_equal(np.frombuffer(second, np.float32), values)
        assert not np.shares_memory(*(np.frombuffer(view, np.uint8) for view in (first, second)))
        with pytest.raises(PartitionError, match=r"expected shape \(7,\) float32"):
            table.copy(spec_of(8, variable_id=2), KEY)

    def test_slots_are_made_when_they_are_read(self, table: ShardTable) -> None:
        table.define_optimizer(3, Adam().to_config())
        assert not table.shards()[KEY].slots
        assert len(table.read_slot(KEY, 3, "m")) == NUM_BLOCKS
        assert sorted(table.shards()[KEY].slots) == [(3, "m"), (3, "v")]

    def test_an_optimizer_is_defined_once(self, table: ShardTable) -> None:
        for _ in range(2):
            table.define_optimizer(0, SGD(0.5).to_config())
        table.define_optimizer(0, {**SGD(0.5).to_config(), "excluded_names": ()})  # the same
        with pytest.raises(
            ConfigurationError, match="optimizer 0 on /job:ps/task:1 is already defined"
        ):
            table.define_optimizer(0, SGD(0.25).to_config())

    def test_values_are_copied_into_memory_of_the_given_pool(self) -> None:
        pool = BlockPool()
        table = ShardTable(TASK, pool)
        values = np.ones(20_000, np.float32)
        table.create(spec_of(20_000), values)
        values[:] = 2
        assert pool.statistics().misses == 1
        assert (np.frombuffer(table.read(KEY)[0], np.float32) == 1).all()


class TestOptimizers:
    CONFIG = SGD(0.5, momentum=0.5).to_config()

    def test_iterations_are_those_of_the_most_used_one(self, table: ShardTable) -> None:
        assert table.iterations == 0
        for number, step in ((1, 7), (2, 3)):
            table.define_optimizer(number, self.CONFIG)
            table.set_count(number, step)
        assert table.iterations == 7

    def test_pushes_are_counted_on_from_what_is_set_and_told(self, table: ShardTable) -> None:
        table.define_optimizer(1, self.CONFIG)
        base = marked_after(0, 5)
        table.set_count(1, base)
        assert table.hear_count(1, 0, base, [(1, 3)], 1) == 3
        assert (table.push_count(1).known, table.iterations) == (8, 8)

    def test_a_learning_rate_is_set_and_the_definition_stays(self, table: ShardTable) -> None:
        table.define_optimizer(1, self.CONFIG)
        table.set_learning_rate(1, Constant(0.25).to_config())
        table.define_optimizer(1, self.CONFIG)  # what other users know
        assert table.optimizers()[1].rule.learning_rate(0) == 0.25

    def test_a_slot_is_loaded_block_by_block(self, table: ShardTable) -> None:
        table.define_optimizer(1, self.CONFIG)
        value = np.arange(NUM_BLOCKS * BLOCK_ELEMENTS, dtype=np.float32)
        for _ in table.load_slot(KEY, 1, "momentum", value):
            assert table.busy(KEY)
        read = np.concatenate(
            [np.frombuffer(view, np.float32) for view in table.read_slot(KEY, 1, "momentum")]
        )
        np.testing.assert_array_equal(read, value)
        with pytest.raises(
            ValueMismatchError, match="expected 3145728 bytes for slot 'momentum', got"
        ):
            table.load_slot(KEY, 1, "momentum", value[1:])

    def test_a_sum_of_gradients_begins_anew(self, table: ShardTable) -> None:
        config = SGD(0.5).with_options(RuleOptions(gradient_accumulation_steps=2)).to_config()
        table.define_optimizer(1, config)
        table.shards()[KEY].pushes[1] = 1
        ones = np.ones(NUM_BLOCKS * BLOCK_ELEMENTS, np.float32)
        for _ in table.load_slot(KEY, 1, ACCUMULATOR, ones):
            pass
        assert not table.shards()[KEY].pushes
        views = table.read_slot(KEY, 1, ACCUMULATOR)
        assert not any(np.frombuffer(view, np.uint8).any() for view in views)


def test_what_a_table_releases_another_one_takes_up_as_it_is() -> None:
    spec = ShardSpec("w", 3, 0, 0, (2,), "float32", 0)
    first, second = ShardTable("/job:ps/task:0"), ShardTable("/job:ps/task:0")
    first.create(spec, np.array([1, 2], np.float32))
    first.define_optimizer(1, SGD(0.5).to_config())
    first.set_count(1, 7)
    (shard,), optimizers = first.release()
    assert first.keys() == []
    with pytest.raises(UsageError, match="not defined"):
        first.push_count(1)
    second.take_up(shard)
    second.take_up_optimizer(4, optimizers[1])
    assert np.frombuffer(b"".join(second.read((3, 0))), np.float32).tolist() == [1, 2]
    assert second.push_count(4).marked == 7
