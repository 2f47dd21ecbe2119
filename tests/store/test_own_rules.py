"""Rules of users on a store: what raises leaves a shard as it was, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import own_rules
from psync.errors import ConfigurationError, RuleError
from psync.numerics.memory import BLOCK_ELEMENTS
from psync.numerics.rules import SGD, RuleOptions, UpdateRule
from psync.specs import ShardSpec
from psync.store.shards import rule_error
from psync.store.store import ShardStore

TASK = "/job:ps/task:1"
KEY = (0, 0)
COLUMNS = 7
ROWS = (2 * BLOCK_ELEMENTS + 10) // COLUMNS  # three blocks, whose borders cut rows
SHAPE = (ROWS, COLUMNS)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


def store_with(*rules: UpdateRule, dtype: str = "float32") -> ShardStore:
    store = ShardStore(TASK)
    store.create(ShardSpec("w", 0, 0, 0, SHAPE, dtype, 1), drawn(1).astype(dtype))
    for number, rule in enumerate(rules, 1):
        store.define_optimizer(number, rule.to_config())
    return store


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def broken(last: bool = True) -> np.ndarray:
    """A gradient that the rule refuses, in its last block or its first."""
    gradient = drawn(9)
    gradient[-1 if last else 0] = 2 * own_rules.TOO_LARGE
    return gradient


def state(store: ShardStore, optimizer: int = 1) -> list[bytes]:
    """Values and slots, as bytes."""
    names = store.rule(optimizer).slot_names()
    arrays = [store.read(KEY), *(store.read_slot(KEY, optimizer, name) for name in names)]
    return [b"".join(views) for views in arrays]


def push(store: ShardStore, gradient: np.ndarray, optimizer: int = 1) -> RuleError | None:
    step = store.begin_push(optimizer, 0)
    for _ in store.apply(optimizer, KEY, gradient, step):
        pass
    return store.take_failure(optimizer, step)


def push_rows(store: ShardStore, rows: np.ndarray, values: np.ndarray) -> RuleError | None:
    step = store.begin_push(1, 0)
    for _ in store.apply_rows(1, KEY, rows, values, step):
        pass
    return store.take_failure(1, step)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("held", [False, True])
def test_blocks_that_are_swapped_in_hold_what_the_rule_gives_at_once(
    dtype: str, held: bool
) -> None:
    store = store_with(
        own_rules.Momentum(0.1, momentum=0.8), SGD(0.1, 0.8, nesterov=True), dtype=dtype
    )
    theirs = store_with(SGD(0.1, 0.8, nesterov=True), dtype=dtype)
    seen, before = (store.read(KEY), state(store)) if held else (None, None)
    for seed in range(3):
        assert push(store, drawn(seed).astype(dtype)) is None
        assert push(theirs, drawn(seed).astype(dtype)) is None
    for mine, other in zip(state(store), state(theirs), strict=True):
        kind = dtype if len(mine) == np.prod(SHAPE) * np.dtype(dtype).itemsize else "float32"
        found, expected = (np.frombuffer(each, kind) for each in (mine, other))
        np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "float16" else 1e-5)
    if seen is not None and before is not None:
        assert b"".join(seen) == before[0]
    assert store.version(KEY) == 3


@pytest.mark.promise("rules.error-changes-nothing")
@pytest.mark.parametrize("last", [False, True])
def test_a_shard_is_as_it_was_when_the_rule_raises(last: bool) -> None:
    store = store_with(own_rules.Momentum(0.1))
    push(store, drawn(2))
    before = state(store)
    error = push(store, broken(last))
    assert error is not None
    assert error.message == (
        'update rule "tests.momentum" for "w/part_0" raised ValueError on /job:ps/task:1: '
        "a gradient above 100"
    )
    assert (error.task, error.type_name) == (TASK, "ValueError")
    assert "own_rules.py" in error.traceback_text
    assert state(store) == before
    assert not store.busy(KEY)
    assert store.version(KEY) == 1
    assert store.take_failure(1, 1) is None  # once
    assert push(store, drawn(3)) is None
    assert state(store) != before


def test_an_accumulator_counts_only_pushes_that_have_not_failed() -> None:
    rule = own_rules.Momentum(0.1).with_options(RuleOptions(gradient_accumulation_steps=2))
    store, other = store_with(rule), store_with(rule)
    for each in (store, other):
        assert push(each, drawn(2)) is None
    before = state(store)
    assert push(store, 2 * broken()) is not None
    assert state(store) == before
    for each in (store, other):
        assert push(each, drawn(3)) is None
    assert state(store) == state(other)
    assert state(store)[2] == bytes(len(before[2]))


@pytest.mark.parametrize("count", [5, ROWS])
def test_rows_are_as_they_were_when_the_rule_raises(count: int) -> None:
    store, dense = (store_with(own_rules.Momentum(0.1)) for _ in range(2))
    rows = np.arange(count, dtype=np.int64)
    before = state(store)
    assert push_rows(store, rows, broken()[-count:]) is not None
    assert state(store) == before
    assert store.version(KEY) == store.statistics()["row_updates"] == 0
    assert push_rows(store, rows, drawn(3)[:count]) is None
    if count == ROWS:
        push(dense, drawn(3))
        assert state(store) == state(dense)
        assert push(store, drawn(4)) is None  # blocks that lie side by side
        assert push(store, broken()) is not None
        assert push(dense, drawn(4)) is None
        assert state(store) == state(dense)


def test_other_shards_of_the_push_are_updated() -> None:
    store = ShardStore(TASK)
    for number in range(3):
        store.create(ShardSpec(f"v{number}", number, 0, 0, (4,), "float32", 1))
    store.define_optimizer(1, own_rules.Momentum(0.1).to_config())
    keys = [(number, 0) for number in range(3)]
    gradients = [np.full(4, size, np.float32) for size in (1, 2 * own_rules.TOO_LARGE, 1)]
    step = store.begin_push(1, 0)
    store.apply_at_once(1, keys, gradients, step)
    error = store.take_failure(1, step)
    assert error is not None
    assert '"v1/part_0"' in error.message
    assert [store.version(key) for key in keys] == [1, 0, 1]
    store.apply_mean_at_once(1, keys, [gradients, gradients], [1.0, 1.0], step + 1)
    assert store.take_failure(1, step + 1) is not None
    assert [store.version(key) for key in keys] == [2, 0, 2]


def test_a_schedule_that_raises_refuses_the_push_and_the_step_stays() -> None:
    store = store_with(SGD(own_rules.Halving(0.5, raises_at=2)))
    for seed in range(2):
        assert push(store, drawn(seed)) is None
    before = state(store)
    for _ in range(2):
        with pytest.raises(RuleError, match='schedule "Halving" raised ArithmeticError') as caught:
            push(store, drawn(5))
    assert caught.value.task == TASK
    assert "no rate for step 2" in caught.value.message
    assert state(store) == before
    assert store.push_count(1).marked == 2
    store.set_learning_rate(1, own_rules.Halving(0.5).to_config())
    assert push(store, drawn(5)) is None


def test_a_schedule_whose_rate_is_negative_refuses_the_push() -> None:
    store = store_with(SGD(own_rules.Halving(-1.0)))
    before = state(store)
    with pytest.raises(RuleError, match=r"learning rate from 0, got -1\.0 at step 0"):
        push(store, drawn(5))
    assert state(store) == before


def test_one_that_is_not_registered_is_refused_by_name() -> None:
    config: Any = own_rules.Momentum(0.1).to_config() | {"rule": "tests.unknown"}
    with pytest.raises(ConfigurationError, match=r"/job:ps/task:1: unknown optimizer 'tests\.unk"):
        ShardStore(TASK).define_optimizer(1, config)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_text_is_told_all_the_same() -> None:
    error = rule_error(TASK, "a rule", Mute())
    assert error.message == f"a rule raised Mute on {TASK}: its text cannot be had"
