"""What is done to gradients for all rules: accumulated, excluded from decay, measured.

How they are applied is in test_store.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from psync.errors import BusyError, PartitionError, UsageError, ValueMismatchError
from psync.numerics.rules import SGD, Lamb, RuleOptions, Sums, UpdateRule
from psync.specs import ShardSpec
from psync.store.store import ShardStore, Work


def value(store: ShardStore, key: tuple[int, int] = (0, 0)) -> np.ndarray:
    return np.frombuffer(b"".join(store.read(key)), np.float32)


def slot(store: ShardStore, name: str) -> np.ndarray:
    return np.frombuffer(b"".join(store.read_slot((0, 0), 0, name)), np.float32)


def run(work: Work) -> None:
    for _ in work:
        pass


def with_options(rule: UpdateRule, options: RuleOptions) -> ShardStore:
    store = ShardStore("/job:ps/task:0")
    for index, name in enumerate(("w", "bias")):
        store.create(ShardSpec(name, index, 0, 0, (4,), "float32", 0), fill=1)
    store.define_optimizer(0, rule.with_options(options).to_config())
    return store


def push(store: ShardStore, variable: int, gradient: float, step: int = 0) -> None:
    grad = np.full(4, gradient, np.float32)
    store.apply_at_once(0, [(variable, 0)], [grad], step)


def test_pushes_are_accumulated_for_each_shard_by_itself() -> None:
    store = with_options(SGD(1.0), RuleOptions(gradient_accumulation_steps=2))
    push(store, 0, 1.0)
    push(store, 1, 5.0)
    assert value(store).tolist() == [1] * 4
    assert slot(store, "gradient_accumulator").tolist() == [1] * 4
    push(store, 0, 3.0)
    assert value(store).tolist() == [-1] * 4
    assert slot(store, "gradient_accumulator").tolist() == [0] * 4
    assert value(store, (1, 0)).tolist() == [1] * 4


def test_the_mean_of_a_synchronous_step_is_accumulated_too() -> None:
    store = with_options(SGD(1.0), RuleOptions(gradient_accumulation_steps=2))
    for scale in (1, 2):
        gradients = [np.full(4, scale * n, np.float32) for n in (1, 3)]
        run(store.apply_checked(0, (0, 0), store.mean_of(gradients, [1.0, 1.0]), 0))
    assert value(store).tolist() == [1 - 3] * 4


def test_an_accumulator_that_is_loaded_begins_anew() -> None:
    """It is not known how many gradients a sum from elsewhere contains."""
    store = with_options(SGD(1.0), RuleOptions(gradient_accumulation_steps=2))
    push(store, 0, 8.0)
    run(store.load_slot((0, 0), 0, "gradient_accumulator", np.full(4, 9, np.float32)))
    push(store, 0, 1.0)
    assert value(store).tolist() == [1] * 4
    push(store, 0, 3.0)
    assert value(store).tolist() == [-1] * 4


def test_excluded_variables_do_not_decay() -> None:
    options = RuleOptions(weight_decay=0.5, excluded_words=("bias",))
    store = with_options(SGD(0.5), options)
    gradients = [np.zeros(4, np.float32)] * 2
    store.apply_at_once(0, [(0, 0), (1, 0)], gradients, 0)
    assert value(store).tolist() == [0.75] * 4
    assert value(store, (1, 0)).tolist() == [1] * 4


@pytest.mark.parametrize("steps", [None, 2])
def test_to_measure_changes_nothing_and_tells_what_is_applied(steps: int | None) -> None:
    options = RuleOptions(gradient_accumulation_steps=steps)
    store = with_options(Lamb(0.5), options)
    if steps:
        push(store, 0, 1.0)
    gradient = store.check_apply(0, (0, 0), np.ones(4, np.float32))
    sums: list[Sums] = []
    work = store.measure(0, (0, 0), gradient, 0, sums)
    with pytest.raises(BusyError):
        store.read((0, 0))
    version = store.version((0, 0))
    run(work)
    assert sums == [(4.0, pytest.approx(4.0))]  # the first update of Adam is a sign
    assert store.version((0, 0)) == version
    assert value(store).tolist() == [1] * 4
    run(store.apply_checked(0, (0, 0), gradient, 0, Lamb.trust_ratio([(16.0, 4.0)])))
    np.testing.assert_allclose(value(store), [1 - 0.5 * 2] * 4, atol=1e-5)


def test_only_layerwise_rules_measure() -> None:
    store = with_options(SGD(1.0), RuleOptions())
    assert not store.is_layerwise(0)
    with pytest.raises(UsageError, match=r"optimizer 0 \(sgd\) on .* has nothing to measure"):
        store.measure(0, (0, 0), np.zeros(4, np.float32), 0, [])
    assert with_options(Lamb(), RuleOptions()).is_layerwise(0)


def test_the_rule_of_an_optimizer_is_known() -> None:
    store = with_options(SGD(0.5), RuleOptions(clipnorm=2.0))
    assert store.rule(0).options.clipnorm == 2.0
    with pytest.raises(UsageError, match="is not defined"):
        store.rule(99)


def test_a_synchronous_step_has_the_number_that_its_group_says() -> None:
    store = ShardStore("/job:ps/task:0")
    store.define_optimizer(1, SGD(1.0).to_config())
    assert [store.begin_step(1, step) for step in (0, 4)] == [0, 4]
    assert store.iterations == 5


def test_the_square_of_a_mean_is_that_of_the_gradient_that_is_applied() -> None:
    store = with_options(SGD(1.0), RuleOptions())
    gradients, sums = [np.full(4, n, np.float32) for n in (1, 3)], list[Sums]()
    run(store.square_mean((0, 0), store.mean_of(gradients, [1.0, 1.0]), sums))
    assert sums == [(16.0, 0.0)]
    assert value(store).tolist() == [1] * 4, "nothing has changed"


def test_what_is_measured_of_a_mean_is_what_is_measured_of_the_gradient_that_it_is() -> None:
    store = with_options(Lamb(0.1), RuleOptions())
    gradients, sums = [np.full(4, n, np.float32) for n in (1, 3)], [list[Sums](), list[Sums]()]
    run(store.measure(0, (0, 0), store.mean_of(gradients, [1.0, 1.0], scale=0.5), 0, sums[0]))
    run(store.measure(0, (0, 0), np.full(4, 1, np.float32), 0, sums[1]))
    assert sums[0] == sums[1] != []


def test_each_push_of_a_mean_has_a_gradient_for_each_shard() -> None:
    store = with_options(SGD(1.0), RuleOptions())
    gradients = [[np.ones(4, np.float32)] * count for count in (2, 1)]
    with pytest.raises(UsageError, match="expected 2 gradients of each push"):
        store.apply_mean_at_once(0, [(0, 0), (1, 0)], gradients, [1.0, 1.0], 0)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (ShardSpec("wide", 5, 0, 0, (5,), "float32", 0), r"expected shape \(4,\) float32, as"),
        (ShardSpec("half", 5, 0, 0, (4,), "float64", 0), r"expected shape \(4,\) float32, as"),
    ],
)
def test_an_average_is_shaped_as_its_variable(other: ShardSpec, text: str) -> None:
    store = with_options(SGD(1.0), RuleOptions())
    store.create(other, fill=0)
    with pytest.raises(PartitionError, match=text):
        store.check_average((5, 0), (0, 0))
    store.create(ShardSpec("count", 6, 0, 0, (4,), "int32", 0), fill=0)
    with pytest.raises(ValueMismatchError, match="only floating-point variables have moving"):
        store.check_average((6, 0), (6, 0))
    store.check_average((1, 0), (0, 0))
