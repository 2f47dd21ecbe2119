"""Metrics of Keras models: sums over batches and workers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training

keras: Any = pytest.importorskip("keras")

from keras_nets import Rows, batches, net, points, served_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")


async def test_metrics_of_workers_are_those_of_all_batches() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = [
            "accuracy", keras.metrics.AUC(name="area"), keras.metrics.Precision(name="precision"),
            keras.metrics.F1Score(threshold=0.5, average="micro", name="f1"),
        ]  # fmt: skip
        weighted = [keras.metrics.MeanSquaredError(name="error")]
        rate = keras.optimizers.SGD(0.0)
        model.compile(rate, "binary_crossentropy", metrics=metrics, weighted_metrics=weighted)
        return model

    x, y = points(0, 135)
    y, weight = y[:, None].astype("float32"), np.linspace(0, 1, len(x), dtype="float32")

    def same_again(_: psync.InputContext) -> Any:  # whoever gets how many of the six closures
        return itertools.repeat((x, y, weight))

    alone = build()
    expected = alone.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    del expected["loss"]  # Keras's mean over batches depends on how they are cut
    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, build)
        history = await model.fit(same_again, 1, 6, verbose=False)
        evaluated = await model.evaluate((x, y, weight), batch_size=9)
        of_training = {name: values[-1] for name, values in history.history.items()}
        for found in (of_training, evaluated):
            assert found.pop("loss") > 0
            assert found == pytest.approx(expected, rel=1e-5)


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # of a package without types
    """No sum over batches."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs) + 5.0))

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.value)


async def test_metrics_of_the_user_are_merged_if_they_add_up() -> None:
    async with training(1, 2) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Rows()]))
        history = await model.fit(batches, 1, 5, verbose=False)
        assert history.history["rows"] == [5 * 32]
    async with training(1, 1) as (strategy, _):
        model = served_of(strategy, lambda: net(metrics=[Largest()]))
        with pytest.raises(psync.errors.ConfigurationError, match="largest: their variables are"):
            await model.fit(batches, 1, 1, verbose=False)
