"""Handles of accumulators: declared once, placed, known again wherever they arrive."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest

import psync
from local_training import at_once, inside_a_step, strategy_of
from psync.errors import ConfigurationError, UsageError


def test_accumulators_are_placed_one_ps_after_the_other_apart_from_variables():
    strategy = strategy_of(2)
    with strategy.scope():
        held = [psync.ConditionalAccumulator("float32") for _ in range(3)]
        variables = [psync.Variable(0.0) for _ in range(2)]
    assert [each.place.ps for each in held] == [0, 1, 0]
    assert [each.device for each in variables] == [each.device for each in held[:2]]
    assert [each.name for each in held] == [
        "conditional_accumulator", "conditional_accumulator_1", "conditional_accumulator_2",
    ]  # fmt: skip


def test_a_handle_says_what_it_stands_for():
    with strategy_of(1).scope():
        held = psync.ConditionalAccumulator(np.float16, [None, 3], name="g")
        rows = psync.SparseConditionalAccumulator("bfloat16")
    assert (held.dtype, held.shape, held.name) == (np.float16, (None, 3), "g")
    assert (rows.dtype.name, rows.shape) == ("bfloat16", None)
    assert rows.name == "sparse_conditional_accumulator"
    assert repr(held) == "<ConditionalAccumulator 'g' shape=(None, 3) dtype=float16 on ps 0>"


def test_a_shared_name_stands_for_one_accumulator_of_one_kind():
    with strategy_of(2).scope():
        held = psync.ConditionalAccumulator("float32", (2,), shared_name="g")
        assert psync.ConditionalAccumulator(np.float32, [2], shared_name="g") is held
        with pytest.raises(ConfigurationError, match=r"expected shape=\[2\], got shape=None"):
            psync.ConditionalAccumulator("float32", shared_name="g")
        with pytest.raises(
            ConfigurationError, match=r"expected kind='dense', .* got kind='sparse'"
        ):
            psync.SparseConditionalAccumulator("float32", (2,), shared_name="g")
        assert psync.ConditionalAccumulator("float32", name="g").name == "g_1"


@pytest.mark.parametrize("options", [{"shared_name": ""}, {"shared_name": 3}, {"name": ""}])
def test_a_name_that_is_none_is_refused(options):
    with strategy_of(1).scope(), pytest.raises(ConfigurationError, match="expected a text as"):
        psync.ConditionalAccumulator("float32", **options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("int32",), "as dtype, got 'int32'"),
        (("float32", (2, -1)), "expected dimensions"),
        (("float32", None, None, "g", "mean"), "'MEAN' or 'SUM', got 'mean'"),
    ],
)
def test_parameters_of_no_accumulator_are_refused(arguments, text):
    with strategy_of(1).scope():
        with pytest.raises(ConfigurationError, match=text):
            psync.ConditionalAccumulator(*arguments)


def test_outside_a_scope_none_is_declared():
    with pytest.raises(UsageError, match="outside a strategy's scope"):
        psync.ConditionalAccumulator("float32")


def test_in_a_step_none_is_declared():
    with inside_a_step(), pytest.raises(UsageError, match="inside a step"):
        psync.ConditionalAccumulator("float32")


def test_without_a_coordinator_there_is_no_way_to_the_ps():
    with strategy_of(1).scope():
        held = psync.ConditionalAccumulator("float32")
    with pytest.raises(UsageError, match=r'take_grad of accumulator "conditional_accumulator": no'):
        at_once(held.take_grad(1))


def test_an_accumulator_of_another_strategy_is_refused():
    with strategy_of(1).scope():
        foreign = psync.ConditionalAccumulator("float32")
    with inside_a_step(), pytest.raises(UsageError, match="belongs to another program or strat"):
        at_once(foreign.apply_grad(1.0))


def test_a_handle_that_arrives_twice_is_one_object():
    with strategy_of(1).scope():
        held = psync.ConditionalAccumulator("float32", (2,))
    sent = pickle.dumps(held)
    assert pickle.loads(sent) is held
    del held
    gc.collect()
    one, two = pickle.loads(sent), pickle.loads(sent)
    assert one is two
    assert (type(one), one.shape) == (psync.ConditionalAccumulator, (2,))
