"""Merging of state over workers: what becomes of values that workers send, however late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import shared, training
from psync.integrations.served import ServedVariables

ONE = np.ones(3, np.float32)


def served_of(
    strategy: psync.ParameterServerStrategy, state: dict[str, np.ndarray], merge: str = "mean"
) -> ServedVariables:
    with strategy.scope():
        return ServedVariables(
            "Model", {"w": ONE, **state}, {"w"}, set(state), psync.optimizers.SGD(0.0),
            name="model", merge=merge, cast_gradients=True,
        )  # fmt: skip


async def push_state(served: ServedVariables, **now: Any) -> None:
    """Pull, and push what the state has become."""
    values, _ = await served._pull_values(None)
    before = {key: values[key] for key in now}
    await served._push_values({"w": ONE}, before, now)


async def on_workers(coordinator: Any, served: ServedVariables, values: dict[int, Any]) -> None:
    """Push a value of "s" from each of these workers, which all pull before any of them pushes."""
    import asyncio

    shared["barrier"] = asyncio.Barrier(len(values))

    async def step() -> None:
        import local_training

        pulled, _ = await served._pull_values(None)
        await local_training.shared["barrier"].wait()
        now = np.full_like(pulled["s"], values[psync.get_worker_index()])
        await served._push_values({"w": ONE}, {"s": pulled["s"]}, {"s": now})

    for _ in values:
        coordinator.schedule(step)
    await coordinator.join()


async def read(served: ServedVariables, key: str = "s") -> np.ndarray:
    value: np.ndarray = (await served._read_values())[key]
    return value


async def test_the_mean_lies_between_what_workers_send() -> None:
    async with training(1, 2) as (strategy, coordinator):
        served = served_of(strategy, {"s": np.zeros(2, np.float32)})
        await on_workers(coordinator, served, {0: 4.0, 1: 8.0})
        first, second = 4.0, 8.0
        assert set(await read(served)) <= {first / 4 + second / 2, second / 4 + first / 2}


@pytest.mark.promise("updates.model-state-in-range")
async def test_late_values_never_overshoot() -> None:
    """Differences to an old value, added up, would make this variance negative."""
    async with training(1, 2) as (strategy, _):
        served = served_of(strategy, {"s": np.ones(1, np.float32)})
        values, _ = await served._pull_values(None)
        late = {"s": values["s"]}
        for _ in range(40):
            await push_state(served, s=np.array([1e-4], np.float32))
        await served._push_values({"w": ONE}, late, {"s": np.array([0.9], np.float32)})
        assert 1e-4 < (await read(served))[0] < 0.9


async def test_counters_become_the_largest_one_and_flags_stay_set() -> None:
    async with training(1, 2) as (strategy, _):
        state = {"n": np.array(5), "seen": np.array([False, True]), "u": np.array([3], np.uint8)}
        served = served_of(strategy, state)
        await push_state(
            served, n=np.array(9), seen=np.array([True, True]), u=np.array([2], np.uint8)
        )
        await push_state(served, n=np.array(7), seen=np.array([False, True]), u=state["u"])
        values = await served._read_values()
        assert values["n"] == 9
        assert values["n"].shape == ()
        assert values["seen"].all()
        assert values["u"] == [3]


async def test_first_takes_worker_0_alone() -> None:
    async with training(1, 2) as (strategy, coordinator):
        served = served_of(strategy, {"s": np.zeros(1, np.float32)}, "first")
        await on_workers(coordinator, served, {0: 4.0, 1: 8.0})
        assert await read(served) == [4.0]


async def test_what_has_not_changed_is_not_sent_and_counts_as_a_call_all_the_same() -> None:
    """A closure that runs again may change other state by chance; its calls keep their numbers."""

    async with training(1, 2) as (strategy, coordinator):
        served = served_of(strategy, {"s": np.array([np.nan, 1], np.float32), "n": np.array(1)})

        async def step(changes: bool) -> int:
            from psync.client.context import current_closure

            values, _ = await served._pull_values(None)
            before = {key: values[key] for key in ("s", "n")}
            now = {key: before[key] + changes for key in before}
            await served._push_values({"w": ONE}, before, now)
            closure = current_closure()
            assert closure is not None
            return next(closure.ordinals)

        calls = [coordinator.schedule(step, args=(changes,)) for changes in (False, True)]
        await coordinator.join()
        unchanged, different = await coordinator.fetch(calls)
        assert unchanged == different
        (statistics,) = await coordinator.ps_statistics()
        assert statistics["store"]["assigns"] == 1  # of n, in the second one


async def test_in_a_gang_it_is_the_plain_mean_of_all_replicas() -> None:
    async with training(1, 2) as (strategy, _):
        served = served_of(strategy, {"s": np.zeros(1, np.float32), "n": np.array(0)})

        async def replica() -> None:
            index = psync.get_worker_index()
            values, _ = await served._pull_values(None)
            now = {"s": np.array([4.0 + index], np.float32), "n": np.array(3)}
            await served._push_values({"w": ONE}, {key: values[key] for key in now}, now)

        await strategy.run(replica)
        assert await read(served) == [4.5]
        assert await read(served, "n") == 3


@pytest.mark.promise("updates.model-state-merged-once")
@pytest.mark.parametrize("first", [0, 1])
async def test_a_closure_that_runs_again_merges_nothing_a_second_time(first: float) -> None:
    """Also where the first run has changed no float: the calls of both have the same numbers."""
    async with training(2, 1) as (strategy, coordinator):
        served = served_of(strategy, {"s": np.zeros(1, np.float32), "n": np.array(0)})

        async def step() -> psync.Outcome:
            from psync.client.context import ClosureContext, current_closure, inside

            closure = current_closure()
            assert closure is not None
            values, _ = await served._pull_values(None)
            before = {key: values[key] for key in ("s", "n")}
            now = {"s": np.full(1, first, np.float32), "n": np.array(1)}
            await served._push_values({"w": ONE}, before, now)
            again = ClosureContext(
                worker_index=0, closure_id=closure.closure_id, runtime=closure.runtime
            )
            with inside(again):  # as on another worker, after this one was lost
                now = {"s": np.full(1, 7, np.float32), "n": np.array(7)}
                return (await served._push_values({"w": ONE}, before, now)).outcome

        outcome = coordinator.schedule(step)
        await coordinator.join()
        assert await outcome is psync.Outcome.DUPLICATE
        assert await read(served) == [first or 7]
        assert await read(served, "n") == 1
