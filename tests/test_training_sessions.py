"""Training sessions: every task runs its own loop, on a network in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psync
from psync.errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailed,
    TrainingEnded,
    UsageError,
)
from psync.session_hooks import SessionHook
from psync.training_sessions import MonitoredTrainingSession
from session_cluster import session_cluster

Strategy = psync.ParameterServerStrategy


def declared(strategy: Strategy) -> Any:
    """The variables of every program here: a vector of ones over the ps tasks, and a step."""
    with strategy.scope():
        w = psync.Variable(np.zeros(4, np.float32), name="w")
        return w, psync.get_or_create_global_step()


# --- asynchronous training ---------------------------------------------------------------------


@pytest.mark.parametrize("chief", [False, True])
async def test_all_tasks_train_the_variables_that_the_chief_has_created(chief: bool) -> None:
    sgd = psync.optimizers.SGD(1.0)
    rounds = 5

    async def main(strategy: Strategy) -> tuple[bool, list[float]]:
        w, _ = declared(strategy)
        async with MonitoredTrainingSession(strategy) as session:
            for _ in range(rounds):
                await session.run(step, w)
            if session.is_chief:
                while (await w.read())[0] < rounds * tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            return session.is_chief, (await w.read()).tolist()

    async def step(w: Any) -> None:
        await psync.pull(w)
        await sgd.apply_gradients([(np.full(4, -1, np.float32), w)])

    async with session_cluster(2, 2, chief=chief) as cluster:
        tasks = 3 if chief else 2
        results = await cluster.run_all(main)
    assert [is_chief for is_chief, _ in results] == [True] + [False] * (tasks - 1)
    assert results[0][1] == [rounds * tasks] * 4
