"""Work that is stuck is told of, an idle coordinator is not."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import strategy_of
from memory_cluster import coordinating, note
from psync.errors import ConfigurationError

pytestmark = pytest.mark.virtual_time


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "no closure has ended for" in text]


@pytest.mark.parametrize(("seconds", "told"), [([25], 2), ([8] * 10, 0)], ids=["silence", "news"])
async def test_a_silence_while_there_is_work_is_told_of_and_again_when_it_goes_on(
    seconds, told, caplog
):
    async with coordinating(num_workers=1, watchdog_timeout=10) as (_, coordinator):
        for each in seconds:
            coordinator.schedule(asyncio.sleep, (each,))
        await coordinator.join()
        assert len(reports(caplog)) == told


async def test_an_error_while_reporting_is_logged_and_the_watch_goes_on(caplog):
    heard: list[str] = []

    def fails(text: str) -> None:
        heard.append(text)
        raise RuntimeError("no report today")

    options = {"watchdog_timeout": 10, "on_stall": fails}
    async with coordinating(num_workers=1, **options) as (_, coordinator):
        await coordinator.schedule(asyncio.sleep, (25,))
    assert len(heard) == 2
    assert "no report today" in caplog.text


async def test_a_step_that_hangs_is_named_with_its_worker_and_what_waits(caplog):
    heard: list[str] = []
    options = {"watchdog_timeout": 30, "on_stall": heard.append}
    async with coordinating(num_workers=2, **options) as (_, coordinator):

        async def hangs():
            await note("begun")
            await asyncio.sleep(1e6)

        async def takes(value):
            return value

        stuck = coordinator.schedule(hangs)
        await memory_cluster.event_of("begun").wait()
        behind = coordinator.schedule(takes, args=(stuck,))
        await asyncio.sleep(40)
        (text,) = reports(caplog)
        assert heard == [text]
        assert "no closure has ended for 30 s while there is work" in text
        assert "closures: 1 in flight, 0 queued, 1 wait for inputs; 0 finished" in text
        assert "/job:worker/task:" in text
        assert "hangs), sent 3" in text
        assert "waits for inputs: 1 of " in text
        assert "everybody waits for: closure 0" in text
        assert "asyncio tasks: " in text
        assert text.splitlines()[-1].startswith("psync: end of the report")
        stuck.cancel()
        with pytest.raises(psync.PsyncError):
            await coordinator.join()
        assert behind.done()


@pytest.mark.promise("tasks.watchdog-reports")
async def test_an_idle_coordinator_is_silent(caplog):
    async with coordinating(num_workers=1, watchdog_timeout=30) as (_, coordinator):
        assert await coordinator.schedule(lambda: 1) == 1
        await coordinator.join()
        await asyncio.sleep(1000)
    assert reports(caplog) == []


async def test_queued_work_for_which_no_worker_is_there_names_the_missing(caplog):
    async with coordinating(num_workers=1, watchdog_timeout=30) as (cluster, coordinator):
        await cluster.stop("worker-0")
        await asyncio.sleep(1)
        value = coordinator.schedule(lambda: 1)
        await asyncio.sleep(40)
        (text,) = reports(caplog)
        assert "not connected: /job:worker/task:0 at worker-0:1" in text
        assert "  queued: 1 of " in text
        await cluster.start("worker-0")
        assert await value == 1


async def test_an_error_that_cannot_be_raised_yet_is_told(caplog):
    async with coordinating(num_workers=2, watchdog_timeout=30) as (_, coordinator):

        async def does_not_stop():
            await note("begun")
            for _ in range(2):
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    pass

        async def fails():
            raise ValueError("three is too many")

        coordinator.schedule(does_not_stop)
        await memory_cluster.event_of("begun").wait()
        coordinator.schedule(fails)
        with pytest.raises(ValueError, match="three is too many"):
            await coordinator.join()
    (text, *_) = reports(caplog)
    assert "an error is to be raised: ValueError: three is too many" in text
    assert "asked to stop" in text


async def test_a_worker_that_waits_for_a_token_is_told_by_ps_0_and_by_itself():
    async with coordinating(num_workers=2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.1), 2)

        async def pushes():
            await note("begun")
            await psync.pull(v)
            await optimizer.apply_gradients([(np.ones(4, np.float32), v)], global_step)

        async def computes():
            await note("computing")
            await asyncio.sleep(1e6)

        values = [coordinator.schedule(computes)]
        await memory_cluster.event_of("computing").wait()
        values.append(coordinator.schedule(pushes))
        await memory_cluster.event_of("begun").wait()
        await asyncio.sleep(10)
        ps = "\n".join(cluster.tasks["ps-0"].describe())
        assert "2 shards, 24 bytes" in ps
        assert "step 0, 1 of 2 counted, 1 wait for a token" in ps
        assert "  waiting for others: /job:worker/task:1 (" in ps
        assert "connections: /job:chief/task:0 (" in ps
        worker = "\n".join(cluster.tasks["worker-1"].describe())
        assert "runs closure 1 (" in worker
        assert "pushes) since 10.0 s, at" in worker
        assert "in pushes: await optimizer.apply_gradients(" in worker
        assert "link to /job:ps/task:0 at ps-0:1: connected" in worker
        for value in values:
            value.cancel()


async def test_a_task_that_nobody_has_attached_says_so():
    async with memory_cluster.cluster_of() as cluster:
        assert cluster.tasks["worker-0"].describe() == [
            "/job:worker/task:0 at worker-0:1: waits for a coordinator"
        ]
        assert cluster.tasks["ps-0"].describe()[0] == "/job:ps/task:0: waits for a coordinator"


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_an_error(timeout):
    with pytest.raises(ConfigurationError, match="watchdog_timeout: expected seconds"):
        psync.ClusterCoordinator(strategy_of(), watchdog_timeout=timeout)


async def test_the_environment_sets_the_timeout_and_an_argument_wins(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "psync")
    monkeypatch.setenv("PSYNC_WATCHDOG_TIMEOUT", "30")
    for options, number in (({}, 1), ({"watchdog_timeout": 0}, 1)):
        async with coordinating(num_workers=1, **options) as (_, coordinator):
            value = coordinator.schedule(asyncio.sleep, args=(35,))
            await value
            await coordinator.join()
        assert len(reports(caplog)) == number


async def test_variables_that_are_being_created_are_work(caplog):
    options = {"watchdog_timeout": 30, "ps_timeout": 1000}
    async with coordinating(num_workers=1, **options) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")
        cluster.network.partition("ps-0")
        value = coordinator.schedule(lambda: 1)
        await asyncio.sleep(80)
        text = reports(caplog)[-1]
        assert "variables are being created" in text
        assert "not connected: /job:ps/task:0 at ps-0:1" in text
        cluster.network.heal("ps-0")
        assert await value == 1
        await v.read()


# --- a step that takes too long costs its worker, if the program says so ---------------------


async def test_a_closure_that_hangs_runs_again_elsewhere_and_the_log_says_why(caplog):
    async with coordinating(num_workers=2, closure_timeout=30) as (_, coordinator):

        async def hangs_once():
            if memory_cluster.shared.setdefault("worker", psync.get_worker_index()) == (
                psync.get_worker_index()
            ):
                await asyncio.sleep(3600)
            return psync.get_worker_index()

        value = coordinator.schedule(hangs_once)
        await coordinator.join(timeout=200)
        assert await value == 1 - memory_cluster.shared["worker"]
        assert "is lost (closure 0 (" in caplog.text
        assert "took longer than 30 s" in caplog.text


@pytest.mark.promise("closures.timeout-excludes-waiting")
async def test_time_that_a_step_waits_for_another_worker_does_not_count(caplog):
    """Worker 1 stands still for a while; worker 0 waits for its gradient in a synchronous step."""
    async with coordinating(num_workers=2, closure_timeout=30) as (_, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        sync = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)

        async def step():
            await asyncio.sleep(1)
            if psync.get_worker_index() and "stood" not in memory_cluster.shared:
                memory_cluster.shared["stood"] = True
                await asyncio.sleep(3600)
            await sync.apply_gradients([(np.ones(2, np.float32), v)], global_step)

        for _ in range(2):
            coordinator.schedule(step)
        await coordinator.join(timeout=200)
        assert caplog.text.count("is lost (") == 1
        assert "/job:worker/task:1 is lost (closure 1 (step) took longer than 30 s" in caplog.text
        assert (await v.read() == -2).all()  # in two partial steps


@pytest.mark.promise("closures.timeout-excludes-waiting")
async def test_steps_that_wait_for_each_other_alternately_count_only_what_they_compute(caplog):
    """Each of both is busy for 26 s, and waits for the other one for 18 s."""
    async with coordinating(num_workers=2, closure_timeout=30) as (_, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        sync = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)

        async def steps():
            for turn in range(4):
                await asyncio.sleep(11 if turn % 2 == psync.get_worker_index() else 2)
                await sync.apply_gradients([(np.ones(2, np.float32), v)], global_step)

        for _ in range(2):
            coordinator.schedule(steps)
        await coordinator.join(timeout=200)
        assert "took longer" not in caplog.text
        assert (await v.read() == -4).all()
