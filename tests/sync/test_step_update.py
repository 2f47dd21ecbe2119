from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psync.errors import ConfigurationError, RemoteProtocolError, ValueMismatchError
from psync.numerics.rules import SGD, RuleOptions, UpdateRule
from psync.ps.shard_sets import ShardSet
from psync.specs import ShardSpec
from psync.store.rows import RowValues
from psync.store.step_norms import StepNorms
from psync.store.store import ShardStore
from psync.sync.step_update import Part, RowsAsWhole, StepUpdate, averages_of
from sync_tools import GROUP, config

TASK = "/job:ps/task:0"


def make_store(**dtypes: str) -> ShardStore:
    """A store with variables 0, 1, … of two elements each."""
    store = ShardStore(TASK)
    for number, (name, dtype) in enumerate(dtypes.items()):
        store.create(ShardSpec(name, number, 0, 0, (2,), dtype, 0))
    store.define_optimizer(GROUP, SGD(1.0).to_config())
    return store


def update_of(
    store: ShardStore, parts: Sequence[Part], weights: Sequence[float], **more: object
) -> StepUpdate:
    group = config(2, **more)
    norms = StepNorms(store.rule(GROUP))
    update = StepUpdate(store, GROUP, group, 0, averages_of(store, group, TASK), norms)
    update.gather(parts, weights)
    update.begin()
    return update


def values(store: ShardStore) -> list[float]:
    return [float(np.asarray(store.read(key)[0]).view(np.float32)[0]) for key in store.keys()]


def test_an_average_has_the_shape_and_dtype_of_its_variable_and_its_place() -> None:
    store = make_store(a="float32", b="float64", c="int32", d="int32")
    assert averages_of(store, config(1), TASK) == []
    assert averages_of(store, config(1, averages=((8, 9),)), TASK) == []  # on other ps tasks
    with pytest.raises(ConfigurationError, match=r"expected shape \(2,\) float32.* got .*float64"):
        averages_of(store, config(1, averages=((0, 1),)), TASK)
    with pytest.raises(ConfigurationError, match="must be on the same ps tasks"):
        averages_of(store, config(1, averages=((0, 9),)), TASK)
    with pytest.raises(ValueMismatchError, match="int32"):
        averages_of(store, config(1, averages=((2, 3),)), TASK)


TABLE = (0, 0)


def table_of(rows: int = 6, dtype: str = "float32") -> ShardStore:
    store = ShardStore(TASK)
    store.define_optimizer(GROUP, SGD(1.0).to_config())
    store.create(ShardSpec("table", 0, 0, 0, (rows, 2), dtype, 0))
    return store


def rows_part(store: ShardStore, rows: list[int], values: list[float]) -> Part:
    known = ShardSet((TABLE,)).look_up(store)
    dtype = known.dtype
    made = np.repeat(np.array(values, dtype)[:, None], 2, 1).reshape(len(rows), 2)
    return Part(known, [RowValues(np.array(rows, np.int64), made)], rows=())


def whole_part(store: ShardStore, values: list[float]) -> Part:
    known = ShardSet((TABLE,)).look_up(store)
    return Part(known, [np.repeat(np.array(values, np.float32), 2)])


def table_values(store: ShardStore) -> list[float]:
    return np.frombuffer(b"".join(store.read(TABLE)), np.float32)[::2].tolist()


def run(update: StepUpdate, *, at_once: bool) -> None:
    if at_once:
        update.at_once()
        return
    for position in range(len(update.costs)):
        for _ in update.work(position):
            pass


@pytest.mark.parametrize("at_once", [True, False])
def test_beside_a_whole_gradient_rows_are_whole_ones_with_zeros(*, at_once: bool) -> None:
    store, other = table_of(), table_of()
    parts = [rows_part(store, [1, 5], [2, 4]), whole_part(store, [4] * 6)]
    run(update_of(store, parts, [1.0, 3.0]), at_once=at_once)
    wholes = [whole_part(other, [0, 2, 0, 0, 0, 4]), whole_part(other, [4] * 6)]
    run(update_of(other, wholes, [1.0, 3.0]), at_once=at_once)
    assert table_values(store) == table_values(other) == [-3, -3.5, -3, -3, -3, -4]


def test_rows_as_a_whole_gradient_can_be_cut_anywhere() -> None:
    rows = RowValues(np.array([0, 2, 3]), np.arange(1, 10, dtype=np.float32).reshape(3, 3))
    whole = np.zeros((5, 3), np.float32)
    whole[rows.rows] = rows.values
    for start in range(15):
        for stop in range(start + 1, 16):
            cut = RowsAsWhole(rows)[start:stop]
            assert cut.tolist() == whole.reshape(-1)[start:stop].tolist()


def with_rule(rule: UpdateRule, dtype: str = "float32") -> ShardStore:
    """Two shards of one variable, one of another."""
    store = ShardStore(TASK)
    for variable, index in ((0, 0), (0, 1), (1, 0)):
        store.create(ShardSpec(f"v{variable}", variable, index, index, (2,), dtype, 0), fill=1)
    store.define_optimizer(GROUP, rule.to_config())
    return store


def part_of_all(store: ShardStore, *values: float) -> Part:
    known = ShardSet(((0, 0), (0, 1), (1, 0))).look_up(store)
    return Part(known, [np.full(2, value, np.float32) for value in values])


CLIPPING = SGD(1.0).with_options(RuleOptions(clipnorm=1.0))


def test_the_norm_of_rows_is_that_of_the_rows_of_the_mean() -> None:
    store = table_of()
    for parts, squares in (
        ([rows_part(store, [1, 3], [2, 4]), rows_part(store, [3], [2])], 2 * (4 + 9)),
        ([rows_part(store, [1], [2]), whole_part(store, [0, 4, 0, 0, 0, 0])], 2 * 9),
    ):
        update = update_of(store, parts, [1.0, 1.0])
        assert update.measure_at_once("gradients") == [(0, 0, squares, 0)]


def test_a_shard_whose_norm_was_not_measured_is_refused_before_anything_changes() -> None:
    store = with_rule(CLIPPING)
    update = StepUpdate(store, GROUP, config(1), 0, (), StepNorms(CLIPPING, {0: 1.0}))
    with pytest.raises(RemoteProtocolError, match="whose norms were not measured"):
        update.gather([part_of_all(store, 1, 1, 1)], [1.0])
