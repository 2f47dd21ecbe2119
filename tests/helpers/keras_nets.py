"""Small Keras models and their data, for tests that have found Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import psync
from local_training import strategy_of
from psync.errors import ConfigurationError
from psync.integrations.keras import PSModel


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


def batches(context: psync.InputContext) -> Any:
    seed = context.input_pipeline_id
    while True:
        yield points(seed)
        seed += context.num_input_pipelines


def served_of(strategy: Any, build: Callable[[], Any] = net, **options: Any) -> PSModel:
    with strategy.scope():
        return PSModel(build, **options)


def linear(optimizer: Any = "sgd", units: int = 2, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, **options)])
    model.compile(optimizer, "mse")
    return model


def refusal(build: Any) -> str:
    with strategy_of().scope(), pytest.raises(ConfigurationError) as caught:
        PSModel(build)
    return str(caught.value)


class Rows(keras.metrics.Metric):  # type: ignore[misc]
    """The number of examples."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.count.assign(self.count + keras.ops.shape(outputs)[0])

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.count)
