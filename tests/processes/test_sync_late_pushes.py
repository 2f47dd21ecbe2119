"""A late push leaves no trace on any ps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync import Outcome
from real_training import ONE_LOOP, assert_nothing_is_staged, group_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

KIB = 1024


async def received_bytes(coordinator: psync.ClusterCoordinator) -> list[int]:
    return [
        ps["network"]["bytes_received"] + ps["network"]["bytes_borrowed"]
        for ps in await coordinator.ps_statistics()
    ]


async def state_of(
    coordinator: psync.ClusterCoordinator, *variables: psync.Variable
) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """The values that occur in each variable, and how often each ps has changed a shard."""
    values = [sorted(set(array.flat)) for array in await psync.pull(variables)]
    stores = [ps["store"] for ps in await coordinator.ps_statistics()]
    return values, [(store["applies"], store["assigns"]) for store in stores]


async def rounds(
    cluster: psync.LocalCluster, place: Path, large_kib: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Make two steps of two of three workers; the third pushes late what it has computed before.

    One ps has a variable of ``large_kib``, the other one of a third of that.

    Returns:
        What each ps has received in the last step, and then of the late push, in bytes; and how
        many parts each has found too late, in both steps.
    """
    strategy = psync.ParameterServerStrategy(cluster.resolver)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            large = psync.Variable(np.zeros((large_kib, 256), np.float32))
            small = psync.Variable(np.zeros((large_kib // 3, 256), np.float32))
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2, 3)

        async def step(words: list[Path]) -> psync.PushResult:
            index = psync.get_worker_index()
            arrays = await psync.pull((large, small))
            words[index].with_suffix(f".{index}").touch()
            while not words[index].exists():  # noqa: ASYNC110  # the test's word
                await asyncio.sleep(0.005)
            gradients = [np.ones_like(array) for array in arrays]
            return await optimizer.apply_gradients(
                zip(gradients, (large, small), strict=True), global_step
            )

        for number in (1, 2):  # the first one makes all connections
            soon, late = (place / f"{large_kib} {number} {word}" for word in ("soon", "late"))
            values = [coordinator.schedule(step, ([soon, soon, late],)) for _ in range(3)]
            while len(list(place.glob(f"{large_kib} {number} *.?"))) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            before = await received_bytes(coordinator)
            soon.touch()
            ended = asyncio.as_completed([value.fetch() for value in values])
            for result in [await next(ended), await next(ended)]:
                assert (result.outcome, result.count) == (Outcome.ACCEPTED, 2)
            between = await received_bytes(coordinator)
            state = await state_of(coordinator, large, small)
            assert state[0] == [[-number], [-number]]
            start = await received_bytes(coordinator)
            late.touch()
            result = await next(ended)
            assert (result.outcome, result.staleness) == (Outcome.STALE, 1)
            after = await received_bytes(coordinator)
            assert await state_of(coordinator, large, small) == state
            await assert_nothing_is_staged(coordinator)
        assert await global_step.read() == 2
        replicas = (await group_of(coordinator))["replicas"]
        assert replicas["/job:worker/task:2"] == {"accepted": 0, "stale": 2, "duplicate": 0}
        found_late = [ps["staging"]["stale"] for ps in await coordinator.ps_statistics()]
        return np.subtract(between, before), np.subtract(after, start), found_late


@pytest.mark.promise("steps.stale-dropped")
async def test_a_late_push_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_SHARED_MEMORY", "0")  # of what is lent nothing travels

    def is_about(received: np.ndarray, *kib: int) -> Any:
        return (received >= np.multiply(kib, KIB)).all() and (
            received < np.multiply(kib, KIB) + 4 * KIB  # what messages and pings take
        ).all()

    async with psync.LocalCluster(2, 3) as cluster:
        step, late, found_late = await rounds(cluster, tmp_path, 30)
        assert is_about(step, 2 * 30, 2 * 10)
        assert is_about(late, 30, 10)
        assert found_late == [2, 2]
        step, late, found_late = await rounds(cluster, tmp_path, 960)
        assert is_about(step, 2 * 960, 2 * 320)
        assert is_about(late, 960, 320)
        assert found_late == [2, 2]
