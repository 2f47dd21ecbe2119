"""Values that come with the token: who takes them sees what a pull would have brought."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

import memory_cluster
import psync
from inside import peers_of
from memory_cluster import MemoryCluster, coordinating
from ps_cluster import PsCluster, assign, heard, pull
from psync import Outcome, SyncReplicasOptimizer, optimizers
from psync.client import sync
from psync.client.link import always
from psync.client.plan import Landing
from psync.client.ps import PsClient
from psync.client.sync import PulledAhead
from psync.specs import VariableSpec
from psync.wire.messages import AskStatistics, Pull

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("slow_machine")]

STEPS = 6


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are good for this turn, however long that takes."""
    monkeypatch.setattr(sync, "GOOD_FOR_S", math.inf)


# --- what is kept, and for whom ------------------------------------------------------------------


class Kept(NamedTuple):
    cluster: PsCluster
    client: PsClient
    ahead: PulledAhead
    v: VariableSpec

    def take(self, arrival: int = 1) -> Landing | None:
        return self.ahead.take(self.client.plan((self.v,)), arrival)


@asynccontextmanager
async def kept(now: Callable[[], float] | None = None) -> AsyncIterator[Kept]:
    """A task that has pulled a set, pushed, and got values with its token."""
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(4, np.float32), shards=2)
        client = cluster.client()
        await pull(client, v)
        ahead, plan = PulledAhead(client.links, now or client.now), client.plan((v,))
        assert ahead.take(plan, 0) is None
        ahead.arrivals = 1
        wanted = ahead.want()
        assert wanted is not None
        client.links[0].num_calls += 2  # the push, and its answer
        wanted.into_whole(None, wanted.plan.whole.lengths, None)
        wanted.steps = [[(9, 3)]]
        ahead.put(wanted)
        yield Kept(cluster, client, ahead, v)


# What may happen; returns when the closure that pulls then came in.


async def pulls_another_set(k: Kept) -> int:
    other = await k.cluster.create("other", np.zeros(1, np.float32))
    assert k.ahead.take(k.client.plan((other,)), 1) is None
    return 1


async def asks_a_ps(k: Kept) -> int:
    await assign(k.client, k.v, np.ones(4, np.float32))
    return 1


async def waits(k: Kept) -> int:
    await asyncio.sleep(0)
    return 1


async def connects_anew(k: Kept) -> int:
    for peer in peers_of(k.client.links[1]):
        peer.abort()
        await peer.wait_closed()
    await k.client.links[1].peer("control")
    return 1


async def pushes_again(k: Kept) -> int:
    assert k.ahead.want() is not None
    return 1


async def comes_in(k: Kept) -> int:
    return 2


