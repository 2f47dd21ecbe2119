"""Values for a variable, or for rows of one: which fit, and what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psync.errors import GradientError
from psync.fitting import checked_target, fitting
from psync.specs import ShardSpec, VariableSpec


def spec_of(shape: tuple[int, ...], dtype: str = "float32") -> VariableSpec:
    shard = ShardSpec("v", 0, 0, 0, shape, dtype, 0)
    return VariableSpec("v", 0, shape, dtype, True, (shard,), "train.py:1")


SPEC = spec_of((3, 2))


def fitted(value: Any, spec: VariableSpec = SPEC, **options: Any) -> np.ndarray:
    return fitting(value, spec, "assign", **{"casting": "same_kind", **options})


def test_an_array_that_fits_is_not_copied() -> None:
    value = np.zeros((3, 2), np.float32)
    assert fitted(value) is value


def test_an_array_in_another_order_is_laid_out_anew() -> None:
    value = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert fitted(value).flags.c_contiguous
    np.testing.assert_array_equal(fitted(value), value)


@pytest.mark.parametrize("value", [[[1, 2]] * 3, np.ones((3, 2)), [[1.5, 2.5]] * 3])
def test_lists_and_other_dtypes_of_the_kind_are_cast(value: Any) -> None:
    assert fitted(value).dtype == np.float32
    np.testing.assert_array_equal(fitted(value), np.asarray(value))


def test_rows_have_the_shape_of_rows() -> None:
    assert fitted([[1, 2]], shape=(1, 2)).shape == (1, 2)
    with pytest.raises(GradientError, match=r"assign: expected shape \(2, 2\), got \(3, 2\)"):
        fitted(np.zeros((3, 2), np.float32), shape=(2, 2))


def test_python_integers_fit_unsigned_variables_if_they_are_in_range() -> None:
    unsigned = spec_of((2,), "uint8")
    assert fitted([1, 255], unsigned).tolist() == [1, 255]
    with pytest.raises(GradientError, match="assign: expected uint8"):
        fitted([1, 256], unsigned)


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (np.zeros(3), {}, r"assign: expected shape \(3, 2\), got \(3,\)"),
        ([[1], [2, 3], [4]], {}, "assign: the value is not an array"),
        (np.zeros((3, 2), complex), {}, "assign: expected dtype float32, got complex128"),
        (np.zeros((3, 2)), {"casting": "no"}, "assign: expected dtype float32, got float64"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(GradientError, match=text):
        fitted(value, **options)


def test_a_target_is_taken_as_it_is_or_told_what_is_wrong_with_it() -> None:
    target = np.zeros((3, 2), np.float32)
    assert checked_target(target, SPEC) is target
    read_only = np.zeros((3, 2), np.float32)
    read_only.setflags(write=False)
    for wrong, text in [
        (read_only, "read-only"),
        (np.asfortranarray(target), "not C-contiguous"),
        (np.zeros(3), r"got shape \(3,\) float64"),
        ([[0]], "got list"),
    ]:
        with pytest.raises(GradientError, match=text):
            checked_target(wrong, SPEC)
