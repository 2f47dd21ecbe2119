"""Models that PSModel refuses, and names of variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from local_training import shared, strategy_of, training
from psync.errors import ConfigurationError

keras: Any = pytest.importorskip("keras")

from keras_nets import linear, refusal  # noqa: E402
from psync.integrations.keras import PSModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")


def test_a_model_that_is_not_compiled_is_refused() -> None:
    text = refusal(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    assert "is not compiled" in text
    assert "let build_model call model.compile(" in text


def test_a_step_of_the_users_own_is_refused() -> None:
    class Own(keras.Sequential):  # type: ignore[misc]  # of a package without types
        def train_step(self, *arguments: Any) -> Any:
            raise NotImplementedError

    def build() -> Any:
        model = Own([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    assert "Own overrides train_step" in refusal(build)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    def build() -> Any:
        model = linear()
        model.trainable = False
        model.compile("sgd", "mse")
        return model

    assert "no variable to train" in refusal(build)


async def test_another_model_on_a_worker_is_an_error_that_names_the_difference() -> None:

    shared["units"] = iter([2, 3])

    def build() -> Any:
        import local_training

        return linear(units=next(local_training.shared["units"]))

    async with training(1, 1) as (strategy, _):
        with strategy.scope():
            model = PSModel(build, name="net")
        rows = [(np.zeros((1, 3), np.float32), np.zeros((1, 2), np.float32))]
        with pytest.raises(ConfigurationError, match=r"dense/kernel.*\(3, 2\).*here.*3\)"):
            await model.fit(lambda: rows, 1, 1, verbose=False)


async def test_models_are_called_alike_however_many_were_built_before() -> None:
    linear()
    with strategy_of().scope():
        assert PSModel(linear, name="net").variable("dense/bias").name == "net/dense/bias"
