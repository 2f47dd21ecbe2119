"""Local steps: four sites learn one model, and none shows its images to anybody.

    psync run examples/gallery/local_steps.py --ps 1 --workers 4
    psync run examples/gallery/local_steps.py --ps 1 --workers 4 -- --quick

Each worker is a site that has its own handwritten digits, and mostly two or three of the ten. In a
round each site pulls the model, makes K steps of gradient descent on its own images, and pushes
what has changed. The ps averages that, weighted by images, and takes it for a gradient: federated
averaging (McMahan 2017), which with momentum on the ps is FedAvgM (Hsu 2019). Between rounds sites
send nothing; so K times fewer bytes travel, for nearly the same model.
"""

import sys

import common
import numpy as np

import psync

OWN_SHARE = 0.8  # of a site's digits, that are of its own two or three kinds
BATCH, RATE = 32, 0.2
LOCAL_STEPS = 1, 4, 16
MIN_ACCURACY = 0.93


def sites(x, labels, number, rng):
    """Return which images each site has: most kinds of digits are at home at one of them."""
    home = np.where(
        rng.random(len(x)) < OWN_SHARE, labels % number, rng.integers(0, number, len(x))
    )
    return [np.flatnonzero(home == site) for site in range(number)]


async def train(coordinator, strategy, first, local_steps, rounds, own, seed):
    """Return the variables of a model after some rounds, and its values after each of them."""
    with strategy.scope():
        name = f"K{local_steps}"
        model = [psync.Variable(array, name=f"{name}/{i}") for i, array in enumerate(first)]
        count = psync.Variable(np.int64(0), name=f"{name}/round", trainable=False)
    optimizer = psync.SyncReplicasOptimizer(
        psync.optimizers.Momentum(1.0, momentum=0.5),
        replicas_to_aggregate=len(own),
        total_num_replicas=len(own),
        strict=True,  # each site counts once in a round
    )

    def dataset(context):  # on the worker: what it yields never leaves it
        x, labels = own[context.input_pipeline_id]
        rng = np.random.default_rng([seed, context.input_pipeline_id])
        while True:
            chosen = [rng.integers(0, len(x), BATCH) for _ in range(local_steps)]
            yield len(x), [(x[rows], labels[rows]) for rows in chosen]

    async def one_round(data):  # on some site
        images, batches = next(data)
        before = await psync.pull(model)
        net = [array.copy() for array in before]
        for x, labels in batches:
            _, gradients = common.loss_and_gradients(net, x, labels)
            for array, gradient in zip(net, gradients, strict=True):
                array -= RATE * gradient
        change = [old - new for old, new in zip(before, net, strict=True)]
        pairs = zip(change, model, strict=True)
        await optimizer.apply_gradients(pairs, count, weight=images)

    data = iter(coordinator.create_per_worker_dataset(dataset))
    history = []
    for _ in range(rounds):
        for _ in own:
            coordinator.schedule(one_round, args=(data,))
        await coordinator.join()
        history.append(await psync.pull(model))
    return history


async def main():
    options = common.options(__doc__, steps=480)
    steps = 160 if options.quick else options.steps
    resolver = psync.resolve_cluster()
    workers = resolver.cluster_spec().num_tasks("worker")
    strategy = psync.ParameterServerStrategy(resolver)
    (x, labels), (x_test, labels_test) = common.digits()
    rng = np.random.default_rng(options.seed)
    homes = sites(x, labels, workers, rng)
    own = [(x[rows], labels[rows]) for rows in homes]
    first = common.new_net(rng)
    round_bytes = 2 * workers * sum(array.nbytes for array in first)  # to each site and back

    curves = {}
    async with psync.ClusterCoordinator(strategy) as coordinator:
        for number, rows in enumerate(homes):
            print(f"site {number}: {np.bincount(labels[rows], minlength=10)} images of 0 to 9")
        alone = max(accuracy_alone(first, *one, steps) for one in own)
        print(f"the best site alone: accuracy {alone:.4f}")
        print("local steps  rounds  MB sent  accuracy")
        for local_steps in LOCAL_STEPS:
            rounds = steps // local_steps
            history = await train(
                coordinator, strategy, first, local_steps, rounds, own, options.seed
            )
            curves[local_steps] = [common.accuracy(net, x_test, labels_test) for net in history]
            reached = curves[local_steps][-1]
            print(
                f"{local_steps:11}  {rounds:6}  {rounds * round_bytes / 1e6:7.1f}  {reached:8.4f}"
            )
            if reached < MIN_ACCURACY or reached <= alone:
                return f"{local_steps} local steps: accuracy {reached:.4f}"
    draw(curves, round_bytes, alone, options.out)


def accuracy_alone(first, x, labels, steps):
    """Return what a site reaches without the others."""
    net, rng = [array.copy() for array in first], np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.integers(0, len(x), BATCH)
        for array, gradient in zip(
            net, common.loss_and_gradients(net, x[rows], labels[rows])[1], strict=True
        ):
            array -= RATE * gradient
    return common.accuracy(net, *common.digits()[1])


def draw(curves, round_bytes, alone, folder):
    """Draw the accuracy over steps, and over bytes."""
    drawn, (left, right) = common.figure()
    for local_steps, curve in curves.items():
        rounds = np.arange(1, len(curve) + 1)
        left.plot(rounds * local_steps, curve, label=f"{local_steps} local steps")
        right.plot(rounds * round_bytes / 1e6, curve)
    left.axhline(alone, color="grey", linestyle="--", label="best site alone")
    left.set(title="accuracy of images never seen", xlabel="steps of each site", ylim=(0.2, 1))
    right.set(title="the same, by what was sent", xlabel="MB", xscale="log", ylim=(0.2, 1))
    left.legend(frameon=False, loc="lower right")
    common.save(drawn, folder, "local_steps")


if __name__ == "__main__":
    failure = psync.run(main)
    sys.exit(f"local_steps: {failure}" if failure else 0)
