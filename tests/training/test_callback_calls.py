"""What a fit tells callbacks of batches, and what follows when they stop or raise."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from psync.callbacks import Callback

X = np.arange(8, dtype=np.float32)


def batches(context: psync.InputContext) -> Any:
    while True:
        yield X, X


def value_and_grad(values: Any, batch: Any) -> Any:
    return float(values.sum()), np.full(1, 1.0, np.float32), batch[1]


def make(strategy: Any, compute: Any = value_and_grad) -> psync.Trainer:
    with strategy.scope():
        w = psync.Variable(np.zeros(1, np.float32), name="w")
        metric = psync.metrics.MeanSquaredError("mse")
    return psync.Trainer(strategy, w, compute, psync.optimizers.SGD(1.0), [metric])


class Notes(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []

    async def on_train_batch_end(self, batch: int, logs: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append((batch, dict(logs)))

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.ended.append(len(self.seen))


async def fitted(callback: Callback, compute: Any = value_and_grad, **options: Any) -> None:
    async with training(num_workers=1) as (strategy, _):
        known: dict[str, Any] = {"epochs": 2, "steps_per_epoch": 5, **options}
        trainer = make(strategy, compute)
        await trainer.fit(batches, callbacks=[callback], verbose=False, **known)


async def test_each_execution_is_told_once_in_order_with_its_means() -> None:
    notes = Notes()
    await fitted(notes, steps_per_execution=2)
    assert [batch for batch, _ in notes.seen] == [1, 3, 4] * 2
    # The variable falls by 1 with each step, and the loss is its value.
    assert [logs["loss"] for _, logs in notes.seen] == [-0.5, -2.5, -4.0, -5.5, -7.5, -9.0]
    assert all(logs["mse"] == 0.0 for _, logs in notes.seen)
    assert notes.ended == [3, 6]


async def test_training_that_is_stopped_ends_with_the_epoch_unfinished() -> None:
    class Stops(Notes):
        async def on_train_batch_end(self, batch: int, logs: Any) -> None:
            await super().on_train_batch_end(batch, logs)
            self.trainer.stop_training = batch == 2

    stops = Stops()
    await fitted(stops, steps_per_epoch=1000)
    assert [batch for batch, _ in stops.seen] == [0, 1, 2]
    assert stops.ended == [3]


async def test_an_error_of_a_callback_ends_training() -> None:
    class Fails(Notes):
        async def on_train_batch_end(self, batch: int, logs: Any) -> None:
            await super().on_train_batch_end(batch, logs)
            raise ValueError("no")

    fails = Fails()
    with pytest.raises(ValueError, match="no"):
        await fitted(fails, steps_per_epoch=1000)
    assert (len(fails.seen), fails.ended) == (1, [])


async def test_an_error_of_a_step_is_that_of_fit() -> None:
    def broken(values: Any, batch: Any) -> Any:
        if values[0] <= -3:
            raise ZeroDivisionError("a bug")
        return value_and_grad(values, batch)

    notes = Notes()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await fitted(notes, broken)
    assert notes.ended == []


async def test_of_an_execution_that_met_the_end_of_data_its_steps_are_told() -> None:
    def few(context: psync.InputContext) -> Any:
        return [(X, X)] * 3

    notes = Notes()
    async with training(num_workers=1) as (strategy, _):
        await make(strategy).fit(
            few, epochs=1, steps_per_epoch=6, steps_per_execution=2, callbacks=[notes],
            verbose=False,
        )  # fmt: skip
    assert [batch for batch, _ in notes.seen] == [1, 2]
    assert notes.ended == [2]


async def test_without_such_a_callback_workers_send_nothing_back() -> None:
    async with training(num_workers=1) as (strategy, coordinator):
        trainer = make(strategy)
        step = trainer._steps(tells=False)
        data = iter(coordinator.create_per_worker_dataset(batches))
        assert await coordinator.schedule(step, args=(data, 0, 1)) is None
