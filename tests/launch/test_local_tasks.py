"""Tasks of a local cluster: how they start, leave, and where they are found; see test_local.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

import pytest

import psync
from psync.launch.gpus import GpuShares
from psync.launch.local_tasks import TasksHere, TasksInProcesses
from psync.testing import settle

pytestmark = pytest.mark.processes


async def test_a_worker_of_the_same_index_is_elsewhere_than_the_one_that_has_left() -> None:
    async with contextlib.AsyncExitStack() as resources:
        host = TasksHere(None, resources)
        await host.start("ps", 0)
        assert await host.start("worker", 0) == "worker-0:1"
        assert not host.has_left(0)
        await host.leave(0)
        assert host.has_left(0)
        assert await host.start("worker", 0) == "worker-0:2"


async def test_hundreds_of_workers_in_memory_do_not_take_each_others_places(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "psync.net.endpoint")
    async with psync.LocalCluster(1, 200, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                variable = psync.Variable(0.0, name="variable")

            async def step() -> None:
                await variable.assign_add(1.0)

            for _ in range(200):
                coordinator.schedule(step)
            await coordinator.join()
            assert await variable.read() == 200
    assert "its place was needed" not in caplog.text


async def test_a_process_leaves_with_code_0_also_if_it_is_still_starting() -> None:
    async with contextlib.AsyncExitStack() as resources:
        counts = {"ps": 1, "worker": 1}
        host = TasksInProcesses(
            counts, os.environ, GpuShares(None, {}), 0, security=False, resources=resources
        )
        await host.start("worker", 0)
        first = await host.start("worker", 1)
        process = host.processes["worker-1"]
        assert not host.has_left(1)
        await host.leave(1)  # it may have loaded, or not
        assert host.has_left(1)
        assert process.returncode in (0, -signal.SIGTERM)
        assert "was asked to leave" in (host.platform.given_up.reason(first) or "")
        again = await host.start("worker", 1)
        assert host.platform.given_up.reason(again) is None
        assert host.processes["worker-1"] is not process


async def test_one_that_died_too_often_has_left() -> None:
    async with contextlib.AsyncExitStack() as resources:
        host = TasksInProcesses(
            {"ps": 1, "worker": 1},
            os.environ,
            GpuShares(None, {}),
            0,
            security=False,
            resources=resources,
        )
        address = await host.start("worker", 0)
        given_up = asyncio.Event()
        host.platform.given_up.listen(lambda *_: given_up.set())
        os.kill(host.processes["worker-0"].pid, signal.SIGKILL)
        await given_up.wait()
        assert "restarts are off" in (host.platform.given_up.reason(address) or "")
        await settle()
        assert host.has_left(0)
