"""What metrics compute: values of Keras's documentation, weights, shapes, sums of parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops import for_each
from psync.errors import ConfigurationError, ValueMismatchError
from psync.numerics import metric_rules as rules


def value(rule: rules.MetricRule, *batch: Any, sample_weight: Any = None) -> float:
    return rule.result(rule.contribution(*batch, sample_weight=sample_weight))


LABELS, SCORES = [[2], [1]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]]


@for_each(
    "rule, batch, sample_weight, expected",
    [
        (rules.Mean(), ([1, 3, 5, 7],), None, 4.0),
        (rules.Mean(), ([1, 3, 5, 7],), [1, 1, 0, 0], 2.0),
        (rules.Mean(), (2.5,), None, 2.5),
        (rules.Mean(), ([[1, 3], [5, 7]],), [[1, 0], [1, 1]], (0.5 + 6) / 1.5),
        (rules.Mean(), ([[1, 3], [5, 7]],), [1, 3], (2 + 18) / 4),
        (rules.Sum(), ([1, 3, 5, 7],), None, 16.0),
        (rules.Sum(), ([1, 3, 5, 7],), [1, 1, 0, 0], 4.0),
        (rules.Sum(), ([[1, 3], [5, 7]],), [1, 2], 28.0),
        (rules.Accuracy(), ([[1], [2], [3], [4]], [[0], [2], [3], [4]]), None, 0.75),
        (rules.Accuracy(), ([[1], [2], [3], [4]], [[0], [2], [3], [4]]), [1, 1, 0, 0], 0.5),
        (rules.BinaryAccuracy(), ([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]]), None, 0.75),
        (
            rules.BinaryAccuracy(),
            ([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]]),
            [1, 0, 0, 1],
            0.5,
        ),
        (rules.BinaryAccuracy(0.7), ([1, 1], [0.6, 0.8]), None, 0.5),
        (rules.SparseCategoricalAccuracy(), (LABELS, SCORES), None, 0.5),
        (rules.SparseCategoricalAccuracy(), (LABELS, SCORES), [0.7, 0.3], 0.3),
        (rules.SparseCategoricalAccuracy(), ([2, 1], SCORES), None, 0.5),
        (rules.MeanSquaredError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 0.25),
        (rules.MeanSquaredError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), [1, 0], 0.5),
        (rules.MeanAbsoluteError(), ([[0, 1], [0, 0]], [[3, 1], [0, 0]]), None, 0.75),
        (rules.AUC(3), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]), None, 0.75),
        (rules.AUC(3), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]), [1, 0, 0, 1], 1.0),
        (rules.AUC(np.int64(3)), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]), [[1], [0], [0], [1]], 1.0),
        (rules.BinaryAccuracy(np.float32(0.5)), ([0, 1], [0.4, 0.4]), None, 0.5),
    ],
)
def test_values_are_those_of_keras(
    rule: rules.MetricRule, batch: tuple[Any, ...], sample_weight: Any, expected: float
) -> None:
    assert value(rule, *batch, sample_weight=sample_weight) == pytest.approx(expected)


@for_each("rule", [rules.Mean(), rules.Sum(), rules.Accuracy(), rules.AUC(), rules.AUC(curve="PR")])
def test_without_examples_the_value_is_0(rule: rules.MetricRule) -> None:
    assert rule.result(np.zeros(rule.shape)) == 0.0


class TestAUC:
    y_true = (0, 0, 1, 1, 1, 0)
    y_pred = (0.1, 0.4, 0.35, 0.8, 0.9, 0.6)

    def brute_force(self, thresholds: np.ndarray) -> np.ndarray:
        true, pred = np.array(self.y_true) > 0, np.array(self.y_pred)
        rows = [
            [(true & above).sum(), (~true & above).sum(),
             (~true & ~above).sum(), (true & ~above).sum()]
            for above in (pred > threshold for threshold in thresholds)
        ]  # fmt: skip
        return np.array(rows).T

    @for_each("num_thresholds", [2, 3, 7, 200])
    def test_counts_are_those_of_each_threshold(self, num_thresholds: int) -> None:
        rule = rules.AUC(num_thresholds)
        counted = rule.contribution(self.y_true, self.y_pred)
        np.testing.assert_array_equal(counted, self.brute_force(rule.thresholds))

    def test_a_prediction_on_a_threshold_is_not_above_it(self) -> None:
        rule = rules.AUC(thresholds=[0.5])
        counted = rule.contribution([1, 1], [0.5, 0.6])
        np.testing.assert_array_equal(counted[0], [2, 1, 0])

    def test_many_thresholds_come_close_to_the_area_by_ranks(self) -> None:
        positives = [p for t, p in zip(self.y_true, self.y_pred, strict=True) if t]
        negatives = [p for t, p in zip(self.y_true, self.y_pred, strict=True) if not t]
        pairs = [p > n for p in positives for n in negatives]
        assert value(rules.AUC(2000), self.y_true, self.y_pred) == pytest.approx(np.mean(pairs))

    def test_ways_of_summing_lie_in_order(self) -> None:
        low, middle, high = (
            value(rules.AUC(3, summation_method=method), self.y_true, self.y_pred)
            for method in ("minoring", "interpolation", "majoring")
        )
        assert low < middle < high

    def test_areas_below_precision_and_recall(self) -> None:
        low, high = (
            value(rules.AUC(9, "PR", method), self.y_true, self.y_pred)
            for method in ("minoring", "majoring")
        )
        assert 0 < low < high <= 1
        assert value(rules.AUC(9, "PR"), [0, 1, 1], [0.1, 0.8, 0.9]) == pytest.approx(1.0)

    def test_logits_go_through_a_sigmoid(self) -> None:
        logits = [-1000.0, -1.0, 0.5, 4.0]
        probabilities = [0.0, *(1 / (1 + np.exp(-x)) for x in (-1.0, 0.5, 4.0))]
        direct = rules.AUC().contribution([0, 1, 0, 1], probabilities)
        np.testing.assert_array_equal(
            rules.AUC(from_logits=True).contribution([0, 1, 0, 1], logits), direct
        )

    def test_predictions_outside_of_0_to_1_are_refused(self) -> None:
        with pytest.raises(ValueMismatchError, match=r"from 0 to 1, got -1\.0 to 0\.5\n.*sigmoid"):
            rules.AUC().contribution([0, 1], [-1.0, 0.5])
        with pytest.raises(ValueMismatchError, match="from 0 to 1"):
            rules.AUC().contribution([0, 1], [float("nan"), 0.5])

    def test_weights_may_be_of_each_example(self) -> None:
        counted = rules.AUC(2).contribution(
            [[1, 1], [1, 1]], np.full((2, 2), 0.5), sample_weight=[1, 3]
        )
        assert counted[0, 0] == 8


@for_each(
    "make, text",
    [
        (lambda: rules.BinaryAccuracy(1.0), "expected threshold between 0 and 1"),
        (lambda: rules.AUC(1), "expected num_thresholds above 1, got 1"),
        (lambda: rules.AUC(curve="roc"), "expected curve 'ROC' or 'PR'"),
        (lambda: rules.AUC(summation_method="none"), "expected summation_method"),
        (lambda: rules.AUC(thresholds=[0.5, 2]), "expected a list of thresholds from 0 to 1"),
        (lambda: rules.AUC(thresholds=[np.nan]), "expected a list of thresholds from 0 to 1"),
        (lambda: rules.AUC(thresholds=["a"]), "expected a list of thresholds from 0 to 1"),
        (lambda: rules.AUC(thresholds=[[0.5]]), "expected a list of thresholds from 0 to 1"),
        (lambda: rules.BinaryAccuracy("a"), "expected threshold between 0 and 1, got 'a'"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


@for_each(
    "rule, batch, weights, text",
    [
        (rules.Mean(), ("abc",), None, "mean: expected numbers, got str"),
        (rules.Accuracy(), ([1, 2], [1, 2, 3]), None, r"of one shape, got \(2,\) and \(3,\)"),
        (rules.SparseCategoricalAccuracy(), ([1, 2], [[0, 1]]), None, r"y_true of shape \(1,\)"),
        (rules.SparseCategoricalAccuracy(), ([1], 0.5), None, "got a scalar"),
        (rules.Mean(), ([1, 2],), [1, 2, 3], r"sample_weight of shape \(2,\), got \(3,\)"),
        (rules.Mean(), ([1, 2],), [[1, 2], [3, 4]], "sample_weight of at most 1 axes"),
        (rules.AUC(), ([1, 0], [0.5, 0.5]), [1, 2, 3], r"sample_weight of shape \(2,\)"),
        (rules.Mean(), (), None, r"mean: expected \(values\), got 0 arguments"),
        (rules.AUC(), ([1],), None, r"auc: expected \(y_true, y_pred\), got 1 arguments"),
        (rules.Mean(), (["1"],), None, "mean: expected numbers, got list"),
        (rules.Mean(), (None,), None, "mean: expected numbers, got NoneType"),
        (rules.Mean(), ([1j],), None, "mean: expected numbers, got complex128"),
        (rules.Mean(), ([[1], [1, 2]],), None, "mean: expected numbers, got list"),
        (rules.Mean(), (np.zeros((3, 0)),), None, r"values of each example, got shape \(3, 0\)"),
        (rules.SparseCategoricalAccuracy(), ([1], np.zeros((1, 0))), None, r"got \(1, 0\)"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    rule: rules.MetricRule, batch: tuple[Any, ...], weights: Any, text: str
) -> None:
    with pytest.raises(ValueMismatchError, match=text):
        rule.contribution(*batch, sample_weight=weights)


@for_each("weight", [None, 1.0, []])
def test_a_batch_without_examples_counts_nothing(weight: Any) -> None:
    rule = rules.Mean()
    np.testing.assert_array_equal(rule.contribution([], sample_weight=weight), [0, 0])


def test_infinities_are_results() -> None:
    rule = rules.MeanSquaredError()
    assert value(rule, [1e300], [-1e300]) == np.inf
    assert np.isnan(value(rule, [np.inf], [np.inf]))


def test_a_last_axis_of_one_that_only_one_has_is_dropped() -> None:
    assert value(rules.MeanSquaredError(), [1.0, 2.0], [[1.0], [4.0]]) == 2.0
    assert value(rules.MeanSquaredError(), [[1.0], [2.0]], [1.0, 4.0]) == 2.0
    assert value(rules.Mean(), [1.0, 3.0], sample_weight=[[1.0], [3.0]]) == 2.5


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    )
)
@pytest.mark.parametrize("rule", [rules.MeanSquaredError(), rules.BinaryAccuracy(), rules.AUC(5)])
def test_batches_may_be_counted_apart_and_added(
    rule: rules.MetricRule, batches: list[list[tuple[int, float]]]
) -> None:
    apart = sum(
        (rule.contribution([t for t, _ in batch], [p for _, p in batch]) for batch in batches),
        np.zeros(rule.shape),
    )
    whole = [pair for batch in batches for pair in batch]
    together = rule.contribution([t for t, _ in whole], [p for _, p in whole])
    np.testing.assert_allclose(apart, together)
