"""One trace, from its beginning to its file: of clusters in memory whose tasks' clocks differ."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, coordinating, running
from psync.errors import ClosedError, ConfigurationError
from psync.net.tracing import stretch
from psync.net.tracing.readings import Reading
from psync.net.tracing.stretch import Trace, tracing
from trace_events import TraceFile
from traced_by_hand import CHIEF, ByHand


async def train(strategy: psync.ParameterServerStrategy, path: Path, *, synchronous: bool) -> Trace:
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(8, np.float32), name="w")
            sgd: Any = psync.optimizers.SGD(0.5)
            options: dict[str, Any] = {}
            if synchronous:
                sgd = psync.SyncReplicasOptimizer(sgd, 2, 2)
                options = {"global_step": psync.get_or_create_global_step()}

        async def train_step() -> None:
            value = await psync.pull(w)
            await sgd.apply_gradients([(value + 1, w)], **options)

        async with coordinator.trace(path) as traced:
            for _ in range(20):
                coordinator.schedule(train_step)
            await coordinator.join()
        return traced


@pytest.mark.parametrize("synchronous", [False, True])
async def test_everything_is_in_the_file_on_one_clock(tmp_path: Path, synchronous: bool) -> None:
    apart = MemoryCluster(num_ps=2)
    apart.clocks = {"ps-0": 1000.0, "ps-1": -3.0, "worker-0": -77.7, "worker-1": 5e6}
    async with running(apart) as cluster:
        two = psync.FixedShardsPartitioner(2)
        traced = await train(cluster.strategy(two), tmp_path / "t.json", synchronous=synchronous)
    trace = TraceFile(tmp_path / "t.json")  # which checks that nothing comes before it was sent
    assert traced.summary is not None
    assert traced.summary.within_s < 0.05
    assert traced.summary.seconds < 20
    assert list(trace.tasks.values()) == ["chief", "ps-0", "ps-1", "worker-0", "worker-1"]
    workers = ["worker-0", "worker-1"]
    slices = [each for worker in workers for each in trace.slices(worker, "steps")]
    named = [each for each in slices if each["name"].endswith("train_step")]
    assert sorted(each["args"]["closure"] for each in named) == list(range(20))
    inner = {each["name"] for each in slices}
    assert {"compute", "pull", "wait" if synchronous else "push"} <= inner
    update = "Contribute" if synchronous else "Push"
    pushes = trace.slices("ps-0", "from worker-", update)
    assert len(pushes) == 20
    assert {each["args"]["variables"] for each in pushes} == {"w"}
    assert {each["args"]["bytes received"] for each in pushes} <= {16, 32}
    assert {(update, worker, "ps-0") for worker in workers} <= set(trace.arrows())
    if synchronous:
        assert [each["name"] for each in trace.slices("ps-0", "steps")] == [
            f"step {number}" for number in range(10)
        ]
        assert trace.counter("ps-0", "global step") == list(range(1, 11))
    else:
        assert trace.counter("ps-0", "optimizer step")[-1] == 20
    assert trace.slices("chief", "in flight on worker-0")
    assert trace.counter("chief", "closures queued")


async def test_a_worker_that_dies_ends_and_others_go_on(tmp_path: Path) -> None:
    async with coordinating(num_workers=2) as (cluster, coordinator):

        async def step() -> None:
            await asyncio.sleep(0.001)

        async def steps(count: int) -> None:
            for _ in range(count):
                coordinator.schedule(step)
            await coordinator.join()

        async with coordinator.trace(tmp_path / "t.json"):
            await steps(20)
            await asyncio.sleep(2 * stretch.READ_EVERY_S)
            await cluster.kill_worker("worker-1")
            await steps(20)
    trace = TraceFile(tmp_path / "t.json")
    ended = [
        max(each["ts"] for each in trace.slices(worker, "steps"))
        for worker in ("worker-0", "worker-1")
    ]
    assert ended[1] < ended[0]


async def test_what_a_trace_holds_is_bounded_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "MAX_BYTES", 1)
    async with coordinating() as (_, coordinator):
        async with coordinator.trace(tmp_path / "t.json") as traced:
            await traced.wait(asyncio.Event())
    assert traced.cut_short == "more than 0 MiB were recorded"
    assert TraceFile(tmp_path / "t.json").about["ended"] == traced.cut_short


async def test_an_error_in_the_program_leaves_a_trace(tmp_path: Path) -> None:
    async with coordinating() as (_, coordinator):
        with pytest.raises(ValueError, match="mine"):
            async with coordinator.trace(tmp_path / "t.json"):
                raise ValueError("mine")
    assert "chief" in TraceFile(tmp_path / "t.json").tasks.values()


async def test_where_the_file_cannot_be_written_nothing_begins(tmp_path: Path) -> None:
    async with coordinating() as (_, coordinator):
        for path, why in ((tmp_path / "no" / "t.json", "No such"), (tmp_path, "Is a directory")):
            with pytest.raises(ConfigurationError, match=f"cannot be written there: {why}"):
                async with coordinator.trace(path):
                    pytest.fail("it has begun")


async def test_a_coordinator_that_has_ended_cannot_be_traced(tmp_path: Path) -> None:
    async with coordinating() as (_, coordinator):
        pass
    with pytest.raises(ClosedError, match="trace: the coordinator is not running"):
        async with coordinator.trace(tmp_path / "t.json"):
            pytest.fail("it has begun")
    assert list(tmp_path.iterdir()) == []


class Ending:
    """A run that ends after so many questions."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._chief = ByHand(CHIEF)

    async def read(self, name: str, *, last: bool = False) -> list[Reading]:
        self._answers -= 1
        if self._answers < 0:
            raise ConfigurationError("train.py has ended")
        return [self._chief.reading(1.0)]


async def test_a_run_that_ends_leaves_what_there_was() -> None:
    trace = Trace(Ending(2).read, "train.py")
    await trace.record()
    await trace.wait(asyncio.Event())
    assert trace.cut_short == "train.py has ended"
    file = io.StringIO()
    trace.write(file)
    assert "train.py has ended" in file.getvalue()


async def test_a_run_that_has_ended_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has ended"):
        async with tracing(Ending(0).read, "train.py", tmp_path / "t.json"):
            pytest.fail("it has begun")
    assert list(tmp_path.iterdir()) == []
