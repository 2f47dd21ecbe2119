"""Gradients whose norm is limited: of a variable, of all, of rows; and what is left alone."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from psync.numerics.rows import IndexedSlices
from psync.numerics.rules import RuleOptions, clipped_by_norm
from psync.numerics.sums import SQUARES_PIECE, scaled, sum_of_squares

EACH, ALL = RuleOptions(clipnorm=5.0), RuleOptions(global_clipnorm=5.0)


def test_without_a_limit_the_gradients_are_returned_as_they_are() -> None:
    gradients = [np.full(3, 1e30, np.float32), IndexedSlices(np.ones((1, 2)), [0])]
    clipped = clipped_by_norm(gradients, [0, 1], RuleOptions(clipvalue=1.0))
    assert all(a is b for a, b in zip(clipped, gradients, strict=True))


def test_each_variable_is_shortened_by_itself_and_no_array_is_changed() -> None:
    long, short = np.array([6.0, 8.0], np.float32), np.array([3.0, 4.0], np.float32)
    clipped = clipped_by_norm([long, short], [0, 1], EACH)
    assert clipped[0].tolist() == [3, 4]
    assert clipped[1] is short
    assert long.tolist() == [6, 8]


def test_the_global_norm_is_of_all_gradients_of_a_push() -> None:
    clipped = clipped_by_norm([np.array([[6.0]]), np.array([8.0, 0.0])], [0, 1], ALL)
    assert [gradient.tolist() for gradient in clipped] == [[[3.0]], [4.0, 0.0]]
    short = np.array([3.0, 4.0])
    assert clipped_by_norm([short], [0], ALL)[0] is short


def test_shards_of_one_variable_have_one_norm() -> None:
    clipped = clipped_by_norm([np.array([6.0]), np.array([8.0]), np.array([4.0])], [0, 0, 1], EACH)
    assert [gradient.tolist() for gradient in clipped] == [[3.0], [4.0], [4.0]]


def test_rows_that_are_named_twice_count_as_their_sum() -> None:
    rows = IndexedSlices(np.array([[1.0, 4.0], [8.0, 0.0], [5.0, -4.0]]), [3, 1, 3], (9, 2))
    (clipped,) = clipped_by_norm([rows], [0], EACH)
    assert isinstance(clipped, IndexedSlices)
    assert clipped.indices.tolist() == [1, 3]
    assert clipped.values.tolist() == [[4.0, 0.0], [3.0, 0.0]]
    assert clipped.dense_shape == (9, 2)


def test_dense_gradients_and_rows_share_a_global_norm() -> None:
    rows = IndexedSlices(np.array([[8.0]]), [3])
    dense, clipped = clipped_by_norm([np.array([6.0]), rows], [0, 1], ALL)
    assert isinstance(clipped, IndexedSlices)
    assert (dense.tolist(), clipped.values.tolist()) == ([3.0], [[4.0]])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_dtype_stays_and_squares_do_not_overflow(dtype: object) -> None:
    long = np.full((2, 2), 1000.0, dtype)  # type: ignore[call-overload]
    for options in (EACH, ALL):
        (clipped,) = clipped_by_norm([long], [0], options)
        assert isinstance(clipped, np.ndarray)
        assert clipped.dtype == long.dtype
        assert clipped.tolist() == [[2.5, 2.5]] * 2


def test_any_memory_layout_and_size() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((3, SQUARES_PIECE)).astype(np.float32)
    for gradient in (wide.T, wide[:, ::2], np.zeros((0, 4), np.float32), np.array(7, np.float32)):
        (clipped,) = clipped_by_norm([gradient], [0], EACH)
        norm = np.linalg.norm(gradient.astype(np.float64))
        expected = gradient * min(1.0, 5 / norm) if norm else gradient
        np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def test_norms_that_are_not_finite() -> None:
    infinite, finite = np.array([math.inf, 1.0]), np.array([1.0])
    (one, other) = clipped_by_norm([infinite, finite], [0, 1], EACH)
    np.testing.assert_array_equal(one, [math.nan, 0.0])
    assert other is finite
    for bad in (infinite, np.array([math.nan])):
        for clipped in clipped_by_norm([bad, finite], [0, 1], ALL):
            assert np.isnan(clipped).all()


def test_a_sum_of_squares_has_the_same_bits_on_every_cpu() -> None:
    program = (
        "import numpy as np; from psync.numerics.sums import SQUARES_PIECE, sum_of_squares;"
        "values = np.random.default_rng(0).standard_normal(3 * SQUARES_PIECE + 7);"
        "print([sum_of_squares(values.astype(kind)).hex() for kind in 'fd'])"
    )
    printed = set()
    for core in ("Prescott", "Haswell", "SkylakeX"):  # an unknown name is taken for the CPU's own
        environ = {**os.environ, "OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        printed.add(run.stdout)
    assert len(printed) == 1, printed


def test_a_sum_of_squares_does_not_depend_on_where_an_array_is_cut() -> None:
    array = np.random.default_rng(2).standard_normal(5 * SQUARES_PIECE + 7)
    total = 0.0
    for start, stop in (
        (0, 2 * SQUARES_PIECE),
        (2 * SQUARES_PIECE, 3 * SQUARES_PIECE),
        (3 * SQUARES_PIECE, None),
    ):
        total = sum_of_squares(array[start:stop], total)
    assert total == sum_of_squares(array)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_is_scaled_keeps_its_dtype_and_is_the_same_array_at_one(dtype: object) -> None:
    array = np.array([3.0, -0.0, np.inf], dtype)  # type: ignore[call-overload]
    assert scaled(array, 1.0) is array
    assert scaled(array, 0.5).dtype == array.dtype
    assert str(scaled(array, 0.0).tolist()) == "[0.0, -0.0, nan]"
