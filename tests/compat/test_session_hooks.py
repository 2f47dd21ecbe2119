"""Hooks of training sessions."""

from __future__ import annotations

import pytest

import psync
from memory_cluster import coordinating
from psync import SyncReplicasHook
from psync.compat.session_hooks import known_step


@pytest.mark.parametrize("is_chief", [True, False])
async def test_the_chief_alone_puts_the_initial_tokens(is_chief: bool) -> None:
    put = []

    async def put_tokens() -> None:
        put.append("tokens")

    hook = SyncReplicasHook(put_tokens, is_chief)
    hook.begin()
    assert put == []
    await hook.after_create_session(None)
    assert put == ["tokens"] * is_chief


# Which global step is meant where a program names none.


def test_before_the_first_push_there_is_nothing_to_run_on_the_chief() -> None:
    optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 3, 1, name="sync")
    for ask in (optimizer.get_init_tokens_op, optimizer.get_chief_queue_runner):
        with pytest.raises(ValueError, match="before apply_gradients of sync was called"):
            ask()


async def test_the_step_of_the_strategy_that_runs_is_meant_until_something_is_pushed() -> None:
    assert known_step(None) is None
    async with coordinating(1, 1) as (_, coordinator):
        assert known_step(None) is None
        with coordinator.strategy.scope():
            step = psync.get_or_create_global_step()
            pushed = psync.Variable(0, name="pushed")
        assert known_step(None) is step
        assert known_step(pushed) is pushed
