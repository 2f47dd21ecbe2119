"""What is refused as an argument of a synchronous optimizer, and what it becomes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import psync
from psync import optimizers
from psync.api.sync_arguments import NOWHERE, check_wrapped, checked_weight
from psync.errors import ConfigurationError, ValueMismatchError
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


@pytest.mark.parametrize(
    ("changes", "text"),
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
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
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
        check_wrapped("sync", psync.SyncReplicasOptimizer(optimizers.SGD(1), 2, name="inner"))
    bounded = optimizers.SGD(0.1, name="bounded", staleness_bound=psync.StalenessBound(1))
    with pytest.raises(ConfigurationError, match="'bounded' has a staleness bound"):
        check_wrapped("sync", bounded)
    with pytest.raises(ConfigurationError, match=r"sync: expected one of psync\.optimizers as opt"):
        check_wrapped("sync", "sgd")
    check_wrapped("sync", optimizers.SGD(1))
