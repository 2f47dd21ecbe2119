"""Metrics: sums that steps update on their workers, and one value that the program reads.

The sums of a metric are one ON_READ variable on a ps. Each worker updates its own copy with one
small message, and reading adds up the copies. The sums survive the loss of a worker. Each
contribution of a closure counts once, even if the closure runs again elsewhere.

    with strategy.scope():
        accuracy = psync.metrics.SparseCategoricalAccuracy()

    async def step(batches):
        ...
        await accuracy.update_state(labels, logits)

    await coordinator.join()
    print(await accuracy.result())
    await accuracy.reset_state()

To write a metric, subclass ``MetricRule``: it computes the contribution of a batch to the sums, and
the value of the sums. ``psync.metrics.Metric(MyRule())`` is then the metric. Rules run where the
metric is updated and read, never on a ps. See ``docs/howto/rules.md``.

Source: ``keras.metrics`` of Keras 3, for names, arguments and formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from psync.api.variables import Variable, VariableAggregation, VariableSynchronization
from psync.numerics import metric_rules
from psync.numerics.metric_rules import Averaged as Averaged
from psync.numerics.metric_rules import MetricRule as MetricRule


class Metric:
    """Base of all metrics; declared in ``strategy.scope()``.

    Args:
        rule: Computation of the sums and of the value.
        name: Name of the metric; its variable is called "<name>/sums".

    Raises:
        UsageError: The call is outside a scope, or inside a step.
    """

    def __init__(self, rule: metric_rules.MetricRule, name: str | None = None) -> None:
        self.name = name or rule.name
        self._rule = rule
        self._sums: Variable = Variable(
            np.zeros(rule.shape),
            name=f"{self.name}/sums",
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    def variables(self) -> list[Variable]:
        """The variable that holds the sums."""
        return [self._sums]

    async def update_state(self, *batch: Any, sample_weight: Any = None) -> None:
        """Add a batch to the metric.

        Args:
            batch: Arrays; see the metric's class.
            sample_weight: Weight of each example (or of each value, in the values' shape); None: 1.

        Raises:
            ValueMismatchError: The arguments do not fit together. Nothing was counted.
            UsageError: The call is outside a step, and no coordinator is running.
            ParameterServerLost: A ps is lost.
            ClosureCancelled: The step was cancelled.

        Cancellation: An update that has begun completes in the background.
        """
        await self.add(self.contribution(*batch, sample_weight=sample_weight))

    def contribution(self, *batch: Any, sample_weight: Any = None) -> np.ndarray:
        """Return a batch's contribution to the sums, without counting it.

        Contributions may be added up, so that several batches are counted in one message.

        Args:
            batch, sample_weight: See ``update_state``.

        Raises:
            ValueMismatchError: The arguments do not fit together.
        """
        return self._rule.contribution(*batch, sample_weight=sample_weight)

    async def add(self, contribution: np.ndarray) -> None:
        """Add a result of ``contribution``, or a sum of several; see ``update_state``."""
        await self._sums.assign_add(contribution)

    def value_of(self, sums: np.ndarray) -> float:
        """Return the value that the metric would have with these sums, a sum of contributions."""
        return self._rule.result(sums)

    async def result(self) -> float:
        """Return the value: over all workers in the program, of this worker in a step.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        return self.value_of(await self._sums.read())

    async def reset_state(self) -> None:
        """Reset the sums: for all workers in the program, for this worker in a step.

        Call ``join`` first: updates of concurrent steps may be counted before or after the reset.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running.
            ParameterServerLost: A ps is lost.
            ClosureCancelled: The step was cancelled.

        Cancellation: A reset that has begun completes in the background.
        """
        await self._sums.assign(np.zeros(self._rule.shape))


class _OfRule(Metric):
    """A metric whose rule has no options."""

    _rule_class: ClassVar[Callable[..., MetricRule]]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(self._rule_class(), name)


class Mean(_OfRule):
    """Mean of values over examples: ``update_state(values)``.

    An example is a position on axis 0; values on further axes are averaged first.

    Args:
        name: Name of the metric.

    Source: ``keras.metrics.Mean``.
    """

    _rule_class = metric_rules.Mean


class Sum(_OfRule):
    """Sum of values: ``update_state(values)``.

    Args:
        name: Name of the metric.

    Source: ``keras.metrics.Sum``.
    """

    _rule_class = metric_rules.Sum


class Accuracy(_OfRule):
    """Fraction of predictions that equal their labels: ``update_state(y_true, y_pred)``.

    Labels and predictions have one shape.

    Args:
        name: Name of the metric.

    Source: ``keras.metrics.Accuracy``.
    """

    _rule_class = metric_rules.Accuracy


class BinaryAccuracy(Metric):
    """Fraction of correct predictions, 1 above a threshold: ``update_state(y_true, y_pred)``.

    Args:
        name: Name of the metric.
        threshold: Number in (0, 1).

    Raises:
        ConfigurationError: The threshold is out of range.

    Source: ``keras.metrics.BinaryAccuracy``.
    """

    def __init__(self, name: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(metric_rules.BinaryAccuracy(threshold), name)


class SparseCategoricalAccuracy(_OfRule):
    """Fraction of examples whose likeliest class is the label.

    ``update_state(y_true, y_pred)``: class numbers of shape (…) and a score for each class of shape
    (…, classes).

    Args:
        name: Name of the metric.

    Source: ``keras.metrics.SparseCategoricalAccuracy``.
    """

    _rule_class = metric_rules.SparseCategoricalAccuracy


class MeanSquaredError(_OfRule):
    """Mean of squared differences: ``update_state(y_true, y_pred)``, of one shape.

    Args:
        name: Name of the metric.

    Source: ``keras.metrics.MeanSquaredError``. In a one-dimensional batch each element is an
        example here; in Keras the whole batch is one.
    """

    _rule_class = metric_rules.MeanSquaredError


class MeanAbsoluteError(_OfRule):
    """Mean of absolute differences; see ``MeanSquaredError``.

    Args:
        name: Name of the metric.

    Source: ``keras.metrics.MeanAbsoluteError``.
    """

    _rule_class = metric_rules.MeanAbsoluteError


class AUC(Metric):
    """Area under a curve: ``update_state(y_true, y_pred)``, labels 0 or 1, predictions in [0, 1].

    Args:
        num_thresholds: Number of points of the curve, at least 2.
        curve: "ROC" or "PR" (precision over recall).
        summation_method: "interpolation", "minoring" or "majoring".
        name: Name of the metric.
        thresholds: Numbers in [0, 1] that replace the evenly spaced thresholds.
        from_logits: Whether a sigmoid is applied to the predictions first.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: ``keras.metrics.AUC``, without its ``multi_label``.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        *,
        thresholds: Any = None,
        from_logits: bool = False,
    ) -> None:
        rule = metric_rules.AUC(num_thresholds, curve, summation_method, thresholds, from_logits)
        super().__init__(rule, name)
