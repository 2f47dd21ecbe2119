"""Layerwise rules: norms of whole variables, whatever pieces they are in.

Their laws are in test_update_rules.py; that they compute what Keras does in test_optimizers_golden.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from psync.numerics.memory import Scratch
from psync.numerics.rules import PIECE, Lamb, RuleOptions, slot_dtype

STEP = 4  # of the updates that are measured


def arrays(
    size: int, dtype: object = np.float64
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A parameter, a gradient, and slots that have been used."""
    rng = np.random.default_rng(3)
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    param, grad = (rng.standard_normal(size).astype(kind) for _ in range(2))
    moments = [rng.standard_normal(size), rng.random(size)]
    return param, grad, [moment.astype(slot_dtype(kind)) for moment in moments]


def update_of(grad: np.ndarray, slots: list[np.ndarray]) -> np.ndarray:
    t = STEP + 1
    m = (0.9 * slots[0] + 0.1 * grad) / (1 - 0.9**t)
    v = (0.999 * slots[1] + 0.001 * grad**2) / (1 - 0.999**t)
    return m / (np.sqrt(v) + 1e-7)


@pytest.mark.parametrize("weight_decay", [None, 0.5])
def test_an_update_has_the_length_of_the_variable_times_the_learning_rate(
    weight_decay: float | None,
) -> None:
    rule = Lamb(0.01).with_options(RuleOptions(weight_decay=weight_decay))
    param, grad, slots = arrays(1000)
    decayed = param * (1 - 0.01 * (weight_decay or 0))
    direction = update_of(grad, slots)
    expected = decayed - 0.01 * np.linalg.norm(decayed) * direction / np.linalg.norm(direction)
    rule.apply(param, grad, slots, param, slots, STEP, Scratch())
    np.testing.assert_allclose(param, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_measuring_changes_nothing_and_sums_in_float64(dtype: object) -> None:
    param, grad, slots = arrays(3 * PIECE + 5, dtype)
    before = [array.tobytes() for array in (param, grad, *slots)]
    of_param, of_update = Lamb(0.01).measure([(param, grad, slots)], STEP, Scratch())
    assert [array.tobytes() for array in (param, grad, *slots)] == before
    assert of_param == pytest.approx(float(np.sum(param.astype(np.float64) ** 2)), rel=1e-13)
    wide = [slot.astype(np.float64) for slot in slots]
    expected = update_of(grad.astype(np.float64), wide)
    assert of_update == pytest.approx(float(np.sum(expected**2)), rel=1e-5)


def test_norms_do_not_depend_on_chunks_or_blocks() -> None:
    param, grad, slots = arrays(5 * PIECE + 17, np.float32)
    whole = Lamb().measure([(param, grad, slots)], STEP, Scratch())
    cuts = [slice(0, 2 * PIECE), slice(2 * PIECE, 3 * PIECE), slice(3 * PIECE, None)]
    blocks = ((param[cut], grad[cut], [slot[cut] for slot in slots]) for cut in cuts)
    assert Lamb().measure(blocks, STEP, Scratch(7)) == whole


def test_pieces_applied_with_the_ratio_of_the_whole_make_the_whole() -> None:
    """Shards of a variable, each measured on its own ps."""
    rule = Lamb(0.1)
    param, grad, slots = arrays(1000, np.float32)
    parts = [slice(0, 300), slice(300, 1000)]
    sums = [
        rule.measure([(param[part], grad[part], [s[part] for s in slots])], STEP, Scratch())
        for part in parts
    ]
    expected, expected_slots = param.copy(), [slot.copy() for slot in slots]
    rule.apply(expected, grad, expected_slots, expected, expected_slots, STEP, Scratch())
    for part in parts:
        cut = [slot[part] for slot in slots]
        ratio = rule.trust_ratio(sums)
        rule.apply(param[part], grad[part], cut, param[part], cut, STEP, Scratch(), ratio)
    np.testing.assert_allclose(param, expected, rtol=1e-6)
    assert [s.tobytes() for s in slots] == [s.tobytes() for s in expected_slots]


def test_the_ratio_is_one_where_there_is_none() -> None:
    assert Lamb.trust_ratio([(9.0, 4.0)]) == 1.5
    assert Lamb.trust_ratio([(5.0, 4.0), (4.0, 0.0)]) == 1.5
    assert Lamb.trust_ratio([(0.0, 4.0)]) == 1
    assert Lamb.trust_ratio([(4.0, 0.0)]) == 1
    assert Lamb.trust_ratio([(math.nan, 4.0)]) == 1
    assert Lamb.trust_ratio([(4.0, math.inf)]) == 0
    assert Lamb.trust_ratio([(1e308, 1.0), (1e308, 1.0)]) == math.inf  # its sum is beyond floats


def test_gradients_are_clipped_before_they_are_measured() -> None:
    rule = Lamb().with_options(RuleOptions(clipvalue=0.5))
    param, grad, slots = arrays(100)
    clipped = np.clip(grad, -0.5, 0.5)
    assert rule.measure([(param, grad, slots)], STEP, Scratch()) == Lamb().measure(
        [(param, clipped, slots)], STEP, Scratch()
    )
