"""Values that come with a token, or with answers to a push: as a pull would have brought them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import coordinating, until
from psync import Outcome, SyncReplicasOptimizer, optimizers
from psync.wire.messages import Read, Update

pytestmark = pytest.mark.timeout(20)

STEPS = 6


class Training:
    """Workers, a variable on each of two ps tasks, and the pulls that both hear."""

    def __init__(self, coordinator: psync.ClusterCoordinator, pulls: list[list[Read]]) -> None:
        self.coordinator, self.pulls = coordinator, pulls
        with coordinator.strategy.scope():
            self.global_step = psync.get_or_create_global_step()
            self.model = [psync.Variable(np.full(3, n, np.float32), name=f"w{n}") for n in range(2)]

    def optimizer(self, needed: int = 2, **options: Any) -> SyncReplicasOptimizer:
        return SyncReplicasOptimizer(optimizers.SGD(1.0), needed, **options)

    def gradients(self) -> list[tuple[np.ndarray, Any]]:
        return [(np.ones(3, np.float32), w) for w in self.model]


@asynccontextmanager
async def training(num_workers: int = 2) -> AsyncIterator[Training]:
    async with coordinating(2, num_workers, tapped=True) as (cluster, coordinator):
        with (
            cluster.tap("ps-0").hearing(Read) as first,
            cluster.tap("ps-1").hearing(Read) as second,
        ):
            yield Training(coordinator, [first, second])


@pytest.mark.virtual_time  # values are good for a millisecond
@pytest.mark.parametrize(
    ("pull_ahead", "fills", "pulls"),
    [(True, False, 2), (True, True, 2), (False, False, 2 * STEPS)],
)
async def test_a_loop_that_pulls_and_pushes_pulls_once_for_each_worker_that_wants_it(
    pull_ahead: bool, fills: bool, pulls: int
) -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(pull_ahead=pull_ahead)

        async def loop() -> list[tuple[list[float], Outcome, int]]:
            seen = []
            out = [np.empty(3, np.float32) for _ in model] if fills else None
            for _ in range(STEPS):
                values = await psync.pull(model, out=out)
                assert out is None or values[0] is out[0]
                pairs = [(np.ones_like(value), w) for value, w in zip(values, model, strict=True)]
                result = await optimizer.apply_gradients(pairs, global_step)
                seen.append(([float(value[0]) for value in values], result.outcome, result.step))
            return seen

        runs = [t.coordinator.schedule(loop) for _ in range(2)]
        await t.coordinator.join()
        for seen in await t.coordinator.fetch(runs):
            assert seen == [([-n, 1 - n], Outcome.ACCEPTED, n + 1) for n in range(STEPS)]
        assert [len(heard) for heard in t.pulls] == [pulls] * 2
        assert int(await global_step.read()) == STEPS


@pytest.mark.parametrize("waits", [False, True])
async def test_values_are_asked_for_by_a_step_that_has_computed_or_awaited_since_its_push(
    waits: bool,
) -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(1)

        async def loop() -> None:
            for _ in range(STEPS):
                values = await psync.pull(model)
                await optimizer.apply_gradients(zip(values, model, strict=True), global_step)
                if waits:
                    await asyncio.sleep(0)
                else:
                    time.sleep(0.002)  # noqa: ASYNC251  # it computes, or reads a file

        await t.coordinator.schedule(loop)
        assert [len(heard) for heard in t.pulls] == [STEPS] * 2


@pytest.mark.virtual_time
async def test_closures_that_were_scheduled_before_take_what_came_with_the_token() -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(pull_ahead=True)

        async def step() -> tuple[float, bool]:
            first, second = await psync.pull(model)
            pairs = [(np.ones(3, np.float32), w) for w in model]
            result = await optimizer.apply_gradients(pairs, global_step)
            return float(first[0] + result.step), bool(first[0] + 1 == second[0])

        results = [t.coordinator.schedule(step) for _ in range(40)]
        await t.coordinator.join()
        assert await t.coordinator.fetch(results) == [(1.0, True)] * 40  # each of its own step
        assert max(len(pulls) for pulls in t.pulls) < 40


async def test_what_the_program_did_before_it_scheduled_a_closure_is_seen_there() -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(1, pull_ahead=True)

        async def step() -> list[float]:
            values = await psync.pull(model)
            await optimizer.apply_gradients(zip(values, model, strict=True), global_step)
            return [float(value[0]) for value in values]

        for value in range(1, 8):
            for w in model:
                await w.assign(np.full(3, value, np.float32))
            assert await t.coordinator.schedule(step) == [value, value]


async def test_what_happened_before_a_step_heard_of_it_outside_of_psync_is_seen() -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(1, pull_ahead=True)

        async def step() -> list[float]:
            for _ in range(2):
                values = await psync.pull(model)
                await optimizer.apply_gradients(zip(values, model, strict=True), global_step)
            memory_cluster.event_of("pushed").set()
            await memory_cluster.event_of("changed").wait()
            return [float(value[0]) for value in await psync.pull(model)]

        scheduled = t.coordinator.schedule(step)
        await memory_cluster.event_of("pushed").wait()
        for w in model:
            await w.assign(np.full(3, 7, np.float32))
        memory_cluster.event_of("changed").set()
        assert await scheduled == [7, 7]


async def test_what_happened_before_the_batch_that_a_closure_waits_for_is_seen() -> None:
    async with coordinating(1, 1) as (_, coordinator):
        with coordinator.strategy.scope():
            global_step = psync.get_or_create_global_step()
            w = psync.Variable(np.zeros(3, np.float32), name="w")
        optimizer = SyncReplicasOptimizer(optimizers.SGD(1.0), 1)
        gate = memory_cluster.shared["gate"] = threading.Event()

        def batches() -> Iterator[int]:
            for n in range(20):
                if n == 10:
                    memory_cluster.shared["gate"].wait()
                yield n

        async def step(batches: Any) -> float:
            n = next(batches)
            value = await psync.pull(w)
            await optimizer.apply_gradients([(np.ones(3, np.float32), w)], global_step)
            if n == 9:
                memory_cluster.event_of("ten").set()
            return float(value[0])

        data = iter(coordinator.create_per_worker_dataset(batches))
        results = [coordinator.schedule(step, (data,)) for _ in range(20)]
        await memory_cluster.event_of("ten").wait()
        await until(lambda: coordinator.statistics()["closures"].finished == 10)  # the next waits
        await w.assign(np.full(3, 1000, np.float32))
        gate.set()
        seen = await coordinator.fetch(results)
        assert seen == [-n if n < 10 else 1010 - n for n in range(20)]
        memory_cluster.shared.clear()


async def test_what_the_worker_itself_has_written_is_seen() -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(1, pull_ahead=True)
        sgd = optimizers.SGD(1.0)

        async def step() -> list[float]:
            seen = []
            for value in range(1, 5):
                values = await psync.pull(model)
                await optimizer.apply_gradients(zip(values, model, strict=True), global_step)
                if value % 2:
                    await model[1].assign(np.full(3, value, np.float32))
                else:
                    await sgd.apply_gradients([(np.full(3, -value, np.float32), model[1])])
                seen.append(float((await psync.pull(model))[1][0]))
            return seen

        assert await t.coordinator.schedule(step) == [1, 2, 3, 4]


async def test_a_copy_may_be_changed_and_arrays_to_fill_are_filled() -> None:
    async with training() as t:
        model, global_step, optimizer = t.model, t.global_step, t.optimizer(1, pull_ahead=True)
        gradients = t.gradients()

        async def step() -> list[list[float]]:
            seen = []
            out = [np.zeros(3, np.float32) for _ in model]
            for options in ({}, {"copy": True}, {"out": out}, {}):
                values = await psync.pull(model, **options)
                if options:
                    values[0] += 1  # of this copy alone
                else:
                    assert not values[0].flags.writeable
                seen.append([float(value[0]) for value in values])
                await optimizer.apply_gradients(gradients, global_step)
            return seen

        assert await t.coordinator.schedule(step) == [[0, 1], [0, 0], [-1, -1], [-3, -2]]


async def test_the_global_step_is_that_of_the_token_wherever_it_lies() -> None:
    for on_ps_1 in (False, True):
        async with coordinating(2, 1) as (_, coordinator):
            with coordinator.strategy.scope():
                if on_ps_1:
                    psync.Variable(0, name="first")
                global_step = psync.get_or_create_global_step()
                w = psync.Variable(np.zeros(3, np.float32), name="w")
            optimizer = SyncReplicasOptimizer(optimizers.SGD(1.0), 1, pull_ahead=True)

            async def loop(w: Any, global_step: Any, optimizer: Any) -> list[tuple[int, float]]:
                seen = []
                for _ in range(4):
                    step, value = await psync.pull((global_step, w))
                    seen.append((int(step), float(value[0])))
                    await optimizer.apply_gradients([(np.ones(3, np.float32), w)], global_step)
                return seen

            seen = await coordinator.schedule(loop, (w, global_step, optimizer))
            assert seen == [(n, -n) for n in range(4)]


async def test_two_optimizers_in_one_program() -> None:
    async with training() as t:
        model, global_step = t.model, t.global_step
        with t.coordinator.strategy.scope():
            other_step = psync.Variable(0, name="other_step", trainable=False)
        one, two = (t.optimizer(name=name, pull_ahead=True) for name in ("one", "two"))

        async def step(_: int) -> list[Outcome]:
            outcomes = []
            for _ in range(4):
                for optimizer, counter in ((one, global_step), (two, other_step)):
                    await psync.pull(model)
                    pairs = [(np.ones(3, np.float32), w) for w in model]
                    result = await optimizer.apply_gradients(pairs, counter)
                    outcomes.append(result.outcome)
            return outcomes

        runs = [t.coordinator.schedule(step, (n,)) for n in range(2)]
        await t.coordinator.join()
        for outcomes in await t.coordinator.fetch(runs):
            assert outcomes == [Outcome.ACCEPTED] * 8
        assert [int((await w.read())[0]) for w in model] == [-8, -7]


async def test_a_late_worker_is_not_made_late_by_what_it_was_sent() -> None:
    """It takes values with the token of a stale push; its next gradients are of that step."""
    async with training() as t:
        model, global_step = t.model, t.global_step
        optimizer = t.optimizer(1, total_num_replicas=2, pull_ahead=True)

        async def step(count: int) -> list[tuple[str, float, int]]:
            seen = []
            for _ in range(count):
                values = await psync.pull(model)
                await asyncio.sleep(0)
                pairs = [(np.ones(3, np.float32), w) for w in model]
                result = await optimizer.apply_gradients(pairs, global_step)
                seen.append((result.outcome.value, float(values[0][0]), result.staleness))
            return seen

        runs = [t.coordinator.schedule(step, (12,)) for _ in range(2)]
        await t.coordinator.join()
        seen = [each for run in await t.coordinator.fetch(runs) for each in run]
        accepted = sorted(value for outcome, value, _ in seen if outcome == "accepted")
        assert accepted == [-n for n in reversed(range(len(accepted)))]  # of each step one
        assert int(await global_step.read()) == len(accepted)
        assert memory_cluster.shared == {}


# --- with the answers to a push ------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_program_that_wants_other_variables_than_it_pushes_pulls_these() -> None:
    async with training(1) as t:
        sgd, (first, second) = optimizers.SGD(1.0), t.model
        _, value = await sgd.push_pull([(np.ones(3, np.float32), first)], pull=second)
        assert value.tolist() == [1, 1, 1]
        _, value = await sgd.push_pull([(np.ones(3, np.float32), second)], pull=second)
        assert value.tolist() == [0, 0, 0]
        assert [len(heard) for heard in t.pulls] == [0, 1]


@pytest.mark.virtual_time
@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("at", [0, 1], ids=["with the variable", "on another ps"])
async def test_a_push_that_is_cancelled_counts_in_the_global_step(at, compression) -> None:
    optimizer = optimizers.SGD(1.0, compression=compression)
    async with coordinating(2, 1, tapped=True) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w, _, *steps = [psync.Variable(first) for first in (np.zeros(3, np.float32), 0.0, 0, 0)]
        await psync.pull([w, *steps])
        go_on = asyncio.Event()
        with cluster.tap("ps-0").at(Update, go_on.wait) as sent:
            pairs = [(np.ones(3, np.float32), w)]
            push = asyncio.ensure_future(optimizer.apply_gradients(pairs, steps[at]))
            await sent.wait()
            push.cancel()
            await asyncio.gather(push, return_exceptions=True)
            go_on.set()
            while not int(await steps[at].read()):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0)
        assert (await w.read()).tolist() == [-1] * 3


async def test_an_option_is_that_of_apply_gradients_or_an_error_that_names_push_pull() -> None:
    async with training(1) as t:
        both, gradients, model, step = t.optimizer(1), t.gradients(), t.model, t.global_step

        async def train() -> list[float]:
            _, values = await both.push_pull(gradients, model, step, name="n", weight=2.0)
            return [float(value[0]) for value in values]

        assert await t.coordinator.schedule(train) == [-1, 0]
        for optimizer in (optimizers.SGD(1.0), both):
            with pytest.raises(TypeError, match=r"push_pull\(\) got an unexpected .*'compression'"):
                await optimizer.push_pull(gradients, model, step, compression="bf16")


async def test_tasks_of_a_step_that_push_at_once() -> None:
    async with training(1) as t:
        sgd = optimizers.SGD(1.0)
        for n in range(1, STEPS):
            pushes = [sgd.push_pull([pair], pull=t.model) for pair in t.gradients()]
            results = await asyncio.gather(*pushes)
            assert [values[at][0] for at, (_, values) in enumerate(results)] == [-n, 1 - n]


async def test_where_reads_are_kept_the_kept_ones_are_returned() -> None:
    async with training(1) as t:
        sgd = optimizers.SGD(1.0)
        with psync.cache_variable_reads():
            await psync.pull(t.model)
            _, values = await sgd.push_pull(t.gradients(), pull=t.model)
            assert [value[0] for value in values] == [0, 1]
        _, values = await sgd.push_pull(t.gradients(), pull=t.model)
        assert [value[0] for value in values] == [-2, -1]
