"""What integrations share: variables by name, values that travel when they may have changed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import psync
from local_training import in_step, strategy_of, training
from psync.errors import ConfigurationError, UsageError, ValueMismatchError
from psync.integrations.served import ServedVariables, check_same, in_thread

VALUES = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "a.bias": np.zeros(2, np.float32),
    "table": np.full((4, 2), 7, np.float32),
}


def served_of(
    strategy: psync.ParameterServerStrategy, trained: Any = ("a.weight", "a.bias"), **options: Any
) -> ServedVariables:
    optimizer = options.pop("optimizer", None) or psync.optimizers.SGD(1.0)
    with strategy.scope():
        return ServedVariables(
            "Model", options.pop("values", VALUES), trained, (), optimizer,
            **{"name": "net", "merge": "mean", "cast_gradients": True, **options},
        )  # fmt: skip


def test_variables_are_called_as_the_model_calls_its_arrays() -> None:
    strategy = strategy_of()
    served = served_of(strategy)
    assert served.variable("a.weight").name == "net/a.weight"
    assert [v.name for v in served.trainable_variables] == ["net/a.bias", "net/a.weight"]
    assert not served.variable("table").trainable
    assert served_of(strategy_of(), name=None).variable("a.bias").name == "a.bias"
    with pytest.raises(UsageError, match=r"no variable 'b'\nhint: there are a\.weight, a\.bias"):
        served.variable("b")


async def test_frozen_values_travel_when_they_have_changed() -> None:
    async with training(2, 1) as (strategy, _):
        served = served_of(strategy)
        values, version = await served._pull_values(None)
        assert values.keys() == VALUES.keys()
        assert (await served._pull_values(version))[0].keys() == {"a.weight", "a.bias"}
        await served._load_values({"a.bias": np.ones(2)})
        assert (await served._pull_values(version))[0].keys() == {"a.weight", "a.bias"}
        await served._load_values({"table": np.ones((4, 2))})
        values, other = await served._pull_values(version)
        assert (values["table"] == 1).all()
        assert other != version


async def test_a_restored_checkpoint_tells_that_frozen_values_are_others(tmp_path: Path) -> None:
    async with training(2, 1) as (strategy, _):
        served = served_of(strategy)
        checkpoint = psync.Checkpoint(model=served, optimizer=served.optimizer)
        path = await checkpoint.save(tmp_path)
        await served._load_values({"table": np.ones((4, 2))})
        _, version = await served._pull_values(None)
        await checkpoint.restore(path)
        values, _ = await served._pull_values(version)
        assert (values["table"] == 7).all()
        saved = await checkpoint.read(path)
        assert saved["model"].keys() == {*VALUES, "~frozen"}


async def test_values_are_read_into_given_memory() -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        served = served_of(strategy)
        memory = {key: np.empty_like(value) for key, value in VALUES.items()}
        values, _ = await served._pull_values(None, memory.__getitem__)
        for key, value in VALUES.items():
            assert values[key] is memory[key]
            np.testing.assert_array_equal(memory[key], value)


async def test_nothing_is_loaded_if_one_array_does_not_fit() -> None:
    async with training(1, 1) as (strategy, coordinator):
        served = served_of(strategy)
        with pytest.raises(ValueMismatchError, match=r'value for "table": expected shape \(4, 2\)'):
            await served._load_values({"a.bias": np.ones(2), "table": np.ones(3)})
        assert not (await served._read_values())["a.bias"].any()

        async def step() -> None:
            await served._load_values({"a.bias": np.ones(2)})

        with pytest.raises(UsageError, match="Model 'net': loading values inside a step"):
            await in_step(coordinator, step)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
async def test_gradients_of_other_floats_are_cast(dtype: Any) -> None:
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy)
        await served._push_values({"a.bias": np.array([1, 2], dtype)}, {}, {})
        rows = psync.IndexedSlices(np.array([[0.5, 1]], dtype), np.array([2]))
        await served._push_values({"a.weight": rows, "a.bias": None}, {}, {})
        values = await served._read_values()
        assert values["a.bias"].tolist() == [-1, -2]
        assert values["a.weight"].tolist() == [[0, 1], [2, 3], [3.5, 4]]


async def test_a_gradient_that_does_not_survive_the_cast_is_refused_by_name() -> None:
    async with training(1, 1) as (strategy, _):
        served = served_of(strategy)
        large = {"a.weight": np.ones((3, 2)), "a.bias": np.array([0, 1e300])}
        message = 'gradient for "net/a.bias": expected values in the range of float32, got 1e.300'
        with pytest.raises(ValueMismatchError, match=message):
            await served._push_values(large, {}, {})
        infinite = np.array([0, np.inf])  # is what it is
        await served._push_values({"a.bias": infinite}, {}, {})
        assert (await served._read_values())["a.bias"].tolist() == [0, -np.inf]
        strict = served_of(strategy, cast_gradients=False, name="strict")
        with pytest.raises(ValueMismatchError, match="expected dtype float32, got float64"):
            await strict._push_values({"a.bias": np.ones(2)}, {}, {})


async def test_a_synchronous_optimizer_counts_in_the_global_step() -> None:
    async with training(2, 2) as (strategy, coordinator):
        sync = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)
        served = served_of(strategy, optimizer=sync)

        async def step() -> Any:
            await served._pull_values(None)
            result = await served._push_values({"a.bias": np.ones(2, np.float32)}, {}, {})
            return result.outcome

        outcomes = [coordinator.schedule(step) for _ in range(6)]
        await coordinator.join()
        assert set(await coordinator.fetch(outcomes)) == {psync.Outcome.ACCEPTED}
        with strategy.scope():
            assert await psync.get_or_create_global_step().read() == 3
        assert (await served._read_values())["a.bias"].tolist() == [-3, -3]


def test_what_it_is_made_with_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="Model: expected an optimizer of psync"):
        served_of(strategy_of(), optimizer="adam")
    with pytest.raises(ConfigurationError, match="expected cast_gradients to be a bool"):
        served_of(strategy_of(), cast_gradients=1)
    with pytest.raises(UsageError, match="making a Model outside a strategy's scope"):
        ServedVariables(
            "Model", VALUES, VALUES, (), psync.optimizers.SGD(), name=None, merge="mean",
            cast_gradients=True,
        )  # fmt: skip


def test_a_build_with_other_arrays_is_refused() -> None:
    declared = {"w": ((2, 3), "float32"), "b": ((3,), "float32")}
    check_same("Model", declared, declared.items())
    message = (
        r'it is built otherwise .*; "w": declared shape \(2, 3\) float32, here shape \(2, 4\)'
        r' float32; "b": declared shape \(3,\) float32, here nothing; "c": declared nothing'
    )
    with pytest.raises(ConfigurationError, match=message):
        check_same("Model", declared, {"w": ((2, 4), "float32"), "c": ((), "int64")}.items())
    many = {str(index): ((), "int64") for index in range(7)}
    with pytest.raises(ConfigurationError, match="and 4 more"):
        check_same("Model", declared, many.items())


async def test_a_cancellation_waits_for_what_runs_in_a_thread() -> None:
    """It writes into tensors, say, which the next closure reads and writes."""
    begun, go, done = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def function() -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait()
        done.append(True)

    task = asyncio.ensure_future(in_thread(function))
    await begun.wait()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done
    assert await in_thread(lambda: 5) == 5
