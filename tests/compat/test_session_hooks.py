"""Hooks of training sessions."""

from __future__ import annotations

import pytest

import psync
from psync import SyncReplicasHook


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
