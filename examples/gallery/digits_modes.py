"""One model, five ways to apply gradients, on workers of which one in ten steps is slow.

    psync run examples/gallery/digits_modes.py --ps 2 --workers 4
    psync run examples/gallery/digits_modes.py --ps 2 --workers 4 -- --quick

Asynchronous: each gradient is applied as it comes, whatever has changed meanwhile. With a bound: so
it is, but no worker gets more than two rounds ahead. Synchronous: the mean of all four workers'
gradients is one step, and each step waits for the slowest. With a backup: the first three of the
four make the step. Deterministic: as synchronous, and summed in one order, so that two runs give
the same bits; here there are two.

All see the same number of gradients, and each gradient weighs the same. Real clusters have slow
steps because of other programs, disks and networks; here a step waits as long as it "computes".
"""

import asyncio
import sys
import time

import common
import numpy as np

import psync

RATE = 1.0  # of a step that takes the gradients of all workers
BATCH = 32
COMPUTE_S, SLOW_S, SLOW_SHARE = 0.004, 0.04, 0.1
MIN_ACCURACY, AT_LEAST_QUICK = 0.9, 0.6


def dataset_of(x, labels):
    def batches(context):  # runs on each worker: its part of the images, for ever
        part = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        own_x, own_labels = x[part], labels[part]
        rng = np.random.default_rng(context.input_pipeline_id)
        while True:
            chosen = rng.integers(0, len(own_x), BATCH)
            seconds = SLOW_S if rng.random() < SLOW_SHARE else COMPUTE_S
            yield own_x[chosen], own_labels[chosen], seconds

    return batches


def modes(workers):
    """Return an optimizer for each mode; a gradient counts RATE / workers in all of them."""
    sgd, one = psync.optimizers.SGD, RATE / workers
    sync = {"total_num_replicas": workers}
    return {
        "asynchronous": sgd(one),
        "staleness at most 2": sgd(one, staleness_bound=psync.StalenessBound(2)),
        "synchronous": psync.SyncReplicasOptimizer(sgd(RATE), workers, **sync),
        "one backup": psync.SyncReplicasOptimizer(sgd(RATE - one), workers - 1, **sync),
        "deterministic": psync.SyncReplicasOptimizer(
            sgd(RATE), workers, **sync, deterministic=True
        ),
        "deterministic, again": psync.SyncReplicasOptimizer(
            sgd(RATE), workers, **sync, deterministic=True
        ),
    }


async def train(coordinator, optimizer, model, step_count, data, gradients):
    """Schedule so many gradients; return for each: when it was applied, its loss, did it count."""
    synchronous = isinstance(optimizer, psync.SyncReplicasOptimizer)

    async def step(data):  # runs on some worker
        x, labels, seconds = next(data)
        net = await psync.pull(model)
        loss, gradients = common.loss_and_gradients(net, x, labels)
        await asyncio.sleep(seconds)
        pairs = zip(gradients, model, strict=True)
        if synchronous:
            push = await optimizer.apply_gradients(pairs, step_count)
        else:
            push = await optimizer.apply_gradients(pairs)
        return time.time(), loss, push.outcome is psync.Outcome.ACCEPTED

    began = time.time()
    scheduled = [coordinator.schedule(step, args=(data,)) for _ in range(gradients)]
    await coordinator.join()
    return np.array(await coordinator.fetch(scheduled)) - [began, 0, 0]


async def main():
    options = common.options(__doc__, gradients=2400)
    gradients = 400 if options.quick else options.gradients
    least = AT_LEAST_QUICK if options.quick else MIN_ACCURACY
    resolver = psync.resolve_cluster()
    workers = resolver.cluster_spec().num_tasks("worker")
    strategy = psync.ParameterServerStrategy(resolver)
    training, (x_test, labels_test) = common.digits()
    rows, nets = {}, {}
    async with psync.ClusterCoordinator(strategy) as coordinator:
        print(f"{'mode':>22}  seconds  gradients/s  dropped  accuracy")
        for index, (mode, optimizer) in enumerate(modes(workers).items()):
            first = common.new_net(np.random.default_rng(options.seed))  # the same for all
            with strategy.scope():
                model = [psync.Variable(a, name=f"{index}/{i}") for i, a in enumerate(first)]
                count = psync.Variable(np.int64(0), name=f"{index}/step", trainable=False)
            data = iter(coordinator.create_per_worker_dataset(dataset_of(*training)))
            rows[mode] = log = await train(coordinator, optimizer, model, count, data, gradients)
            nets[mode] = await psync.pull(model)
            reached, seconds = common.accuracy(nets[mode], x_test, labels_test), log[:, 0].max()
            print(
                f"{mode:>22}  {seconds:7.1f}  {gradients / seconds:11.0f}"
                f"  {np.mean(log[:, 2] == 0):7.1%}  {reached:8.4f}"
            )
            if reached < least:
                return f"{mode}: accuracy {reached:.4f}, expected at least {least}"

    again = rows.pop("deterministic, again")
    draw(rows, options.out)
    bits = [b"".join(array.tobytes() for array in nets[mode]) for mode in list(nets)[-2:]]
    print(f"two deterministic runs of {len(again)} gradients, the same bits: {bits[0] == bits[1]}")
    if bits[0] != bits[1]:
        return "two deterministic runs differ"
    took = {mode: log[:, 0].max() for mode, log in rows.items()}
    if not (options.quick or took["asynchronous"] < took["one backup"] < took["synchronous"]):
        return f"expected asynchronous < one backup < synchronous, in seconds; got {took}"


def draw(rows, folder):
    """Draw the loss over time, smoothed over the newest gradients, and the time of each mode."""
    drawn, (left, right) = common.figure()
    for mode, log in rows.items():
        log = log[log[:, 0].argsort()]
        smooth = np.convolve(log[:, 1], np.ones(100) / 100, "valid")
        left.plot(log[99:, 0], smooth, label=mode)
    left.set(title="training loss", xlabel="seconds", yscale="log")
    left.legend(frameon=False)
    right.barh(list(rows), [log[:, 0].max() for log in rows.values()], color="C0")
    right.invert_yaxis()
    right.set(title="time for the same number of gradients", xlabel="seconds")
    common.save(drawn, folder, "digits_modes")


if __name__ == "__main__":
    failure = psync.run(main)
    sys.exit(f"digits_modes: {failure}" if failure else 0)
