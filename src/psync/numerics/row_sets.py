"""Row numbers as callers give them: put in order, each once; and what becomes of duplicates."""

from __future__ import annotations

import numpy as np


def ascending(rows: np.ndarray) -> bool:
    """Return whether row numbers ascend strictly, so that each is there once."""
    return len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())


def in_order(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers in ascending order, and which of ``rows`` each one was.

    Equal ones stay in their order.

    Args:
        rows: int64, not negative.
    """
    bits = len(rows).bit_length()
    if len(rows) and int(rows.max()) >> (63 - bits):
        order = np.argsort(rows, kind="stable")
        return rows[order], order
    # Sorting numbers that end with their position takes a fifth of the time of argsort.
    packed = rows << bits
    packed |= np.arange(len(rows))
    packed.sort()
    order = packed & ((1 << bits) - 1)
    packed >>= bits
    return packed, order


def distinct(rows: np.ndarray, *, sort: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the row numbers ascending, each once, and where each of ``rows`` is among them.

    The second is None if ``rows`` are like this already.

    Args:
        rows: int64, not negative.
        sort: Whether they must ascend. Else they stay as they are if each is there once.
    """
    if ascending(rows) or not (sort or _have_duplicates(rows)):
        return rows, None
    ordered, order = in_order(rows)
    inverse = np.empty(len(rows), np.int64)
    if ascending(ordered):
        inverse[order] = np.arange(len(rows))
        return ordered, inverse
    starts = starts_of(ordered)
    numbers = np.zeros(len(rows), np.int64)
    numbers[starts[1:]] = 1
    inverse[order] = np.cumsum(numbers)
    return ordered[starts], inverse


def _have_duplicates(rows: np.ndarray) -> bool:
    return not ascending(np.sort(rows))


def starts_of(ordered: np.ndarray) -> np.ndarray:
    """Return where each run of equal numbers begins."""
    first = np.empty(len(ordered), np.bool_)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return np.flatnonzero(first)
