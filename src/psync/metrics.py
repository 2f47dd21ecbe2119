"""Metrics: sums that steps add to on their workers, and one value that the program reads.

The sums of a metric are one ON_READ variable on a ps: each worker adds to a copy of its own, in one
small message, and reading adds the copies up. They outlive the worker, and what a closure adds
counts once, also when it runs again elsewhere.

    with strategy.scope():
        accuracy = psync.metrics.SparseCategoricalAccuracy()

    async def step(batches):
        ...
        await accuracy.update_state(labels, logits)

    await coordinator.join()
    print(await accuracy.result())
    await accuracy.reset_state()

A metric of your own is a rule of your own, a subclass of ``MetricRule``: what a batch adds to the
sums, and the value of the sums. It is computed where it is updated and read, never on a ps:
``psync.metrics.Metric(MyRule())``. See ``docs/howto/rules.md``.

Source: ``keras.metrics`` of Keras 3, for names, arguments and formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from psync.api.variables import Variable, VariableAggregation, VariableSynchronization
from psync.numerics import metric_rules
from psync.numerics.metric_rules import Averaged as Averaged
from psync.numerics.metric_rules import MetricRule as MetricRule


class Metric:
    """Base of all metrics; declared in ``strategy.scope()``.

    Args:
        rule: What is added up, and what comes of it.
        name: Of the metric; its variable is called "<name>/sums".

    Raises:
        UsageError: Outside a scope, or inside a step.
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
        """Count a batch.

        Args:
            batch: As the metric's class says.
            sample_weight: Of each example (or of each value, in the values' shape); None: 1.

        Raises:
            ValueMismatchError: What is given does not fit together. Nothing was counted.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is gone.
            ClosureCancelled: In a step that was cancelled.

        Cancellation: Once begun, it ends in the background.
        """
        await self.add(self.contribution(*batch, sample_weight=sample_weight))

    def contribution(self, *batch: Any, sample_weight: Any = None) -> np.ndarray:
        """Return what a batch adds to the sums, without counting it.

        Contributions may be added up: so several batches can be counted in one message.

        Args:
            batch, sample_weight: See ``update_state``.

        Raises:
            ValueMismatchError: What is given does not fit together.
        """
        return self._rule.contribution(*batch, sample_weight=sample_weight)

    async def add(self, contribution: np.ndarray) -> None:
        """Count what ``contribution`` returned, or a sum of such; see ``update_state``."""
        await self._sums.assign_add(contribution)

    def value_of(self, sums: np.ndarray) -> float:
        """Return what the metric would be if these, a sum of contributions, were its sums."""
        return self._rule.result(sums)

    async def result(self) -> float:
        """Return the value: of all workers in the program, of this worker in a step.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        return self.value_of(await self._sums.read())

    async def reset_state(self) -> None:
        """Reset the sums: in the program for all workers, in a step for this one.

        Join first: what steps count at the same time is counted before or after.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is gone.
            ClosureCancelled: In a step that was cancelled.

        Cancellation: Once begun, it ends in the background.
        """
        await self._sums.assign(np.zeros(self._rule.shape))


class Mean(Metric):
    """Mean of values, over examples: ``update_state(values)``.

    An example is a position on axis 0; what lies behind it is averaged first.

    Args:
        name: Of the metric.

    Source: ``keras.metrics.Mean``.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(metric_rules.Mean(), name)


class Sum(Metric):
    """Sum of values: ``update_state(values)``.

    Args:
        name: Of the metric.

    Source: ``keras.metrics.Sum``.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(metric_rules.Sum(), name)


class Accuracy(Metric):
    """How often predictions equal labels: ``update_state(y_true, y_pred)``, of one shape.

    Args:
        name: Of the metric.

    Source: ``keras.metrics.Accuracy``.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(metric_rules.Accuracy(), name)


class BinaryAccuracy(Metric):
    """How often predictions above a threshold are 1: ``update_state(y_true, y_pred)``.

    Args:
        name: Of the metric.
        threshold: In (0, 1).

    Raises:
        ConfigurationError: The threshold is not.

    Source: ``keras.metrics.BinaryAccuracy``.
    """

    def __init__(self, name: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(metric_rules.BinaryAccuracy(threshold), name)


class SparseCategoricalAccuracy(Metric):
    """How often the likeliest class is the label.

    ``update_state(y_true, y_pred)``: class numbers of shape (…) and a score for each class of shape
    (…, classes).

    Args:
        name: Of the metric.

    Source: ``keras.metrics.SparseCategoricalAccuracy``.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(metric_rules.SparseCategoricalAccuracy(), name)


class MeanSquaredError(Metric):
    """Mean of squared differences: ``update_state(y_true, y_pred)``, of one shape.

    Args:
        name: Of the metric.

    Source: ``keras.metrics.MeanSquaredError``. Of one-dimensional batches each element is an
        example here; in Keras the whole batch is one.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(metric_rules.MeanSquaredError(), name)


class MeanAbsoluteError(Metric):
    """Mean of absolute differences; see ``MeanSquaredError``.

    Args:
        name: Of the metric.

    Source: ``keras.metrics.MeanAbsoluteError``.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(metric_rules.MeanAbsoluteError(), name)


class AUC(Metric):
    """Area under a curve: ``update_state(y_true, y_pred)``, labels 0 or 1, predictions in [0, 1].

    Args:
        num_thresholds: At which the curve is known, at least 2.
        curve: "ROC" or "PR" (precision over recall).
        summation_method: "interpolation", "minoring" or "majoring".
        name: Of the metric.
        thresholds: To be used instead of evenly spaced ones, in [0, 1].
        from_logits: Whether predictions are to go through a sigmoid first.

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
