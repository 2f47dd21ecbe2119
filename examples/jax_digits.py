"""Train a Flax model with BatchNorm on digits: 2 ps, 2 workers, and one process beside them.

    pip install -e '.[examples,jax]' flax
    psync run examples/jax_digits.py --ps 2 --workers 2
    psync run examples/jax_digits.py --ps 2 --workers 2 -- --sync

The model and its gradients are Flax's and jax's: a jitted function of a pytree of parameters. Each
step pulls that tree and pushes its gradients; the optimizer runs on the ps tasks, and the running
statistics of BatchNorm are merged there. With --sync a step is the mean of both workers' gradients.
First the same model is trained in this process alone, with optax.
"""

import argparse
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import psync
from psync.integrations.jax import PSPytree, step_key

BATCH = 64
RATE = 3e-3
MIN_ACCURACY = 0.96
MAX_LOSS = 0.02  # of accuracy, compared with the single process
MAX_GAP = 0.01  # between evaluation and training mode


class Net(nnx.Module):
    """A convolution and two matrices: 64 pixels to 10 classes."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 32, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dense = nnx.Linear(32 * 4 * 4, 64, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.classes = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images, key=None):
        x = nnx.relu(self.norm1(self.conv(images))).reshape(len(images), -1)
        x = nnx.relu(self.norm2(self.dense(x)))
        return self.classes(self.dropout(x, rngs=key))


def split(net):
    """Return the structure of a model, its parameters, and its running statistics."""
    return nnx.split(net, nnx.Param, nnx.BatchStat)


def load(part):
    """Return images of 8×8×1 pixels from 0 to 1, and labels: 1437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[:360] if part == "test" else order[360:]
    return (images[chosen] / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels[chosen]


def batches(context=None):  # runs on each worker, in a thread of its own
    """Yield shuffled batches of the images, or of this worker's part of them, for ever."""
    images, labels = load("train")
    if context is not None:
        part = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        images, labels = images[part], labels[part]
    rng = np.random.default_rng(0 if context is None else context.input_pipeline_id)
    while True:
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield images[chosen], labels[chosen]


def gradients_of(graph):
    """Return the jitted function that steps call."""

    def loss_of(params, stats, images, labels, key):
        net = nnx.merge(graph, params, stats, copy=True)
        net.train()
        logits = net(images, key)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, nnx.state(net, nnx.BatchStat)

    return jax.jit(jax.value_and_grad(loss_of, has_aux=True))


def accuracy_of(graph, params, stats, *, as_in_training=False):
    net = nnx.merge(graph, params, stats, copy=True)
    net.eval()
    if as_in_training:
        net.set_attributes(nnx.BatchNorm, use_running_average=False)
    images, labels = load("test")
    return float((net(images).argmax(1) == labels).mean())


def train_alone(graph, params, stats, steps):
    """Return the accuracy that the same number of steps reaches in this process."""
    value_and_grad, data = gradients_of(graph), batches()
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    slots = optimizer.init(params)

    @jax.jit
    def update(params, slots, grads):
        updates, slots = optimizer.update(grads, slots)
        return optax.apply_updates(params, updates), slots

    for number in range(steps):
        key = jax.random.fold_in(jax.random.key(0), number)
        (_, stats), grads = value_and_grad(params, stats, *next(data), key)
        params, slots = update(params, slots, grads)
    return accuracy_of(graph, params, stats)


async def main():
    options = parse_options()
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy) as coordinator:
        began = time.perf_counter()
        graph, params, stats = split(Net(nnx.Rngs(0)))
        alone = train_alone(graph, params, stats, options.steps)
        print(f"single process: accuracy {alone:.4f} in {time.perf_counter() - began:.1f} s")

        adam = psync.optimizers.Adam(psync.schedules.CosineDecay(RATE, options.steps))
        mean_of_2 = psync.SyncReplicasOptimizer(adam, replicas_to_aggregate=2)
        optimizer = mean_of_2 if options.sync else adam
        with strategy.scope():
            served = PSPytree(params, optimizer, name="net", state=stats)
        value_and_grad = gradients_of(graph)
        data = iter(coordinator.create_per_worker_dataset(batches))

        def step(data):  # runs on some worker, in a thread
            images, labels = next(data)
            params, stats = psync.wait(served.pull())
            (loss, stats), grads = value_and_grad(params, stats, images, labels, step_key(0))
            result = psync.wait(served.push(grads, state=stats))
            return loss.item(), result.staleness

        # A synchronous step is made of two pushes: as many updates as above take twice the batches.
        pushes = options.steps * (2 if options.sync else 1)
        began = time.perf_counter()
        scheduled = [coordinator.schedule(step, args=(data,)) for _ in range(pushes)]
        await coordinator.join()
        seconds = time.perf_counter() - began
        losses, staleness = map(np.array, zip(*await coordinator.fetch(scheduled), strict=True))

        params, stats = await served.pull()
        as_in_training = accuracy_of(graph, params, stats, as_in_training=True)
        evaluated = accuracy_of(graph, params, stats)

    kind = "synchronous" if options.sync else "asynchronous"
    print(f"loss {losses[:20].mean():.4f} at first, {losses[-20:].mean():.4f} in the end")
    print(f"{pushes / seconds:.0f} pushes/s, staleness {staleness.mean():.2f}")
    print(f"2 workers, {kind}: accuracy {evaluated:.4f}, in training mode {as_in_training:.4f}")
    if evaluated < max(MIN_ACCURACY, alone - MAX_LOSS):
        return f"accuracy is {evaluated:.4f}, a single process has {alone:.4f}"
    if evaluated < as_in_training - MAX_GAP:
        return f"evaluation is worse than training mode by {as_in_training - evaluated:.4f}"


def parse_options():
    parser = argparse.ArgumentParser(
        "jax_digits.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=300, help="updates of the model")
    parser.add_argument("--sync", action="store_true", help="mean of two gradients in each step")
    return parser.parse_args()


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"jax_digits: {failure}" if failure else 0)
