"""A program without a mistake, and what type checkers know in it: see test_checkers.py.

It runs, too: ``assert_type`` then looks whether what came is of that type.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, assert_type

import numpy as np

import psync

Batch = tuple[np.ndarray, np.ndarray]
Array = np.ndarray

X, Y = np.ones((4, 3), np.float32), np.ones(4, np.float32)


class Layer(NamedTuple):
    w: psync.Variable
    b: psync.Variable


def batches(context: psync.InputContext) -> Iterator[Batch]:
    rng = np.random.default_rng(context.input_pipeline_id)
    while True:
        x = rng.normal(size=(4, 3)).astype(np.float32)
        yield x, x.sum(axis=1)


def share(loss: float, of: int = 2) -> float:
    return loss / of


async def named(name: str, *, upper: bool) -> str:
    return name.upper() if upper else name


async def nothing() -> None: ...


async def count(dataset: Iterable[Batch]) -> int:
    return len([x for (x, _), _ in zip(dataset, range(2), strict=False)])


def unannotated(x):  # type: ignore[no-untyped-def]
    return x


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, values: list[float]) -> list[float]:
        return [value * self.by for value in values]

    async def one(self, value: float) -> float:
        return value * self.by


async def main(strategy: psync.ParameterServerStrategy) -> None:
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(3, np.float32), name="w")
            b = psync.Variable(np.zeros(3, np.float32), name="b")
        assert_type(w, psync.Variable)
        optimizer = psync.optimizers.SGD(0.05)

        async def step(data: Iterator[Batch], scale: float = 1.0) -> float:
            x, y = next(data)
            error = x @ await psync.pull(w) - y
            await optimizer.apply_gradients([(x.T @ error * scale, w)])
            return float(np.mean(error**2))

        await data_of_any_kind(strategy, coordinator, step)
        data = iter(coordinator.create_per_worker_dataset(batches))

        # Arguments: by position, by name, by default; of functions of all kinds.
        loss = coordinator.submit(step, data)
        assert_type(loss, psync.RemoteValue[float])
        assert_type(coordinator.submit(step, data, 0.5), psync.RemoteValue[float])
        assert_type(coordinator.submit(step, data, scale=0.5), psync.RemoteValue[float])
        assert_type(coordinator.submit(nothing), psync.RemoteValue[None])
        name = coordinator.submit(named, "loss", upper=True)
        assert_type(name, psync.RemoteValue[str])
        assert_type(coordinator.submit(Scale(2.0), [1.0]), psync.RemoteValue[list[float]])
        assert_type(coordinator.submit(functools.partial(share, of=3), 1), psync.RemoteValue[float])
        unknown = coordinator.submit(unannotated, 3)

        # A RemoteValue is an argument as its value is.
        assert_type(coordinator.submit(step, data, loss), psync.RemoteValue[float])
        number = coordinator.submit(len, "four")
        assert_type(coordinator.submit(share, loss), psync.RemoteValue[float])
        assert_type(coordinator.submit(share, loss, number), psync.RemoteValue[float])
        assert_type(coordinator.submit(share, 5, number), psync.RemoteValue[float])
        assert_type(coordinator.submit(share, loss, of=3), psync.RemoteValue[float])
        assert_type(coordinator.submit(named, name, upper=False), psync.RemoteValue[str])
        assert_type(coordinator.submit(Scale(2.0).one, loss), psync.RemoteValue[float])
        assert_type(coordinator.submit(share, unknown, unknown), psync.RemoteValue[float])
        assert_type(coordinator.submit(share, 1.0, unknown), psync.RemoteValue[float])
        state: float | psync.RemoteValue[float] = 1.0
        for _ in range(3):
            state = coordinator.submit(share, state)

        # schedule, with a tuple of arguments; what has no type there goes as a list or by name.
        assert_type(coordinator.schedule(step, args=(data,)), psync.RemoteValue[float])
        assert_type(coordinator.schedule(step, (data, 0.5)), psync.RemoteValue[float])
        assert_type(coordinator.schedule(step, (data, loss)), psync.RemoteValue[float])
        assert_type(coordinator.schedule(nothing), psync.RemoteValue[None])
        assert_type(coordinator.schedule(share, [loss, number]), psync.RemoteValue[float])
        assert_type(coordinator.schedule(named, ("a",), {"upper": True}), psync.RemoteValue[str])
        by_name = {"name": name, "upper": True}
        assert_type(coordinator.schedule(named, kwargs=by_name), psync.RemoteValue[str])
        arguments: tuple[Any, ...] = (1.0, 2)
        coordinator.schedule(share, arguments)
        await coordinator.join()

        # Results.
        assert_type(await loss, float)
        assert_type(loss.get_nowait(), float)
        assert_type(await name.fetch(), str)
        assert_type(await coordinator.fetch(loss), float)
        assert_type(await coordinator.fetch([loss, loss]), list[float])
        assert_type(await coordinator.fetch({"loss": loss}), dict[str, float])
        assert_type(await coordinator.fetch((loss, name)), tuple[float, str])
        assert_type(await coordinator.fetch((loss, name, loss)), tuple[float, str, float])
        assert_type(await coordinator.fetch([[loss]]), list[list[float]])
        assert_type(await coordinator.fetch([{"loss": loss}]), list[dict[str, float]])
        assert_type(await coordinator.fetch({"losses": [loss]}), dict[str, list[float]])
        assert_type(await coordinator.fetch({0: {"loss": loss}}), dict[int, dict[str, float]])
        expected: list[float] = await coordinator.fetch([number, number])
        assert expected == [4, 4]
        assert await coordinator.fetch(state) == 1 / 8

        # Values of variables.
        assert_type(await w.read(), Array)
        assert_type(await psync.pull(w), Array)
        assert_type(await psync.pull((w, b)), tuple[Array, Array])
        assert_type(await psync.pull([w, b], copy=True), list[Array])
        assert_type(await psync.pull({"w": w, "b": b}), dict[str, Array])
        assert_type(await psync.pull([(w, b)]), list[tuple[Array, Array]])
        assert_type(await psync.pull([{"w": w}]), list[dict[str, Array]])
        assert_type(await psync.pull({"dense": {"w": w}}), dict[str, dict[str, Array]])
        assert_type(await psync.pull({"dense": (w, b)}), dict[str, tuple[Array, Array]])
        assert_type(await psync.pull(strategy.variables), tuple[Array, ...])
        layer = await psync.pull(Layer(w, b))  # a Layer of arrays: no checker has a name for it
        assert layer.w.shape == (3,)


async def data_of_any_kind(
    strategy: psync.ParameterServerStrategy, coordinator: psync.ClusterCoordinator, step: Any
) -> None:
    """Datasets know their batches."""
    made = coordinator.create_per_worker_dataset(batches)
    assert_type(made, psync.PerWorkerDataset[Batch])
    assert_type(iter(made), psync.PerWorkerIterator[Batch])
    of_list = coordinator.create_per_worker_dataset([(X, Y)] * 3)
    numbers = coordinator.create_per_worker_dataset([1, 2, 3])
    assert_type(iter(numbers), psync.PerWorkerIterator[int])
    cut = strategy.distribute_datasets_from_function(batches)
    assert_type(cut, psync.DistributedDataset[Batch])
    assert_type(coordinator.create_per_worker_dataset(cut), psync.PerWorkerDataset[Batch])
    arrays = psync.data.from_arrays((X, Y), 2)
    of_arrays = iter(coordinator.create_per_worker_dataset(arrays))
    losses = [coordinator.submit(step, batches) for batches in (iter(of_list), of_arrays)]
    counted = coordinator.submit(count, made.build())
    assert await coordinator.fetch(counted) == 2
    assert len(await coordinator.fetch(losses)) == 2
