"""Values for a variable, or for rows of one: which fit, and what becomes of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loops import for_each
from psync.errors import ValueMismatchError
from psync.numerics.casting import checked_target, fitting
from psync.specs import ShardSpec, VariableSpec, dtype_of


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


@for_each("value", [[[1, 2]] * 3, np.ones((3, 2)), [[1.5, 2.5]] * 3])
def test_lists_and_other_dtypes_of_the_kind_are_cast(value: Any) -> None:
    assert fitted(value).dtype == np.float32
    np.testing.assert_array_equal(fitted(value), np.asarray(value))


def test_rows_have_the_shape_of_rows() -> None:
    assert fitted([[1, 2]], shape=(1, 2)).shape == (1, 2)
    with pytest.raises(ValueMismatchError, match=r"assign: expected shape \(2, 2\), got \(3, 2\)"):
        fitted(np.zeros((3, 2), np.float32), shape=(2, 2))


def test_python_integers_fit_unsigned_variables_if_they_are_in_range() -> None:
    unsigned = spec_of((2,), "uint8")
    assert fitted([1, 255], unsigned).tolist() == [1, 255]
    with pytest.raises(ValueMismatchError, match="expected values in the range of uint8, got 256"):
        fitted([1, 256], unsigned)


@for_each(
    "value, dtype, came",
    [
        (np.array([1, 300]), "int8", "300"),
        (np.array([1, -129], np.int16), "int8", "-129"),
        (np.array([0, 2**63], np.uint64), "int64", "9223372036854775808"),
        (np.array([0, 300], np.uint16), "uint8", "300"),
        ([0, 300], "int8", "300"),
        ([0, -1], "uint8", "-1"),
        (np.array([1, 1e300]), "float32", "1e+300"),
        (np.array([-1e300, np.inf]), "float32", "-1e+300"),
        ([0.5, 1e300], "float32", "1e+300"),
        (np.array([1, 70000]), "float16", "70000"),
        (np.array([1, 65535], np.uint16), "float16", "65535"),
        (np.array([1, 1e39]), "bfloat16", "1e+39"),
        (np.array([1, 3.4e38], np.float32), "bfloat16", "3.4e+38"),
        (np.array([1, 1e38], ml_dtypes.bfloat16), "float16", "9.96921e+37"),
        (np.array([1, np.finfo(np.longdouble).max]), "float64", "1.189731495357231765e+4932"),
        (300, "int8", "300"),
        (np.int64(300), "int8", "300"),
        (1e300, "float32", "1e+300"),
        (np.array(-1e300), "float16", "-1e+300"),
    ],
)
def test_an_operand_that_the_dtype_cannot_hold_is_refused(
    value: Any, dtype: str, came: str
) -> None:
    with pytest.raises(ValueMismatchError) as caught:
        fitted(value, spec_of(np.shape(value), dtype))
    assert caught.value.message == f"assign: expected values in the range of {dtype}, got {came}"


@for_each(
    "value, dtype",
    [
        (np.array([-128, 127]), "int8"),
        (np.array([0, 2**63 - 1], np.uint64), "int64"),
        (np.array([np.inf, np.nan]), "float32"),
        ([float("-inf"), float("nan")], "float16"),
        (np.array([np.inf, -np.inf], np.float32), "bfloat16"),
        (np.array([np.inf, 1], ml_dtypes.bfloat16), "float16"),
        (np.array([np.finfo(np.float32).max, 1e-300]), "float32"),
        (np.array([65504, -65504]), "float16"),
        (np.array([2**64 - 1, 1], np.uint64), "bfloat16"),
        (np.array([2**53 + 1, 1]), "float64"),
        (np.array([True, False]), "int8"),
        (np.array([True, False]), "bfloat16"),
        ([3, 4], "bfloat16"),
        (np.array([1, 2], ">i8"), "int8"),
        (np.zeros((0, 2), np.int64), "int8"),
        (np.zeros((0, 2), np.float64), "float16"),
        (np.int64(7), "int8"),
        (True, "bool"),
    ],
)
def test_what_the_dtype_can_hold_is_cast(value: Any, dtype: str) -> None:
    made = fitted(value, spec_of(np.shape(value), dtype))
    expected = np.array(value).astype(dtype_of(dtype))
    assert made.dtype == expected.dtype
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, expected)


@for_each(
    "value, dtype",
    [
        (np.array([1.0, 2.0]), "int64"),
        (np.array([1, 2]), "uint8"),
        (np.array([1, 2]), "bool"),
        (np.array([1.0, 2.0], ml_dtypes.bfloat16), "int64"),
        (np.array([1j, 2]), "bfloat16"),
        ([1, 2**70], "float32"),
        (["1", "2"], "float32"),
    ],
)
def test_a_lower_kind_is_refused_whatever_the_numbers_are(value: Any, dtype: str) -> None:
    with pytest.raises(ValueMismatchError, match=f"assign: expected dtype {dtype}, got "):
        fitted(value, spec_of((2,), dtype))


@for_each(
    "value, options, text",
    [
        (np.zeros(3), {}, r"assign: expected shape \(3, 2\), got \(3,\)"),
        ([[1], [2, 3], [4]], {}, "assign: the value is not an array"),
        (np.zeros((3, 2), complex), {}, "assign: expected dtype float32, got complex128"),
        (np.zeros((3, 2)), {"casting": "no"}, "assign: expected dtype float32, got float64"),
        ([[1, 1e300]] * 3, {"casting": "no"}, r"in the range of float32, got 1e\+300"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueMismatchError, match=text):
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
        (np.ma.masked_array(target, np.ones((3, 2), bool)), "got a masked array"),
    ]:
        with pytest.raises(ValueMismatchError, match=text):
            checked_target(wrong, SPEC)
