from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psync.errors import ConfigurationError, RemoteProtocolError, ValueMismatchError
from psync.numerics.rules import SGD, Lamb, RuleOptions, UpdateRule
from psync.ps.shard_sets import ShardSet
from psync.specs import ShardSpec
from psync.store.rows import RowValues
from psync.store.step_norms import StepNorms
from psync.store.store import Key, ShardStore
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


def part(store: ShardStore, **gradients: float) -> Part:
    """Of a push that carries these variables: their numbers with a "v" before them."""
    keys: tuple[Key, ...] = tuple((int(name[1:]), 0) for name in gradients)
    known = ShardSet(keys).look_up(store)
    return Part(known, [np.full(2, value, np.float32) for value in gradients.values()])


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


@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_is_computed_at_once_and_shard_by_shard(*, at_once: bool) -> None:
    for other in ({"v0": 3.0, "v1": 1.0}, {"v1": 1.0, "v0": 3.0}, {"v0": 3.0}):
        store = make_store(a="float32", b="float32", c="float32")
        parts = [part(store, v0=1.0, v1=2.0), part(store, **other)]
        update = update_of(store, parts, [3.0, 1.0], decay=0.5, averages=((0, 2),))
        assert set(update.touched) == {(0, 0), (1, 0), (2, 0)}
        if at_once:
            update.at_once()
        else:
            for position in range(len(update.costs)):
                for _ in update.work(position):
                    pass
        assert values(store) == [-1.5, -1.75 if "v1" in other else -2.0, -0.75]


def test_a_step_without_a_part_here_still_moves_averages() -> None:
    store = make_store(a="float32", b="float32")
    update = update_of(store, [], [], decay=0.5, averages=((0, 1),))
    assert update.costs == [8]
    update.at_once()
    assert store.version((0, 0)) == 0
    assert store.version((1, 0)) == 1


def test_the_cost_counts_what_every_push_brings() -> None:
    store = make_store(a="float32", b="float32")
    alike = update_of(store, [part(store, v0=1.0)] * 3, [1.0] * 3)
    assert list(alike.costs) == [24]
    mixed = update_of(store, [part(store, v0=1.0), part(store, v1=1.0, v0=1.0)], [1.0] * 2)
    assert list(mixed.costs) == [16, 8]


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
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [0, -2, 0, -2.5, 0, -4]),
        ({"sparse_divisor": "total"}, [0, -0.5, 0, -2.5, 0, -3]),
        ({"reduction": "sum"}, [0, -2, 0, -10, 0, -12]),
    ],
)
def test_a_row_becomes_the_mean_over_the_pushes_that_have_it(
    more: dict[str, str], expected: list[float], *, at_once: bool
) -> None:
    store = table_of()
    parts = [rows_part(store, [1, 3], [2, 4]), rows_part(store, [3, 5], [2, 4])]
    run(update_of(store, parts, [1.0, 3.0], **more), at_once=at_once)
    assert table_values(store) == expected


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


def test_the_cost_of_rows_is_that_of_the_rows() -> None:
    store = table_of(1 << 20)
    update = update_of(store, [rows_part(store, [1, 1 << 19], [1, 1])] * 2, [1.0] * 2)
    assert sum(update.costs) < 1024


def test_pushes_without_a_row_here_change_nothing() -> None:
    store = table_of()
    update = update_of(store, [rows_part(store, [], [])] * 2, [1.0] * 2)
    run(update, at_once=True)
    assert table_values(store) == [0] * 6


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_of_rows_are_those_of_whole_gradients_bit_for_bit(dtype: str) -> None:
    """Where all pushes have the same rows: the same terms, in the same order."""
    rng = np.random.default_rng(5)
    stores = table_of(dtype=dtype), table_of(dtype=dtype)
    typed = stores[0].shards()[TABLE].values.dtype
    rows = [0, 2, 5]
    parts: tuple[list[Part], list[Part]] = ([], [])
    for _ in range(5):
        values = rng.normal(size=(3, 2)).astype(typed)
        whole = np.zeros((6, 2), typed)
        whole[rows] = values
        known = ShardSet((TABLE,))
        some = RowValues(np.array(rows, np.int64), values)
        parts[0].append(Part(known.look_up(stores[0]), [some], rows=()))
        parts[1].append(Part(ShardSet((TABLE,)).look_up(stores[1]), [whole.reshape(-1)]))
    for store, its_parts in zip(stores, parts, strict=True):
        run(update_of(store, its_parts, [0.3, 1.0, 2.0, 1.0, 0.7]), at_once=False)
    lazy, dense = (b"".join(store.read(TABLE)) for store in stores)
    assert lazy == dense


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


@pytest.mark.parametrize("at_once", [True, False])
def test_factors_that_came_are_used_and_nothing_is_measured(*, at_once: bool) -> None:
    store = with_rule(CLIPPING)
    update = update_of(store, [part_of_all(store, 4, 4, 2)], [1.0])
    update.norms.scales = {0: 0.25, 1: 0.5}
    assert update.passes() == []
    run(update, at_once=at_once)
    assert values(store) == [0, 0, 0]


def test_a_ps_that_was_told_nothing_measures_by_itself() -> None:
    store = with_rule(CLIPPING)
    update = update_of(store, [part_of_all(store, 3, 4, 0.5)], [1.0])
    assert update.passes() == ["gradients"]
    assert update.cost == 2 * sum(update.costs)
    update.at_once()
    norm = np.sqrt(2 * 9 + 2 * 16)
    np.testing.assert_allclose(values(store), [1 - 3 / norm, 1 - 4 / norm, 0.5], rtol=1e-6)


def test_a_layerwise_rule_takes_all_shards_that_are_here_for_the_variable() -> None:
    store = with_rule(Lamb(0.5, epsilon=1.0))
    update = update_of(store, [part_of_all(store, 1, 3, 1)], [1.0])
    assert update.passes() == ["updates"]
    update.at_once()
    directions = np.array([1 / 2, 3 / 4])
    ratio = np.sqrt(4) / np.sqrt(2 * (directions**2).sum())
    expected = [*(1 - 0.5 * ratio * directions), 1 - 0.5]
    np.testing.assert_allclose(values(store), expected, rtol=1e-5)


def test_what_is_measured_is_named_by_shard_and_draws_no_step() -> None:
    store = with_rule(CLIPPING)
    update = StepUpdate(store, GROUP, config(1), 5, (), StepNorms(CLIPPING))
    update.gather([part_of_all(store, 3, 4, 0.5)], [1.0])
    assert update.measure_at_once("gradients") == [(0, 0, 18, 0), (0, 1, 32, 0), (1, 0, 0.5, 0)]
    assert store.push_count(GROUP).marked == 0
    assert values(store) == [1, 1, 1]


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
