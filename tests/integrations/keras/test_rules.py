"""Keras optimizers and schedules as rules on the ps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training

keras: Any = pytest.importorskip("keras")

from keras_nets import linear, refusal  # noqa: E402
from psync.integrations.keras import PSModel  # noqa: E402
from psync.integrations.keras.rules import RULES, optimizer_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")


def test_an_optimizer_without_a_rule_is_refused_by_name() -> None:
    text = refusal(lambda: linear(keras.optimizers.Adafactor()))
    assert "no rule on the ps for the Keras optimizer Adafactor" in text
    assert f"those with one: {', '.join(RULES)}" in text

    class Mine(keras.optimizers.SGD):  # type: ignore[misc]
        pass

    assert "Mine" in refusal(lambda: linear(Mine(0.1)))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert "mixed_bfloat16" in refusal(lambda: linear(scaled))


def test_schedules_are_those_of_keras() -> None:
    of_keras = keras.optimizers.schedules
    for schedule in (
        of_keras.ExponentialDecay(0.1, 10, 0.5, staircase=True),
        of_keras.InverseTimeDecay(0.1, 10, 0.5),
        of_keras.PolynomialDecay(0.1, 10, 0.01, power=2.0, cycle=True),
        of_keras.CosineDecay(0.1, 30, warmup_target=0.3, warmup_steps=5),
        of_keras.CosineDecayRestarts(0.1, 7),
        of_keras.PiecewiseConstantDecay([5, 9], [0.3, 0.2, 0.1]),
    ):
        rate = optimizer_of(keras.optimizers.SGD(schedule)).learning_rate
        assert isinstance(rate, psync.schedules.Schedule)
        for step in range(25):
            expected = float(keras.ops.convert_to_numpy(schedule(step)))
            assert rate(step) == pytest.approx(expected, rel=1e-5), (schedule, step)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, 0.8, nesterov=True, clipnorm=0.5),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, 0.8, 0.5, 1e-5, centered=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, 0.8, 0.99, 1e-4, amsgrad=True, clipvalue=0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, 0.1, 0.8, 0.99, 1e-5, global_clipnorm=0.5),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5, 0.9, 1e-5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1, 0.2, 1e-5),
    "Adamax": lambda: keras.optimizers.Adamax(0.01, 0.8, 0.99, 1e-5),
    "Nadam": lambda: keras.optimizers.Nadam(0.01, 0.8, 0.99, 1e-5),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, -0.6, 0.2, 0.001, 0.01, 0.01, beta=0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01, 0.8, 0.95),
    "Lamb": lambda: keras.optimizers.Lamb(0.01, 0.8, 0.99, 1e-5),
}


@pytest.mark.parametrize("name", list(RULES))
async def test_an_optimizer_does_what_that_of_keras_does(name: str) -> None:
    rng = np.random.default_rng(4)
    gradients = rng.normal(size=(8, 2, 3, 5)).astype(np.float32)
    first = rng.normal(size=(2, 3, 5)).astype(np.float32)
    optimizer = OPTIMIZERS[name]()
    of_keras = [keras.Variable(value, name=f"w{i}") for i, value in enumerate(first)]
    if name == "AdamW":
        optimizer.exclude_from_weight_decay(var_names=["w1"])
    async with training(1, 1) as (strategy, _):
        with strategy.scope():
            variables = [psync.Variable(value, name=f"w{i}") for i, value in enumerate(first)]
            ours = optimizer_of(optimizer)
        if name == "AdamW":
            ours.exclude_from_weight_decay(variables[1:])
        for step in gradients:
            await ours.apply_gradients(zip(step, variables, strict=True))
            optimizer.apply([keras.ops.convert_to_tensor(g) for g in step], of_keras)
        for here, there in zip(await psync.pull(variables), of_keras, strict=True):
            value = keras.ops.convert_to_numpy(there.value)
            np.testing.assert_allclose(here, value, rtol=2e-4, atol=2e-5)


async def test_weight_decay_passes_over_what_keras_excludes() -> None:
    def build() -> Any:
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias$"])
        return linear(optimizer, kernel_initializer="ones", bias_initializer="ones")

    async with training(1, 1) as (strategy, _):
        with strategy.scope():
            model = PSModel(build)
        zeros = {key: np.zeros(model.variable(key).shape, np.float32) for key in model._trained}
        await model._push_values(zeros, {}, {})
        kernel, bias = await model.get_weights()
    assert (kernel == 0.5).all()
    assert (bias == 1).all()
