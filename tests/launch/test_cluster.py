"""Clusters that a program starts: on this machine, in processes or in its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync.errors import ConfigurationError, SerializationError, UsageError
from psync.launch.cluster import Host, TaskCluster, TasksHere, TasksInProcesses
from psync.launch.processes import GpuShares
from psync.testing import MemoryNetwork


class Refusing(TasksHere):
    """Starts no worker 2."""

    async def start(self, job: str, index: int) -> str:
        if (job, index) == ("worker", 2):
            raise ConfigurationError("there is no worker 2")
        return await super().start(job, index)


class RefusingCluster(TaskCluster):
    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        self.host = Refusing(None, resources)
        return self.host


async def test_a_cluster_without_one_of_its_tasks_does_not_start() -> None:
    cluster = RefusingCluster(1, 4, ())
    with pytest.raises(ConfigurationError, match="there is no worker 2"):
        await cluster.start()
    assert repr(cluster) == "<RefusingCluster, 1 ps, 4 workers, not running>"
    with pytest.raises(UsageError, match=r"use it inside `async with RefusingCluster\(…\)"):
        _ = cluster.resolver


async def test_workers_that_could_be_started_stay_when_another_cannot_be() -> None:
    async with RefusingCluster(1, 1, ()) as cluster:
        with pytest.raises(ConfigurationError, match="there is no worker 2"):
            await cluster.scale(4)
        assert cluster.resolver.cluster_spec().task_indices("worker") == [0, 1, 3]
        assert "in this process" in cluster._repr_html_()


@pytest.mark.processes
async def test_a_worker_of_the_same_index_is_elsewhere_than_the_one_that_has_left() -> None:
    async with contextlib.AsyncExitStack() as resources:
        host = TasksHere(None, resources)
        await host.start("ps", 0)
        assert await host.start("worker", 0) == "worker-0:1"
        assert not host.has_left(0)
        await host.leave(0)
        assert host.has_left(0)
        assert await host.start("worker", 0) == "worker-0:2"


@pytest.mark.processes
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


@pytest.mark.processes
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


BOTH_KINDS = pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.processes)]
)


@BOTH_KINDS
async def test_it_trains_and_its_resolver_says_who_is_in_it(processes: bool) -> None:
    async with psync.LocalCluster(2, 3, processes) as cluster:
        spec = cluster.resolver.cluster_spec()
        assert {job: spec.num_tasks(job) for job in spec.jobs} == {"chief": 1, "ps": 2, "worker": 3}
        assert (cluster.resolver.task_type, cluster.resolver.task_id) == ("chief", 0)
        strategy = psync.ParameterServerStrategy(cluster.resolver, psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros(100_000, np.float32))
            sgd = psync.optimizers.SGD(0.5)

            async def step() -> int:
                value = await v.read()
                await sgd.apply_gradients([(np.ones_like(value), v)])
                return os.getpid()

            pids = [coordinator.schedule(step) for _ in range(20)]
            await coordinator.join()
            assert (await v.read() == -10).all()
            here = {pid == os.getpid() for pid in await coordinator.fetch(pids)}
            assert here == {not processes}


async def test_two_clusters_in_one_process_do_not_see_each_other() -> None:
    async with (
        psync.LocalCluster(1, 1, processes=False) as one,
        psync.LocalCluster(1, 1, processes=False) as other,
    ):
        values = []
        for number, cluster in enumerate((one, other)):
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            async with psync.ClusterCoordinator(strategy):
                with strategy.scope():
                    v = psync.Variable(number, name="v")
                values.append(int(await v.read()))
    assert values == [0, 1]


@pytest.mark.parametrize(
    ("counts", "options", "text"),
    [
        ((0, 1), {}, "num_ps: expected at least 1, got 0"),
        ((1, -1), {}, "num_workers: expected at least 1, got -1"),
        ((1, "2"), {}, "num_workers: expected at least 1, got '2'"),
        ((1, 1), {"network": MemoryNetwork()}, "network: only tasks in one process can use it"),
        ((1, 1, False), {"security": True}, "security: tasks in one process do not use it"),
        (
            (1, 1, False), {"gpus_per_worker": 1},
            "gpus_per_worker: tasks in one process see the same GPUs",
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_errors(
    counts: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        psync.LocalCluster(*counts, **options)
    assert caught.value.message == text


@pytest.mark.virtual_time
async def test_on_a_slow_network_under_a_virtual_clock_it_trains_and_survives_a_cut() -> None:
    """What a user's own test of failures looks like; no real time passes."""
    network = psync.testing.MemoryNetwork(seed=7, latency=(0.01, 0.1), chunk=(1, 4096))
    async with psync.LocalCluster(2, 2, processes=False, network=network) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver, psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros(10_000, np.float32))

            async def step() -> None:
                await asyncio.sleep(30)  # a long step
                await v.assign_add(np.ones(10_000, np.float32))

            for _ in range(10):
                coordinator.schedule(step)
            await asyncio.sleep(45)
            network.cut("worker-0:1")
            await coordinator.join()
            assert (await v.read() == 10).all()
            assert coordinator.statistics()["closures"].put_back >= 1
    assert asyncio.get_running_loop().time() > 150
    network.check()


