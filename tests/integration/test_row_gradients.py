"""Gradients of some rows, from the optimizer in the user's hand to the ps tasks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import psync
from local_training import at_once, in_step, strategy_of, training
from psync import IndexedSlices, optimizers
from psync.errors import ValueMismatchError


def thirds(shape: tuple[int, ...], dtype: object) -> list[int]:
    return [min(3, shape[0]), *[1] * (len(shape) - 1)]


def ones(*indices: int) -> IndexedSlices:
    return IndexedSlices(np.ones((len(indices), 2), np.float32), indices)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (ones(3, 10), "row 10 does not exist, the variable has 10"),
        (ones(-1), "row -1 does not exist, the variable has 10"),
        (IndexedSlices(np.ones((1, 3), np.float32), [0]), r"expected shape \(1, 2\), got \(1, 3\)"),
        (IndexedSlices(np.ones((1, 2)), [0]), "expected dtype float32, got float64"),
        (
            IndexedSlices(np.ones((1, 2), np.float32), [0], (9, 2)),
            r"expected rows of an array of shape \(10, 2\) as dense_shape, got \(9, 2\)",
        ),
        (SimpleNamespace(values=np.ones((1, 2)), indices=[0.5]), "IndexedSlices: expected indices"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_push(
    gradient: IndexedSlices, expected: str
) -> None:
    with strategy_of().scope():
        v = psync.Variable(np.zeros((10, 2), np.float32), name="v")
    with pytest.raises(ValueMismatchError, match=f'gradient for "v": {expected}'):
        at_once(psync.optimizers.SGD(1.0).apply_gradients([(gradient, v)]))


async def test_a_synchronous_step_takes_the_mean_of_each_row_over_those_that_have_it() -> None:
    async with training(2, 2, partitioner=thirds) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros((10, 2), np.float32))
            b = psync.Variable(np.zeros(2, np.float32))
            global_step = psync.get_or_create_global_step()
        sync = psync.SyncReplicasOptimizer(optimizers.SGD(1.0), 2, deterministic=True)

        async def step() -> psync.Outcome:
            await psync.pull((v, b))
            index = psync.get_worker_index()
            rows = np.array([0, 9] if index else [9, 4, 9])
            values = np.full((len(rows), 2), 1 + index, np.float32)
            gradient = psync.IndexedSlices(values, rows)
            whole = np.full(2, 1 + index, np.float32)
            result = await sync.apply_gradients([(gradient, v), (whole, b)], global_step)
            return result.outcome

        outcomes = [coordinator.schedule(step) for _ in range(4)]
        await coordinator.join()
        assert {await outcome for outcome in outcomes} == {psync.Outcome.ACCEPTED}
        value, bias, steps = await psync.pull((v, b, global_step))
        assert value[:, 0].tolist() == [-4, 0, 0, 0, -2, 0, 0, 0, 0, -4]
        assert bias.tolist() == [-3, -3]
        assert steps == 2


@pytest.mark.parametrize("pull_ahead", [False, True])
async def test_whole_gradients_and_rows_of_the_same_variable_go_on_in_steps(
    pull_ahead: bool,
) -> None:
    """Ps 0 gets the former for all ps tasks, of the latter its own part."""
    async with training(2, partitioner=thirds) as (strategy, coordinator):
        with strategy.scope():
            step = psync.get_or_create_global_step()
            v = psync.Variable(np.zeros((10, 2), np.float32))
        optimizer = psync.SyncReplicasOptimizer(
            optimizers.SGD(1.0), replicas_to_aggregate=1, pull_ahead=pull_ahead
        )

        async def push() -> list[str]:
            whole = np.ones((10, 2), np.float32)
            rows = IndexedSlices(np.ones((2, 2), np.float32), (9, 0))
            outcomes = []
            for gradient in (whole, rows, rows, whole):
                await psync.pull(v)
                result = await optimizer.apply_gradients([(gradient, v)], step)
                outcomes.append(result.outcome.value)
            return outcomes

        assert await in_step(coordinator, push) == ["accepted"] * 4
        assert (await v.read())[:, 0].tolist() == [-4, *[-2] * 8, -4]
