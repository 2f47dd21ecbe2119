"""The modes: their names, and that a gradient weighs the same in each."""

from __future__ import annotations

import pytest

from psync import SyncReplicasOptimizer
from psync.bench.modes import Mode, modes_of


@pytest.mark.parametrize("mode", modes_of(4, 3), ids=lambda mode: str(mode.name))
def test_a_gradient_weighs_the_same_in_every_mode(mode: Mode) -> None:
    assert mode.rate(0.5) / mode.aggregated == 0.5 / 4


def test_backups_are_replicas_that_are_not_waited_for() -> None:
    optimizer = Mode(4, backups=1).optimizer(0.5)
    assert isinstance(optimizer, SyncReplicasOptimizer)
    config = optimizer.get_config()
    assert (config["replicas_to_aggregate"], config["total_num_replicas"]) == (3, 4)
