"""Rules and schedules of users on ps tasks: whoever dies, and whatever is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import own_rules
import psync
from memory_cluster import MemoryCluster, coordinating, event_of, replicated, running, shared
from own_rules import SHAPE, check_bits, declared, rule, train
from psync import FailoverEvent
from psync.errors import RuleError
from psync.wire.limits import Limits

pytestmark = pytest.mark.virtual_time

REFUSED = np.full(SHAPE, 2 * own_rules.TOO_LARGE, np.float32)
MESSAGE = r'update rule "tests.momentum" for "w/part_\d" raised ValueError on /job:ps/task:\d: a gr'


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


def bury_at(cluster: MemoryCluster, name: str, place: str) -> asyncio.Task[None]:
    """Let a ps die when a place is reached, and be stopped then."""
    died = cluster.kill_at(name, place)

    async def bury() -> None:
        await died.wait()
        await cluster.stop(name)

    return asyncio.create_task(bury())


@pytest.mark.parametrize("place", ["ps.backup.taken", "ps.backup.sending", "ps.push.applied"])
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_training_under_failover_gives_the_bits_of_one_process(lost: str, place: str) -> None:
    async with replicated() as (cluster, coordinator):
        w, optimizer = declared(coordinator.strategy.scope())
        died = None
        for number in range(20):
            if number == 9:
                died = cluster.kill_at(lost, place, 2)
            coordinator.schedule(train, args=(w, optimizer, number))
            await coordinator.join()
        assert died is not None
        assert died.is_set()
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        await check_bits(w, optimizer, 20)


async def test_deterministic_steps_under_failover_give_the_bits_of_one_process() -> None:
    async with replicated() as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.ones(SHAPE, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        inner = psync.optimizers.Optimizer(rule(), weight_decay=0.01)
        optimizer = psync.SyncReplicasOptimizer(inner, 1, 1, deterministic=True)
        for number in range(12):
            if number == 6:
                burying = bury_at(cluster, "ps-0", "ps.step.applied")
            coordinator.schedule(train, args=(w, optimizer, number, global_step))
            await coordinator.join()
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        await burying
        await check_bits(w, optimizer, 12)


async def push(w: Any, optimizer: Any, gradient: np.ndarray) -> str:
    """Push, and return what became of it."""
    try:
        result = await optimizer.apply_gradients([(gradient, w)])
    except RuleError as exc:
        return str(exc.message)
    return str(result.outcome.value)


async def test_a_rule_that_raises_fails_the_push_and_the_step_may_go_on() -> None:
    async with coordinating(2) as (_, coordinator):
        w, optimizer = declared(coordinator.strategy.scope())
        coordinator.schedule(train, args=(w, optimizer, 0))
        await coordinator.join()
        told = await coordinator.schedule(push, args=(w, optimizer, REFUSED)).fetch()
        assert told.startswith('update rule "tests.momentum" for "w/part_0" raised ValueError on')
        await check_bits(w, optimizer, 1)
        coordinator.schedule(optimizer.apply_gradients, args=([(REFUSED, w)],))
        with pytest.raises(RuleError, match=MESSAGE) as caught:
            await coordinator.join()
        assert "own_rules.py" in caught.value.traceback_text
        await check_bits(w, optimizer, 1)


@pytest.mark.promise("rules.error-changes-nothing")
async def test_a_large_push_fails_as_a_small_one_does_and_nothing_waits_behind_it() -> None:
    async with replicated() as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.ones((2, 600_000), np.float32), name="w")
        optimizer = psync.optimizers.Optimizer(rule())
        good, bad = np.ones(w.shape, np.float32), np.ones(w.shape, np.float32)
        bad[:, -1] = 2 * own_rules.TOO_LARGE  # in the last of three blocks
        pushed = [coordinator.schedule(push, args=(w, optimizer, each)) for each in (bad, good)]
        pushed.append(coordinator.schedule(push, args=(w, optimizer, bad)))
        told = await coordinator.fetch(pushed)
        assert [each == "accepted" for each in told] == [False, True, False]
        value = await w.read()
        assert (value == value[:, :1]).all()  # the other ps may have had them in another order
        assert value[0, 0] < 1
        await cluster.kill("ps-1")  # the backup has applied what the other one has
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        assert np.array_equal(await w.read(), value)


@pytest.mark.promise("rules.same-error-again")
async def test_a_push_that_is_sent_again_gets_the_same_error() -> None:
    cluster = MemoryCluster(1, losses={"Update": {"min_each": 2}})
    async with running(cluster), psync.ClusterCoordinator(cluster.strategy()) as coordinator:
        w, optimizer = declared(coordinator.strategy.scope())
        result = coordinator.schedule(push, args=(w, optimizer, REFUSED))
        assert "raised ValueError" in await result.fetch()
        assert cluster.losses is not None
        assert cluster.losses.lost
        assert np.array_equal(await w.read(), np.ones(SHAPE))
        assert cluster.ps("ps-0").statistics()["ledger"]["duplicate"] >= 2


@pytest.mark.promise("rules.same-error-again")
async def test_a_promoted_backup_answers_with_the_same_error() -> None:
    of_ps_0 = np.zeros(SHAPE, np.float32)
    of_ps_0[0] = 2 * own_rules.TOO_LARGE
    deaths = 0
    for count in (1, 2, 3):  # the push comes with one of these messages of the log
        async with replicated() as (cluster, coordinator):
            w, optimizer = declared(coordinator.strategy.scope())
            coordinator.schedule(train, args=(w, optimizer, 0))
            await coordinator.join()
            died = cluster.kill_at("ps-0", "ps.backup.taken", count)
            result = coordinator.schedule(push, args=(w, optimizer, of_ps_0))
            assert '"w/part_0" raised ValueError' in await result.fetch()
            if died.is_set():
                assert isinstance(await anext(coordinator.events()), FailoverEvent)
                deaths += 1
    assert deaths


async def push_and_hang(w: Any, optimizer: Any) -> str:
    """Push; its worker is lost, or its session ended, until the test lets it go on."""
    told = await push(w, optimizer, REFUSED)
    shared.setdefault("told", []).append(told)
    shared["worker"] = f"worker-{psync.get_worker_index()}"
    event_of(f"run {len(shared['told'])}").set()
    await event_of("go on").wait()
    return told


@pytest.mark.promise("rules.same-error-again")
async def test_another_run_of_the_closure_gets_the_same_error() -> None:
    async with replicated() as (cluster, coordinator):
        w, optimizer = declared(coordinator.strategy.scope())
        result = coordinator.schedule(push_and_hang, args=(w, optimizer))
        await event_of("run 1").wait()
        await cluster.stop(shared["worker"])
        await event_of("run 2").wait()
        event_of("go on").set()
        assert "raised ValueError" in await result.fetch()
        assert shared["told"] == [await result.fetch()] * 2
        assert np.array_equal(await w.read(), np.ones(SHAPE))


async def step_of(w: Any, optimizer: Any, gradient: np.ndarray, global_step: Any) -> None:
    await psync.pull(w)
    await optimizer.apply_gradients([(gradient, w)], global_step)


@pytest.mark.promise("steps.rule-error-ends-group")
@pytest.mark.parametrize("lost", [None, "ps-0", "ps-1"])
async def test_a_synchronous_step_that_raises_ends_the_training_of_its_optimizer(
    lost: str | None,
) -> None:
    async with replicated() as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.ones(SHAPE, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        inner = psync.optimizers.Optimizer(rule(), weight_decay=0.01)
        optimizer = psync.SyncReplicasOptimizer(inner, 1, 1)
        coordinator.schedule(train, args=(w, optimizer, 0, global_step))
        await coordinator.join()
        before, gradient = await w.read(), np.zeros(SHAPE, np.float32)
        gradient[0] = 2 * own_rules.TOO_LARGE  # on one of both ps tasks
        burying = None if lost is None else bury_at(cluster, lost, "ps.step.applied")
        for _ in range(2):
            coordinator.schedule(step_of, args=(w, optimizer, gradient, global_step))
            with pytest.raises(RuleError, match=f"{MESSAGE}.*\nhint: sync_replicas has ended"):
                await coordinator.join()
        assert np.array_equal((await w.read())[:2], before[:2])
        if burying is not None:
            await burying
        assert not any(cluster.ps(n).is_torn for n in ("ps-0", "ps-1") if n != lost)


async def test_a_group_that_a_rule_has_ended_takes_no_memory_from_others() -> None:
    limits = Limits(staging_bytes=8 * REFUSED.nbytes)
    async with coordinating(2, limits=limits) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.ones(SHAPE, np.float32), name="w")
            v = psync.Variable(np.ones(SHAPE, np.float32), name="v")
            step = psync.get_or_create_global_step()
        ended = psync.SyncReplicasOptimizer(psync.optimizers.Optimizer(rule()), 1, name="ended")
        other = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1, name="other")

        async def pushed(optimizer: Any, gradient: Any) -> str:
            try:
                result = await optimizer.apply_gradients([(gradient, w), (gradient, v)], step)
            except RuleError as exc:
                return str(exc.message)
            return str(result.outcome.value)

        for _ in range(20):
            told = await coordinator.schedule(pushed, args=(ended, REFUSED)).fetch()
            assert 'update rule "tests.momentum" for ' in told
        good = np.ones(SHAPE, np.float32)
        assert await coordinator.schedule(pushed, args=(other, good)).fetch() == "accepted"
