"""A port of a program for tf.distribute.ParameterServerStrategy.

    psync run examples/ported/train.py --ps 2 --workers 2

It learns the weights of a linear function. docs/howto/tensorflow.md compares it with its original.
"""

import numpy as np

import psync


def dataset_fn(input_context):
    rng = np.random.default_rng(input_context.input_pipeline_id)
    while True:
        x = rng.normal(size=(64, 10)).astype(np.float32)
        yield x, x @ np.arange(10, dtype=np.float32)


async def main():
    strategy = psync.ParameterServerStrategy(variable_partitioner=psync.FixedShardsPartitioner(2))
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(10, np.float32))
        optimizer = psync.optimizers.SGD(0.05)
        data = iter(coordinator.create_per_worker_dataset(dataset_fn))

        async def worker_fn(iterator):
            async def replica_fn(inputs):
                x, y = inputs
                error = x @ await w.read() - y
                await optimizer.apply_gradients([(2 * x.T @ error / len(x), w)])
                return np.mean(error**2)

            return await psync.get_strategy().run(replica_fn, args=(next(iterator),))

        for epoch in range(5):
            for _ in range(100):
                loss = coordinator.schedule(worker_fn, args=(data,))
            await coordinator.join()
            print(epoch, await loss.fetch())


if __name__ == "__main__":
    psync.run(main)
