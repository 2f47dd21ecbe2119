"""Index expressions on a remote variable: the rows to fetch, and the rest applied locally.

``value[index]`` with the value elsewhere: the part of the index that is about axis 0 says which
rows travel, the rest is applied by numpy to what has come. An index means what it means to
numpy, and is checked whole before anything travels: a number that is out of range is an error
even where numpy would not look at it, because the result is empty.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psync.errors import IndexTypeError, IndexValueError, VariableIndexError, check_fits
from psync.specs import plain_array


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows of a variable, and what becomes of them."""

    rows: range | np.ndarray | None  # numbers, int64, shape (n,); None: there is no axis 0
    _index: Any = None  # of what was fetched; None: nothing is left to do but the shape
    _shape: tuple[int, ...] = ()  # of the numbers, where they are not just a list

    def of(self, fetched: np.ndarray) -> Any:
        """Return ``value[index]``, given the rows, or the value itself if ``rows`` is None."""
        if self._index is not None:
            return fetched[self._index]
        return fetched.reshape(self._shape + fetched.shape[1:])


def select(
    index: Any, shape: Sequence[int], name: str, elsewhere: tuple[type, ...] = ()
) -> Selection:
    """Return which rows ``value[index]`` needs, and what is then done with them.

    Args:
        index: As numpy takes it: integers, slices, ``...``, None, arrays and lists of integers,
            masks, and tuples of these.
        shape: Of the value.
        name: Of the variable, for messages.
        elsewhere: Types whose values are not here, and which can therefore not be an index.

    Raises:
        VariableIndexError: Out of range, too many items, a mask of another shape, …: an IndexError.
        IndexTypeError: Something else than an index: also a TypeError.
        IndexValueError: A step of 0, or a ragged list: also a ValueError.
    """
    shape = tuple(shape)
    given = index if isinstance(index, tuple) else (index,)
    items, position = _placed([_read(item, name, elsewhere) for item in given], shape, name)
    _check_broadcast(items, name)
    if not shape:
        return Selection(None, tuple(items))
    if position is None or items[position] is Ellipsis:
        return Selection(range(shape[0]), tuple(items))
    first = items[position]
    alone = len(items) == 1
    if isinstance(first, int):
        rows: range | np.ndarray = range(first, first + 1)
        local: Any = 0
    elif isinstance(first, slice):
        rows, local = range(*first.indices(shape[0])), slice(None)
    elif first.dtype == bool:
        rows = np.flatnonzero(first.any(axis=tuple(range(1, first.ndim))))
        if alone and first.ndim == 1:
            return Selection(rows, None, (len(rows),))
        local = first[rows]
    else:
        rows = first.reshape(-1)
        if alone:
            return Selection(rows, None, first.shape)
        local = np.arange(first.size).reshape(first.shape)
    items[position] = local
    return Selection(rows, tuple(items))


def row_numbers(indices: Any, num_rows: int, what: str, *, ndim: int | None = None) -> np.ndarray:
    """Return row numbers as an int64 array of the shape in which they came.

    Args:
        indices: Integers, an array or what numpy makes one of.
        num_rows: Each number is below this, and not negative.
        what: For messages: 'sparse_read of "v"'.
        ndim: Of the indices; None: any.

    Raises:
        VariableIndexError: One is out of range.
        IndexTypeError: They are no integers.
        IndexValueError: They have another number of axes, or are ragged.
    """
    array = index_array(indices, what)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # what numpy makes of an empty list
    if array.dtype.kind not in "iu":
        raise IndexTypeError(f"{what}: expected integers as indices, got {array.dtype}")
    fits, hint = ndim in (None, array.ndim), "reshape them to one axis: indices.reshape(-1)"
    expected = f"{what}: expected indices of shape (n,)"
    check_fits(fits, expected, array.shape, hint, error=IndexValueError)
    if array.size and (array.min() < 0 or array.max() >= num_rows):
        worst = array[(array < 0) | (array >= num_rows)].reshape(-1)[0]
        why = f", expected 0 to {num_rows - 1}" if num_rows else ": there are no rows"
        raise VariableIndexError(f"{what}: index {worst} is out of bounds{why}")
    return array.astype(np.int64, copy=False)


def index_array(indices: Any, what: str) -> np.ndarray:
    """Return indices as an array, whatever its dtype.

    Raises:
        IndexValueError: They are ragged.
    """
    try:
        return plain_array(indices)
    except (TypeError, ValueError, OverflowError) as exc:
        raise IndexValueError(f"{what}: the indices are not an array: {exc}") from exc


