"""Element specs: shapes and dtypes of a dataset's elements.

An element is a nest of arrays: dicts, lists, tuples and named tuples of whatever has a shape and a
dtype, or is a number or text. Its spec is the same nest of ``TensorSpec``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from psync.errors import UsageError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one array of an element.

    Attributes:
        shape: A size is None if it differs between elements; the shape is None if the rank does.
        dtype: numpy's name of the dtype; "str", "bytes" or "object" for other values.

    Source: ``tf.TensorSpec``.
    """

    shape: tuple[int | None, ...] | None
    dtype: str


def map_nest(leaf: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Return ``nest`` with ``leaf(value, …)`` in the place of each value.

    Args:
        leaf: Called with a value of ``nest`` and those at its place in ``others``.
        nest: Dicts, lists, tuples and named tuples of values; None stays None.
        others: Nests of the same structure.

    Raises:
        UsageError: If the structures differ; says how.
    """
    for other in others:
        _check_alike(nest, other)
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {key: map_nest(leaf, nest[key], *[each[key] for each in others]) for key in nest}
    if isinstance(nest, tuple | list):
        parts = [map_nest(leaf, *parts) for parts in zip(nest, *others, strict=True)]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return leaf(nest, *others)


def leaves_of(nest: Any) -> list[Any]:
    """Return the values of a nest, in the order of ``map_nest``."""
    found: list[Any] = []
    map_nest(found.append, nest)
    return found


def spec_of(elements: Iterable[Any]) -> Any:
    """Return what the elements have in common; None if there are none.

    Raises:
        UsageError: If they differ in structure or in dtype.
    """
    spec: Any = None
    for number, element in enumerate(elements):
        one = map_nest(_leaf_spec, element)
        spec = map_nest(_common, spec, one) if number else one
    return spec


def _leaf_spec(value: Any) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        value = np.asarray(value)
    return TensorSpec(tuple(int(size) for size in value.shape), _dtype_name(value.dtype))


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        return {"U": "str", "S": "bytes", "O": "object"}.get(dtype.kind, str(dtype.name))
    return str(dtype).rpartition(".")[2]  # as torch.float32


def _common(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    if one.dtype != other.dtype:
        raise UsageError(f"elements of one dataset differ in dtype: {one.dtype} and {other.dtype}")
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return TensorSpec(None, one.dtype)
    sizes = zip(one.shape, other.shape, strict=True)
    return TensorSpec(tuple(a if a == b else None for a, b in sizes), one.dtype)


def _check_alike(one: Any, other: Any) -> None:
    for a, b in zip(_described(one), _described(other), strict=True):
        if a != b:
            raise UsageError(
                f"elements of one dataset differ in structure: {a} and {b}",
                hint="give every batch the same nesting of dicts, lists and tuples",
            )


def _described(nest: Any) -> tuple[str, str]:
    """Say of which type a nest is, and with what in it."""
    if isinstance(nest, Mapping):
        return "of type dict", f"with keys {sorted(map(str, nest))}"
    if isinstance(nest, tuple | list):
        return f"of type {type(nest).__name__}", f"with {len(nest)} parts"
    return f"of type {'NoneType' if nest is None else 'array'}", ""
