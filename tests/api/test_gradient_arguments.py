"""Gradients as users give them. What is refused is listed in test_optimizer_handles.py."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import strategy_of
from psync.api.gradient_arguments import checked_pairs
from psync.errors import ValueMismatchError


@pytest.fixture
def variables() -> tuple[psync.Variable, psync.Variable]:
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
        w = psync.Variable(np.zeros((2, 2), np.float32), name="w")
    assert isinstance(v, psync.Variable)
    assert isinstance(w, psync.Variable)
    return v, w


def test_pairs_come_back_as_arrays_that_fit(
    variables: tuple[psync.Variable, psync.Variable],
) -> None:
    v, w = variables
    gradient = np.ones(2, np.float32)
    pairs = checked_pairs([(gradient, v), ([[1, 2], [3, 4]], w)], None)
    assert pairs[0][0] is gradient
    assert (pairs[1][0].dtype, pairs[1][0].tolist()) == (np.float32, [[1, 2], [3, 4]])
    assert [variable for _, variable in pairs] == [v, w]
    with strategy_of().scope():
        scalar = psync.Variable(1.0)
    ((number, _),) = checked_pairs([(0.5, scalar)], None)
    assert (number.dtype, number.shape, number.item()) == (np.float32, (), 0.5)


def test_an_array_in_another_memory_layout_is_laid_out_as_the_variable(
    variables: tuple[psync.Variable, psync.Variable],
) -> None:
    _, w = variables
    gradient = np.arange(4, dtype=np.float32).reshape(2, 2).T
    ((array, _),) = checked_pairs([(gradient, w)], None)
    assert np.array_equal(array, gradient)
    assert array.flags.c_contiguous


def test_none_is_passed_over_unless_there_is_nothing_else(
    variables: tuple[psync.Variable, psync.Variable],
) -> None:
    v, w = variables
    assert [
        variable for _, variable in checked_pairs([(None, v), (np.ones((2, 2), "f4"), w)], None)
    ] == [w]
    with pytest.raises(ValueMismatchError, match=r"all gradients are None \(v, w\)"):
        checked_pairs([(None, v), (None, w)], None)


def test_nan_is_a_gradient_unless_an_optimizer_forbids_it(
    variables: tuple[psync.Variable, psync.Variable],
) -> None:
    gradient = np.array([1, np.nan], np.float32)
    checked_pairs([(gradient, variables[0])], None)
    with pytest.raises(
        ValueMismatchError, match="1 of 2 elements are NaN or infinite\nhint: sgd was"
    ):
        checked_pairs([(gradient, variables[0])], "sgd")
