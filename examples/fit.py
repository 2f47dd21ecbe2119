"""Handwritten digits without a training loop: psync.Trainer, as Keras users know it.

    pip install -e '.[examples]'
    psync run examples/fit.py --ps 2 --workers 2
    psync run examples/fit.py --ps 2 --workers 2 -- --epochs 15

The model of digits.py. Here the loop, the metrics, the validation and the checkpoints are the
trainer's. Called again with more epochs it goes on where it ended, and so it does after a crash;
delete out/fit to begin anew.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import psync

STEPS = 100  # of an epoch, over all workers
BATCH = 64
MIN_ACCURACY = 0.95


def load():
    """Return (images, labels) to train with, 1437, and those for validation, 360."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    return [(images[chosen], labels[chosen]) for chosen in (order[360:], order[:360])]


def forward(params, batch):
    """Return the loss, what its gradient is made of, and the score of each class."""
    images, labels = batch
    hidden = np.maximum(images @ params["w1"] + params["b1"], 0)
    logits = hidden @ params["w2"] + params["b2"]
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(labels)), labels] + 1e-9).mean()
    return loss, (hidden, probabilities), logits


def value_and_grad(params, batch):  # runs on the workers
    images, labels = batch
    loss, (hidden, d_logits), logits = forward(params, batch)
    d_logits[np.arange(len(labels)), labels] -= 1
    d_logits /= len(labels)
    d_hidden = d_logits @ params["w2"].T * (hidden > 0)
    gradients = {
        "w1": images.T @ d_hidden, "b1": d_hidden.sum(axis=0),
        "w2": hidden.T @ d_logits, "b2": d_logits.sum(axis=0),
    }  # fmt: skip
    return loss, gradients, logits


async def main():
    options = parse_options()
    resolver = psync.resolve_cluster()
    num_ps = resolver.cluster_spec().num_tasks("ps")
    strategy = psync.ParameterServerStrategy(
        resolver, psync.MinSizePartitioner(min_shard_bytes=1 << 10, max_shards=num_ps)
    )
    rng = np.random.default_rng(0)
    train, validation = load()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "epochs.csv"

    async with psync.ClusterCoordinator(strategy):
        with strategy.scope():
            model = {
                "w1": psync.Variable(rng.normal(0, 1 / 8, (64, 64)).astype(np.float32), name="w1"),
                "b1": psync.Variable(np.zeros(64, np.float32), name="b1"),
                "w2": psync.Variable(rng.normal(0, 1 / 8, (64, 10)).astype(np.float32), name="w2"),
                "b2": psync.Variable(np.zeros(10, np.float32), name="b2"),
            }
            metrics = [psync.metrics.SparseCategoricalAccuracy("accuracy")]
        trainer = psync.Trainer(
            strategy,
            model,
            value_and_grad,
            psync.optimizers.Adam(),
            metrics,
            loss_and_predictions=lambda params, batch: forward(params, batch)[::2],
            checkpoint_directory=options.out / "checkpoints",
        )
        # A function of the epoch alone, so that the rate is the right one after a resume, too.
        decay = psync.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 * 0.9**epoch)
        patience = psync.callbacks.EarlyStopping(patience=5, restore_best_weights=True)
        # Each worker reads the rows in an order of its own, for ever; an epoch is so many steps.
        batches = psync.data.from_arrays(train, BATCH, shuffle_seed=0, num_epochs=None)
        history = await trainer.fit(
            batches,
            epochs=options.epochs,
            steps_per_epoch=STEPS,
            validation_data=validation,  # each image counts once, whichever workers die
            callbacks=[decay, patience, psync.callbacks.CSVLogger(log, append=True)],
        )
        final = await trainer.evaluate(validation)

    print_history(history)
    if patience.stopped_epoch is not None:
        print(f"stopped early, after epoch {patience.stopped_epoch + 1}")
    print(f"validation: loss {final['loss']:.4f}, accuracy {final['accuracy']:.4f}; log: {log}")
    if final["accuracy"] < MIN_ACCURACY:
        return f"accuracy is {final['accuracy']:.4f}, expected at least {MIN_ACCURACY}"


def print_history(history):
    names = list(history.history)
    print("epoch", *(f"{name:>12}" for name in names))
    for epoch, *values in zip(history.epoch, *history.history.values(), strict=True):
        print(f"{epoch + 1:5}", *(f"{value:12.4f}" for value in values))


def parse_options():
    parser = argparse.ArgumentParser("fit.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help="in all, with those before")
    parser.add_argument("--out", type=Path, default=Path("out/fit"), help="checkpoints, log")
    return parser.parse_args()


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"fit: {failure}" if failure else 0)
