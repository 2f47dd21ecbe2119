"""Learn to read handwritten digits, asynchronously, on 2 ps and 2 workers.

    pip install -e '.[examples]'
    psync run examples/digits.py --ps 2 --workers 2
    psync run examples/digits.py --ps 2 --workers 2 -- --short --seed 7

1797 real images of 8×8 pixels, from scikit-learn. The model has 64 inputs, 64 hidden units and
10 outputs; numpy computes its gradient. Each worker pulls the parameters, computes on a batch
of its own part of the images, and pushes the gradient, which the ps tasks apply at once: no
worker waits for another. This script runs as the chief and as each worker, not on a ps.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import psync

STEPS = 200  # of an epoch, over all workers: 9 passes over the training images
BATCH = 64
MIN_ACCURACY = 0.95
MIN_SHARE = 0.4  # of the closures, as a multiple of an equal share: with 2 workers, a fifth


def load(part):
    """Return images (rows of 64 pixels from 0 to 1) and labels: 1437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[:360] if part == "test" else order[360:]
    return (images[chosen] / 16).astype(np.float32), labels[chosen]


def batches(context):  # runs on each worker, in a thread of its own
    """Yield random batches of this worker's part of the images, for ever."""
    part = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    images, labels = (array[part] for array in load("train"))
    rng = np.random.default_rng(context.input_pipeline_id)
    while True:
        chosen = rng.choice(len(labels), BATCH, replace=False)
        yield images[chosen], labels[chosen]


def forward(params, images):
    w1, b1, w2, b2 = params
    hidden = np.maximum(images @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def loss_and_gradients(params, images, labels):
    """Return the mean cross entropy, and its gradient with respect to each parameter."""
    hidden, logits = forward(params, images)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    truth = np.arange(len(labels)), labels
    loss = -np.log(probabilities[truth] + 1e-9).mean()
    probabilities[truth] -= 1
    d_logits = probabilities / len(labels)
    d_hidden = d_logits @ params[2].T * (hidden > 0)
    gradients = images.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_logits, d_logits.sum(0)
    return loss, gradients


async def main():
    options = parse_options()
    resolver = psync.resolve_cluster()
    num_ps, num_workers = map(resolver.cluster_spec().num_tasks, ("ps", "worker"))
    strategy = psync.ParameterServerStrategy(
        resolver, psync.MinSizePartitioner(min_shard_bytes=1 << 10, max_shards=num_ps)
    )
    rng = np.random.default_rng(options.seed)
    test_images, test_labels = load("test")

    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():  # the two matrices are cut in shards, one on each ps
            model = [
                psync.Variable(rng.normal(0, 1 / 8, (64, 64)).astype(np.float32), name="w1"),
                psync.Variable(np.zeros(64, np.float32), name="b1"),
                psync.Variable(rng.normal(0, 1 / 8, (64, 10)).astype(np.float32), name="w2"),
                psync.Variable(np.zeros(10, np.float32), name="b2"),
            ]
        rate = psync.schedules.CosineDecay(0.01, decay_steps=options.epochs * STEPS)
        optimizer = psync.optimizers.Adam(rate)
        data = iter(coordinator.create_per_worker_dataset(batches))

        async def step(data):  # runs on some worker
            images, labels = next(data)
            params = await psync.pull(model)  # one round trip to each ps, in parallel
            loss, gradients = loss_and_gradients(params, images, labels)
            push = await optimizer.apply_gradients(zip(gradients, model, strict=True))
            return loss, psync.get_worker_index(), push.staleness

        log, accuracies = [], []
        print("epoch    loss  accuracy  steps/s  closures on each worker")
        for epoch in range(1, options.epochs + 1):
            began = time.perf_counter()
            scheduled = [coordinator.schedule(step, args=(data,)) for _ in range(STEPS)]
            await coordinator.join()
            seconds = time.perf_counter() - began
            results = await coordinator.fetch(scheduled)
            _, logits = forward(await psync.pull(model), test_images)
            accuracies.append(np.mean(logits.argmax(axis=1) == test_labels))
            log += results
            losses, workers, _ = map(np.array, zip(*results, strict=True))
            shares = np.bincount(workers, minlength=num_workers) / STEPS
            row = f"{epoch:5}  {losses.mean():6.4f}  {accuracies[-1]:8.4f}  {STEPS / seconds:7.0f}"
            print(row, *(f"{share:5.0%}" for share in shares))
        stores = [counters["store"] for counters in await coordinator.ps_statistics()]

    losses, workers, staleness = map(np.array, zip(*log, strict=True))
    counts = np.bincount(workers, minlength=num_workers)
    report(accuracies[-1], counts, stores, staleness.mean())
    print(f"plot: {plot(losses, workers, accuracies, options.out)}")
    if accuracies[-1] < MIN_ACCURACY:
        return f"test accuracy is {accuracies[-1]:.4f}, expected at least {MIN_ACCURACY}"
    if counts.min() < MIN_SHARE * counts.mean():
        return f"worker {counts.argmin()} ran only {counts.min()} of {len(log)} closures"
    if idle := [index for index, store in enumerate(stores) if not store["shards"]]:
        return f"ps {idle[0]} holds no shard"


def report(accuracy, counts, stores, staleness):
    """Print what came of it: in colour on a terminal, as plain text elsewhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=box.ROUNDED if console.is_terminal else None)
    table.add_row("test accuracy", f"[bold]{accuracy:.4f}[/]")
    for index, count in enumerate(counts):
        table.add_row(f"worker {index}", f"{count} closures, {count / sum(counts):.0%}")
    for index, store in enumerate(stores):
        table.add_row(f"ps {index}", f"{store['shards']} shards, {store['bytes']} bytes")
    table.add_row("mean staleness", f"{staleness:.2f} updates by others")
    console.print(table)


def plot(losses, workers, accuracies, folder):
    """Draw the loss of each step and the accuracy after each epoch; return the file's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for worker in np.unique(workers):
        (own,) = np.nonzero(workers == worker)
        left.plot(own, losses[own], ".", markersize=3, alpha=0.5, label=f"worker {worker}")
    epochs = np.arange(1, len(accuracies) + 1)
    left.set(title="training loss of each step", xlabel="step", yscale="log")
    means = losses.reshape(-1, STEPS).mean(axis=1)
    left.plot((epochs - 0.5) * STEPS, means, "k.-", label="mean of an epoch")
    right.set(title="test accuracy", xlabel="epoch", xticks=epochs, ylim=(min(0.9, *accuracies), 1))
    right.plot(epochs, accuracies, "o-", label="after the epoch")
    right.axhline(MIN_ACCURACY, color="grey", linestyle="--", label="expected")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    right.legend(loc="lower right")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.png"
    figure.savefig(path, dpi=120)
    return path


def parse_options():
    parser = argparse.ArgumentParser("digits.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help=f"each of {STEPS} steps")
    parser.add_argument("--short", dest="epochs", action="store_const", const=3, help="3 epochs")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    return parser.parse_args()


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"digits: {failure}" if failure else 0)
