"""What workers compute of a batch: several inputs, dropout, mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training

keras: Any = pytest.importorskip("keras")

from keras_nets import batches, net, points, served_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")


async def test_models_of_several_inputs_and_outputs() -> None:
    def build() -> Any:
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        both = keras.layers.Concatenate()([a, b])
        outputs = {
            "sum": keras.layers.Dense(1, name="sum")(both),
            "class": keras.layers.Dense(2, name="class", activation="softmax")(both),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        losses = {"sum": "mse", "class": "sparse_categorical_crossentropy"}
        model.compile("adam", losses, metrics={"class": "accuracy"})
        return model

    def pairs() -> Any:
        x, y = points(1)
        yield {"a": x, "b": x}, {"sum": x.sum(1), "class": y}

    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, build)
        history = await model.fit(pairs, 1, 1, verbose=False)
        names = {"loss", "sum_loss", "class_loss", "class_accuracy"}
        assert set(history.history) == names
        x, _ = points(1, 9)
        outputs = await model.predict({"a": x, "b": x}, batch_size=4)
        assert {name: each.shape for name, each in outputs.items()} == {
            "sum": (9, 1), "class": (9, 2),
        }  # fmt: skip


async def test_workers_draw_masks_of_their_own() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(3)
        seed = keras.random.SeedGenerator(7)

        class Noise(keras.layers.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.seed = seed
                self.bias = self.add_weight(shape=(1,), initializer="zeros", name="bias")

            def call(self, x: Any, training: bool = False) -> Any:
                noise = keras.random.normal(keras.ops.shape(x), seed=self.seed)
                return keras.ops.where(training, noise, x) + self.bias

        model = keras.Sequential([keras.Input((1,)), Noise()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    def both(rule: Any, number: int) -> Any:
        return psync.SyncReplicasOptimizer(rule, number)

    zero = np.zeros((4, 1), np.float32)

    def one_batch() -> Any:
        yield zero, zero

    losses = []
    for workers in (1, 2):
        async with training(1, workers) as (strategy, _):
            model = served_of(strategy, build, synchronous=partial(both, number=workers))
            history = await model.fit(one_batch, 1, workers, verbose=False)
            losses.append(history.history["loss"][0])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


async def test_mixed_precision_is_that_of_the_program(floats: Callable[..., None]) -> None:
    floats("float32", "mixed_bfloat16")
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(norm=True))
        history = await model.fit(batches, 2, 30, verbose=False)
        assert history.history["loss"][1] < history.history["loss"][0]
        assert {weight.dtype.name for weight in await model.get_weights()} == {"float32"}
        outputs = await model.predict(points(1)[0])
        assert outputs.dtype.name == "bfloat16" or keras.config.backend() == "torch"
