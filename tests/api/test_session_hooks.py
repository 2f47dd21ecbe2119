"""Hooks of training sessions, and what a TensorFlow program starts on the chief."""

from __future__ import annotations

import asyncio

import pytest

import psync
from memory_cluster import cluster_of, coordinating
from ps_cluster import heard, until
from psync.api.sync_replicas import ChiefQueueRunner, SyncReplicasHook
from psync.wire.messages import AwaitEnd, EndTraining


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
    optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)
    assert optimizer._known_step() is None
    async with coordinating(1, 1) as (_, coordinator):
        assert optimizer._known_step() is None
        with coordinator.strategy.scope():
            step = psync.get_or_create_global_step()
            pushed = psync.Variable(0, name="pushed")
        assert optimizer._known_step() is step
        optimizer._of_step(pushed)
        assert optimizer._known_step() is pushed


@pytest.mark.parametrize("end", ["of training", "of its task"])
async def test_the_chiefs_queue_runner_waits_for_the_end(end: str) -> None:
    async with cluster_of(1, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            with coordinator.strategy.scope():
                step = psync.get_or_create_global_step()
            asked = heard(cluster.tasks["ps-0"], AwaitEnd)  # type: ignore[arg-type]
            running = asyncio.create_task(ChiefQueueRunner(step).run())
            await until(lambda: asked)
            assert not running.done()
            if end == "of training":
                runtime = coordinator.strategy._runtime
                assert runtime is not None
                await runtime.ps.links[0].call(lambda peer: EndTraining("enough", False))
                await running
        await running
