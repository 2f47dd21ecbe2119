"""Conversion of arrays to bytes and back; no other module does either.

The wire carries C order, little endian. ``memoryview(a).cast("B")`` fails for arrays with
a 0 in their shape, for Fortran order and for bfloat16, so views go through ``uint8``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psync.errors import PartitionError
from psync.specs import dtype_of


class Joined(tuple[memoryview, ...]):
    """All segments of a message in buffers that need not end where segments do.

    Attributes:
        lengths: Of the segments.
    """

    lengths: Sequence[int]


def cut(views: Sequence[memoryview], lengths: Sequence[int]) -> list[list[memoryview]]:
    """Cut a body that lies in several views into segments of these lengths: of each its views."""
    rest, segments = [*reversed(views)], list[list[memoryview]]()
    for length in lengths:
        pieces = []
        while length:
            view = rest.pop()
            if len(view) > length:
                rest.append(view[length:])
            pieces.append(view[:length])
            length -= len(pieces[-1])
        segments.append(pieces)
    return segments


def to_bytes_view(array: NDArray[np.generic]) -> memoryview:
    """Return the bytes of ``array`` in C order, little endian, as a flat memoryview.

    No copy is made for a C-contiguous native array: the view aliases the array, which must
    not change while the view may still be in flight.
    """
    if array.dtype.isnative:
        try:
            return array.data.cast("B")  # three times as fast as what follows
        except (TypeError, ValueError):
            # Not C-contiguous, empty, or a dtype that memoryview does not know: bfloat16, …
            pass
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def to_bytes_views(arrays: Sequence[NDArray[np.generic]]) -> list[memoryview]:
    """Return ``to_bytes_view`` of each: in one call for many that are ready to be sent."""
    views: list[memoryview] = []
    try:
        for each in arrays:
            views += [each.data.cast("B") if each.dtype.isnative else to_bytes_view(each)]
    except (TypeError, ValueError):
        views = list(map(to_bytes_view, arrays))
    return views


def array_from_bytes(
    data: memoryview | bytearray | bytes | NDArray[np.uint8], shape: tuple[int, ...], dtype: str
) -> NDArray[np.generic]:
    """Return an array of ``shape`` and ``dtype`` over ``data``, without a copy.

    The array is writable if ``data`` is, and keeps ``data`` alive.

    Raises:
        PartitionError: If the number of bytes does not fit shape and dtype.
    """
    kind = dtype_of(dtype)
    raw = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    expected = kind.itemsize
    for extent in shape:
        expected *= extent
    if raw.nbytes != expected or min(shape, default=0) < 0:
        raise PartitionError(
            f"expected {expected} bytes for shape {shape} {dtype}, got {raw.nbytes} bytes"
        )
    return raw.view(kind).reshape(shape)
