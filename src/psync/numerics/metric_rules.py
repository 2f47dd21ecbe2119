"""Metric formulas: the sums that a batch adds, and the value of the sums.

A metric is a vector of float64 sums. ``contribution`` computes the addend of a batch, and
``result`` computes the value from the sums. The sums of any number of workers can therefore be
added in any order, and each batch counts once.

Source: ``keras.metrics`` of Keras 3, for weights, averages and formulas. Its sums are float32, in
which a count stops at 16,777,216.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from psync.errors import ValueMismatchError, check_fits
from psync.specs import DTYPE_NAMES, HiddenValues, checked_integer, plain_array

EDGE = 1e-7
"""How far the outermost thresholds of an AUC lie outside of [0, 1]."""


class MetricRule(ABC):
    """Computation of a metric: the contribution of a batch, and the value of the sums."""

    name: ClassVar[str]  # for messages, and of the metric by default
    takes: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")  # what a batch is
    shape: tuple[int, ...]  # of the sums

    def contribution(self, *batch: Any, sample_weight: Any = None) -> np.ndarray:
        """Return a batch's contribution to the sums.

        Args:
            batch: Arrays, as ``takes`` describes.
            sample_weight: Weight of each example, or of each value; None: 1.

        Raises:
            ValueMismatchError: The number of arrays is wrong, they are not numeric, or they do not
                fit together.
        """
        if len(batch) != len(self.takes):
            raise ValueMismatchError(
                f"{self.name}: expected ({', '.join(self.takes)}), got {len(batch)} arguments"
            )
        parts = [as_floats(self.name, part) for part in batch]
        weights = None if sample_weight is None else as_floats(self.name, sample_weight)
        with np.errstate(all="ignore"):  # infinities and NaN are results
            return self.counted(*parts, weights=weights)

    @abstractmethod
    def counted(self, *batch: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """Return the contribution of a batch of float64 arrays."""

    @abstractmethod
    def result(self, sums: np.ndarray) -> float:
        """Return the metric's value; 0.0 if nothing was counted."""


