"""What ps tasks are told of a synchronous optimizer: its averages, and its one global step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of
from psync import optimizers
from psync.api.sync_arguments import NOWHERE, GroupConfig
from psync.errors import ConfigurationError, UsageError
from psync.store.sync_config import SyncConfig


def config() -> GroupConfig:
    return GroupConfig(
        SyncConfig(
            name="sync",
            optimizer=optimizers.SGD(0.5).get_config(),
            replicas_to_aggregate=2,
            total_num_replicas=2,
            global_step=NOWHERE,
        )
    )


def variables(strategy: psync.ParameterServerStrategy, *names: str) -> list[Any]:
    with strategy.scope():
        return [psync.Variable(0, name=name, trainable=False) for name in names]


def test_the_global_step_stays_the_same() -> None:
    step, other = variables(strategy_of(), "step", "other")
    group = config()
    group.of_step(step)
    with pytest.raises(ConfigurationError) as caught:
        group.of_step(other)
    assert caught.value.message == (
        'sync: expected the same global step "step" as before, got "other"'
    )


def test_averages_that_follow_another_step_are_refused() -> None:
    strategy = strategy_of()
    step, other = variables(strategy, "step", "other")
    with strategy.scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    group = config()
    group.add_averages(psync.ExponentialMovingAverage(0.75, num_updates=other), [v])
    assert (group.averaged_by, group.sync.num_updates) == (other, True)
    with pytest.raises(ConfigurationError, match='averages depends on "other", not on the glob'):
        group.of_step(step)
    assert group.of_step(other)


def test_averages_are_of_one_strategy_and_the_global_step_too() -> None:
    """A variable of another one may have the same number."""
    (step,) = variables(strategy_of(), "step")
    one, other = strategy_of(), strategy_of()
    with one.scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    with other.scope():
        w = psync.Variable(np.zeros(2, np.float32), name="w")
    with pytest.raises(ConfigurationError, match='averages of "v" and variable "w"'):
        config().add_averages(psync.ExponentialMovingAverage(0.75), [v, w])
    group = config()
    group.add_averages(psync.ExponentialMovingAverage(0.75), [v])
    with pytest.raises(ConfigurationError, match="to different programs or"):
        group.of_step(step)


def test_averages_of_one_variable_that_is_no_list() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    with pytest.raises(UsageError, match='expected a list of variables, got variable "v"'):
        config().add_averages(psync.ExponentialMovingAverage(0.9), v)  # type: ignore[arg-type]
