"""Synchronous training on real processes, round by round: who counts, who is late, who goes on.

Each worker runs one closure a round, and its part in it is written in a table, beside what must
come of it. A worker's gradient is ``(1 + index) * 2**step``, of the step that it has pulled; the
learning rate is 1. So the values below are means that one can check by hand, exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

import psync
from psync import Outcome, PushResult
from real_training import ONE_LOOP, assert_nothing_is_staged, coordinated

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

ACCEPTED, STALE = Outcome.ACCEPTED, Outcome.STALE

Became: TypeAlias = list[tuple[Outcome, int]]
"""Of each push of one closure: the outcome and the token."""

Round: TypeAlias = tuple[str, tuple[Became, ...], int, float]
"""Each worker's part in a round, what becomes of its pushes, the global step, the value then.

Parts: "push"; "twice"; "late": push once the step is over whose values it has; "rest".
"""


async def play(
    cluster: psync.LocalCluster, rounds: Sequence[Round], *numbers: int, **options: Any
) -> list[PushResult]:
    """Train for as many rounds as there are, and compare; return all results, as they came."""
    async with coordinated(cluster) as (strategy, coordinator):
        with strategy.scope():
            one = psync.Variable(0.0)
            both = psync.Variable(np.zeros((2, 3), np.float32))  # a row on each ps
            arrived = psync.Variable(0)
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), *numbers, **options)

        async def step(parts: list[str], together: int) -> tuple[int, list[PushResult]]:
            index = psync.get_worker_index()
            now, _, _ = await psync.pull((global_step, one, both))
            await arrived.assign_add(1)
            while await arrived.read() < together:  # nobody pushes before all have pulled
                pass
            while parts[index] == "late" and await global_step.read() == now:
                pass
            gradient = (1 + index) * 2.0 ** int(now)
            pairs = [(gradient, one), (np.full((2, 3), 2 * gradient, np.float32), both)]
            return index, [
                await optimizer.apply_gradients(pairs, global_step)
                for _ in range({"rest": 0, "twice": 2}.get(parts[index], 1))
            ]

        all_results: list[PushResult] = []
        for number, (parts, became, step_then, value) in enumerate(rounds, 1):
            args = (parts.split(), number * len(became))
            closures = [coordinator.schedule(step, args) for _ in became]
            await coordinator.join()
            by_worker = dict(await coordinator.fetch(closures))
            found = tuple(
                [(result.outcome, result.step) for result in by_worker[index]]
                for index in range(len(became))
            )
            assert found == became, parts
            while await global_step.read() < step_then:
                pass  # who has a token of an earlier step does not wait for this one to be closed
            assert await psync.pull((global_step, one)) == (step_then, value)
            assert (await both.read()).tolist() == [[2 * value] * 3] * 2
            all_results += [result for index in sorted(by_worker) for result in by_worker[index]]
        await assert_nothing_is_staged(coordinator)
        return all_results


def accepted(token: int) -> Became:
    return [(ACCEPTED, token)]


def stale(token: int) -> Became:
    return [(STALE, token)]


REST: Became = []


async def test_two_workers_are_averaged_in_each_step() -> None:
    every_step = [
        ("push push", (accepted(1), accepted(1)), 1, -1.5),  # - (1 + 2) / 2
        ("push push", (accepted(2), accepted(2)), 2, -4.5),  # - (2 + 4) / 2
        ("push push", (accepted(3), accepted(3)), 3, -10.5),  # - (4 + 8) / 2
    ]
    second_wasted = [
        ("push push", (accepted(0), accepted(0)), 1, -1.5),  # initial tokens: nobody waits
        ("push push", (stale(1), stale(1)), 1, -1.5),  # from step 0, by these tokens
        ("push push", (accepted(2), accepted(2)), 2, -4.5),
        ("push push", (accepted(3), accepted(3)), 3, -10.5),
    ]
    two_each = [  # 4 gradients a step of 2 replicas
        ("twice twice", ([(ACCEPTED, 0), (ACCEPTED, 1)],) * 2, 1, -1.5),
        ("twice twice", ([(ACCEPTED, 1), (ACCEPTED, 2)],) * 2, 2, -4.5),
    ]
    async with psync.LocalCluster(2, 2) as cluster:
        for result in await play(cluster, every_step, 2):
            assert (result.staleness, result.partial, result.count) == (0, False, 2)
        wasted = await play(cluster, second_wasted, 2, tensorflow_compat=True)
        assert [result.staleness for result in wasted] == [0, 0, 1, 1, 0, 0, 0, 0]
        pushes = await play(cluster, two_each, 4, 2, strict=True)
        assert {result.count for result in pushes if result.step} == {0, 4}


async def test_a_backup_worker_is_not_waited_for() -> None:
    every_step = [
        ("push push late", (accepted(1), accepted(1), stale(1)), 1, -1.5),  # - (1 + 2) / 2
        ("late push push", (stale(2), accepted(2), accepted(2)), 2, -6.5),  # - (4 + 6) / 2
        ("push late push", (accepted(3), stale(3), accepted(3)), 3, -14.5),  # - (4 + 12) / 2
    ]
    second_wasted = [  # of those who took an initial token
        ("push push late", (accepted(0), accepted(0), stale(1)), 1, -1.5),
        ("push push rest", (stale(1), stale(1), REST), 1, -1.5),
        ("push push late", (accepted(2), accepted(2), stale(2)), 2, -4.5),  # - (2 + 4) / 2
        ("late push push", (stale(3), accepted(3), accepted(3)), 3, -14.5),  # - (8 + 12) / 2
    ]
    spare_token = [
        ("push push rest", (accepted(1), accepted(1), REST), 1, -1.5),
        ("twice rest rest", ([(ACCEPTED, 1), (ACCEPTED, 2)], REST, REST), 2, -3.5),  # - (2 + 2) / 2
    ]
    bound_tokens = [
        ("push push rest", (accepted(1), accepted(1), REST), 1, -1.5),
        ("twice rest rest", ([(ACCEPTED, 2), (ACCEPTED, 3)], REST, REST), 3, -5.5),  # - 2 - 2
    ]
    async with psync.LocalCluster(2, 3) as cluster:
        for result in await play(cluster, every_step, 2, 3):
            assert (result.count, result.staleness) in ((2, 0), (0, 1))
            assert not result.partial
        await play(cluster, second_wasted, 2, 3, tensorflow_compat=True)
        twice = (await play(cluster, spare_token, 2, 3))[2:]
        assert [(result.partial, result.count) for result in twice] == [(False, 0), (False, 2)]
        alone = (await play(cluster, bound_tokens, 2, 3, strict=True))[2:]
        assert [(result.partial, result.count) for result in alone] == [(True, 1), (True, 1)]