async def test_it_is_started_once_and_has_a_resolver_only_while_it_runs() -> None:
    cluster = psync.LocalCluster(1, 1, processes=False)
    with pytest.raises(UsageError, match="the cluster is not running"):
        _ = cluster.resolver
    assert repr(cluster) == "<LocalCluster, 1 ps, 1 workers, not running>"
    async with cluster:
        assert cluster.resolver
        assert repr(cluster) == "<LocalCluster, 1 ps, 1 workers, running>"
        with pytest.raises(UsageError, match="the cluster was already started"):
            await cluster.start()
    with pytest.raises(UsageError, match="the cluster is not running"):
        _ = cluster.resolver
    with pytest.raises(UsageError, match="the cluster was already started"):
        await cluster.start()
    await cluster.stop()  # again: nothing happens


async def test_a_step_cannot_capture_it() -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with pytest.raises(
                SerializationError, match="the cluster's processes belong to the chief"
            ):
                coordinator.schedule(lambda: cluster)


@pytest.mark.processes
@pytest.mark.parametrize("by", ["a cancellation", "an error"])
async def test_ended_in_the_middle_it_leaves_no_process_behind(by: str) -> None:
    async def train() -> None:
        async with psync.LocalCluster(1, 1) as cluster:
            started.set_result(cluster)
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            async with psync.ClusterCoordinator(strategy):
                if by == "an error":
                    _ = 1 / 0
                await asyncio.Event().wait()

    started: asyncio.Future[psync.LocalCluster] = asyncio.get_running_loop().create_future()
    training = asyncio.create_task(train())
    cluster = await started
    if by == "a cancellation":
        training.cancel()
    with pytest.raises((asyncio.CancelledError, ZeroDivisionError)):
        await training
    assert training.cancelled() is (by == "a cancellation")
    assert [task.returncode is None for task in cluster.tasks.values()] == [False, False]


