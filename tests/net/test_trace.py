"""A task records while somebody asks; a coordinator asks all tasks; a trace becomes a file."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import msgpack

import psync
from endpoints import PS, SECRET, connected, done
from memory_cluster import MemoryCluster, cluster_of, coordinating, event_of, note, running
from psync.errors import ClosedError, ConfigurationError
from psync.net import trace as module
from psync.net.connection import Handler
from psync.net.platform import Platform
from psync.net.trace import LEASE_S, TICK_S, SpanCollector, SpanRecorder, Trace, tracing
from psync.net.trace_file import Reading
from psync.testing import MemoryNetwork
from psync.wire.messages import AskStatistics, Shutdown
from trace_events import TraceFile
from traced_by_hand import CHIEF, ByHand, entries_of


def new_recorder(**options: Any) -> SpanRecorder:
    now = asyncio.get_running_loop().time
    return SpanRecorder(Platform(MemoryNetwork(), SECRET, now=now), PS, **options)


def read(recorder: SpanRecorder, name: str = "r", *, last: bool = False) -> dict[str, Any]:
    body = recorder.read(name, last=last)
    reading: dict[str, Any] = msgpack.decode(body)
    return {**reading, "entries": entries_of(body)}


def notes(reading: dict[str, Any]) -> list[Any]:
    return [entry[2] for entry in reading["entries"]]


@pytest.mark.virtual_time
async def test_it_records_from_the_first_question_to_the_last() -> None:
    recorder = new_recorder()
    told: list[bool] = []
    recorder.watch(lambda which: told.append(which is recorder))
    assert not recorder._readers
    assert read(recorder)["entries"] == []
    assert (bool(recorder._readers), told) == (True, [True])
    recorder.note("a", 1)
    assert notes(read(recorder)) == [1]
    recorder.note("a", 2)
    assert notes(read(recorder, last=True)) == [2]
    assert (bool(recorder._readers), told) == (False, [True, False])
    assert notes(read(recorder)) == []
    recorder.close()


@pytest.mark.virtual_time
async def test_each_reader_gets_what_came_since_it_has_asked() -> None:
    recorder = new_recorder()
    read(recorder, "one")
    recorder.note("a", 1)
    read(recorder, "two")
    recorder.note("a", 2)
    assert notes(read(recorder, "one", last=True)) == [1, 2]
    assert notes(read(recorder, "two", last=True)) == [2]


@pytest.mark.virtual_time
async def test_facts_are_told_in_the_beginning_and_in_the_end() -> None:
    recorder = new_recorder(facts=lambda: {"variables": {1: "w"}})
    facts = [read(recorder, last=last)["facts"] for last in (False, False, True)]
    assert facts == [{"variables": {1: "w"}}, {}, {"variables": {1: "w"}}]


@pytest.mark.virtual_time
async def test_counters_are_looked_at_again_and_again() -> None:
    recorder = new_recorder(counters=lambda: {"queue": 3})
    assert notes(read(recorder)) == [{"queue": 3}]
    await asyncio.sleep(2.5 * TICK_S)
    assert notes(read(recorder, last=True)) == [{"queue": 3}] * 2
    await asyncio.sleep(2.5 * TICK_S)
    assert notes(read(recorder, last=True)) == [{"queue": 3}]  # it has begun again


@pytest.mark.virtual_time
async def test_what_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RING_BYTES", 10_000)
    async with connected(server={Shutdown: Handler(done)}) as pair:
        recorder = new_recorder()
        recorder.watch_endpoint(pair.server)
        read(recorder, "slow")
        read(recorder)
        for number in range(1, 5):
            await pair.peer.call(Shutdown("x" * 3000))
            reading = read(recorder)
            assert (reading["lost"], len(reading["entries"])) == (0, 2), number
        slow = read(recorder, "slow")
        assert (slow["lost"], len(slow["entries"])) == (2, 6)  # a question and its answer
        recorder.note("a", "x" * 20_000)
        assert read(recorder)["lost"] == 1
        assert read(recorder, "slow")["lost"] == 1
        recorder.close()


@pytest.mark.virtual_time
async def test_who_does_not_come_back_is_forgotten_after_a_while() -> None:
    recorder = new_recorder()
    read(recorder, "one")
    await asyncio.sleep(LEASE_S - 1)
    read(recorder, "one")
    recorder.note("a", 1)
    await asyncio.sleep(LEASE_S - 1)
    assert notes(read(recorder, "one")) == [1]
    await asyncio.sleep(LEASE_S + 0.1)
    assert not recorder._readers


@pytest.mark.virtual_time
async def test_it_sees_all_messages_of_connections_old_and_new() -> None:
    async with connected(server={AskStatistics: Handler(done)}) as pair:
        recorder = new_recorder()
        forget = recorder.watch_endpoint(pair.server)
        await pair.peer.call(AskStatistics())
        first = read(recorder)
        await pair.peer.call(AskStatistics())
        bulk = await pair.client.connect(pair.address, PS, "bulk")
        await bulk.call(AskStatistics())
        reading = read(recorder)
        assert [entry[2:4] for entry in reading["entries"]] == [
            [16, 2], [17 + 256, 2], [16, 1], [17 + 256, 1],
        ]  # fmt: skip
        connections = [*first["connections"], *reading["connections"]]
        assert [description for _, description in connections] == [
            [PS, 1, "/job:worker/task:0", 2, "control"], [PS, 1, "/job:worker/task:0", 2, "bulk"],
        ]  # fmt: skip
        await bulk.call(AskStatistics())
        assert read(recorder)["connections"] == []  # each is described once
        forget()
        await bulk.call(AskStatistics())
        assert read(recorder, last=True)["entries"] == []
        assert bulk.tap is None


@pytest.mark.virtual_time
async def test_a_request_costs_no_look_at_the_clock_while_nobody_asks() -> None:
    looks: list[int] = []

    def now() -> float:
        looks.append(1)
        return 0.0

    async with connected(server={AskStatistics: Handler(done)}) as pair:
        platform = dataclasses.replace(pair.server.platform, now=now)
        recorder = SpanRecorder(platform, PS)
        recorder.watch_endpoint(pair.server)
        await pair.peer.call(AskStatistics())
        assert looks == []


def collector_of(coordinator: Any) -> SpanCollector:
    collector: SpanCollector = coordinator._seen.source.spans
    return collector


def tasks(readings: list[Reading]) -> list[str]:
    return sorted(reading.task for reading in readings)


WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]


@pytest.mark.virtual_time
async def test_all_tasks_answer() -> None:
    async with coordinating() as (_, coordinator):
        collector = collector_of(coordinator)
        for _ in range(2):
            assert tasks(await collector.read_all("r")) == [CHIEF, PS, *WORKERS]
        assert tasks(await collector.read_all("r", last=True)) == [CHIEF, PS, *WORKERS]


@pytest.mark.virtual_time
async def test_who_is_gone_is_not_waited_for_and_others_go_on() -> None:
    async with coordinating() as (cluster, coordinator):
        collector = collector_of(coordinator)
        await collector.read_all("r")
        await cluster.kill_worker("worker-1")
        await asyncio.sleep(1)
        assert tasks(await collector.read_all("r")) == [CHIEF, PS, WORKERS[0]]
        await cluster.revive("worker-1")
        await asyncio.sleep(5)
        assert tasks(await collector.read_all("r", last=True)) == [CHIEF, PS, *WORKERS]


@pytest.mark.virtual_time
async def test_a_task_that_dies_while_it_is_asked_is_left_out() -> None:
    async with coordinating() as (cluster, coordinator):
        cluster.network.partition("worker-1")
        reading = asyncio.create_task(collector_of(coordinator).read_all("r"))
        await asyncio.sleep(0.01)
        await cluster.kill_worker("worker-1")
        assert tasks(await reading) == [CHIEF, PS, WORKERS[0]]
        cluster.network.heal("worker-1")


@pytest.mark.virtual_time
async def test_what_comes_late_is_in_a_later_reading() -> None:
    async with coordinating() as (cluster, coordinator):
        collector = collector_of(coordinator)
        cluster.network.partition("worker-1")
        assert tasks(await collector.read_all("r")) == [CHIEF, PS, WORKERS[0]]
        cluster.network.heal("worker-1")
        await asyncio.sleep(1)
        assert tasks(await collector.read_all("r")).count(WORKERS[1]) == 2  # the late one, and this


@pytest.mark.virtual_time
async def test_many_tasks_are_asked_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASKED_AT_ONCE", 1)
    async with coordinating() as (_, coordinator):
        collector = collector_of(coordinator)
        assert tasks(await collector.read_all("r")) == [CHIEF, PS, *WORKERS]  # all begin
        turns = [tasks(await collector.read_all("r"))[1] for _ in range(6)]
        assert sorted(turns[:3]) == sorted(turns[3:]) == [PS, *WORKERS]
        assert tasks(await collector.read_all("r", last=True)) == [CHIEF, PS, *WORKERS]


@pytest.mark.virtual_time
async def test_when_the_coordinator_closes_nobody_is_left_asking() -> None:
    async with cluster_of() as cluster:
        import psync

        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            cluster.network.partition("worker-1")
            await collector_of(coordinator).read_all("r")
            cluster.network.heal("worker-1")


@pytest.mark.virtual_time
async def test_a_closure_that_runs_when_it_begins_is_known() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):

        async def step() -> None:
            await note("running")
            await event_of("go").wait()

        value = coordinator.schedule(step)
        await event_of("running").wait()
        collector = collector_of(coordinator)
        readings = [*await collector.read_all("r"), *await collector.read_all("r", last=True)]
        event_of("go").set()
        await value
        began = [
            entry[1:]
            for task, body, *_ in readings
            for entry in entries_of(body)
            if task in WORKERS and entry[1] in ("began", "work")
        ]
        assert sorted(began, key=str) == [["began", 0], ["work", 0]]


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
    pushes = trace.slices("ps-0", "from worker-", "Update")
    assert len(pushes) == 20
    assert {each["args"]["variables"] for each in pushes} == {"w"}
    assert {each["args"]["bytes received"] for each in pushes} == {16}
    assert {("Update", worker, "ps-0") for worker in workers} <= set(trace.arrows())
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
            await asyncio.sleep(2 * module.READ_EVERY_S)
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
    monkeypatch.setattr(module, "MAX_BYTES", 1)
    async with coordinating() as (_, coordinator):
        async with coordinator.trace(tmp_path / "t.json") as traced:
            await traced.ended.wait()
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


async def test_a_run_that_ends_leaves_what_there_was(tmp_path: Path) -> None:
    trace = Trace(Ending(2).read, "train.py")
    await trace.record()
    assert trace.ended.is_set()
    assert trace.cut_short == "train.py has ended"
    trace.write(tmp_path / "t.json")
    assert "train.py has ended" in (tmp_path / "t.json").read_text()


async def test_a_run_that_has_ended_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has ended"):
        async with tracing(Ending(0).read, "train.py", tmp_path / "t.json"):
            pytest.fail("it has begun")
    assert list(tmp_path.iterdir()) == []
