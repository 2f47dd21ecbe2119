from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psync
from local_training import declare, inside_a_step, strategy_of
from psync.errors import UsageError

Creator = Callable[..., Any]


def noting(log: list[str], name: str) -> Creator:
    def creator(next_creator: Creator, **kwargs: Any) -> Any:
        log.append(name)
        return next_creator(**kwargs)

    return creator


def pinning(strategy: psync.ParameterServerStrategy, ps: int) -> Creator:
    def creator(next_creator: Creator, **kwargs: Any) -> Any:
        with strategy.pinned(ps):
            return next_creator(**kwargs)

    return creator


def test_it_sees_what_was_given_and_may_change_it() -> None:
    seen: dict[str, Any] = {}

    def creator(next_creator: Creator, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return next_creator(**{**kwargs, "name": "other", "trainable": False})

    with strategy_of().scope(), psync.variable_creator_scope(creator):
        v = psync.Variable([1.0, 2.0], name="v", shape=(2,))
    assert seen == {
        "initial_value": [1.0, 2.0],
        "name": "v",
        "dtype": None,
        "shape": (2,),
        "trainable": None,  # not given: yes, unless it is synchronized on read
        "synchronization": psync.VariableSynchronization.AUTO,
        "aggregation": psync.VariableAggregation.NONE,
    }
    assert (v.name, v.trainable, v.shape) == ("other", False, (2,))
    assert __file__ in v.spec.declared_at


def test_the_innermost_is_called_first_and_the_strategys_scope_changes_no_order() -> None:
    log: list[str] = []
    strategy = strategy_of()
    with psync.variable_creator_scope(noting(log, "1")):
        with psync.variable_creator_scope(noting(log, "2")), strategy.scope():
            with psync.variable_creator_scope(noting(log, "3")):
                with psync.variable_creator_scope(noting(log, "4")):
                    psync.Variable(0.0)
            psync.Variable(0.0)
    with strategy.scope():
        psync.Variable(0.0)
    assert log == ["4", "3", "2", "1", "2", "1"]


def test_one_around_the_scope_says_where_and_takes_nobodys_turn() -> None:
    strategy = strategy_of(3, psync.FixedShardsPartitioner(2))
    with psync.variable_creator_scope(pinning(strategy, 2)), strategy.scope():
        v = psync.Variable(np.zeros(4))
        with psync.variable_creator_scope(pinning(strategy, 1)):  # the one around the scope wins
            assert psync.Variable(0.0).spec.shards[0].ps == 2
    following = declare(strategy, following=0.0)
    assert (v.spec.shards[0].ps, len(v.spec.shards)) == (2, 1)
    assert following.spec.shards[0].ps == 0


def test_what_one_inside_the_scope_says_about_the_place_is_overridden() -> None:
    strategy = strategy_of(3)
    log: list[str] = []
    with strategy.scope():
        with (
            psync.variable_creator_scope(noting(log, "runs")),
            psync.variable_creator_scope(pinning(strategy, 2)),
        ):
            v = psync.Variable(0.0)
            with strategy.pinned(1):
                pinned = psync.Variable(0.0)
    assert log == ["runs", "runs"]
    assert [v.spec.shards[0].ps, pinned.spec.shards[0].ps] == [0, 1]


def test_one_may_make_several_or_give_back_one_that_is_there() -> None:
    strategy = strategy_of()
    shared: list[Any] = []

    def sharing(next_creator: Creator, **kwargs: Any) -> Any:
        if not shared:
            shared.append(next_creator(**kwargs))
        return shared[0]

    with strategy.scope(), psync.variable_creator_scope(sharing):
        assert psync.Variable(0.0) is psync.Variable(1.0)
    assert len(strategy.variables) == 1


def test_one_that_returns_no_variable_is_told_what_it_forgot() -> None:
    with strategy_of().scope(), psync.variable_creator_scope(lambda next_creator, **kwargs: None):
        with pytest.raises(UsageError, match=r'"v": expected a variable creator .* got None') as e:
            psync.Variable(0.0, name="v")
    assert e.value.hint == "return next_creator(**kwargs)"


def test_its_own_errors_are_raised_and_it_ends_with_its_scope() -> None:
    def failing(next_creator: Creator, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    with strategy_of().scope():
        with psync.variable_creator_scope(failing), pytest.raises(ZeroDivisionError):
            psync.Variable(0.0)
        psync.Variable(0.0)


def test_what_psync_declares_by_itself_it_does_not_see_nor_is_it_entered_in_a_step() -> None:
    log: list[str] = []
    with strategy_of().scope(), psync.variable_creator_scope(noting(log, "seen")):
        psync.get_or_create_global_step()
    assert log == []
    with pytest.raises(UsageError, match="variable_creator_scope: expected a callable"):
        with psync.variable_creator_scope("creator"):  # type: ignore[arg-type]
            pass
    text = "entering a variable creator scope inside a step"
    with inside_a_step(), pytest.raises(UsageError, match=text):
        with psync.variable_creator_scope(print):
            pass
