"""Tasks that are killed in the middle of a run: what goes on, and that updates are exact.

Everything here is a real process. Where one has to die at a certain point of an update, it does so
itself, at a failpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import psync
from psync.errors import ParameterServerLost, WorkerLost
from real_training import DEADLY, ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]


# --- workers -----------------------------------------------------------------------------------

POINTS = [
    "worker.closure.start",
    "worker.push.begun",
    "worker.push.between_ps",
    "worker.push.answered",
    "worker.closure.end",
]


@pytest.mark.promise("updates.at-most-once")
@pytest.mark.parametrize("point", POINTS)
async def test_each_update_is_there_once_although_workers_die_all_the_time(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 16
    monkeypatch.setenv("PSYNC_FAILPOINTS", f"{point}=kill@4")  # of each life of a worker
    async with training(2, 2, **DEADLY) as (_, strategy, coordinator):
        with strategy.scope():
            one = psync.Variable(0.0)
            both = psync.Variable(np.zeros(4, np.float32))
        sgd = psync.optimizers.SGD(1.0)

        async def step() -> int:
            await sgd.apply_gradients([(-1.0, one), (np.full(4, -1, np.float32), both)])
            return os.getpid()

        values = [coordinator.schedule(step) for _ in range(count)]
        await coordinator.join()
        lives = Counter(await coordinator.fetch(values))
        assert await one.read() == count
        assert (await both.read()).tolist() == [count] * 4
        assert len(lives) > 2  # workers that were started again took part
        assert max(lives.values()) <= 4


@pytest.mark.promise("errors.updates-stop")
async def test_after_an_error_updates_of_a_step_that_has_not_heard_of_it_are_refused(
    tmp_path: Path,
) -> None:
    """It computes on its worker's loop, which does not read that it is cancelled."""
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    async with training(1, 2) as (_, strategy, coordinator):
        with strategy.scope():
            counter = psync.Variable(0)

        async def computing() -> None:
            begun.touch()
            while not go_on.exists():
                pass
            await counter.assign_add(1)

        def failing() -> None:
            while not begun.exists():
                pass
            raise ValueError("no luck")

        coordinator.schedule(computing)
        with pytest.raises(ValueError, match="no luck"):
            await coordinator.schedule(failing)
        assert await counter.read() == 0  # also: the ps has read what was sent before
        go_on.touch()
        with pytest.raises(ValueError, match="no luck"):
            await coordinator.join()
        assert await counter.read() == 0
        await coordinator.schedule(computing)
        assert await counter.read() == 1


@pytest.mark.promise("closures.at-least-once")
@pytest.mark.smoke
async def test_closures_of_a_killed_worker_run_elsewhere_and_it_takes_part_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "psync")
    async with training(1, 2) as (cluster, strategy, coordinator):
        with strategy.scope():
            done = psync.Variable(0)

        victim = cluster.tasks["worker-0"]
        pid = victim.pid

        async def slow() -> int:
            if os.getpid() == pid:
                await asyncio.Event().wait()  # until it is killed
            await done.assign_add(1)
            return psync.get_worker_index()

        values = [coordinator.schedule(slow) for _ in range(6)]
        while await done.read() < 5:  # all but the one that the victim runs
            continue
        victim.kill()
        await coordinator.join()
        assert await done.read() == 6
        assert set(await coordinator.fetch(values)) <= {0, 1}

        async def where() -> int:
            await asyncio.sleep(0.01)
            return psync.get_worker_index()

        workers: set[int] = set()
        while workers != {0, 1}:
            again = [coordinator.schedule(where) for _ in range(10)]
            await coordinator.join()
            workers = set(await coordinator.fetch(again))
        assert cluster.tasks["worker-0"].pid != victim.pid
    assert "worker-0 was killed by SIGKILL and is started again" in caplog.text
    assert "/job:worker/task:0 has rejoined" in caplog.text


async def test_join_ends_when_the_last_worker_is_given_up_and_says_so() -> None:
    async with training(1, 1, max_restarts=1, max_losses=10) as (_, _, coordinator):
        coordinator.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL))
        for _ in range(2):
            with pytest.raises(WorkerLost) as caught:
                await coordinator.join()
            assert caught.value.message == (
                "/job:worker/task:0 was killed by SIGKILL and is not started again "
                "(2 deaths within a minute), and there is no other worker"
            )
            coordinator.schedule(os.getpid)
        await coordinator.close()


# --- a ps --------------------------------------------------------------------------------------


@pytest.mark.promise("failures.ps-without-checkpoint")
@pytest.mark.parametrize(
    ("point", "max_restarts"),
    [("", 0), ("", 3), ("ps.push.received", 0), ("ps.push.applied", 3)],
)
async def test_a_killed_ps_ends_the_run_with_a_clear_error_soon(
    point: str,
    max_restarts: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if point:
        monkeypatch.setenv("PSYNC_FAILPOINTS", f"{point}=kill@3")
    async with psync.LocalCluster(2, 2, max_restarts=max_restarts) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(0.0)
            sgd = psync.optimizers.SGD(1.0)

            async def step() -> None:
                await sgd.apply_gradients([(1.0, v)])

            values = [coordinator.schedule(step) for _ in range(2000)]
            if not point:
                await values[0]  # something was computed
                cluster.tasks["ps-0"].kill()
            began = time.monotonic()
            what = "was restarted and has lost" if max_restarts else "is lost: it was killed by"
            address = cluster.resolver.cluster_spec().task_address("ps", 0)
            with pytest.raises(ParameterServerLost) as caught:
                await coordinator.join()
            assert time.monotonic() - began < 15
            assert caught.value.task == "/job:ps/task:0"
            assert f"/job:ps/task:0 at {address} {what}" in caught.value.message
            assert "no checkpoint or complete backup: restart" in caught.value.hint
            assert coordinator.done()
            assert all(value.done() for value in values)
            with pytest.raises(ParameterServerLost):
                await v.read()
            coordinator.schedule(step)
            with pytest.raises(ParameterServerLost):
                await coordinator.join()
    again = "is started again" if max_restarts else "is not started again"
    assert f"ps-0 was killed by SIGKILL and {again}" in caplog.text
