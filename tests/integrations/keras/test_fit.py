"""fit, evaluate and predict of served Keras models: the numbers of a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import shared, training

keras: Any = pytest.importorskip("keras")

from psync.integrations.keras import ServedModel  # noqa: E402  # needs keras

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def points(seed: int, size: int = 32) -> Any:
    """A batch of two classes, in the present floats of Keras."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 4)) * 3 + 1
    return x.astype(keras.config.floatx()), (x.sum(1) > 4).astype(np.int32)


def net(optimizer: Any = None, *, norm: bool = False, metrics: Any = ("accuracy",)) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh")]
    if norm:
        layers.append(keras.layers.BatchNormalization(momentum=0.9))
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def served_of(strategy: Any, build: Callable[[], Any] = net, **options: Any) -> ServedModel:
    with strategy.scope():
        return ServedModel(build, **options)


def batches(context: psync.data.InputContext) -> Any:
    seed = context.input_pipeline_id
    while True:
        yield points(seed)
        seed += context.num_input_pipelines


# --- a single process's numbers -------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
async def test_two_synchronous_workers_have_the_loss_curve_of_a_single_process(
    name: str, dtype: str, floats: Callable[[str], None]
) -> None:
    floats(dtype)
    steps, make = 100, OPTIMIZERS[name]

    def build() -> Any:
        return net(make())

    alone = build()
    data = (points(step) for step in range(steps))
    of_keras = alone.fit(data, epochs=steps, steps_per_epoch=1, shuffle=False, verbose=0)

    shared["epochs"] = [0, 0]

    def halves(context: psync.data.InputContext) -> Any:
        import local_training

        worker = context.input_pipeline_id
        step = local_training.shared["epochs"][worker]
        local_training.shared["epochs"][worker] += 1
        x, y = points(step)
        yield x[worker::2], y[worker::2]

    async with training(2, 2) as (strategy, _):
        model = served_of(
            strategy,
            build,
            synchronous=lambda rule: psync.SyncReplicasOptimizer(rule, 2, deterministic=True),
        )
        history = await model.fit(halves, steps, 2, verbose=False)
        weights = await model.get_weights()
    tolerance = {"float32": 1e-4, "float64": 1e-5}[dtype]
    np.testing.assert_allclose(history.history["loss"], of_keras.history["loss"], rtol=tolerance)
    for ours, theirs in zip(weights, alone.get_weights(), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, theirs, rtol=20 * tolerance, atol=tolerance)
