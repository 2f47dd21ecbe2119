"""The first program of the README, with a small regression as its model."""

import numpy as np

import psync

TRUE_WEIGHTS = np.random.default_rng(99).normal(size=(64, 10)).astype(np.float32)


def my_batches(shard, num_shards):
    rng = np.random.default_rng([shard, num_shards])
    while True:
        x = rng.normal(scale=0.5, size=(32, 64)).astype(np.float32)
        yield x, x @ TRUE_WEIGHTS


def loss_and_grads(weights, bias, x, y):
    error = x @ weights + bias - y
    return float((error**2).mean()), (x.T @ error / len(x), error.mean(axis=0))


def dataset_fn(context):  # runs on each worker
    return my_batches(shard=context.input_pipeline_id, num_shards=context.num_input_pipelines)


async def main():
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(),
        variable_partitioner=psync.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2),
    )
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():  # declares; created in one batch before the first closure needs them
            w = psync.Variable(np.zeros((64, 10), np.float32), name="w")
            b = psync.Variable(np.zeros(10, np.float32), name="b")
        optimizer = psync.optimizers.SGD(0.5)
        batches = iter(coordinator.create_per_worker_dataset(dataset_fn))

        async def step(batches):  # runs on some worker
            x, y = next(batches)
            weights, bias = await psync.pull((w, b))  # one round trip to each ps, in parallel
            loss, grads = loss_and_grads(weights, bias, x, y)
            await optimizer.apply_gradients(zip(grads, (w, b)))  # noqa: B905
            return loss

        for epoch in range(10):
            losses = [coordinator.schedule(step, args=(batches,)) for _ in range(100)]
            await coordinator.join()
            print(epoch, np.mean(await coordinator.fetch(losses)))


if __name__ == "__main__":
    psync.run(main)  # chief: runs main(); ps, worker: serve until told to stop
