"""Programs without async, in one process: the calls block, and raise what a coroutine would get."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import psync
from psync import blocking
from psync.errors import ClosureCancelled, SerializationError, UnsupportedError, UsageError
from trace_events import TraceFile


@pytest.fixture
def coordinator() -> Iterator[blocking.ClusterCoordinator]:
    with blocking.LocalCluster(1, 2, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with blocking.ClusterCoordinator(strategy) as coordinator:
            yield coordinator


def square(number: int) -> int:
    return number * number


def test_steps_are_scheduled_joined_and_fetched(coordinator: blocking.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        w = psync.Variable(np.zeros(3, np.float32), name="w")
    optimizer = psync.optimizers.SGD(0.5)
    batches = iter(coordinator.create_per_worker_dataset([1.0, 2.0]))

    async def step(batches: Iterator[float]) -> float:
        size = next(batches)
        await optimizer.apply_gradients([(np.full(3, size, np.float32), w)])
        return size

    values = [coordinator.schedule(step, (batches,)) for _ in range(2)]
    coordinator.join(timeout=60)
    assert coordinator.done()
    total = sum(coordinator.fetch(values))
    assert psync.wait(w.read()).tolist() == [-0.5 * total] * 3
    assert coordinator.fetch(coordinator.schedule_all(square, [(i,) for i in range(50)])) == [
        i * i for i in range(50)
    ]
    assert coordinator.fetch(coordinator.submit(square, number=4)) == 16
    assert coordinator.statistics()["closures"].finished == 53
    assert len(coordinator.ps_statistics()) == 1
    coordinator.report({"loss": 0.5})
    assert coordinator.status().queue.finished == 53
    assert coordinator.status().reported == {"loss": 0.5}
    assert coordinator.dashboard_url == ""


def test_an_error_of_a_step_is_raised_with_its_own_type(
    coordinator: blocking.ClusterCoordinator,
) -> None:
    coordinator.schedule(square, ("two",))
    with pytest.raises(TypeError, match="can't multiply"):
        coordinator.join()


def test_a_step_cannot_take_the_coordinator_along(coordinator: blocking.ClusterCoordinator) -> None:
    with pytest.raises(SerializationError, match="the coordinator lives on the chief"):
        coordinator.schedule(lambda: coordinator.join())


def test_what_is_awaited_runs_in_the_context_of_the_caller(
    coordinator: blocking.ClusterCoordinator,
) -> None:
    async def declare() -> str:
        return psync.Variable(np.zeros(1), name="inside").name

    with coordinator.strategy.scope():
        assert psync.wait(declare()) == "inside"


def test_on_its_own_loop_it_says_what_to_do_instead(
    coordinator: blocking.ClusterCoordinator,
) -> None:
    async def waits() -> None:
        psync.wait(asyncio.sleep(0))

    with pytest.raises(UsageError, match="would block that loop forever"):
        psync.wait(waits())


async def test_it_works_beside_a_loop_that_runs(coordinator: blocking.ClusterCoordinator) -> None:
    """As in the cell of a notebook."""
    assert coordinator.fetch(coordinator.schedule(square, (7,))) == 49


def test_a_cluster_is_scaled_in_plain_calls() -> None:
    with blocking.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with blocking.ClusterCoordinator(strategy) as coordinator:
            cluster.adapt(1, 2, interval=60)
            cluster.scale(3)
            assert len(coordinator.statistics()["closures"].workers) == 3


async def test_its_loop_ends_where_another_one_runs() -> None:
    """As when a cell closes what an earlier one has opened."""
    with blocking.LocalCluster(1, 1, processes=False) as cluster:
        assert "running" in cluster._repr_html_()
    assert "not running" in cluster._repr_html_()
    assert "psync.blocking" not in {thread.name for thread in threading.enumerate()}


def test_the_loop_ends_with_the_last_context_manager() -> None:
    for _ in range(2):
        with blocking.LocalCluster(1, 1, processes=False) as cluster:
            assert "psync.blocking" in {thread.name for thread in threading.enumerate()}
            with pytest.raises(UsageError, match="was already started"):
                cluster.start()
        cluster.close()
        assert "psync.blocking" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(UsageError, match="wait outside a step"):
        psync.wait(asyncio.sleep(0))


def handed_out(coordinator: blocking.ClusterCoordinator, tmp_path: Path) -> Iterator[object]:
    """All that a program gets from psync.blocking, but its own strategy."""
    yield coordinator
    yield coordinator.schedule(square, (2,))
    yield coordinator.submit(square, 2)
    yield from coordinator.schedule_all(square, [(2,)])
    dataset = coordinator.create_per_worker_dataset([1.0, 2.0])
    yield from (dataset, dataset.build(), iter(dataset), dataset.iterator(1))
    visits = coordinator.distribute_once([1, 2])
    yield visits
    yield from visits.schedule(square)
    coordinator.join()
    status = coordinator.status()
    yield from (status, *status.workers, *status.ps, status.queue)
    with coordinator.trace(tmp_path / "t.json") as traced:
        yield traced
    assert traced.summary is not None
    yield traced.summary
    yield coordinator.events()
    with blocking.LocalCluster(1, 1, processes=False) as cluster:
        yield from (cluster, cluster.resolver)


def test_nothing_that_it_hands_out_has_a_method_that_is_a_coroutine(
    coordinator: blocking.ClusterCoordinator, tmp_path: Path
) -> None:
    asynchronous = {
        f"{type(thing).__name__}.{name}"
        for thing in handed_out(coordinator, tmp_path)
        for name in dir(type(thing))
        if not name.startswith("_")
        and any(
            kind(inspect.getattr_static(type(thing), name))
            for kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        )
    }
    assert asynchronous == set()


def test_handles_return_values(coordinator: blocking.ClusterCoordinator) -> None:
    value = coordinator.schedule(square, (3,))
    assert value.fetch() == value.get() == psync.wait(value) == coordinator.fetch(value) == 9
    assert coordinator.schedule(square, (value,)).fetch() == 81
    with pytest.raises(UsageError, match="wait expected an awaitable, got int"):
        psync.wait(value.fetch())  # type: ignore[arg-type]
    failed = coordinator.schedule(square, ("two",))
    with pytest.raises(TypeError, match="can't multiply"):
        failed.fetch()
    with pytest.raises(ClosureCancelled):
        coordinator.schedule(square, (4,)).fetch()  # it ended at once
    with pytest.raises(TypeError, match="can't multiply"):
        coordinator.join()

    batches = iter(coordinator.create_per_worker_dataset([1.0, 2.0]))
    coordinator.schedule(next, (batches,)).fetch()
    assert sorted(batches.positions().values()) == [0, 1]
    with pytest.raises(UnsupportedError, match="outside a step"):
        batches.next_in(0)

    async def on_the_loop() -> None:
        with pytest.raises(UsageError, match="await value"):
            slow.fetch()

    slow = coordinator.schedule(time.sleep, (0.1,))
    psync.wait(on_the_loop())
    assert slow.fetch() is None


def test_a_closure_is_cancelled_in_a_plain_call(coordinator: blocking.ClusterCoordinator) -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    value = coordinator.schedule(for_ever)
    value.cancel()
    with pytest.raises(ClosureCancelled):
        value.fetch()


def test_visits_go_epoch_by_epoch_in_plain_calls(coordinator: blocking.ClusterCoordinator) -> None:
    visits = coordinator.distribute_once([1, 2, 3], num_epochs=2)
    found = [sorted(value.fetch() for value in visits.schedule(square)) for _ in visits]
    assert found == [[1, 4, 9]] * 2
    assert visits.done()
    visits = coordinator.distribute_once([1, 2, 3], num_epochs=2)
    visits.run(square)
    assert [account.num_done for account in visits.account()] == [3, 3]


def test_a_value_is_there_when_all_is_closed() -> None:
    with blocking.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with blocking.ClusterCoordinator(strategy) as coordinator:
            value = coordinator.schedule(square, (3,))
            coordinator.join()
    assert value.fetch() == 9


def test_on_another_loop_than_its_own_it_says_so(coordinator: blocking.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        w = psync.Variable(np.zeros(3), name="w")
    with pytest.raises(UsageError, match=r"(?s)a different event loop.*psync\.wait"):
        asyncio.run(w.read())
    assert psync.wait(w.read()).tolist() == [0.0] * 3


@pytest.mark.promise("forks.never-wait")
def test_a_forked_process_does_not_wait_for_a_loop_that_it_does_not_have(
    coordinator: blocking.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        w = psync.Variable(np.zeros(3), name="w")
    psync.wait(w.read())
    for call in (lambda: psync.wait(w.read()), lambda: psync.empty_like(w), coordinator.done):
        read_end, write_end = os.pipe()
        if not (child := os.fork()):
            try:
                call()
            except UsageError as exc:
                os.write(write_end, exc.message.encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end, encoding="utf-8") as said:
            message = said.read()
        os.waitpid(child, 0)
        assert message in (
            "wait outside a step",
            "empty_like: no connection to the ps tasks here",
            "done on a different event loop than the cluster's",
        )
    assert psync.wait(w.read()).tolist() == [0.0] * 3


async def coroutine() -> None: ...


def test_run_takes_a_plain_function() -> None:
    for main in [coroutine, None]:
        with pytest.raises(UsageError, match="expected a plain function"):
            blocking.run(main)  # type: ignore[arg-type]


def test_a_stretch_is_traced_in_plain_calls(
    coordinator: blocking.ClusterCoordinator, tmp_path: Path
) -> None:
    with coordinator.trace(tmp_path / "t.json") as traced:
        coordinator.schedule(lambda: None)
        coordinator.join()
    assert traced.summary is not None
    trace = TraceFile(tmp_path / "t.json")
    assert sorted(trace.tasks.values()) == sorted(traced.summary.tasks)
    steps = [each for worker in trace.tasks.values() for each in trace.slices(worker, "steps")]
    assert any(each["name"].endswith("<lambda>") for each in steps)


def test_a_run_is_reported_in_plain_calls(
    coordinator: blocking.ClusterCoordinator, tmp_path: Path
) -> None:
    with blocking.report(tmp_path / "run.html"):
        coordinator.schedule(lambda: None)
        coordinator.join()
    assert "1 finished" in (tmp_path / "run.html").read_text()