@pytest.mark.asyncio
class TestKeeping:
    async def test_the_next_pull_of_the_set_takes_them_and_no_other(self) -> None:
        async with kept() as k:
            values = k.take()
            assert values is not None
            assert values.steps == [[(9, 3)]]
            assert values.arrays is not None
            assert [array.shape for array in values.arrays] == [(4,)]
            assert not values.arrays[0].flags.writeable
            assert k.take() is None

    @pytest.mark.parametrize(
        "happens",
        [pulls_another_set, asks_a_ps, waits, connects_anew, pushes_again, comes_in],
        ids=lambda happens: happens.__name__,
    )
    async def test_whatever_happens_after_the_push_drops_them(
        self, happens: Callable[[Kept], Awaitable[int]]
    ) -> None:
        async with kept() as k:
            assert k.take(await happens(k)) is None

    async def test_an_answer_to_what_was_asked_before_the_push_drops_them(self) -> None:
        async with kept() as k:
            asked = asyncio.create_task(k.client.links[1].call(always(AskStatistics())))
            await asyncio.sleep(0)  # it is under way, and says later what is there then
            wanted = k.ahead.want()
            assert wanted is not None
            k.client.links[0].num_calls += 2
            wanted.into_whole(None, wanted.plan.whole.lengths, None)
            k.ahead.put(wanted)
            await asked
            assert k.take() is None

    async def test_they_are_dropped_if_the_step_has_not_let_go_of_the_loop_for_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sync, "GOOD_FOR_S", 0.001)
        async with kept() as k:
            time.sleep(0.002)  # noqa: ASYNC251  # it computes, or reads a file
            assert k.take() is None

    @pytest.mark.parametrize(("age_s", "good"), [(0.0009, True), (0.0011, False)])
    async def test_they_are_good_for_a_millisecond_also_where_the_loop_counts_no_less(
        self, age_s: float, good: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sync, "GOOD_FOR_S", 0.001)
        times = iter([7.0005, 7.0005 + age_s])
        async with kept(lambda: next(times)) as k:
            assert (k.take() is not None) is good

    async def test_of_two_pushes_the_one_that_was_sent_first_brings_nothing(self) -> None:
        async with kept() as k:
            first = k.ahead.want()
            assert first is not None
            first.into_whole(None, first.plan.whole.lengths, None)
            assert k.ahead.want() is not None
            k.client.links[0].num_calls += 2
            k.ahead.put(first)
            assert k.take() is None

    async def test_the_next_closure_gets_them_if_the_first_ended_in_that_turn(self) -> None:
        async with kept() as k:
            k.ahead.end_closure()
            await asyncio.sleep(0)  # the session's own affairs
            k.ahead.begin_closure()
            assert k.take() is not None
        async with kept() as k:
            k.ahead.end_closure()
            k.ahead.begin_closure()
            await asyncio.sleep(0)
            assert k.take() is None
        async with kept() as k:
            await asyncio.sleep(0)
            k.ahead.end_closure()
            k.ahead.begin_closure()
            assert k.take() is None

    async def test_none_are_wanted_after_a_pull_that_came_too_late_for_them(self) -> None:
        async with kept() as k:
            await asyncio.sleep(0)
            assert k.take() is None
            assert k.ahead.want() is None
            k.ahead.put(None)
            assert k.take(2) is None  # a closure that came after the push
            assert k.ahead.want() is None
            k.client.links[0].num_calls += 2
            k.ahead.put(None)
            assert k.take() is None  # in time, had there been any
            assert k.ahead.want() is not None

    async def test_none_are_wanted_after_a_pull_before_which_something_else_was_asked(self) -> None:
        async with kept() as k:
            await k.client.links[1].call(always(AskStatistics()))
            k.ahead.put(None)
            assert k.take() is None
            assert k.ahead.want() is None

    async def test_none_are_wanted_while_an_update_is_under_way(self) -> None:
        async with kept() as k:
            link = k.client.links[1]
            sequence = link.updates.draw()
            assert k.ahead.want() is None
            link.updates.answered(sequence)
            assert k.ahead.want() is not None

    async def test_none_are_wanted_of_a_set_that_is_large(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros((1 << 14) + 1, np.float32))
            client = cluster.client()
            ahead = PulledAhead(client.links, client.now)
            assert ahead.want() is None  # nothing was pulled
            ahead.take(client.plan((v,)), 0)
            assert ahead.want() is None


# --- in training ---------------------------------------------------------------------------------


class Training:
    """Two workers, a model on two ps tasks, and how many pulls were asked for."""

    def __init__(self, cluster: MemoryCluster, coordinator: psync.ClusterCoordinator) -> None:
        self.coordinator = coordinator
        with coordinator.strategy.scope():
            self.global_step = psync.get_or_create_global_step()
            self.model = [psync.Variable(np.full(3, n, np.float32), name=f"w{n}") for n in range(2)]
        self.pulls = [heard(cluster.tasks[f"ps-{index}"], Pull) for index in range(2)]  # type: ignore[arg-type]

    def optimizer(self, needed: int = 2, **options: Any) -> SyncReplicasOptimizer:
        return SyncReplicasOptimizer(optimizers.SGD(1.0), needed, **options)


@asynccontextmanager
async def training() -> AsyncIterator[Training]:
    async with coordinating(2, 2) as (cluster, coordinator):
        yield Training(cluster, coordinator)


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
        await asyncio.sleep(0.1)  # the next closure waits for its batch
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
                pairs = [(np.ones(3, np.float32), w) for w in model]
                await optimizer.apply_gradients(pairs, global_step)
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
