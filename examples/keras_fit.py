"""Train a Keras 3 model with BatchNorm on digits: 2 ps, 2 workers, and one process beside them.

    pip install -e '.[examples,keras,jax]'
    psync run examples/keras_fit.py --ps 2 --workers 2
    KERAS_BACKEND=torch psync run examples/keras_fit.py --ps 2 --workers 2 -- --sync

The model is compiled as ever; fit, evaluate and callbacks are Keras's words. Its optimizer runs on
the ps tasks, batches are trained on the workers, metrics and the moving statistics of BatchNorm are
merged. With --sync an update is the mean of both workers' gradients. First the same model is
trained by Keras alone in this process.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import psync
from psync.integrations.keras import PSModel

BATCH = 64
MIN_ACCURACY = 0.95
MAX_LOSS = 0.02  # of accuracy, compared with the single process
MAX_GAP = 0.01  # between evaluation and training mode


def build_model():  # here, and on each worker
    """Return a compiled model: 64 pixels to 10 classes."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=300, alpha=0.1)
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def load(part):
    """Return images of 64 pixels from 0 to 1, and labels: 1437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[:360] if part == "test" else order[360:]
    return (images[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int32)


def batches(context):  # runs on each worker, in a thread of its own
    """Yield shuffled batches of this worker's part of the images, for ever."""
    images, labels = load("train")
    part = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    return psync.data.from_arrays(
        (images[part], labels[part]), BATCH, shuffle_seed=1, num_epochs=None
    )


def train_alone(epochs, steps):
    """Return the accuracy that the same number of updates reaches in this process."""
    images, labels = load("train")
    model = build_model()
    epochs = round(epochs * steps * BATCH / len(images))
    model.fit(images, labels, BATCH, epochs, verbose=0)
    return model.evaluate(*load("test"), verbose=0, return_dict=True)["accuracy"]


async def main():
    options = parse_options()
    keras.utils.set_random_seed(0)
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy):
        began = time.perf_counter()
        alone = train_alone(options.epochs, options.steps)
        backend, seconds = keras.config.backend(), time.perf_counter() - began
        print(f"Keras on {backend}, single process: accuracy {alone:.4f} in {seconds:.1f} s")

        def both(rule):
            return psync.SyncReplicasOptimizer(rule, replicas_to_aggregate=2)

        with strategy.scope():
            model = PSModel(build_model, name="net", synchronous=both if options.sync else None)
        # A synchronous update is made of two steps: as many as above take twice the batches.
        steps = options.steps * (2 if options.sync else 1)
        stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
        began = time.perf_counter()
        await model.fit(batches, options.epochs, steps, load("test"), [stop], verbose="lines")
        seconds = time.perf_counter() - began

        images, labels = load("test")
        evaluated = (await model.evaluate((images, labels)))["accuracy"]
        outputs = (await model.pull())(images, training=True)
        as_in_training = float((keras.ops.convert_to_numpy(outputs).argmax(1) == labels).mean())

    kind = "synchronous" if options.sync else "asynchronous"
    print(
        f"2 workers, {kind}: accuracy {evaluated:.4f}, in training mode {as_in_training:.4f}, "
        f"in {seconds:.1f} s"
    )
    if evaluated < max(MIN_ACCURACY, alone - MAX_LOSS):
        return f"accuracy is {evaluated:.4f}, a single process has {alone:.4f}"
    if evaluated < as_in_training - MAX_GAP:
        return f"evaluation is worse than training mode by {as_in_training - evaluated:.4f}"


def parse_options():
    parser = argparse.ArgumentParser("keras_fit.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="updates of an epoch")
    parser.add_argument("--sync", action="store_true", help="mean of two gradients in each update")
    return parser.parse_args()


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"keras_fit: {failure}" if failure else 0)
