"""Casting of values that users pass for a variable or for rows of it, with range checks.

Values are cast within a kind or to a higher one (numpy's "same_kind"), and only if the dtype can
hold every number: floats may be rounded, none may become infinite, integers stay as they are. What
travels has the shard's dtype; a ps casts nothing. *Results* are numpy's in place: integers wrap
around, floats overflow to infinity.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from psync.errors import ValueMismatchError
from psync.specs import VariableSpec, check_not_masked, dtype_of, plain_array


def fitting(
    value: Any,
    spec: VariableSpec,
    operation: str,
    *,
    casting: Literal["no", "same_kind"],
    shape: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Return ``value`` as a C-contiguous array of a variable's dtype, and its shape or another one.

    Args:
        value: An array, or what numpy makes one of. Python numbers, and lists of them, have no
            dtype: they get the variable's, unless it is of a lower kind. Each number must be one
            that this dtype can hold: floats may be rounded, but not become infinite.
        spec: Of the variable.
        operation: For messages.
        casting: Which other dtypes of arrays are converted.
        shape: That is expected; None: the variable's.

    Raises:
        ValueMismatchError: If it does not fit.
    """
    dtype = dtype_of(spec.dtype)
    shape = spec.shape if shape is None else shape
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
        return value if value.flags.c_contiguous else np.asarray(value, order="C")
    try:
        array = plain_array(value)
    except (TypeError, ValueError) as exc:
        raise ValueMismatchError(f"{operation}: the value is not an array: {exc}") from exc
    if array.shape != shape:
        raise ValueMismatchError(f"{operation}: expected shape {shape}, got {array.shape}")
    typed, kind = hasattr(value, "dtype"), array.dtype.kind
    if typed and casting == "no":
        fits = np.can_cast(array.dtype, dtype, casting)
    else:
        fits = _is_same_kind(array.dtype, dtype) or (not typed and (kind, dtype.kind) == ("i", "u"))
    if not fits:
        raise ValueMismatchError(
            f"{operation}: expected dtype {spec.dtype}, got {array.dtype}",
            hint=f"convert it: np.asarray(value, {spec.dtype!r})",
        )
    beyond = _out_of_range(array, dtype)
    if beyond is None:
        with np.errstate(over="ignore"):  # it is found below
            made = np.asarray(array, dtype, order="C")
        beyond = overflow(array, made)
    if beyond is not None:
        raise ValueMismatchError(
            f"{operation}: expected values in the range of {spec.dtype}, got {beyond}",
            hint="clip them, or declare the variable with a wider dtype",
        )
    return made


def overflow(array: np.ndarray, made: np.ndarray) -> str | None:
    """Return a finite element of ``array`` that is infinite in ``made``, as text, or None.

    Args:
        array: Anything.
        made: The array in another dtype.
    """
    source, target = array.dtype, made.dtype
    if source.kind in "iub":
        may_overflow = target == np.float16  # all others hold the largest integer
    else:
        floating = source.kind in "fO" or source.name == "bfloat16"
        may_overflow = floating and (target.itemsize < source.itemsize or target.itemsize == 2)
    if source != target and target.kind not in "iub" and may_overflow:
        finite = np.isfinite(made)
        if not finite.all():
            # Python integers above those of numpy are objects, of which it knows nothing.
            known = array.astype(np.float64) if array.dtype.kind == "O" else array
            lost = array[~finite & np.isfinite(known)]
            return str(lost[0]) if lost.size else None
    return None


def _out_of_range(array: np.ndarray, dtype: np.dtype) -> str | None:
    """Return an integer that an integer dtype cannot hold, as text, or None."""
    if dtype.kind not in "iu" or not array.size or np.can_cast(array.dtype, dtype):
        return None
    limits = np.iinfo(dtype)
    extremes = array.min(), array.max()
    return next((str(each) for each in extremes if not limits.min <= each <= limits.max), None)


def _is_same_kind(source: np.dtype, target: np.dtype) -> bool:
    """Return whether a cast stays within a kind, or goes to a higher one, as numpy has it."""
    # Of bfloat16 numpy knows neither; it is floating.
    known = [np.dtype(np.float32) if each.name == "bfloat16" else each for each in (source, target)]
    return np.can_cast(known[0], known[1], "same_kind")


def checked_target(array: Any, spec: VariableSpec) -> np.ndarray:
    """Return ``array`` if the value of a variable can be read into it.

    Raises:
        ValueMismatchError: If it cannot.
    """
    expected = f"expected a writable C-contiguous array of shape {spec.shape} {spec.dtype}"
    if not isinstance(array, np.ndarray):
        raise ValueMismatchError(f'out for "{spec.name}": {expected}, got {type(array).__name__}')
    try:
        check_not_masked(array)
    except TypeError as exc:
        raise ValueMismatchError(f'out for "{spec.name}": {expected}, got {exc}') from None
    flaws = "" if array.flags.c_contiguous else ", not C-contiguous"
    flaws += "" if array.flags.writeable else ", read-only"
    if flaws or array.shape != spec.shape or array.dtype != dtype_of(spec.dtype):
        got = f"shape {array.shape} {array.dtype}{flaws}"
        raise ValueMismatchError(f'out for "{spec.name}": {expected}, got {got}')
    return array
