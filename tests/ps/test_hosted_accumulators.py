"""Descriptions of accumulators, gradients as messages, and turns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from psync.errors import ValueMismatchError
from psync.ps.takes import (
    gradient_of,
    rule_of,
)
from psync.wire.messages import ApplyGradient, DefineAccumulator
from psync.wire.tensors import to_bytes_view

DENSE = DefineAccumulator("g", "dense", "float32", [None, 2], "SUM", "", True, 3)
SPARSE = DefineAccumulator("g", "sparse", "bfloat16", None, "MEAN", "total", False, 0)


def applying(shape: list[int]) -> ApplyGradient:
    return ApplyGradient(1, 1, -1, 0, "g", shape, None, 0, 1.0)


@pytest.mark.parametrize("shape", [[0, 1 << 61], [0, 1 << 62], [0, 1 << 40, 1 << 40]])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_gradient_without_elements_of_which_no_sum_can_be_made_is_refused(
    kind: str, shape: list[int]
) -> None:
    rule = rule_of(dataclasses.replace(SPARSE, kind=kind))
    with pytest.raises(ValueMismatchError, match="no array has the shape"):
        gradient_of(applying(shape), [], rule)


def test_a_gradient_of_a_shape_that_no_array_has_is_refused() -> None:
    with pytest.raises(ValueMismatchError, match="no array has the shape"):
        gradient_of(applying([1] * 70), [to_bytes_view(np.ones(1, np.float32))], rule_of(DENSE))