@pytest.mark.processes
def test_workers_find_what_lies_beside_the_script_wherever_it_was_started(tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "beside.py").write_text("async def step():\n    return 'found'\n")
    (tmp_path / "script" / "program.py").write_text(
        "import asyncio, beside, psync\n"
        "async def main():\n"
        "    async with psync.LocalCluster(1, 1) as cluster:\n"
        "        strategy = psync.ParameterServerStrategy(cluster.resolver)\n"
        "        async with psync.ClusterCoordinator(strategy) as coordinator:\n"
        "            print(await coordinator.schedule(beside.step))\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "../script/program.py"]
    (tmp_path / "elsewhere").mkdir()
    run = subprocess.run(
        command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "found\n"), run.stderr


# --- more and fewer workers ---------------------------------------------------------------------


async def workers_of(coordinator: psync.ClusterCoordinator) -> list[str]:
    """Who takes part, by the coordinator's own account."""
    return sorted(each.worker for each in coordinator.statistics()["closures"].workers)


def names(*indices: int) -> list[str]:
    return [f"/job:worker/task:{index}" for index in indices]


@BOTH_KINDS
async def test_a_running_coordinator_takes_in_workers_and_lets_them_go(processes: bool) -> None:
    async with psync.LocalCluster(1, 2, processes) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(0)

            async def step() -> None:
                await v.assign_add(1)

            async def train(total: int) -> None:
                for _ in range(50):
                    coordinator.schedule(step)
                await coordinator.join()
                assert await v.read() == total

            await train(50)
            await cluster.scale(workers=4)
            assert await workers_of(coordinator) == names(0, 1, 2, 3)
            assert cluster.resolver.cluster_spec().num_tasks("worker") == 4
            await train(100)

            async def index() -> int:
                return psync.get_replica_context().replica_id_in_sync_group

            replicas = strategy.experimental_local_results(await strategy.run(index))
            assert list(replicas) == [0, 1, 2, 3]
            await cluster.scale(workers=1)
            assert await workers_of(coordinator) == names(0)
            assert cluster.resolver.cluster_spec().num_tasks("worker") == 1
            await train(150)
            await cluster.scale(workers=3)
            assert await workers_of(coordinator) == names(0, 1, 2)
            await train(200)
        assert repr(cluster) == "<LocalCluster, 1 ps, 3 workers, running>"
        if processes:
            ended = [cluster.tasks[f"worker-{index}"].returncode for index in range(4)]
            assert ended == [None, None, None, 0]


@BOTH_KINDS
async def test_without_a_coordinator_the_next_strategy_is_of_the_workers_there_are(
    processes: bool,
) -> None:
    async with psync.LocalCluster(1, 3, processes) as cluster:
        for number in (1, 2):
            await cluster.scale(number)
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            async with psync.ClusterCoordinator(strategy) as coordinator:
                assert await workers_of(coordinator) == names(*range(number))


@pytest.mark.promise("workers.scale-any-time")
@pytest.mark.parametrize("sizes", [[1], [5], [1, 4], [4, 2, 3]], ids=str)
async def test_it_is_scaled_at_any_moment_of_a_program(sizes: list[int]) -> None:
    for turns in (0, 3, 10, 20, 30, 40, 50, 60, 80, 100, 150, 250):
        async with psync.LocalCluster(1, 3, processes=False) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
            with strategy.scope():
                v = psync.Variable(0)

            async def step(v: psync.Variable = v) -> None:
                await v.assign_add(1)

            async def program(strategy: Any = strategy, v: Any = v, step: Any = step) -> int:
                async with psync.ClusterCoordinator(strategy) as coordinator:
                    for _ in range(30):
                        coordinator.schedule(step)
                    await coordinator.join()
                    return int(await v.read())

            running = asyncio.create_task(program())
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(10):
                for size in sizes:
                    await cluster.scale(size)
                assert await running == 30
            assert cluster.resolver.cluster_spec().num_tasks("worker") == sizes[-1]


@pytest.mark.virtual_time
async def test_a_worker_that_leaves_ends_its_closure_and_its_index_is_not_used_meanwhile() -> None:
    async with psync.LocalCluster(1, 2, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            values = [coordinator.schedule(asyncio.sleep, (10, number)) for number in range(2)]
            await asyncio.sleep(1)
            leaving = asyncio.create_task(cluster.scale(1))
            await asyncio.sleep(1)
            await cluster.scale(2)
            assert cluster.resolver.cluster_spec().task_indices("worker") == [0, 2]
            assert not leaving.done()
            await leaving
            assert await coordinator.fetch(values) == [0, 1]
            assert coordinator.statistics()["closures"].put_back == 0
            assert await workers_of(coordinator) == names(0, 2)


async def test_wrong_numbers_of_workers_are_errors() -> None:
    cluster = psync.LocalCluster(1, 1, processes=False)
    with pytest.raises(UsageError, match="the cluster is not running"):
        await cluster.scale(2)
    with pytest.raises(UsageError, match="the cluster is not running"):
        cluster.adapt(1, 2)
    async with cluster:
        with pytest.raises(ConfigurationError, match="workers: expected a whole number above 0"):
            await cluster.scale(0)
        with pytest.raises(ConfigurationError, match="interval: expected seconds above 0, got 0"):
            cluster.adapt(1, 2, interval=0)


@pytest.mark.processes
async def test_more_workers_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    async with psync.LocalCluster(1, 1, gpus_per_worker=1) as cluster:
        with pytest.raises(ConfigurationError, match="3 workers with 1 each need 3 GPUs"):
            await cluster.scale(3)
        with pytest.raises(ConfigurationError, match="3 workers with 1 each need 3 GPUs"):
            cluster.adapt(1, 3)
        await cluster.scale(2)
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):
            seen = await strategy.run(os.getenv, ("CUDA_VISIBLE_DEVICES",))
            assert list(strategy.experimental_local_results(seen)) == ["0", "1"]


@pytest.mark.virtual_time
async def test_an_adaptive_cluster_follows_the_queue() -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            cluster.adapt(minimum=1, maximum=6)

            async def step() -> None:
                await asyncio.sleep(10)

            def number() -> int:
                return cluster.resolver.cluster_spec().num_tasks("worker")

            await asyncio.sleep(5)
            assert number() == 1
            for _ in range(6):
                coordinator.schedule(step)
            await asyncio.sleep(2)
            assert number() == 6
            assert len(await workers_of(coordinator)) == 6
            await coordinator.join()
            await asyncio.sleep(1.5)  # it has looked, and waits
            assert number() == 6
            await asyncio.sleep(5)
            assert number() == 1
            assert await workers_of(coordinator) == names(0)
            await cluster.scale(2)
            await asyncio.sleep(10)
            assert number() == 2  # it is adaptive no more
            cluster.adapt(3, 3)
            await asyncio.sleep(0.5)
            assert number() == 3


@pytest.mark.virtual_time
async def test_tasks_of_one_process_that_share_memory_end_one_by_one() -> None:
    network = MemoryNetwork(shares_memory=True)
    async with psync.LocalCluster(1, 2, processes=False, network=network) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                variable = psync.Variable(np.zeros(1 << 18, np.float32))

            async def step() -> None:
                await variable.assign_add(np.ones(1 << 18, np.float32))

            coordinator.schedule(step)
            await coordinator.join()
            own = await variable.read()
            await cluster.scale(1)
            for _ in range(3):
                coordinator.schedule(step)
            await coordinator.join()
            assert (own == 1).all()
            assert (await variable.read() == 4).all()
            del own


def test_a_program_that_raises_before_it_has_closed_anything_ends() -> None:
    """All of it is cancelled then, the sessions of workers too."""
    program = """
import asyncio, psync

async def main():
    cluster = psync.LocalCluster(1, 1, processes=False)
    await cluster.start()
    await psync.ClusterCoordinator(psync.ParameterServerStrategy(cluster.resolver)).start()
    raise ValueError("a mistake")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: a mistake\n")
