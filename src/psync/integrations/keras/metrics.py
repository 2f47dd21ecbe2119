"""Metrics of a Keras model as sums: over batches, and over workers.

Metrics of Keras hold sums, such as a total and a count, or positives and negatives at thresholds.
What a batch adds to them is found by beginning with metrics that are reset. Sums of that, put back
into the metrics of a model, give their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

BatchSpec = Any
"""A batch without its values: a shape and a dtype in place of each array."""


def build_metrics(model: Any, batch: Any) -> None:
    """Make the variables of a model's metrics, which depend on the shapes of a batch.

    Args:
        model: Compiled.
        batch: Arrays, or a ``BatchSpec``.
    """
    optimizer, model.optimizer = model.optimizer, None  # or its slots would be made, too
    try:
        model._symbolic_build(data_batch=batch)
    finally:
        model.optimizer = optimizer


def reset_metrics(model: Any) -> list[np.ndarray]:
    """Reset the metrics of a model, and return the values of their variables."""
    model.reset_metrics()
    return [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in model.metrics_variables]


def set_metrics(model: Any, sums: np.ndarray) -> None:
    """Let metrics be as if they alone had counted all batches.

    Args:
        model: Its metrics are built.
        sums: Of what batches have added to them.
    """
    reset = reset_metrics(model)
    for variable, first, part in zip(
        model.metrics_variables, reset, parts_of(sums, reset), strict=True
    ):
        variable.assign((first + part).astype(first.dtype))


def parts_of(sums: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Cut a vector into arrays of the shapes of others."""
    ends = np.cumsum([each.size for each in like])
    parts = np.split(sums, ends[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, like, strict=True)]


def spec_of(batch: Any) -> BatchSpec:
    """Return the shapes and dtypes of a batch, nested as it is."""

    def spec(value: Any) -> Any:
        if value is None:
            return None
        array = keras.ops.convert_to_tensor(value) if not hasattr(value, "shape") else value
        return _Spec(tuple(array.shape), keras.backend.standardize_dtype(array.dtype))

    return keras.tree.map_structure(spec, as_tuple(batch))


class _Spec:
    """Shape and dtype of an array: what Keras asks of it to build metrics."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


def as_tuple(batch: Any) -> Any:
    """Return a batch as Keras tells (x, y) from x: by its being a tuple."""
    return tuple(batch) if isinstance(batch, list) else batch


def all_metrics(model: Any) -> list[Any]:
    """Return the metrics of a model, those in a compiled group one by one."""
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return found
