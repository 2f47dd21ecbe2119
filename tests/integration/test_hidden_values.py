"""Masked arrays: wherever arrays come in, values that a mask hides are refused and not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of, training
from psync.errors import UsageError
from psync.metrics import Mean, MeanAbsoluteError

HIDDEN = "a masked array, whose mask hides 1 of 3 values: decide what they are, as by value.filled"


def hiding(dtype: Any = np.float32) -> Any:
    return np.ma.array(np.array([1, 2, 3], dtype), mask=[False, True, False])


def declared(strategy: Any, value: Any = (0.0, 0.0, 0.0)) -> Any:
    with strategy.scope():
        return psync.Variable(np.asarray(value, np.float32), name="v")


async def push(v: Any, gradient: Any) -> None:
    await psync.optimizers.SGD(0.1).apply_gradients([(gradient, v)])


async def read_into(v: Any, out: Any) -> None:
    await psync.pull(v, out=out)


CALLS = {
    "push": lambda v: push(v, hiding()),
    "push that forbids NaN": lambda v: psync.optimizers.SGD(
        0.1, forbid_nonfinite=True
    ).apply_gradients([(hiding(), v)]),
    "push of rows": lambda v: push(v, psync.IndexedSlices(hiding(), [0, 1, 2])),
    "rows of a push": lambda v: push(v, psync.IndexedSlices(np.ones(3), hiding(np.int64))),
    "a list": lambda v: v.assign([1.0, np.ma.masked, 3.0]),
    "assign": lambda v: v.assign(hiding()),
    "assign_add": lambda v: v.assign_add(hiding()),
    "assign_sub": lambda v: v.assign_sub(hiding()),
    "rows": lambda v: v.sparse_read(hiding(np.int64)),
    "pull into": lambda v: read_into(v, hiding()),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls_of_a_variable_refuse_them_and_change_nothing(name: str) -> None:
    async with training() as (strategy, _):
        v = declared(strategy)
        hidden = HIDDEN.replace("1 of 3", "1 of 1") if name == "a list" else HIDDEN
        with pytest.raises(UsageError) as caught:
            await CALLS[name](v)
        assert hidden in str(caught.value)
        assert (await v.read()).tolist() == [0.0] * 3


async def test_a_step_is_told_so_too() -> None:
    async with training() as (strategy, coordinator):
        v, gradient = declared(strategy), hiding()
        optimizer = psync.optimizers.SGD(0.1)

        async def step() -> None:
            await optimizer.apply_gradients([(gradient, v)])

        with pytest.raises(UsageError, match=r'gradient for "v": .*a masked array, whose mask'):
            await coordinator.schedule(step)


async def test_an_initial_value() -> None:
    async with training() as (strategy, _):
        with strategy.scope(), pytest.raises(UsageError) as caught:
            psync.Variable(hiding(), name="w")
        assert HIDDEN in str(caught.value)


async def test_an_accumulator() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            dense = psync.ConditionalAccumulator(np.float32, (3,), name="dense")
            rows = psync.SparseConditionalAccumulator(np.float32, (3,), name="rows")
        for refused in (
            dense.apply_grad(hiding()),
            rows.apply_grad(hiding(np.int64), np.ones(3, np.float32)),
            rows.apply_grad([0, 1, 2], hiding()),
        ):
            with pytest.raises(UsageError) as caught:
                await refused
            assert HIDDEN in str(caught.value)


@pytest.mark.parametrize("place", range(3))
def test_metrics(place: int) -> None:
    arguments = [np.ones(3), np.ones(3), np.ones(3)]
    arguments[place] = hiding(np.float64)
    with strategy_of().scope():
        metric, mean = MeanAbsoluteError("mae"), Mean("m")
    with pytest.raises(UsageError) as caught:
        metric.contribution(arguments[0], arguments[1], sample_weight=arguments[2])
    assert HIDDEN in str(caught.value)
    with pytest.raises(UsageError):
        mean.contribution(hiding())


async def test_values_that_replicas_reduce_and_losses() -> None:
    async with training(num_workers=1) as (strategy, _):
        with pytest.raises(UsageError, match=r"(?s)a loss: .*mask hides 1 of 3"):
            await strategy.run(lambda: psync.compute_average_loss(hiding(), global_batch_size=3))

        def reduced() -> Any:
            context = psync.get_replica_context()
            assert context is not None
            return psync.wait(context.all_reduce(psync.ReduceOp.SUM, hiding()))

        with pytest.raises(UsageError, match=r"from replicas: .*mask hides 1 of 3"):
            await strategy.run(reduced)


async def test_data() -> None:
    with pytest.raises(UsageError, match="a masked array, whose mask hides 1 of 3"):
        psync.data.from_arrays((np.ones(3), hiding()), batch_size=1)
    async with training() as (strategy, _):
        v = declared(strategy)
        trainer = psync.Trainer(
            strategy, v, lambda values, batch: (0.0, np.zeros(3)), psync.optimizers.SGD(0.1)
        )
        with pytest.raises(UsageError, match=r"validation data: .*mask hides 1 of 3"):
            await trainer.evaluate((np.ones(3), hiding()))


async def test_a_mask_that_hides_nothing_is_no_obstacle() -> None:
    """As of libraries that read files, which give masked arrays in any case."""
    whole = np.ma.array(np.array([1, 2, 3], np.float32), mask=False)
    async with training() as (strategy, _):
        v = declared(strategy, whole)
        await v.assign_add(whole)
        await psync.optimizers.SGD(1.0).apply_gradients([(np.ma.array(whole), v)])
        assert (await v.read()).tolist() == [1.0, 2.0, 3.0]
