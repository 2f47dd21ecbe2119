"""Norms of the mean of a step: who must measure what, and which factors follow."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from psync.numerics.rules import SGD, Lamb, RuleOptions, UpdateRule, clipped_by_norm
from psync.numerics.sums import sum_of_squares
from psync.store.step_norms import GRADIENTS, UPDATES, ShardSums, StepNorms

NOTHING, EACH, ALL = RuleOptions(), RuleOptions(clipnorm=5.0), RuleOptions(global_clipnorm=5.0)

TWO_VARIABLES = [(0, 0), (1, 0)]
TWO_SHARDS = [(0, 0), (0, 2)]


def rule(options: RuleOptions, *, layerwise: bool = False) -> UpdateRule:
    return (Lamb() if layerwise else SGD()).with_options(options)


@pytest.mark.parametrize(
    ("options", "layerwise", "apart", "spread"),
    [
        (NOTHING, False, [], []),
        (EACH, False, [], [GRADIENTS]),
        (ALL, False, [GRADIENTS], [GRADIENTS]),
        (NOTHING, True, [], [UPDATES]),
        (EACH, True, [], [GRADIENTS, UPDATES]),
        (ALL, True, [GRADIENTS], [GRADIENTS, UPDATES]),
    ],
)
def test_ps_tasks_measure_together_what_lies_on_several_of_them(
    options: RuleOptions, layerwise: bool, apart: list[str], spread: list[str]
) -> None:
    norms = StepNorms(rule(options, layerwise=layerwise))
    assert norms.passes_together(spread=False) == apart
    assert norms.passes_together(spread=True) == spread


@pytest.mark.parametrize(
    ("options", "layerwise", "whole", "cut"),
    [
        (NOTHING, False, [], []),
        (EACH, False, [GRADIENTS], [GRADIENTS]),
        (ALL, False, [GRADIENTS], [GRADIENTS]),
        (NOTHING, True, [], [UPDATES]),  # of a whole variable, as it is applied
        (ALL, True, [GRADIENTS], [GRADIENTS, UPDATES]),
    ],
)
def test_a_ps_measures_alone_what_it_was_not_told(
    options: RuleOptions, layerwise: bool, whole: list[str], cut: list[str]
) -> None:
    chosen = rule(options, layerwise=layerwise)
    assert StepNorms(chosen).passes_alone(TWO_VARIABLES) == whole
    assert StepNorms(chosen).passes_alone(TWO_SHARDS) == cut
    told = StepNorms(chosen, {0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert told.passes_alone(TWO_SHARDS) == []


@pytest.mark.parametrize("options", [EACH, ALL])
def test_scales_are_those_of_a_worker_that_has_all_shards(options: RuleOptions) -> None:
    rng = np.random.default_rng(1)
    keys = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    shards = [rng.standard_normal(40) * 0.6 for _ in keys]
    clipped = clipped_by_norm(shards, [variable for variable, _ in keys], options)
    sums = [(*key, sum_of_squares(shard), 0.0) for key, shard in zip(keys, shards, strict=True)]
    for order in itertools.islice(itertools.permutations(sums), 0, None, 97):
        norms = StepNorms(rule(options))
        norms.conclude(GRADIENTS, order)
        assert norms.scales is not None
        for key, shard, expected in zip(keys, shards, clipped, strict=True):
            assert (shard * norms.scales[key[0]]).tolist() == np.asarray(expected).tolist()


def test_a_ratio_is_that_of_all_shards_of_a_variable() -> None:
    sums: list[ShardSums] = [(0, 1, 12.0, 3.0), (1, 0, 9.0, 0.0), (0, 0, 4.0, 1.0)]
    norms = StepNorms(Lamb())
    norms.conclude(UPDATES, sums)
    assert norms.ratios == {0: math.sqrt(16) / math.sqrt(4), 1: 1.0}
    assert norms.scales is None


def test_norms_that_are_not_finite() -> None:
    """As a worker treats them, and Keras."""
    each, every = StepNorms(rule(EACH)), StepNorms(rule(ALL))
    sums = [(0, 0, math.inf, 0.0), (1, 0, math.nan, 0.0), (2, 0, 4.0, 0.0)]
    each.conclude(GRADIENTS, sums)
    assert str(each.scales) == "{0: 0.0, 1: nan, 2: 1.0}"
    every.conclude(GRADIENTS, sums[::2])
    assert str(every.scales) == "{0: nan, 2: nan}"


def test_of_what_is_known_all_shards_must_have_their_factors() -> None:
    assert StepNorms(SGD()).known_for(TWO_VARIABLES)
    assert StepNorms(SGD(), {0: 1.0, 1: 0.5}).known_for(TWO_VARIABLES)
    assert StepNorms(SGD(), {0: 1.0}).known_for(TWO_SHARDS)
    assert not StepNorms(SGD(), {0: 1.0}).known_for(TWO_VARIABLES)
    assert not StepNorms(Lamb(), {0: 1.0, 1: 1.0}, {1: 1.0}).known_for(TWO_VARIABLES)
