"""Descriptions of accumulators, gradients as messages, and turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from accumulator_tools import take_grad
from psync.errors import ValueMismatchError
from psync.ps.takes import (
    definition_of,
    gradient_of,
    other_parameters,
    reply_of,
    rule_of,
)
from psync.store.dense_accumulators import ConditionalAccumulator
from psync.store.sparse_accumulators import SparseConditionalAccumulator
from psync.wire.messages import ApplyGradient, DefineAccumulator, GradientTaken
from psync.wire.tensors import to_bytes_view

DENSE = DefineAccumulator("g", "dense", "float32", [None, 2], "SUM", "", True, 3)
SPARSE = DefineAccumulator("g", "sparse", "bfloat16", None, "MEAN", "total", False, 0)


@pytest.mark.parametrize("definition", [DENSE, SPARSE])
def test_a_rule_and_its_description_say_the_same(definition: DefineAccumulator) -> None:
    rule: Any = rule_of(definition)
    assert definition_of(rule) == definition


def test_the_error_for_two_of_one_name_says_what_differs() -> None:
    first = definition_of(ConditionalAccumulator("float32", (2,), name="g"))
    second = definition_of(ConditionalAccumulator("float32", (2,), name="g", max_staleness=1))
    assert other_parameters(first, second).message == (
        'accumulator "g": other parameters than at first: expected max_staleness=0, '
        "got max_staleness=1"
    )


def applying(shape: list[int]) -> ApplyGradient:
    return ApplyGradient(1, 1, -1, 0, "g", shape, None, 0, 1.0)


def test_a_gradient_is_the_memory_that_came() -> None:
    body = bytearray(16)
    values: Any = gradient_of(applying([2, 2]), [memoryview(body)], rule_of(DENSE))
    values[1, 1] = 1.0
    assert bytes(body[12:]) == np.float32(1).tobytes()


def test_a_gradient_without_rows_has_no_bytes() -> None:
    given: Any = gradient_of(applying([0, 3]), [], rule_of(SPARSE))
    assert (given[0].shape, given[1].shape, given[2]) == ((0,), (0, 3), None)


def test_what_was_taken_is_sent_without_a_copy() -> None:
    rule = SparseConditionalAccumulator("float32", (None, 2), name="g")
    rule.apply_grad([4, 1], np.ones((2, 2), np.float32))
    take = take_grad(rule, 1)
    message, (indices, values) = reply_of(take)
    assert message == GradientTaken(1, 1, [2, 2], [-1, 2])
    assert bytes(indices) == np.array([1, 4]).tobytes()
    values[:4] = np.float32(7).tobytes()  # type: ignore[index]
    assert take.result().values[0, 0] == 7


def test_bytes_of_an_array_are_those_of_the_gradient() -> None:
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    values: Any = gradient_of(applying([2, 2]), [to_bytes_view(array)], rule_of(DENSE))
    assert (values == array).all()


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
