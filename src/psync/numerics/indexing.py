"""Index expressions on a remote variable: the rows to fetch, and the rest applied locally.

``value[index]`` with the value elsewhere: the part of the index that is about axis 0 says which
rows travel, the rest is applied by numpy to what has come. An index means what it means to
numpy, and is checked whole before anything travels: a number that is out of range is an error
even where numpy would not look at it, because the result is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psync.errors import IndexTypeError, IndexValueError, VariableIndexError, check_fits
from psync.specs import plain_array, shortened

NO_BYTES = np.dtype([])
"""Of arrays that take no memory, whatever their shape: on them numpy is asked about an index."""

_FAR = np.iinfo(np.int64).max
"""What is beyond is beyond any axis, too."""

_ERRORS = {IndexError: VariableIndexError, TypeError: IndexTypeError, ValueError: IndexValueError}


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
    items = [_read(item, name, elsewhere) for item in given]
    try:
        np.empty(shape, NO_BYTES)[tuple(items)]
        position = _about_axis_0(items, shape)
    except (IndexError, TypeError, ValueError) as exc:
        error = next(own for kind, own in _ERRORS.items() if isinstance(exc, kind))
        raise error(f'index {shortened(index)} of "{name}": {exc}') from exc
    if not shape:
        return Selection(None, tuple(items))
    if position is None or items[position] is Ellipsis:
        return Selection(range(shape[0]), tuple(items))
    first = items[position]
    alone = len(items) == 1
    if isinstance(first, int):
        row = first % shape[0]
        rows: range | np.ndarray = range(row, row + 1)
        local: Any = 0
    elif isinstance(first, slice):
        rows, local = range(*first.indices(shape[0])), slice(None)
    elif first.dtype == bool:
        rows = np.flatnonzero(first.any(axis=tuple(range(1, first.ndim))))
        if alone and first.ndim == 1:
            return Selection(rows, None, (len(rows),))
        local = first[rows]
    else:
        rows = np.where(first < 0, first + shape[0], first).reshape(-1)
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
    numbers = array.astype(np.int64, copy=False)
    if array.size and numbers.view(np.uint64).max() >= num_rows:  # those below 0 are the largest
        worst = array[(array < 0) | (array >= num_rows)].reshape(-1)[0]
        why = f", expected 0 to {num_rows - 1}" if num_rows else ": there are no rows"
        raise VariableIndexError(f"{what}: index {worst} is out of bounds{why}")
    return numbers


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
    for leaf in _leaves(item):
        if isinstance(leaf, elsewhere):
            raise IndexTypeError(
                f'index of "{name}": {type(leaf).__name__} is not allowed, because its value is '
                "remote",
                hint="await it first, then index with its value",
            )
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return max(-_FAR, min(int(item), _FAR))
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
        array = np.minimum(array, np.uint64(_FAR))
    return array if array.dtype == bool else array.astype(np.int64, copy=False)


def _leaves(item: Any) -> list[Any]:
    """Return an item, or what is in it if it is a list or slice."""
    if isinstance(item, slice):
        return [item.start, item.stop, item.step]
    return [leaf for part in item for leaf in _leaves(part)] if isinstance(item, list) else [item]


def _about_axis_0(items: Sequence[Any], shape: tuple[int, ...]) -> int | None:
    """Return which item is about axis 0, of an index that numpy takes.

    Raises:
        IndexError: A number is out of range where numpy does not look, as the result is empty.
    """
    masks = [isinstance(item, np.ndarray) and item.dtype == bool for item in items]
    counts = [  # of axes
        item.ndim if is_mask else int(item is not None and item is not Ellipsis)
        for item, is_mask in zip(items, masks, strict=True)
    ]
    axis, first = 0, None
    for at, item in enumerate(items):
        count = len(shape) - sum(counts) if item is Ellipsis else counts[at]
        if count and not axis:
            first = at
        if isinstance(item, np.ndarray) and not masks[at]:
            np.empty((1,) * axis + shape[axis : axis + 1], NO_BYTES)[(0,) * axis + (item,)]
        axis += count
    return first
