"""A parameter server on Dask: linear regression on Dask arrays, each worker with its partitions.

pip install 'psync[dask]' 'dask[array]'
python examples/dask_cluster.py                            # a Dask cluster on this machine
python examples/dask_cluster.py tcp://scheduler:8786
"""

import asyncio
import sys

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

import psync
from psync.integrations.dask import DaskCluster, dataset

TRUE = np.arange(4.0)


async def train(client: Client) -> None:
    x = da.random.default_rng(7).normal(size=(4000, 4), chunks=(500, 4)).persist()
    y = x @ TRUE
    async with DaskCluster(client, num_ps=2, num_workers=2):
        strategy = psync.ParameterServerStrategy(
            variable_partitioner=psync.FixedShardsPartitioner(2)
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(4), name="w")
            optimizer = psync.optimizers.SGD(0.05)
            batches = strategy.experimental_distribute_dataset(
                dataset((x, y), batch_size=50, num_epochs=None)
            )
            data = iter(coordinator.create_per_worker_dataset(batches))

            async def step(data):  # on some worker, in the process of a Dask worker
                x, y = next(data)
                error = x @ await psync.pull(w) - y
                await optimizer.apply_gradients([(x.T @ error / len(error), w)])
                return float(np.mean(error**2))

            for epoch in range(3):
                losses = [coordinator.schedule(step, args=(data,)) for _ in range(100)]
                await coordinator.join()
                print(f"epoch {epoch}: loss {np.mean(await coordinator.fetch(losses)):.6f}")
            found = await w.read()
            print("weights", found.round(2))
            assert np.abs(found - TRUE).max() < 0.01


def main() -> None:
    if len(sys.argv) > 1:
        with Client(sys.argv[1]) as client:
            asyncio.run(train(client))
        return
    with LocalCluster(n_workers=2, dashboard_address=":0") as here, Client(here) as client:
        asyncio.run(train(client))


if __name__ == "__main__":
    main()
