"""Keras models as they are built on each task: variables by name, and what is checked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.utils import naming

from psync.errors import ConfigurationError, UsageError
from psync.integrations.served import Kind
from psync.specs import DTYPE_NAMES, plain_array

BACKENDS = ("jax", "torch")

_OF_THREAD = ("object_name_uids", "dtype_policy")
"""What Keras has for each thread: counts of automatic names ("dense_3"), and the global policy."""

_OWN_STEPS = ("train_step", "test_step", "predict_step", "make_train_function")


class KerasSettings:
    """Settings of Keras that say how a model is built; they go to workers with the function.

    Those of the thread that makes this. Workers build in other threads, where Keras has its
    defaults.
    """

    def __init__(self) -> None:
        self._backend = checked_backend()
        self._floatx = keras.config.floatx()
        self._format = keras.config.image_data_format()
        self._policy = keras.dtype_policies.serialize(keras.config.dtype_policy())

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Let what is built in this block be built as in the program, under the same names.

        Raises:
            ConfigurationError: This task's Keras has another backend.
        """
        if (backend := checked_backend()) != self._backend:
            raise ConfigurationError(
                f"PSModel: declared with the Keras backend {self._backend}, but this task uses "
                f"{backend}",
                hint="set the environment variable KERAS_BACKEND to the same value for all tasks",
            )
        keras.config.set_floatx(self._floatx)
        keras.config.set_image_data_format(self._format)
        before = {name: global_state.get_global_attribute(name) for name in _OF_THREAD}
        naming.reset_uids()
        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(self._policy))
        try:
            yield
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)


