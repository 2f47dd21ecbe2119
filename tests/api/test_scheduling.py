"""submit: schedule in the form of concurrent.futures; test_cluster_coordinator.py has the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import strategy_of
from memory_cluster import coordinating
from psync import StaleCaptureWarning
from psync.errors import ClosedError, ClosureCancelled, SerializationError


async def told(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def thread_of(x: int) -> tuple[int, int]:
    return x, threading.get_ident()


async def test_arguments_go_to_the_step_as_they_are() -> None:
    async with coordinating() as (_, coordinator):
        calls = [
            coordinator.submit(told),
            coordinator.submit(told, 1, (2, 3)),
            coordinator.submit(told, (1,), a=2),
            # Names that methods here have for arguments of their own.
            coordinator.submit(told, self=1, step=2, fn=3, args=4, kwargs=5),
        ]
        assert await coordinator.fetch(calls) == [
            ((), {}),
            ((1, (2, 3)), {}),
            (((1,),), {"a": 2}),
            ((), {"self": 1, "step": 2, "fn": 3, "args": 4, "kwargs": 5}),
        ]
        x, thread = await coordinator.submit(thread_of, 5)
        assert (x, thread == threading.get_ident()) == (5, False)


async def test_remote_values_and_iterators_are_arguments_at_any_depth() -> None:
    def numbers() -> Iterator[int]:
        yield from range(10, 20)

    async def first(data: Iterator[int], plus: int) -> int:
        return next(data) + plus

    async with coordinating(num_workers=1) as (_, coordinator):
        data = iter(coordinator.create_per_worker_dataset(numbers))
        one = coordinator.submit(int, "1")
        assert await coordinator.submit(first, data, one) == 11
        assert await coordinator.submit(first, data, plus=one) == 12
        assert await coordinator.submit(told, [{"x": one}], y=(one, one)) == (
            ([{"x": 1}],),
            {"y": (1, 1)},
        )


async def test_nothing_runs_before_the_program_awaits() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):

        async def step() -> None:
            memory_cluster.shared["ran"] = True

        values = [coordinator.submit(step) for _ in range(3000)]
        assert not coordinator.done()
        assert "ran" not in memory_cluster.shared
        await coordinator.join()
        assert all(value.done() for value in values)
        assert coordinator.statistics()["closures"].finished == 3000


async def test_after_an_error_it_is_cancelled_until_join_has_raised_it() -> None:
    async def broken() -> None:
        raise ZeroDivisionError("in the step")

    async with coordinating() as (_, coordinator):
        with pytest.raises(ZeroDivisionError):
            await coordinator.submit(broken)
        late = coordinator.submit(told)
        with pytest.raises(ClosureCancelled, match="was cancelled"):
            await late
        with pytest.raises(ZeroDivisionError):
            await coordinator.join()
        assert await coordinator.submit(told) == ((), {})


async def test_a_captured_name_that_is_rebound_is_warned_of_at_the_call() -> None:
    async with coordinating() as (_, coordinator):
        rate = 1

        async def step() -> int:
            return rate

        assert await coordinator.submit(step) == 1
        rate = 2
        with pytest.warns(StaleCaptureWarning, match='"rate"') as seen:
            assert await coordinator.submit(step) == 1
        assert seen[0].filename == __file__


async def test_what_is_no_step_or_cannot_be_sent_is_refused() -> None:
    async with coordinating() as (_, coordinator):
        with pytest.raises(SerializationError, match="expected a function, got int"):
            coordinator.submit(5)  # type: ignore[call-overload]
        with pytest.raises(SerializationError, match="lock"):
            coordinator.submit(told, threading.Lock())
        assert coordinator.done()


def test_before_the_coordinator_runs_it_says_so() -> None:
    coordinator = psync.ClusterCoordinator(strategy_of())
    with pytest.raises(ClosedError, match="submit: the coordinator is not running"):
        coordinator.submit(told)
    with pytest.raises(TypeError, match="step"):
        coordinator.submit()  # type: ignore[call-overload]


async def test_fetch_takes_any_nesting_and_returns_what_is_no_remote_value() -> None:
    async with coordinating() as (_, coordinator):
        one = coordinator.submit(int, "1")
        array = np.ones(2)
        found = await coordinator.fetch({"x": [(one, "text")], "y": {"z": [one, array]}})
        assert found == {"x": [(1, "text")], "y": {"z": [1, array]}}
        assert await coordinator.fetch(5) == 5
