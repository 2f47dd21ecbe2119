"""Which variables are meant; in other processes, with two strategies: test_optimizer_handles.py."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import strategy_of, training
from psync.api.gradient_arguments import listed, trainable_here
from psync.errors import UsageError, ValueMismatchError


def test_one_variable_or_several_are_listed_and_nothing_else() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
        w = psync.Variable(np.zeros(2, np.float32), name="w")
    assert listed(v) == [v]
    assert listed(each for each in (w, v)) == [w, v]
    with pytest.raises(ValueMismatchError, match="var_list: expected variables, got ndarray"):
        listed([v, np.zeros(2)])


def test_a_nesting_stays_as_it_is_if_it_has_variables() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    for tree in ({"v": v, "rate": 0.5}, [{"v": v}], (v, [v])):
        assert listed(tree) is tree
    for empty in ({"rate": 0.5}, [[]], ({},)):
        with pytest.raises(ValueMismatchError, match="var_list: expected variables, got none"):
            listed(empty)


async def test_the_trainable_variables_of_the_strategy_that_runs_are_meant() -> None:
    with pytest.raises(UsageError, match="minimize: no trainable variable is declared here"):
        trainable_here("minimize", ())
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
            psync.Variable(0, name="counter", trainable=False)
        assert trainable_here("minimize", ()) == [v]
