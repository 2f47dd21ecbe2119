"""Strategy.run where no coordinator runs, and what it refuses."""

from __future__ import annotations

import pytest

import psync
from local_training import at_once, strategy_of
from psync.api.strategy import LocalRunWarning
from psync.client.context import DatasetContext, inside
from psync.errors import SerializationError, UsageError


async def ids(x: int) -> tuple[int, int, int]:
    context = psync.get_replica_context()
    return context.replica_id_in_sync_group, context.num_replicas_in_sync, x


def test_without_a_coordinator_one_replica_runs_here_with_a_warning():
    strategy = strategy_of()
    with pytest.warns(LocalRunWarning, match="one replica runs in this process"):
        assert at_once(strategy.run(ids, (5,))) == (0, 1, 5)
    with strategy.scope(), pytest.warns(LocalRunWarning):
        assert at_once(strategy.run(lambda x: psync.get_strategy() is strategy, kwargs={"x": 1}))


def test_in_a_training_session_the_program_is_the_replica():
    strategy = strategy_of()
    strategy._runtime = object()  # that of a session; nothing is asked of it here
    assert at_once(strategy.run(ids, [5])) == (0, 1, 5)


def test_what_is_no_call_is_refused():
    strategy = strategy_of()
    with pytest.raises(SerializationError, match="args: expected a tuple, got int"):
        at_once(strategy.run(ids, 5))  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="args: expected a tuple, got PerReplica"):
        at_once(strategy.run(ids, psync.PerReplica((1, 2))))  # type: ignore[arg-type]
    with inside(DatasetContext(0)), pytest.raises(UsageError, match="in dataset code"):
        at_once(strategy.run(ids, (5,)))
