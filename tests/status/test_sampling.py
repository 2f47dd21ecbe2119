"""The status of clusters in memory, as their coordinator says it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from asked import Reply
from memory_cluster import cluster_of, coordinating, replicated, session_cluster
from psync.compat.training_sessions import MonitoredTrainingSession
from psync.errors import ClosedError, ConfigurationError
from psync.net.connection import Handler
from psync.status import sampling
from psync.status.model import Status
from psync.wire.messages import AskStatistics

pytestmark = pytest.mark.virtual_time


def states(status: Status) -> list[str]:
    return [worker.state for worker in status.workers]


async def test_it_tells_what_runs_where_and_since_when() -> None:
    async with coordinating(num_ps=1, num_workers=3) as (_, coordinator):

        async def slow_step() -> None:
            await asyncio.sleep(10)

        for _ in range(2):
            coordinator.schedule(slow_step)
        await asyncio.sleep(4)
        status = await coordinator.status()
        assert sorted(states(status)) == ["busy", "busy", "idle"]
        busy = next(worker for worker in status.workers if worker.state == "busy")
        assert busy.closure is not None
        assert busy.closure.name.endswith("slow_step")
        assert busy.closure.seconds == pytest.approx(4, abs=0.1)
        assert (status.state, status.queue.in_flight) == ("running", 2)
        assert "slow_step" in status.waits_for
        await coordinator.join()
        status = await coordinator.status()
        assert (status.state, status.waits_for, status.queue.finished) == ("idle", "nothing", 2)
        assert [event.kind for event in status.events] == ["joined"] * 3


async def test_a_closure_behind_another_one_runs_since_that_one_has_ended() -> None:
    async with coordinating(num_ps=1, num_workers=1) as (_, coordinator):

        async def step() -> None:
            await asyncio.sleep(10)

        for _ in range(4):  # two of them are sent at once
            coordinator.schedule(step)
        await asyncio.sleep(13)
        (worker,) = (await coordinator.status()).workers
        assert worker.held == 2
        assert worker.closure is not None
        assert worker.closure.seconds == pytest.approx(3, abs=0.1)
        await coordinator.join()


async def test_of_a_training_session_it_tells_tasks_and_steps() -> None:
    optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)
    seen: list[Status] = []

    async def main(strategy: psync.ParameterServerStrategy) -> None:
        with strategy.scope():
            w = psync.Variable(np.zeros(4, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        resolver = strategy.cluster_resolver
        trains = resolver.task_type == "worker"

        async def step() -> None:
            await asyncio.sleep(1 + 4 * (resolver.task_id or 0))
            await optimizer.apply_gradients([(np.ones(4, np.float32), w)], global_step)

        async with MonitoredTrainingSession(strategy, trains=trains, stop_at_step=3) as session:
            if trains:
                while not session.should_stop():
                    await session.run(step)
                return
            assert session._seen is not None
            for seconds in (8, 8):
                await asyncio.sleep(seconds)
                seen.append(await session._seen.source.status())

    async with session_cluster(2, 2, chief=True) as cluster:
        await cluster.run_all(main)
    running, ended = seen
    assert (running.state, running.waits_for) == ("running", "step 3")
    assert (running.steps.global_step, [ps.bytes for ps in running.ps]) == (1, [24, 0])
    assert [each.task for each in running.workers] == ["/job:worker/task:0", "/job:worker/task:1"]
    assert states(running) == ["waiting", "busy"]
    assert running.steps.groups[0].waits_for == ("/job:worker/task:1",)
    assert [row.variable for row in running.placement] == ["w", "global_step"]
    assert (ended.state, states(ended)) == ("ended", ["left", "left"])
    assert "training ends: step 3 is reached" in ended.notes


async def test_it_tells_steps_pushes_pulls_and_staleness() -> None:
    async with cluster_of(num_ps=2) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(8, np.float32), name="w")
            sgd = psync.optimizers.SGD(0.5)

            async def step() -> None:
                value = await psync.pull(w)
                await asyncio.sleep(1)
                await sgd.apply_gradients([(value, w)])

            for _ in range(8):
                coordinator.schedule(step)
            await coordinator.join()
            status = await coordinator.status()
            assert status.steps.global_step == 8
            assert status.steps.steps_per_s > 0
            # Of all but the first of each worker, which take turns.
            assert sum(status.steps.staleness.values()) == 6
            assert sum(int(name) * count for name, count in status.steps.staleness.items()) == 6
            assert None not in [worker.staleness for worker in status.workers]
            for task in status.ps:
                assert (task.state, task.pushes, task.bytes, task.shards) == ("connected", 8, 16, 1)
                assert task.pulls == 8
                assert task.pushes_per_s == status.queue.closures_per_s > 0
                assert task.backup is None


async def test_it_tells_for_whom_a_synchronous_step_waits() -> None:
    async with coordinating(num_ps=1, num_workers=3) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(8, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        sync = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(0.5), replicas_to_aggregate=3, total_num_replicas=3,
            strict=True,
        )  # fmt: skip

        async def step() -> None:
            value = await psync.pull(w)
            await asyncio.sleep(100 if psync.get_worker_index() == 1 else 1)
            await sync.apply_gradients([(value, w)], global_step)

        for _ in range(3):
            coordinator.schedule(step)
        await asyncio.sleep(50)
        status = await coordinator.status()
        (group,) = status.steps.groups
        waiting = ("/job:worker/task:0", "/job:worker/task:2")
        assert (group.counted, group.target, group.waiting) == (2, 3, waiting)
        assert group.waits_for == ("/job:worker/task:1",)
        assert states(status) == ["waiting", "busy", "waiting"]
        assert [worker.accepted for worker in status.workers] == [1, 0, 1]
        await coordinator.join()
        assert (await coordinator.status()).steps.global_step == 1


async def test_the_error_of_a_step_stays_with_its_worker() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):

        def broken_step() -> None:
            raise ValueError("x" * 1000)

        coordinator.schedule(broken_step)
        with pytest.raises(ValueError, match="xxx"):
            await coordinator.join()
        await asyncio.sleep(7)
        status = await coordinator.status()
        (worker,) = status.workers
        assert (worker.failed, status.queue.failed) == (1, 1)
        assert worker.last_error is not None
        assert worker.last_error.seconds == pytest.approx(7, abs=0.1)
        assert "broken_step): ValueError: xxx" in worker.last_error.text
        assert len(worker.last_error.text) == 300


async def test_a_worker_is_lost_and_comes_back() -> None:
    async with coordinating(num_workers=2) as (cluster, coordinator):
        await cluster.stop("worker-1")
        await asyncio.sleep(1)
        status = await coordinator.status()
        assert states(status) == ["idle", "lost"]
        assert (status.events[0].kind, status.workers[1].losses) == ("lost", 1)
        await cluster.start("worker-1")
        await asyncio.sleep(5)
        status = await coordinator.status()
        assert states(status) == ["idle", "idle"]
        assert (status.events[0].kind, status.workers[1].losses) == ("joined", 1)


async def test_a_worker_that_leaves_is_not_lost() -> None:
    async with coordinating(num_workers=2) as (cluster, coordinator):
        task: Any = cluster.tasks["worker-1"]

        async def step() -> None:
            await asyncio.sleep(10)

        for _ in range(2):
            coordinator.schedule(step)
        await asyncio.sleep(1)
        leaving = asyncio.ensure_future(task.leave("the machine is taken"))
        await asyncio.sleep(1)
        assert states(await coordinator.status()) == ["busy", "leaving"]
        await leaving
        await cluster.stop("worker-1")
        await asyncio.sleep(1)
        status = await coordinator.status()
        assert states(status)[1] == "left"
        assert status.events[0].kind == "left"
        await coordinator.join()


async def test_a_ps_that_does_not_answer_keeps_its_numbers_and_gets_an_age() -> None:
    async with coordinating(num_ps=2, ps_timeout=60.0) as (cluster, coordinator):
        assert [ps.state for ps in (await coordinator.status()).ps] == ["connected"] * 2
        await asyncio.sleep(2)
        cluster.network.stop("ps-1")
        status = await coordinator.status()
        assert [ps.state for ps in status.ps] == ["connected", "silent"]
        assert status.ps[0].age_s is not None
        assert status.ps[1].age_s is not None
        assert status.ps[0].age_s < status.ps[1].age_s == pytest.approx(3, abs=0.1)
        cluster.network.go_on("ps-1")


async def test_a_ps_that_has_never_answered_is_silent_once_it_was_asked() -> None:
    async with coordinating(num_ps=2, ps_timeout=60.0) as (cluster, coordinator):
        cluster.network.stop("ps-1")
        status = await coordinator.status()
        assert [ps.state for ps in status.ps] == ["connected", "silent"]
        assert status.ps[1].age_s is None
        cluster.network.go_on("ps-1")
        await asyncio.sleep(1)
        assert [ps.state for ps in (await coordinator.status()).ps] == ["connected"] * 2


async def test_a_failover_is_an_event_and_backups_are_shown() -> None:
    async with replicated() as (cluster, coordinator):
        status = await coordinator.status()
        assert [ps.backup and ps.backup.state for ps in status.ps] == ["paired"] * 2
        await cluster.kill("ps-1")
        await asyncio.sleep(5)
        status = await coordinator.status()
        assert "failover" in [event.kind for event in status.events]
        assert [ps.state for ps in status.ps] == ["connected"] * 2


async def test_what_the_program_reports_is_shown() -> None:
    async with coordinating() as (_, coordinator):
        coordinator.report({"loss": np.float32(0.5), "epoch": 1})
        coordinator.report({"loss": 0.25})
        assert (await coordinator.status()).reported == {"loss": 0.25, "epoch": 1.0}
        with pytest.raises(ConfigurationError, match="report: loss: expected a number, got 'low'"):
            coordinator.report({"loss": "low"})


async def test_ps_tasks_are_asked_once_in_a_while_whoever_asks() -> None:
    async with coordinating(num_ps=1) as (_, coordinator):
        first, second = await asyncio.gather(coordinator.status(), coordinator.status())
        assert (first.ps, first.uptime_s) == (second.ps, second.uptime_s)
        await asyncio.sleep(0.15)
        again = await coordinator.status()
        assert again.ps[0].age_s == pytest.approx(0.15, abs=0.01)
        assert again.ps[0].state == "connected"
        await asyncio.sleep(0.15)
        assert (await coordinator.status()).ps[0].age_s == pytest.approx(0, abs=0.01)


async def test_right_after_a_join_it_counts_all_that_was_joined() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step() -> None:
            pass

        for joined in range(1, 6):
            for _ in range(10):
                coordinator.schedule(step)
            queue = (await coordinator.status()).queue
            assert queue.finished + queue.in_flight + queue.queued == 10 * joined
            await coordinator.join()
            status = await coordinator.status()
            assert (status.queue.finished, status.queue.in_flight) == (10 * joined, 0)
            assert sum(worker.finished for worker in status.workers) == 10 * joined
            assert (status.state, status.waits_for) == ("idle", "nothing")


async def test_one_who_gives_up_takes_nothing_from_another_one() -> None:
    async with coordinating() as (_, coordinator):
        one = asyncio.ensure_future(coordinator.status())
        other = asyncio.ensure_future(coordinator.status())
        await asyncio.sleep(0)
        one.cancel()
        assert (await other).state == "idle"


async def test_a_coordinator_that_does_not_run_has_no_status() -> None:
    async with cluster_of() as cluster:
        coordinator = psync.ClusterCoordinator(cluster.strategy())
        with pytest.raises(ClosedError, match="status: the coordinator is not running"):
            await coordinator.status()


async def test_who_still_asks_when_the_coordinator_is_closed_is_told() -> None:
    async with cluster_of() as cluster:
        coordinator = psync.ClusterCoordinator(cluster.strategy())
        await coordinator.start()
        asking = asyncio.ensure_future(coordinator.status())
        await asyncio.sleep(0)
        await coordinator.close()
        with pytest.raises(ClosedError, match="status: the coordinator was closed"):
            await asking
    memory_cluster.shared.clear()


async def test_workers_are_asked_what_their_time_goes_to_once_somebody_wants_that() -> None:
    async with coordinating(num_ps=1, num_workers=2) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(8, np.float32), name="w")

        async def step() -> None:
            await asyncio.sleep(3)
            await psync.pull(w)

        for _ in range(20):
            coordinator.schedule(step)
        await asyncio.sleep(1)
        assert [worker.work for worker in (await coordinator.status()).workers] == [None, None]
        coordinator._seen.source.asks_workers = True
        for _ in range(4):  # the second answer tells of the time since the first
            await asyncio.sleep(1)
            status = await coordinator.status()
        for worker in status.workers:
            assert worker.work is not None
            assert worker.work.compute == pytest.approx(1, abs=0.05)
            assert worker.work.pull < 0.05
            assert worker.work.seconds == pytest.approx(1, abs=0.05)
        await coordinator.join()
        for _ in range(3):
            await asyncio.sleep(1)
            status = await coordinator.status()
        assert [worker.work and worker.work.compute for worker in status.workers] == [0, 0]


async def test_of_many_workers_some_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ASKED_AT_ONCE", 2)
    async with coordinating(num_workers=3) as (_, coordinator):
        coordinator._seen.source.asks_workers = True
        known = []
        for _ in range(6):
            status = await coordinator.status()
            known.append(sum(worker.work is not None for worker in status.workers))
            await asyncio.sleep(1)
        assert known == [0, 0, 1, 3, 3, 3] or known[-1] == 3


async def test_a_worker_that_does_not_answer_shows_nothing_of_before() -> None:
    async def never(*_: object) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    async with coordinating(num_workers=2) as (cluster, coordinator):
        source = coordinator._seen.source
        source.asks_workers = True
        for _ in range(4):
            await asyncio.sleep(1)
            status = await coordinator.status()
        assert None not in [worker.work for worker in status.workers]
        cluster.tasks["worker-0"]._endpoint.handlers[AskStatistics] = Handler(never)
        for _ in range(2 + int(sampling.WORKER_ANSWERS_WITHIN_S)):
            await asyncio.sleep(1)
            status = await coordinator.status()
        assert [worker.work is None for worker in status.workers] == [True, False]
