"""What a worker computes of one batch with Keras: gradients, changed state, what metrics add up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from psync.client.tensors import array_of, is_tensor
from psync.errors import ConfigurationError
from psync.gradients import gradient_of
from psync.integrations.keras.metrics import (
    all_metrics,
    as_tuple,
    build_metrics,
    parts_of,
    reset_metrics,
    set_metrics,
)
from psync.integrations.keras.models import BuiltModel, checked_backend
from psync.numerics.rows import IndexedSlices
from psync.specs import check_not_masked

_SPREAD = 0x9E3779B9
"""By how much the seeds of two workers differ, modulo 2**32: the golden ratio's bits."""


class Steps(ABC):
    """Computes with the model of one task, whose values are handed in.

    Args:
        built: The model. Its own optimizer is dropped: the ps tasks have it, and slots here would
            be memory for nothing.
        worker: Number of the worker; it draws its own masks of dropout.
    """

    def __init__(self, built: BuiltModel, worker: int) -> None:
        self.built = built
        self._shift = worker * _SPREAD
        built.model.optimizer = None
        self._reset: list[np.ndarray] | None = None  # values of metrics that are reset

    def load(self, values: Mapping[str, np.ndarray]) -> None:
        """Take new values of variables, by name; those that are not there stay."""
        seeds = {
            name: _moved(values[name], self._shift) for name in self.built.seeds if name in values
        }
        self._load({**values, **seeds})

    def state(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the present values of what the model changes itself."""
        found = {name: self._value(name) for name in names}
        for name in self.built.seeds:
            if name in found:
                found[name] = _moved(found[name], -self._shift)
        return found

    def train(self, batch: Any) -> tuple[dict[str, np.ndarray | IndexedSlices | None], np.ndarray]:
        """Return the gradients of a batch by name, and what it adds to metrics; state changes.

        Args:
            batch: x, (x, y) or (x, y, sample_weight).
        """
        batch = self._prepared(batch)
        gradients, sums = self._train(batch)
        return dict(zip(self.built.trained, gradients, strict=True)), sums

    def test(self, batch: Any) -> np.ndarray:
        """Return what a batch adds to metrics, without training."""
        return self._test(self._prepared(batch))

    def predict(self, x: Any) -> Any:
        """Return the outputs for x, as arrays."""
        check_batch(x)
        outputs = self._predict(keras.tree.map_structure(self._data, x))
        return keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)

    @abstractmethod
    def _load(self, values: Mapping[str, np.ndarray]) -> None: ...

    @abstractmethod
    def _value(self, name: str) -> np.ndarray: ...

    @abstractmethod
    def _train(self, batch: Any) -> tuple[Sequence[Any], np.ndarray]: ...

    @abstractmethod
    def _test(self, batch: Any) -> np.ndarray: ...

    @abstractmethod
    def _predict(self, x: Any) -> Any: ...

    @abstractmethod
    def _data(self, value: Any) -> Any:
        """Return an array of a batch as the backend takes it."""

    def _prepared(self, batch: Any) -> Any:
        """Return a batch as the backend takes it; the first one builds the metrics."""
        batch = as_tuple(batch)
        check_batch(batch)
        made = keras.tree.map_structure(self._data, batch)
        if self._reset is None:
            build_metrics(self.built.model, made)
            self._reset = reset_metrics(self.built.model)
            self._check_metrics(made)
        return made

    def _check_metrics(self, batch: Any) -> None:
        """Check that the metrics are sums, where they are not Keras's own, which are.

        Raises:
            ConfigurationError: One is none.
        """
        own = [
            metric.name
            for metric in all_metrics(self.built.model)
            if not type(metric).__module__.startswith("keras.")
        ]
        if not own:
            return
        once = self._test(batch)
        twice = self._test_after(batch, once)
        if not np.allclose(twice, 2 * once, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ConfigurationError(
                f"PSModel: metrics {', '.join(own)}: their variables are not sums over batches, so "
                "workers' values cannot be merged",
                hint="a metric that can be merged adds to its variables in update_state and "
                "computes from them in result, as keras.metrics.Mean does",
            )

    @abstractmethod
    def _test_after(self, batch: Any, sums: np.ndarray) -> np.ndarray:
        """Return what metrics hold, above their reset values, that held so much before a batch."""

    def _added(self, values: Sequence[Any]) -> np.ndarray:
        """Return the values of metrics above what they are when they are reset, as one vector."""
        assert self._reset is not None, "the first batch has built the metrics"
        arrays = [np.asarray(keras.ops.convert_to_numpy(value), np.float64) for value in values]
        differences = [a - b for a, b in zip(arrays, self._reset, strict=True)]
        return np.concatenate([each.ravel() for each in differences])


class JaxSteps(Steps):
    """Steps that are compiled by jax, with all values as arguments."""

    def __init__(self, built: BuiltModel, worker: int) -> None:
        super().__init__(built, worker)
        import jax

        self._jax = jax
        model = built.model
        compiles = model.jit_compile and not model.run_eagerly
        self._values: dict[str, Any] = {}
        self._train_step = jax.jit(self._gradients) if compiles else self._gradients
        self._test_step = jax.jit(self._metrics) if compiles else self._metrics
        self._predict_step = jax.jit(self._outputs) if compiles else self._outputs

    def _load(self, values: Mapping[str, np.ndarray]) -> None:
        # To the device once: frozen values stay there for many steps.
        self._values |= self._jax.device_put(dict(values))

    def _value(self, name: str) -> np.ndarray:
        return np.asarray(self._values[name])

    def _data(self, value: Any) -> Any:
        return array_of(value) if is_tensor(value) else value

    def _train(self, batch: Any) -> tuple[Sequence[Any], np.ndarray]:
        gradients, others, metrics = self._train_step(*self._arguments(), self._reset, batch)
        changed = dict(zip(self.built.others, others, strict=True))
        self._values |= {name: changed[name] for name in self.built.state}
        return [np.asarray(gradient) for gradient in gradients], self._added(metrics)

    def _test(self, batch: Any) -> np.ndarray:
        return self._added(self._test_step(*self._arguments(), self._reset, batch))

    def _test_after(self, batch: Any, sums: np.ndarray) -> np.ndarray:
        assert self._reset is not None, "the first batch has built the metrics"
        before = [
            (reset + part).astype(reset.dtype)
            for reset, part in zip(self._reset, parts_of(sums, self._reset), strict=True)
        ]
        return self._added(self._test_step(*self._arguments(), before, batch))

    def _predict(self, x: Any) -> Any:
        return self._predict_step(*self._arguments(), x)

    def _arguments(self) -> tuple[list[Any], list[Any]]:
        """Return the trained values, and the others, in the order of the model."""
        return (
            [self._values[name] for name in self.built.trained],
            [self._values[name] for name in self.built.others],
        )

    # As ``train_step`` and the others of Keras's own trainer, without the optimizer.

    def _gradients(self, trained: Any, others: Any, metrics: Any, batch: Any) -> Any:
        model = self.built.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        compute = self._jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
        (_, (loss, outputs, others, metrics)), gradients = compute(
            trained, others, metrics, x, y, weight, training=True, optimizer_variables=[]
        )
        _, metrics = model._update_metrics_variables(metrics, loss, x, y, outputs, weight)
        return gradients, others, metrics

    def _metrics(self, trained: Any, others: Any, metrics: Any, batch: Any) -> Any:
        model = self.built.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        _, (loss, outputs, _, metrics) = model.compute_loss_and_updates(
            trained, others, metrics, x, y, weight, training=False
        )
        return model._update_metrics_variables(metrics, loss, x, y, outputs, weight)[1]

    def _outputs(self, trained: Any, others: Any, x: Any) -> Any:
        return self.built.model.predict_step((trained, others), (x,))[0]


class TorchSteps(Steps):
    """Steps of torch, in the tensors of the model."""

    def __init__(self, built: BuiltModel, worker: int) -> None:
        super().__init__(built, worker)
        import torch

        self._torch = torch

    def _load(self, values: Mapping[str, np.ndarray]) -> None:
        self.built.assign(values)

    def _value(self, name: str) -> np.ndarray:
        return array_of(self.built.variables[name].value)

    def _data(self, value: Any) -> Any:
        return None if value is None else keras.ops.convert_to_tensor(value)

    def _train(self, batch: Any) -> tuple[Sequence[Any], np.ndarray]:
        model = self.built.model
        model.zero_grad()
        model.reset_metrics()
        self._loss(batch, training=True).backward()
        gradients = [gradient_of(self._torch, v.value.grad) for v in model.trainable_variables]
        return gradients, self._added([v.value for v in model.metrics_variables])

    def _test(self, batch: Any) -> np.ndarray:
        self.built.model.reset_metrics()
        return self._tested(batch)

    def _test_after(self, batch: Any, sums: np.ndarray) -> np.ndarray:
        set_metrics(self.built.model, sums)
        return self._tested(batch)

    def _predict(self, x: Any) -> Any:
        with self._torch.no_grad():
            return self.built.model.predict_step((x,))

    def _tested(self, batch: Any) -> np.ndarray:
        with self._torch.no_grad():
            self._loss(batch, training=False)
        return self._added([v.value for v in self.built.model.metrics_variables])

    def _loss(self, batch: Any, *, training: bool) -> Any:
        """Return the loss, and let the metrics count the batch: Keras's own ``train_step``, up to
        the optimizer."""
        model = self.built.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        options = {"training": training} if model._call_has_training_arg else {}
        outputs = model(x, **options)
        loss = model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=weight, training=training
        )
        size = next(each for each in keras.tree.flatten(x) if each is not None).shape[0]
        with self._torch.no_grad():
            model._loss_tracker.update_state(loss.detach(), sample_weight=size)
            model.compute_metrics(x, y, outputs, sample_weight=weight)
        return loss


def check_batch(batch: Any) -> None:
    """Refuse masked arrays, whose hidden values the backend would take for data.

    Raises:
        ConfigurationError: There is one.
    """
    try:
        check_not_masked(keras.tree.flatten(batch))
    except TypeError as exc:
        raise ConfigurationError(f"a batch: expected arrays, got {exc}") from exc


def weighted(batch: Any, class_weight: Mapping[int, float]) -> Any:
    """Return a batch (x, y) with the weight of each example's class: (x, y, sample_weight).

    Args:
        batch: As a dataset gives it.
        class_weight: By class; other classes have 1. Empty: the batch is returned as it is.

    Raises:
        ConfigurationError: The batch has no single array of labels, or has weights.

    Source: ``class_weight`` of ``keras.Model.fit``.
    """
    if not class_weight:
        return batch
    parts = as_tuple(batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(parts)
    if y is None or keras.tree.is_nested(y) or weight is not None:
        problem = "got x alone" if y is None else "got several outputs"
        raise ConfigurationError(
            "fit: class_weight needs batches (x, y) with one array y, "
            + ("got (x, y, sample_weight)" if weight is not None else problem),
            hint="weight examples in the dataset instead: yield (x, y, sample_weight), nested as "
            "y, and leave out class_weight",
        )
    check_batch(y)
    labels = array_of(y) if is_tensor(y) else np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    classes, places = np.unique(np.round(labels).astype(int), return_inverse=True)
    weights = [class_weight.get(int(each), 1.0) for each in classes]
    return x, y, np.array(weights, keras.config.floatx())[places.reshape(labels.shape)]


def steps_of(built: BuiltModel, worker: int) -> Steps:
    """Return what computes with a model, on the backend of this process."""
    return {"jax": JaxSteps, "torch": TorchSteps}[checked_backend()](built, worker)


def _moved(seed: np.ndarray, shift: int) -> np.ndarray:
    """Return the state of a ``SeedGenerator``, (seed, count), with another seed."""
    moved = np.array(seed)
    first = (int(moved.ravel().view(np.uint32)[0]) + shift) % (1 << 32)
    moved.view(np.uint32)[0] = first
    return moved
