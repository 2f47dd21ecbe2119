"""The global step: one scalar on ps 0 that takes nobody's turn."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import in_step, inside_a_step, strategy_of, training
from psync.errors import UsageError


def test_it_is_declared_once_and_then_found() -> None:
    with strategy_of(2).scope():
        assert psync.get_global_step() is None
        step = psync.get_or_create_global_step()
        assert psync.get_or_create_global_step() is step
        assert psync.get_global_step() is step
    assert (step.name, step.shape, step.dtype) == ("global_step", (), np.int64)
    assert not step.trainable


def test_it_lies_on_ps_0_and_takes_nobodys_turn() -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        first = psync.Variable(0.0)
        step = psync.get_or_create_global_step()
        second = psync.Variable(0.0)
    assert [v.spec.shards[0].ps for v in (first, step, second)] == [0, 0, 1]
    assert strategy.variables == (first, step, second)


def test_each_strategy_has_its_own() -> None:
    with strategy_of().scope():
        one = psync.get_or_create_global_step()
    with strategy_of().scope():
        assert psync.get_global_step() is None
        assert psync.get_or_create_global_step() is not one


def test_one_that_the_program_declared_itself_is_found() -> None:
    with strategy_of().scope():
        mine = psync.Variable(5, dtype="int32", name="global_step")
        assert psync.get_or_create_global_step() is mine


@pytest.mark.parametrize("value", [0.5, [1, 2]])
def test_a_variable_of_its_name_that_cannot_count_is_an_error(value: object) -> None:
    with strategy_of().scope():
        psync.Variable(value, name="global_step")
        with pytest.raises(UsageError, match="the global step: expected an integer scalar, var"):
            psync.get_or_create_global_step()
        with pytest.raises(UsageError, match=r"declared at .*test_global_step.py:\d+ has shape"):
            psync.get_global_step()


@pytest.mark.parametrize("get", [psync.get_global_step, psync.get_or_create_global_step])
def test_outside_a_scope_there_is_none(get: object) -> None:
    with pytest.raises(UsageError, match="global_step outside a strategy's scope"):
        get()  # type: ignore[operator]


async def test_a_step_gets_it_from_the_program() -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            step = psync.get_or_create_global_step()
        assert await step.read() == 0

        async def count() -> None:
            await step.assign_add(1)

        await in_step(coordinator, count)
        assert await step.read() == 1


def test_a_step_declares_none() -> None:
    text = "get_or_create_global_step inside a step"
    with inside_a_step(), pytest.raises(UsageError, match=text):
        psync.get_or_create_global_step()
