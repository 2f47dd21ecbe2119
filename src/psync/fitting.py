"""Values that users hand over for a variable, or for rows of one: checked, and cast.

Layer: L1. Imports: errors, specs.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from psync.errors import GradientError
from psync.specs import VariableSpec, dtype_of


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
            dtype: they get the variable's, unless it is of a lower kind.
        spec: Of the variable.
        operation: For messages.
        casting: Which other dtypes of arrays are converted.
        shape: That is expected; None: the variable's.

    Raises:
        GradientError: If it does not fit.
    """
    dtype = dtype_of(spec.dtype)
    shape = spec.shape if shape is None else shape
    if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
        return value if value.flags.c_contiguous else np.asarray(value, order="C")
    try:
        array = np.asarray(value)
    except ValueError as exc:
        raise GradientError(f"{operation}: the value is not an array: {exc}") from exc
    if array.shape != shape:
        raise GradientError(f"{operation}: expected shape {shape}, got {array.shape}")
    typed = hasattr(value, "dtype")
    if not np.can_cast(array.dtype, dtype, casting if typed else "same_kind") and (
        typed or (array.dtype.kind, dtype.kind) != ("i", "u")
    ):
        raise GradientError(
            f"{operation}: expected dtype {spec.dtype}, got {array.dtype}",
            hint=f"convert it: np.asarray(value, {spec.dtype!r})",
        )
    try:
        return np.asarray(array if typed else value, dtype, order="C")
    except OverflowError as exc:
        raise GradientError(f"{operation}: expected {spec.dtype}: {exc}") from exc


def checked_target(array: Any, spec: VariableSpec) -> np.ndarray:
    """Return ``array`` if the value of a variable can be read into it.

    Raises:
        GradientError: If it cannot.
    """
    if (
        isinstance(array, np.ndarray)
        and array.shape == spec.shape
        and array.dtype == dtype_of(spec.dtype)
        and array.flags.c_contiguous
        and array.flags.writeable
    ):
        return array
    expected = f"expected a writable C-contiguous array of shape {spec.shape} {spec.dtype}"
    if not isinstance(array, np.ndarray):
        raise GradientError(f'out for "{spec.name}": {expected}, got {type(array).__name__}')
    flaws = "" if array.flags.c_contiguous else ", not C-contiguous"
    flaws += "" if array.flags.writeable else ", read-only"
    got = f"shape {array.shape} {array.dtype}{flaws}"
    raise GradientError(f'out for "{spec.name}": {expected}, got {got}')
