"""Arguments of a synchronous optimizer, and its configuration for ps tasks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of
from loops import for_each
from psync import optimizers
from psync.api.sync_replicas import NOWHERE, checked_weight
from psync.errors import ConfigurationError, UsageError, ValueMismatchError
from psync.store.sync_config import SyncConfig, whole_number

SGD = optimizers.SGD(0.5)


def made(**changes: Any) -> SyncConfig:
    given = {"replicas_to_aggregate": 2, "total_num_replicas": 3, "name": "sync", **changes}
    config = psync.SyncReplicasOptimizer(SGD, **given).get_config()
    return SyncConfig.from_config({**config, "global_step": NOWHERE})


def test_all_of_it_is_in_the_configuration() -> None:
    assert made() == SyncConfig(
        name="sync", optimizer=SGD.get_config(), replicas_to_aggregate=2, total_num_replicas=3,
        global_step=NOWHERE,
    )  # fmt: skip


def test_there_are_as_many_replicas_as_are_needed_unless_said_otherwise() -> None:
    assert made(total_num_replicas=None).total_num_replicas == 2


def test_deterministic_is_strict() -> None:
    assert made(total_num_replicas=2, deterministic=True).strict


def test_numbers_of_numpy_become_plain_ones() -> None:
    config = made(replicas_to_aggregate=np.int64(2), patience_s=np.float32(0.5))
    assert type(config.replicas_to_aggregate) is int
    assert config.patience_s == 0.5
    assert type(config.patience_s) is float
    assert SyncConfig.from_config(config.to_config()) == config


@for_each(
    "changes, text",
    [
        ({"name": ""}, "a synchronous optimizer: expected a name, got ''"),
        ({"name": None}, "a synchronous optimizer: expected a name, got None"),
        (
            {"replicas_to_aggregate": "2"},
            "sync: expected a whole number as replicas_to_aggregate, got '2'",
        ),
        (
            {"replicas_to_aggregate": 2.0},
            "sync: expected a whole number as replicas_to_aggregate, got 2.0",
        ),
        (
            {"total_num_replicas": True},
            "sync: expected a whole number as total_num_replicas, got True",
        ),
        (
            {"replicas_to_aggregate": 0},
            "sync: expected replicas_to_aggregate and total_num_replicas of at least 1, got 0 and "
            "3",
        ),
        (
            {"min_replicas": 4},
            "sync: expected min_replicas from 1 to total_num_replicas (3), got 4",
        ),
        ({"min_replicas": None}, "sync: expected a whole number as min_replicas, got None"),
        ({"patience_s": 0}, "sync: expected patience_s above 0 s and finite, got 0"),
        ({"patience_s": "1"}, "sync: patience_s: expected a number, got '1'"),
        ({"patience_s": float("inf")}, "sync: patience_s: expected a finite number, got inf"),
        ({"strict": 1}, "sync: expected strict to be True or False, got 1"),
        ({"deterministic": None}, "sync: expected deterministic to be True or False, got None"),
        ({"tensorflow_compat": 0}, "sync: expected tensorflow_compat to be True or False, got 0"),
        ({"reduction": "MEAN"}, 'sync: expected reduction "mean" or "sum", got \'MEAN\''),
        ({"reduction": []}, 'sync: expected reduction "mean" or "sum", got []'),
        (
            {"strict": True, "tensorflow_compat": True},
            "sync: tensorflow_compat=True uses unbound tokens, as TensorFlow does",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match="^" + re.escape(text)):
        made(**changes)


def test_a_count_is_a_whole_number() -> None:
    assert whole_number("sync", "num_tokens", np.int32(-1)) == -1
    with pytest.raises(ConfigurationError, match="expected a whole number as num_tokens, got nan"):
        whole_number("sync", "num_tokens", float("nan"))
    with pytest.raises(ConfigurationError, match="as num_tokens, got "):
        whole_number("sync", "num_tokens", np.True_)


def test_a_weight_is_a_number_within_what_can_be_summed() -> None:
    assert checked_weight(np.float32(2)) == 2
    assert type(checked_weight(3)) is float
    for weight in (0, -1.5, 1e31, 1e-31):
        text = f"apply_gradients: expected a weight from 1e-30 to 1e+30, got {weight}"
        with pytest.raises(ValueMismatchError, match=re.escape(text)):
            checked_weight(weight)
    for unusable in ("2", None, float("inf"), True):
        with pytest.raises(ConfigurationError, match="apply_gradients: weight: expected a "):
            checked_weight(unusable)


def test_what_waits_for_others_itself_is_not_wrapped() -> None:
    with pytest.raises(ConfigurationError, match="'inner' is already synchronous"):
        psync.SyncReplicasOptimizer(psync.SyncReplicasOptimizer(SGD, 2, name="inner"), 2)
    bounded = optimizers.SGD(0.1, name="bounded", staleness_bound=psync.StalenessBound(1))
    with pytest.raises(ConfigurationError, match="'bounded' has a staleness bound"):
        psync.SyncReplicasOptimizer(bounded, 2)
    with pytest.raises(
        ConfigurationError, match=r"sync_replicas: expected one of psync\.optimizers as opt"
    ):
        psync.SyncReplicasOptimizer("sgd", 2)  # type: ignore[arg-type]


def optimizer(averages: Any = None, variables: Any = None) -> psync.SyncReplicasOptimizer:
    return psync.SyncReplicasOptimizer(
        optimizers.SGD(0.5), 2, None, averages, variables, name="sync"
    )


def variables(strategy: psync.ParameterServerStrategy, *names: str) -> list[Any]:
    with strategy.scope():
        return [psync.Variable(0, name=name, trainable=False) for name in names]


def test_the_global_step_becomes_part_of_it_with_the_first_push() -> None:
    (step,) = variables(strategy_of(), "step")
    group = optimizer()
    assert group._global_step is None
    told = group._of_step(step)
    (shard,) = step.spec.shards
    assert SyncConfig.from_config(told).global_step == (shard.ps, *shard.key)
    assert group._global_step is step
    assert group._of_step(step) is told


def test_the_global_step_stays_the_same() -> None:
    step, other = variables(strategy_of(), "step", "other")
    group = optimizer()
    group._of_step(step)
    with pytest.raises(ConfigurationError) as caught:
        group._of_step(other)
    assert caught.value.message == (
        'sync: expected the same global step "step" as before, got "other"'
    )


def test_the_step_of_another_strategy_is_another_one() -> None:
    """One optimizer may be used with one strategy after the other."""
    (step,), (other,) = variables(strategy_of(), "step"), variables(strategy_of(), "step")
    group = optimizer()
    group._of_step(step)
    group._of_step(other)
    assert group._global_step is other


def test_averages_follow_with_their_decay() -> None:
    strategy = strategy_of()
    with strategy.scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    group = optimizer(psync.ExponentialMovingAverage(0.75), [v])
    assert (group._sync.decay, group._sync.num_updates) == (0.75, False)
    assert len(group._sync.averages) == 1
    assert group._averaged_by is None


def test_averages_that_follow_another_step_are_refused() -> None:
    strategy = strategy_of()
    step, other = variables(strategy, "step", "other")
    with strategy.scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    group = optimizer(psync.ExponentialMovingAverage(0.75, num_updates=other), [v])
    assert (group._averaged_by, group._sync.num_updates) == (other, True)
    with pytest.raises(ConfigurationError, match='averages depends on "other", not on the glob'):
        group._of_step(step)
    assert group._of_step(other)


def test_averages_are_of_one_strategy_and_the_global_step_too() -> None:
    """A variable of another one may have the same number."""
    (step,) = variables(strategy_of(), "step")
    one, other = strategy_of(), strategy_of()
    with one.scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    with other.scope():
        w = psync.Variable(np.zeros(2, np.float32), name="w")
    with pytest.raises(ConfigurationError, match='averages of "v" and variable "w"'):
        optimizer(psync.ExponentialMovingAverage(0.75), [v, w])
    group = optimizer(psync.ExponentialMovingAverage(0.75), [v])
    with pytest.raises(ConfigurationError, match="to different programs or"):
        group._of_step(step)


def test_averages_of_one_variable_that_is_no_list() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    with pytest.raises(UsageError, match='expected a list of variables, got variable "v"'):
        optimizer(psync.ExponentialMovingAverage(0.9), v)  # type: ignore[arg-type]


def test_nothing_is_averaged_by_what_is_no_average() -> None:
    optimizer(None, None)
    with pytest.raises(ConfigurationError, match="as variable_averages, got float"):
        optimizer(0.9, None)
    with pytest.raises(ConfigurationError, match="variables_to_average without variable_averages"):
        optimizer(None, [])
