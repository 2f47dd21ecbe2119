"""Fast and slow workers in a whole cluster, and what ends their waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import declare
from loops import for_each
from memory_cluster import MemoryCluster, coordinating, event_of, session_cluster
from psync.errors import ConfigurationError, EndOfData

pytestmark = pytest.mark.virtual_time

PAUSES = (0.1, 1.0)  # seconds per round of the fast worker and of the slow one

Step = Callable[..., Coroutine[Any, Any, None]]


@dataclass
class Race:
    """A running coordinator, and a step that does one round at its worker's pace.

    ``rounds`` and ``leads`` are noted by the steps: how many rounds each worker has done, and how
    far ahead of the other one it was each time it was allowed to go on.
    """

    cluster: MemoryCluster
    coordinator: psync.ClusterCoordinator
    step: Step
    rounds: Counter[int]
    leads: list[int]

    def schedule(self, count: int, *args: Any) -> list[psync.RemoteValue]:
        return [self.coordinator.schedule(self.step, args=args) for _ in range(count)]

    def clocks(self) -> dict[str, Any]:
        """What ps 0 says of the only bound."""
        task = self.cluster.tasks["ps-0"]
        (bound,) = task.statistics()["clocks"].values()
        return dict(bound)


@contextlib.asynccontextmanager
async def race(bound: psync.StalenessBound | None, num_ps: int = 2) -> AsyncIterator[Race]:
    async with coordinating(num_ps, 2) as (cluster, coordinator):
        shared = memory_cluster.shared
        shared.update(rounds=Counter(), leads=[], pauses=PAUSES)
        v = declare(coordinator.strategy, v=np.zeros(4, np.float32))
        optimizer = psync.optimizers.SGD(1.0, staleness_bound=bound)

        async def step(num_rounds: int = 1) -> None:
            shared, worker = memory_cluster.shared, psync.get_worker_index()
            for _ in range(num_rounds):
                await asyncio.sleep(shared["pauses"][worker])
                shared["rounds"][worker] += 1
                await optimizer.apply_gradients([(np.ones(4, np.float32), v)])
                rounds = shared["rounds"]
                shared["leads"].append(rounds[worker] - rounds[1 - worker])

        yield Race(cluster, coordinator, step, shared["rounds"], shared["leads"])


# --- the bound -------------------------------------------------------------------------------


async def test_without_a_bound_the_fast_worker_runs_away():
    async with race(None) as running:
        running.schedule(40)
        await running.coordinator.join()
        assert max(running.leads) > 20
        assert running.cluster.tasks["ps-0"].statistics()["clocks"] == {}


@pytest.mark.promise("staleness.bound-holds")
@pytest.mark.parametrize(
    ("bound", "closures", "rounds"),
    [(0, 40, 1), (1, 40, 1), (2, 40, 1), (5, 40, 1), (1, 2, 15)],
    ids=["lock step", "1", "2", "5", "rounds within one closure"],
)
async def test_the_fast_worker_is_ahead_by_the_bound_at_most(bound, closures, rounds):
    async with race(psync.StalenessBound(bound)) as running:
        running.schedule(closures, rounds)
        await running.coordinator.join()
        # At the end the slow worker has nothing left to do, and so no clock.
        assert max(running.leads[:-2] if bound else running.leads) == bound
        assert sum(running.rounds.values()) == closures * rounds
        if bound == 0 or rounds > 1:
            assert running.rounds[0] == running.rounds[1]
        clocks = running.clocks()
        assert clocks["max_staleness"] == bound
        assert clocks["ticks"] == closures * rounds
        assert clocks["waiting"] == 0
        if bound == 0:
            assert 19 <= clocks["waits"] <= 20


async def test_a_report_says_who_waits_and_for_whom():
    async with race(psync.StalenessBound(0)) as running:
        running.schedule(2, 3)
        lines: list[str] = []
        while not running.coordinator.done():
            lines += running.cluster.tasks["ps-0"].describe()
            await asyncio.sleep(0.05)
        said = {line for line in lines if "staleness bound" in line}
        assert any(
            "waiting /job:worker/task:0; slowest /job:worker/task:1, at round" in line
            for line in said
        )


async def test_closures_scheduled_one_by_one_are_bounded_too():
    async with race(psync.StalenessBound(2)) as running:
        pending = set(map(asyncio.ensure_future, running.schedule(2)))
        for _ in range(20):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending |= set(map(asyncio.ensure_future, running.schedule(2 - len(pending))))
        await running.coordinator.join()
        await asyncio.wait(pending)
        assert max(running.leads[:-4]) == 2  # the last rounds may be done alone


# --- what ends a wait ------------------------------------------------------------------------


async def test_a_worker_with_nothing_left_to_do_is_not_waited_for():
    async with race(psync.StalenessBound(0)) as running:
        running.schedule(1, 2)
        running.schedule(1, 20)
        await running.coordinator.join(timeout=60)
        assert sorted(running.rounds.values()) == [2, 20]


async def test_a_worker_whose_next_closure_needs_this_one_is_not_waited_for():
    async with race(psync.StalenessBound(0)) as running:

        async def uses(_: None) -> int:
            return psync.get_worker_index()

        (first,) = running.schedule(1, 5)
        second = running.coordinator.schedule(uses, args=(first,))
        await running.coordinator.join(timeout=60)
        assert await second in (0, 1)


@pytest.mark.promise("staleness.dead-do-not-block")
async def test_a_worker_that_dies_is_not_waited_for():
    async with race(psync.StalenessBound(0)) as running:
        memory_cluster.shared["pauses"] = (0.1, 3600.0)
        values = running.schedule(8)
        await asyncio.sleep(5)
        assert running.rounds == {0: 1}  # and it waits
        await running.cluster.stop("worker-1")
        await running.coordinator.join(timeout=60)
        assert running.rounds == {0: 8}
        await running.coordinator.fetch(values)


async def test_a_worker_that_comes_back_is_waited_for_again():
    async with race(psync.StalenessBound(0)) as running:
        running.schedule(60)
        await asyncio.sleep(4.5)
        await running.cluster.stop("worker-1")
        await asyncio.sleep(1)
        await running.cluster.start("worker-1")
        await asyncio.sleep(1)
        ahead = running.rounds[0] - running.rounds[1]
        assert ahead > 1
        running.leads.clear()
        await running.coordinator.join()
        assert max(running.leads) <= ahead


async def test_a_worker_without_data_is_not_waited_for():
    async with race(psync.StalenessBound(0)) as running:
        data = running.coordinator.create_per_worker_dataset(
            lambda context: range(9 if context.input_pipeline_id else 3)
        )
        step = running.step

        async def one(batches: Any) -> None:
            await asyncio.sleep(0.5)
            next(batches)
            await step()

        batches = iter(data)
        for _ in range(60):
            running.coordinator.schedule(one, args=(batches,))
        with pytest.raises(EndOfData):
            await running.coordinator.join(timeout=60)
        assert running.rounds == {0: 3, 1: 9}


async def test_an_error_elsewhere_ends_a_wait():
    async with race(psync.StalenessBound(0)) as running:
        memory_cluster.shared["pauses"] = (0.1, 0.1)

        async def fails() -> None:
            event_of("fails").set()
            await asyncio.sleep(5)
            raise ValueError("here")

        running.coordinator.schedule(fails)
        await event_of("fails").wait()
        running.schedule(1, 2)
        with pytest.raises(ValueError, match="here"):
            await running.coordinator.join(timeout=60)
        await asyncio.sleep(1)
        assert running.clocks()["waiting"] == 0


async def test_a_closure_that_is_cancelled_ends_its_wait():
    async with race(psync.StalenessBound(0)) as running:
        memory_cluster.shared["pauses"] = (0.1, 10.0)
        values = running.schedule(2)
        await asyncio.sleep(5)
        assert running.clocks()["waiting"] == 1
        (waits,) = [value for value in values if value.status is psync.RemoteValueStatus.NOT_READY][
            :1
        ]
        waits.cancel()
        await running.coordinator.join(timeout=60)
        assert running.clocks()["waiting"] == 0


async def test_a_lost_connection_to_ps_0_counts_no_round_twice():
    async with race(psync.StalenessBound(0)) as running:
        running.schedule(20)
        for _ in range(4):
            await asyncio.sleep(1.3)
            running.cluster.network.cut("ps-0:1")
        await running.coordinator.join(timeout=120)
        assert running.clocks()["ticks"] == 20
        assert max(running.leads) == 0


async def test_a_round_that_another_run_has_done_is_not_done_again():
    async with race(psync.StalenessBound(9)) as running:
        step = running.step

        async def two_rounds_and_more() -> None:
            await step(2)
            event_of(f"done by {psync.get_worker_index()}").set()
            await event_of("end").wait()

        value = running.coordinator.schedule(two_rounds_and_more)
        await event_of("done by 0").wait()
        assert running.clocks()["ticks"] == 2
        await running.cluster.stop("worker-0")
        await event_of("done by 1").wait()
        assert running.clocks()["ticks"] == 2
        event_of("end").set()
        await value


# --- who has a clock -------------------------------------------------------------------------


async def test_optimizers_have_clocks_of_their_own_and_the_program_has_none():
    async with coordinating(1, 2) as (cluster, coordinator):
        v = declare(coordinator.strategy, v=np.zeros(4, np.float32))
        bounds = [psync.StalenessBound(rounds) for rounds in (0, 3)]
        optimizers = [psync.optimizers.SGD(1.0, staleness_bound=bound) for bound in bounds]

        async def step() -> None:
            for optimizer in optimizers:
                await optimizer.apply_gradients([(np.ones(4, np.float32), v)])

        for _ in range(3):
            await step()
        assert (await v.read() == -6).all()
        assert cluster.tasks["ps-0"].statistics()["clocks"] == {}
        for _ in range(6):
            coordinator.schedule(step)
        await coordinator.join()
        clocks = cluster.tasks["ps-0"].statistics()["clocks"]
        assert {int(number) for number in clocks} == {o.number for o in optimizers}
        assert [c["max_staleness"] for c in clocks.values()] == [0, 3]
        assert [c["ticks"] for c in clocks.values()] == [6, 6]


async def test_programs_that_train_in_sessions_have_clocks_until_they_leave():
    optimizer = psync.optimizers.SGD(1.0, staleness_bound=psync.StalenessBound(1))
    rounds: Counter[int] = Counter()
    leads: list[int] = []
    both_are_here = asyncio.Barrier(2)

    async def main(strategy: psync.ParameterServerStrategy) -> None:
        v = declare(strategy, v=np.zeros(4, np.float32))
        worker = strategy.cluster_resolver.task_id
        async with psync.MonitoredTrainingSession(strategy) as session:
            await both_are_here.wait()
            for _ in range((20, 5)[worker]):
                await asyncio.sleep(PAUSES[worker])
                rounds[worker] += 1
                await session.run(push, v)
                if rounds[1] < 5:
                    leads.append(rounds[worker] - rounds[1 - worker])

    async def push(v: psync.Variable) -> None:
        await optimizer.apply_gradients([(np.ones(4, np.float32), v)])

    async with session_cluster(1, 2) as cluster:
        await cluster.run_all(main)
    assert rounds == {0: 20, 1: 5}
    assert max(leads) == 1


# --- what may be said ------------------------------------------------------------------------


@for_each("rounds", [-1, (1 << 31) + 1, 1.0, True, "2", None])
def test_what_is_no_number_of_rounds_is_refused(rounds):
    with pytest.raises(ConfigurationError, match=f"max_staleness from 0 to .*, got {rounds!r}"):
        psync.StalenessBound(rounds)
    with pytest.raises(ConfigurationError, match=r"expected a StalenessBound or None .* got "):
        psync.optimizers.Adam(staleness_bound=rounds or 2)
    assert repr(psync.StalenessBound(np.int64(3))) == "StalenessBound(max_staleness=3)"
