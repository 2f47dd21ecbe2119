"""What is refused as an argument of a synchronous optimizer, and what it becomes."""

from __future__ import annotations

import re
from typing import Any

import pytest

import psync
from psync import optimizers
from psync.api.sync_arguments import NOWHERE, check_wrapped
from psync.errors import ConfigurationError
from psync.store.sync_config import SyncConfig

SGD = optimizers.SGD(0.5)


def made(**changes: Any) -> SyncConfig:
    given = {"replicas_to_aggregate": 2, "total_num_replicas": 3, "name": "sync", **changes}
    config = psync.SyncReplicasOptimizer(SGD, **given).get_config()
    return SyncConfig.from_config({**config, "global_step": NOWHERE})


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


def test_what_waits_for_others_itself_is_not_wrapped() -> None:
    with pytest.raises(ConfigurationError, match="'inner' is already synchronous"):
        check_wrapped("sync", psync.SyncReplicasOptimizer(optimizers.SGD(1), 2, name="inner"))
    bounded = optimizers.SGD(0.1, name="bounded", staleness_bound=psync.StalenessBound(1))
    with pytest.raises(ConfigurationError, match="'bounded' has a staleness bound"):
        check_wrapped("sync", bounded)
    with pytest.raises(ConfigurationError, match=r"sync: expected one of psync\.optimizers as opt"):
        check_wrapped("sync", "sgd")
    check_wrapped("sync", optimizers.SGD(1))