def _read(item: Any, name: str, elsewhere: tuple[type, ...]) -> Any:
    """Return one item as an int, a slice, an array of numbers or bools, ``...`` or None."""
    if item is None or item is Ellipsis:
        return item
    for leaf in _leaves(item):
        if isinstance(leaf, elsewhere):
            raise _not_allowed(leaf, name)
    if isinstance(item, slice):
        return _read_slice(item, name, elsewhere)
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return int(item)
    try:
        array = plain_array(item)
    except TypeError as exc:
        raise IndexTypeError(f'index of "{name}": got {exc}') from exc
    except ValueError as exc:
        raise IndexValueError(f'index of "{name}": the list is not an array: {exc}') from exc
    if array.size == 0 and not isinstance(item, np.ndarray):
        array = array.astype(np.intp)  # of an empty list numpy makes floats
    if array.dtype.kind not in "iub":
        kind = array.dtype if isinstance(item, np.ndarray | list) else type(item).__name__
        raise IndexTypeError(
            f'index of "{name}": expected integers, slices, ..., None, or arrays of integers or '
            f"bools, got {kind}"
        )
    if array.ndim == 0 and array.dtype.kind in "iu":
        return int(array)
    if array.dtype == np.uint64:  # numbers beyond int64 stay out of range, and do not wrap around
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array if array.dtype == bool else array.astype(np.int64, copy=False)


def _read_slice(item: slice, name: str, elsewhere: tuple[type, ...]) -> slice:
    bounds = []
    for bound in (item.start, item.stop, item.step):
        if isinstance(bound, elsewhere):
            raise _not_allowed(bound, name)
        try:
            bounds.append(None if bound is None else operator.index(bound))
        except TypeError as exc:
            raise IndexTypeError(
                f'index of "{name}": expected integers or None as bounds of a slice, got '
                f"{type(bound).__name__}"
            ) from exc
    if bounds[2] == 0:
        raise IndexValueError(f'index of "{name}": the step of a slice cannot be 0')
    return slice(*bounds)


def _leaves(item: Any) -> list[Any]:
    return [leaf for part in item for leaf in _leaves(part)] if isinstance(item, list) else [item]


def _not_allowed(item: Any, name: str) -> IndexTypeError:
    return IndexTypeError(
        f'index of "{name}": {type(item).__name__} is not allowed, because its value is remote',
        hint="await it first, then index with its value",
    )


def _placed(
    values: Sequence[Any], shape: tuple[int, ...], name: str
) -> tuple[list[Any], int | None]:
    """Return the items with negative numbers counted from the front, and which is about axis 0."""
    used = [_num_axes(value) for value in values]
    if sum(value is Ellipsis for value in values) > 1:
        raise VariableIndexError(f'index of "{name}": only one ... can stand in an index')
    if sum(used) > len(shape):
        raise VariableIndexError(
            f'index of "{name}": too many indices: it has {len(shape)} axes, the index covers '
            f"{sum(used)}"
        )
    items: list[Any] = []
    axis, first = 0, None
    for value, count in zip(values, used, strict=True):
        if value is Ellipsis:
            count = len(shape) - sum(used)
        if first is None and axis == 0 and count:
            first = len(items)
        items.append(_within(value, axis, shape, name))
        axis += count
    return items, first


def _num_axes(value: Any) -> int:
    if value is None or value is Ellipsis:
        return 0
    return value.ndim if isinstance(value, np.ndarray) and value.dtype == bool else 1


def _within(value: Any, axis: int, shape: tuple[int, ...], name: str) -> Any:
    """Return an item that fits the axes that it is about."""
    if isinstance(value, int):
        if not -shape[axis] <= value < shape[axis]:
            raise _out_of_bounds(value, axis, shape, name)
        return value + shape[axis] if value < 0 else value
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == bool:
        about = shape[axis : axis + value.ndim]
        expected = f'index of "{name}": expected a mask of shape {about}'
        check_fits(value.shape == about, expected, value.shape, error=VariableIndexError)
        return value
    size = shape[axis]
    outside = (value < -size) | (value >= size)
    if outside.any():
        raise _out_of_bounds(int(value[outside][0]), axis, shape, name)
    return np.where(value < 0, value + size, value) if (value < 0).any() else value


def _out_of_bounds(value: int, axis: int, shape: tuple[int, ...], name: str) -> VariableIndexError:
    return VariableIndexError(
        f'index {value} is out of bounds for axis {axis} of "{name}", which has size {shape[axis]}'
    )


def _check_broadcast(items: Sequence[Any], name: str) -> None:
    """Check that arrays and masks fit each other."""
    arrays = [item for item in items if isinstance(item, np.ndarray)]
    shapes = [(int(np.count_nonzero(a)),) if a.dtype == bool else a.shape for a in arrays]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError as exc:
        raise VariableIndexError(
            f'index of "{name}": arrays of the shapes {", ".join(map(str, shapes))} do not fit '
            "each other"
        ) from exc
