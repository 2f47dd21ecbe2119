"""A program with ten mistakes, each of which a type checker finds: see test_checkers.py.

It is written as a user would who annotates all, and never run. A line that ends in a comment
``mistake: …`` has one; no other has any.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import psync

Batch = tuple[np.ndarray, np.ndarray]


def batches(context: psync.InputContext) -> Iterator[Batch]:
    rng = np.random.default_rng(context.input_pipeline_id)
    while True:
        x = rng.normal(size=(64, 10)).astype(np.float32)
        yield x, x.sum(axis=1)


def share(loss: float, of: int) -> float:
    return loss / of


async def main() -> None:
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(10, np.float32), name="w")
        optimizer = psync.optimizers.SGD(0.05)
        dataset = coordinator.create_per_worker_dataset(batches)
        data = iter(dataset)

        async def step(data: Iterator[Batch], scale: float = 1.0) -> float:
            x, y = next(data)
            values = await psync.pull({"w": w})
            error = x @ values["w"] - y
            error += 0.01 * w  # mistake: a variable is no array
            error += values["b"] + values[0]  # mistake: the keys are those of what was pulled
            await optimizer.apply_gradients([(x.T @ error * scale, w)])
            w.assign_sub(values["w"])  # mistake: nothing happens without await
            return float(np.mean(error**2))

        loss = coordinator.submit(step, data)
        coordinator.submit(step, data, scale=0.5)
        coordinator.submit(share, loss, 2)

        coordinator.submit(step, data, "0.5")  # mistake: a wrong argument of a coroutine function
        coordinator.submit(share, 0.5, of="two")  # mistake: one of a plain function, by name
        coordinator.submit(step, dataset)  # mistake: the dataset, not its iterator
        name = coordinator.submit(str, 5)
        coordinator.submit(share, name, 2)  # mistake: the RemoteValue of another type
        coordinator.schedule(share, args=(0.5, "two"))  # mistake: a wrong argument in a tuple

        await coordinator.join()
        print(loss + 1)  # mistake: a RemoteValue is no value before it is awaited
        print(await loss + 1)
        losses: list[str] = await coordinator.fetch([loss])  # mistake: they are floats
        print(losses)


if __name__ == "__main__":
    psync.run(main)