class Averaged(MetricRule):
    """A mean over examples; its sums are (weighted total, weight)."""

    shape = (2,)

    def counted(self, *batch: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """Return the contribution of a batch; see ``MetricRule.counted``."""
        per_example, weights = per_sample(self.name, self.values(*batch), weights, np.mean)
        examples = per_example.shape[0] if per_example.ndim else 1
        count = examples if weights is None else weights.sum()
        return np.array([per_example.sum(), count], np.float64)

    def result(self, sums: np.ndarray) -> float:
        """Return the mean; see ``MetricRule.result``."""
        total, count = sums
        return float(total / count) if count else 0.0

    @abstractmethod
    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return the values to average; axis 0 is the examples."""


class Mean(Averaged):
    """Mean of values over examples."""

    name = "mean"
    takes = ("values",)

    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return the values themselves."""
        return batch[0]


class Sum(MetricRule):
    """Sum of values."""

    name = "sum"
    takes = ("values",)
    shape = (1,)

    def counted(self, *batch: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """Return the contribution of a batch; see ``MetricRule.counted``."""
        per_example, _ = per_sample(self.name, batch[0], weights, np.sum)
        return np.array([per_example.sum()], np.float64)

    def result(self, sums: np.ndarray) -> float:
        """Return the sum; see ``MetricRule.result``."""
        return float(sums[0])


class Accuracy(Averaged):
    """Fraction of predictions that equal their labels."""

    name = "accuracy"

    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return 1 where prediction and label are equal, otherwise 0."""
        y_true, y_pred = alike(self.name, *batch)
        return np.asarray(y_true == y_pred, np.float64)


class BinaryAccuracy(Averaged):
    """Fraction of predictions that equal their labels after rounding at a threshold.

    Args:
        threshold: Number in (0, 1); a prediction above it is 1.
    """

    name = "binary_accuracy"

    def __init__(self, threshold: float = 0.5) -> None:
        fits = isinstance(threshold, int | float | np.floating) and 0 < threshold < 1
        check_fits(fits, f"{self.name}: expected threshold between 0 and 1", threshold)
        self.threshold = float(threshold)

    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return 1 where the rounded prediction equals the label, otherwise 0."""
        y_true, y_pred = alike(self.name, *batch)
        return np.asarray(y_true == (y_pred > self.threshold), np.float64)


class SparseCategoricalAccuracy(Averaged):
    """Fraction of examples whose likeliest class is the label; labels are class numbers."""

    name = "sparse_categorical_accuracy"

    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return 1 where the likeliest class is the label, otherwise 0."""
        y_true, y_pred = batch
        if not y_pred.ndim or not y_pred.shape[-1]:
            got = y_pred.shape if y_pred.ndim else "a scalar"
            raise ValueMismatchError(
                f"{self.name}: expected y_pred of shape (…, classes), got {got}"
            )
        if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
            y_true = y_true[..., 0]
        of, fits = y_pred.shape[:-1], y_true.shape == y_pred.shape[:-1]
        expected = f"{self.name}: expected y_true of shape {of} for y_pred of shape {y_pred.shape}"
        check_fits(fits, expected, y_true.shape, error=ValueMismatchError)
        return np.asarray(y_true == y_pred.argmax(axis=-1), np.float64)


class MeanSquaredError(Averaged):
    """Mean of squared differences."""

    name = "mean_squared_error"

    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return the squared differences."""
        y_true, y_pred = alike(self.name, *batch)
        return np.asarray(np.square(y_true - y_pred))


class MeanAbsoluteError(Averaged):
    """Mean of absolute differences."""

    name = "mean_absolute_error"

    def values(self, *batch: np.ndarray) -> np.ndarray:
        """Return the absolute differences."""
        y_true, y_pred = alike(self.name, *batch)
        return np.asarray(np.abs(y_true - y_pred))


class AUC(MetricRule):
    """Area under the ROC or the precision-recall curve, as a Riemann sum over thresholds.

    For each threshold it sums true positives, false positives, true negatives and false negatives.

    Args:
        num_thresholds: Number of at least 2; the outermost thresholds lie just outside [0, 1].
        curve: "ROC" or "PR".
        summation_method: "interpolation" (trapezoids; for PR the interpolation of Davis and
            Goadrich 2006), "minoring" or "majoring".
        thresholds: Numbers in [0, 1] that replace the evenly spaced thresholds; the outermost ones
            are added.
        from_logits: Whether a sigmoid is applied to the predictions first.
    """

    name = "auc"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        thresholds: Any = None,
        from_logits: bool = False,
    ) -> None:
        check_fits(curve in ("ROC", "PR"), f"{self.name}: expected curve 'ROC' or 'PR'", curve)
        fits = summation_method in ("interpolation", "minoring", "majoring")
        expected = "expected summation_method 'interpolation', 'minoring' or 'majoring'"
        check_fits(fits, f"{self.name}: {expected}", summation_method)
        if thresholds is not None:
            try:
                inner = np.sort(np.asarray(thresholds, np.float64), axis=None)
            except (TypeError, ValueError):
                inner = np.array([np.nan])
            fits = np.ndim(thresholds) == 1 and bool(np.all((inner >= 0) & (inner <= 1)))
            check_fits(fits, f"{self.name}: expected a list of thresholds from 0 to 1", thresholds)
        else:
            expected = f"{self.name}: expected num_thresholds above 1"
            count = checked_integer(expected, num_thresholds, 2)
            inner = np.arange(1, count - 1) / (count - 1)
        self.curve = curve
        self.summation_method = summation_method
        self.from_logits = from_logits
        self.thresholds = np.concatenate(([0.0 - EDGE], inner, [1.0 + EDGE]))
        self.shape = (4, len(self.thresholds))

    def counted(self, *batch: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """Return the contribution of a batch; an example with ``y_true`` above 0 is positive."""
        y_true, y_pred = alike(self.name, *batch)
        if self.from_logits:
            y_pred = 1 / (1 + np.exp(-y_pred))
        if y_pred.size and not (y_pred.min() >= 0 and y_pred.max() <= 1):
            raise ValueMismatchError(
                f"{self.name}: expected predictions from 0 to 1, got {y_pred.min()} to "
                f"{y_pred.max()}",
                hint="AUC(from_logits=True) applies a sigmoid",
            )
        weights = np.ones(()) if weights is None else squeezed(weights, y_pred)
        if weights.ndim < y_pred.ndim:
            weights = weights.reshape(weights.shape + (1,) * (y_pred.ndim - weights.ndim))
        weights = broadcast(self.name, weights, y_pred.shape)
        # Of each prediction: how many thresholds lie below it.
        below = np.searchsorted(self.thresholds, y_pred.ravel(), side="left")
        positive, flat = y_true.ravel() > 0, weights.ravel()
        true = self._counted(below[positive], flat[positive])
        false = self._counted(below[~positive], flat[~positive])
        return np.stack([true, false, flat[~positive].sum() - false, flat[positive].sum() - true])

    def _counted(self, below: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return for each threshold the weight of the predictions above it."""
        count = len(self.thresholds)
        by_position = np.bincount(below, weights, minlength=count + 1)
        return by_position[::-1].cumsum()[::-1][1:]

    def result(self, sums: np.ndarray) -> float:
        """Return the area; see ``MetricRule.result``."""
        true, false, not_false, not_true = sums
        if self.curve == "PR" and self.summation_method == "interpolation":
            return _interpolated_pr(true, false, not_true)
        recall = ratio(true, true + not_true)
        if self.curve == "ROC":
            x, y = ratio(false, false + not_false), recall
        else:
            x, y = recall, ratio(true, true + false)
        if self.summation_method == "interpolation":
            heights = (y[:-1] + y[1:]) / 2
        elif self.summation_method == "minoring":
            heights = np.minimum(y[:-1], y[1:])
        else:
            heights = np.maximum(y[:-1], y[1:])
        return float(((x[:-1] - x[1:]) * heights).sum())


def _interpolated_pr(true: np.ndarray, false: np.ndarray, not_true: np.ndarray) -> float:
    """Return the area below a precision-recall curve between whose points counts are linear."""
    positives = true + false
    slope = ratio(true[:-1] - true[1:], np.maximum(positives[:-1] - positives[1:], 0))
    intercept = true[1:] - slope * positives[1:]
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    growth = np.where(both, ratio(positives[:-1], positives[1:]), 1.0)
    growth[growth <= 0] = 1.0
    steps = slope * (true[:-1] - true[1:] + intercept * np.log(growth))
    return float(ratio(steps, true[1:] + not_true[1:]).sum())


def ratio(dividend: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Return the quotients, with 0 where the divisor is 0."""
    quotients: np.ndarray = np.zeros(dividend.shape)
    np.divide(dividend, divisor, out=quotients, where=divisor != 0)
    return quotients


def as_floats(name: str, value: Any) -> np.ndarray:
    """Return ``value`` as a float64 array.

    Raises:
        ValueMismatchError: It is not numeric.
    """
    try:
        array = plain_array(value)
    except (TypeError, ValueError) as exc:
        got = exc if isinstance(exc, HiddenValues) else type(value).__name__
        raise ValueMismatchError(f"{name}: expected numbers, got {got}") from exc
    if array.dtype.kind not in "biuf" and array.dtype.name not in DTYPE_NAMES:
        got = type(value).__name__ if array.dtype.kind in "OUS" else array.dtype.name
        raise ValueMismatchError(f"{name}: expected numbers, got {got}")
    return array.astype(np.float64)


def alike(name: str, y_true: np.ndarray, y_pred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays in one shape; a last axis of 1 that only one of them has is dropped.

    Raises:
        ValueMismatchError: The shapes differ in another way.
    """
    if y_pred.ndim == y_true.ndim + 1 and y_pred.shape[-1] == 1:
        y_pred = y_pred[..., 0]
    elif y_true.ndim == y_pred.ndim + 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    if y_true.shape != y_pred.shape:
        raise ValueMismatchError(
            f"{name}: expected y_true and y_pred of one shape, got {y_true.shape} and "
            f"{y_pred.shape}"
        )
    return y_true, y_pred


def per_sample(
    name: str, values: np.ndarray, weights: np.ndarray | None, reduce: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (weighted value of each example, weight of each example or None).

    Args:
        name: Name of the metric.
        values: Array with the examples on axis 0, or a scalar.
        weights: Array whose shape is a prefix of the values' shape, or None.
        reduce: ``np.mean`` or ``np.sum``, applied to all axes that the weights do not have, and
            to all axes but the first.

    Raises:
        ValueMismatchError: The weights do not fit, or there are examples without values.
    """
    if not values.size and reduce is np.mean:  # of nothing there is no mean
        if values.shape[0]:
            raise ValueMismatchError(
                f"{name}: expected values of each example, got shape {values.shape}"
            )
        return np.zeros(0), None
    if weights is not None:
        weights = squeezed(weights, values)
        expected = (
            f"{name}: expected sample_weight of at most {values.ndim} axes, as the values have"
        )
        fits = weights.ndim <= values.ndim
        check_fits(fits, expected, weights.ndim, error=ValueMismatchError)
        if weights.ndim < values.ndim:
            values = reduce(values, axis=tuple(range(weights.ndim, values.ndim)))
        weights = broadcast(name, weights, values.shape)
        values = values * weights
        if weights.ndim > 1:
            weights = reduce(weights, axis=tuple(range(1, weights.ndim)))
    if values.ndim > 1:
        values = reduce(values, axis=tuple(range(1, values.ndim)))
    return values, weights


def squeezed(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return weights of shape (n, 1) for values of shape (n,) as (n,)."""
    fits = weights.ndim == values.ndim + 1 and weights.shape[-1] == 1
    return weights[..., 0] if fits else weights


def broadcast(name: str, weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weights broadcast to a shape.

    Raises:
        ValueMismatchError: They do not fit.
    """
    try:
        return np.broadcast_to(weights, shape)
    except ValueError:
        raise ValueMismatchError(
            f"{name}: expected sample_weight of shape {shape}, got {weights.shape}"
        ) from None