class BuiltModel:
    """A compiled Keras model, and its variables by name.

    Names are the paths that Keras gives, without the model's name: "dense/kernel". Automatic names
    are counted anew for each model, so that they are the same in each process.

    Args:
        build_model: Returns the model.
        settings: In which it is called.

    Attributes:
        model: The model.
        variables: All of them; none of metrics and optimizer.
        trained: Names of those that are trained, in the order of ``model.trainable_variables``.
        others: Names of the others, in the order of ``model.non_trainable_variables``.
        state: Names of those that the model changes itself: moving statistics, seeds.
        seeds: Names of those that are the state of a ``SeedGenerator``.
        weights: Names in the order of ``get_weights()``.

    Raises:
        ConfigurationError: It is no model that can be served.
    """

    def __init__(self, build_model: Callable[[], Any], settings: KerasSettings) -> None:
        with settings.here():
            self.model = model = build_model()
        _check_model(model)
        self._compiled_with = model.optimizer, model.loss
        names: dict[int, str] = {}
        self.variables: dict[str, Any] = {}
        for variable in [*model.trainable_variables, *model.non_trainable_variables]:
            name = _unique(variable.path.removeprefix(f"{model.name}/"), self.variables)
            names[id(variable)] = name
            self.variables[name] = variable
            _check_variable(name, variable)
        self.trained = [names[id(variable)] for variable in model.trainable_variables]
        self.others = [names[id(variable)] for variable in model.non_trainable_variables]
        self.weights = [names[id(variable)] for variable in model.weights]
        self.seeds = [name for name in self.others if name not in self.weights]
        frozen = {
            id(variable)
            for layer in model._flatten_layers()
            for variable in layer._trainable_variables
        }
        self.state = [name for name in self.others if id(self.variables[name]) not in frozen]
        if not self.trained:
            raise ConfigurationError(
                f"PSModel: the model {model.name!r} has no variable to train",
                hint="let build_model return a model with trainable variables, built by "
                "keras.Input or by a call on a batch",
            )

    def kinds(self) -> Iterator[tuple[str, Kind]]:
        """Yield names, shapes and dtypes."""
        for name, variable in self.variables.items():
            yield name, (tuple(variable.shape), str(variable.dtype))

    def check_unchanged(self) -> None:
        """Check that the model is trained as it was when it was declared.

        Raises:
            ConfigurationError: It was compiled again, or other layers are trainable now.
        """
        model, (optimizer, loss) = self.model, self._compiled_with
        trained = {id(variable) for variable in model.trainable_variables}
        again = model.optimizer is not optimizer or model.loss is not loss
        if again or trained != {id(self.variables[name]) for name in self.trained}:
            raise ConfigurationError(
                f"PSModel: the program's model {model.name!r} "
                + ("was compiled again" if again else "has other trainable layers than before")
                + " since it was declared; workers and ps tasks do not see the change",
                hint="declare another PSModel whose build_model returns the changed model, and "
                "copy the weights: await new.set_weights(await old.get_weights())",
            )

    def values(self) -> dict[str, np.ndarray]:
        """Return the values of all variables, which are not to be changed."""
        return {name: _array_of(variable) for name, variable in self.variables.items()}

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Set variables."""
        for name, value in values.items():
            self.variables[name].assign(value)


def checked_backend() -> str:
    """Return the backend of Keras in this process.

    Raises:
        ConfigurationError: Nothing here computes gradients with it.
    """
    backend = str(keras.config.backend())
    if backend not in BACKENDS:
        raise ConfigurationError(
            f"PSModel: expected one of the Keras backends {', '.join(BACKENDS)}, got {backend}",
            hint="set the environment variable KERAS_BACKEND before Keras is imported",
        )
    return backend


def weights_of(kinds: Mapping[str, Kind], weights: Any) -> dict[str, np.ndarray]:
    """Return weights by name.

    Args:
        kinds: Of all weights, in the order of ``get_weights()``.
        weights: A list in that order.

    Raises:
        UsageError: Their number or a shape differs.
    """
    try:
        arrays = [plain_array(weight) for weight in weights]
    except (TypeError, ValueError) as exc:
        raise UsageError(f"set_weights: expected arrays, got {exc}") from exc
    if len(arrays) != len(kinds):
        raise UsageError(
            f"set_weights: expected {len(kinds)} arrays, got {len(arrays)}",
            hint=f"in the order of get_weights(): {', '.join(list(kinds)[:10])}",
        )
    for (name, (shape, _)), array in zip(kinds.items(), arrays, strict=True):
        if array.shape != shape:
            raise UsageError(f'set_weights: "{name}": expected shape {shape}, got {array.shape}')
    return dict(zip(kinds, arrays, strict=True))


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            f"PSModel: expected build_model to return a keras.Model, got {type(model).__name__}"
        )
    if not model.compiled or model.optimizer is None:
        raise ConfigurationError(
            f"PSModel: the model {model.name!r} is not compiled",
            hint="let build_model call model.compile(optimizer, loss, metrics): the optimizer "
            "becomes the rule on the ps tasks",
        )
    if not model.built:
        raise ConfigurationError(
            f"PSModel: the model {model.name!r} is not built, so its variables have no shapes yet",
            hint="let build_model give it a keras.Input, or call it on a batch",
        )
    for name in _OWN_STEPS:
        if not getattr(type(model), name).__module__.startswith("keras."):
            raise ConfigurationError(
                f"PSModel: {type(model).__name__} overrides {name}, which would not be called: the "
                "step here includes pulls and pushes",
                hint="override compute_loss or compute_metrics instead; write other steps with "
                "psync.coordinator and psync.gradients",
            )


def _check_variable(name: str, variable: Any) -> None:
    problem = hint = ""
    if str(variable.dtype) not in DTYPE_NAMES:
        problem = f"variables cannot be {variable.dtype}"
        hint = f"use one of {', '.join(DTYPE_NAMES)}"
    elif variable.trainable and variable.constraint is not None:
        problem = f"no rule on the ps has its constraint {type(variable.constraint).__name__}"
        hint = "a regularizer is part of the loss, and works; the optimizer can clip gradients"
    elif getattr(variable, "overwrite_with_gradient", False):
        problem = "its gradient would replace it, which no rule on the ps does"
        hint = "train without quantization, and quantize the trained model"
    if problem:
        raise ConfigurationError(f'PSModel: variable "{name}": {problem}', hint=hint)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name, or with a number that makes it one of its own."""
    names = (name if number == 0 else f"{name}_{number}" for number in range(len(taken) + 1))
    return next(each for each in names if each not in taken)


def _array_of(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable.value))
