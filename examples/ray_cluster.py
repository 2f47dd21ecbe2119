"""A parameter server on Ray: linear regression on a ray.data dataset, each worker with its blocks.

pip install 'psync[ray]' 'ray[data]'
python examples/ray_cluster.py                             # a Ray of its own, on this machine
RAY_ADDRESS=head:6379 python examples/ray_cluster.py       # on a node of a cluster
ray job submit --working-dir . -- python examples/ray_cluster.py
"""

import asyncio

import numpy as np
import ray

import psync
from psync.integrations.ray import RayCluster, dataset

TRUE = np.arange(4.0)


def rows() -> ray.data.Dataset:
    """4,000 rows in 8 blocks; yours are ray.data.read_parquet(…)."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    x = np.random.default_rng(7).normal(size=(4000, 4))
    columns = [{"x": row, "y": float(row @ TRUE)} for row in x]
    return ray.data.from_items(columns, override_num_blocks=8)


async def main() -> None:
    async with RayCluster(num_ps=2, num_workers=2, resources_per_worker={"CPU": 0.5}):
        strategy = psync.ParameterServerStrategy(
            variable_partitioner=psync.FixedShardsPartitioner(2)
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(4), name="w")
            optimizer = psync.optimizers.SGD(0.05)
            batches = strategy.experimental_distribute_dataset(
                dataset(rows(), batch_size=50, num_epochs=None)
            )
            data = iter(coordinator.create_per_worker_dataset(batches))

            async def step(data):  # on some worker, an actor of Ray's
                batch = next(data)  # a dict of arrays by column
                error = batch["x"] @ await psync.pull(w) - batch["y"]
                await optimizer.apply_gradients([(batch["x"].T @ error / len(error), w)])
                return float(np.mean(error**2))

            for epoch in range(3):
                losses = [coordinator.schedule(step, args=(data,)) for _ in range(100)]
                await coordinator.join()
                print(f"epoch {epoch}: loss {np.mean(await coordinator.fetch(losses)):.6f}")
            found = await w.read()
            print("weights", found.round(2))
            assert np.abs(found - TRUE).max() < 0.01


if __name__ == "__main__":
    asyncio.run(main())
