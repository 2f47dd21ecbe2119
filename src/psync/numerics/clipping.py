"""Gradient clipping by norm, of one variable or of all.

A push goes to the ps tasks in shards, and a norm is of a variable, or of all variables. The worker
has all of it, so it clips before the push and no further round is needed. No task has the whole
mean of a synchronous step: the ps tasks compute its norm together, by the same formulas (see
``store.step_norms``). Clipping by value is elementwise: each ps does it as part of its rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from psync.numerics.rule_options import RuleOptions
from psync.numerics.scatter import IndexedSlices
from psync.numerics.sums import sum_dtype

Gradient = np.ndarray | IndexedSlices

PIECE = 1 << 16
"""Elements that are converted to float64 at a time, in which squares do not overflow."""


def clipped_by_norm(
    gradients: Sequence[Gradient],
    variables: Sequence[int],
    options: RuleOptions,
) -> list[Gradient]:
    """Return gradients no longer than ``clipnorm`` each, or ``global_clipnorm`` together.

    What is short enough is returned as it is, not copied; the rest is multiplied by limit / norm.
    Rows that are named more than once count as their sum. Where the global norm is not finite, all
    becomes NaN; where one variable's is infinite, its finite elements become 0.

    Args:
        gradients: Of variables or of some of their shards; not changed.
        variables: Of each gradient the variable's id. Shards of one variable have one norm.
        options: Only the two limits of norms are used.

    Source: ``clip_by_global_norm`` and ``_clip_by_norm`` of ``keras.optimizers.Optimizer``.
    """
    if not clips_norms(options):
        return list(gradients)
    merged = [_merged(gradient) for gradient in gradients]
    squares = [sum_of_squares(_values(gradient)) for gradient in merged]
    scales = clip_scales(zip(variables, squares, strict=True), options)
    return [
        _scaled(gradient, scales[variable])
        for variable, gradient in zip(variables, merged, strict=True)
    ]


def clips_norms(options: RuleOptions) -> bool:
    """Return whether a norm is limited."""
    return options.clipnorm is not None or options.global_clipnorm is not None


def clip_scales(squares: Iterable[tuple[int, float]], options: RuleOptions) -> dict[int, float]:
    """Return for each variable what its gradient is multiplied by; 1: it is short enough.

    Args:
        squares: A variable's id, and the sum of squares of its gradient or of a shard of it.
        options: One limit of norms is set.

    Source: as for ``clipped_by_norm``.
    """
    of_variable: dict[int, float] = {}
    for variable, of_gradient in squares:
        of_variable[variable] = of_variable.get(variable, 0.0) + of_gradient
    limit = options.global_clipnorm
    if limit is None:
        return {
            variable: _scale(its_squares, options.clipnorm or 0.0)
            for variable, its_squares in of_variable.items()
        }
    scale = _scale(sum(of_variable.values()), limit)
    scale = scale if scale > 0 else math.nan  # the norm is infinite
    return dict.fromkeys(of_variable, scale)


def sum_of_squares(array: np.ndarray, before: float = 0.0) -> float:
    """Return the sum of squares of an array, in float64.

    It has the same bits on every CPU and with every number of threads. Those of ``np.dot`` differ,
    and with them a backup that runs on another machine.

    Args:
        array: Any shape.
        before: The sum of what comes before it. An array that is cut into multiples of ``PIECE``
            has the same sum, bit for bit, as at once.
    """
    flat = array.reshape(-1)  # a copy only of what lies scattered
    total = before
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE].astype(np.float64)
        with np.errstate(over="ignore"):  # infinity is a result
            np.multiply(piece, piece, out=piece)
            total += float(np.add.reduce(piece))
    return total


def scaled(values: np.ndarray, scale: float) -> np.ndarray:
    """Return values multiplied by a scale, rounded once to their dtype; themselves if it is 1."""
    if scale == 1.0:
        return values
    with np.errstate(all="ignore"):  # infinity times 0 is a result
        wide = np.multiply(values, scale, dtype=sum_dtype(values.dtype))
        product: np.ndarray = wide.astype(values.dtype, copy=False)
    return product


def _scale(squares: float, limit: float) -> float:
    norm = math.sqrt(squares)
    return 1.0 if norm <= limit else limit / norm


def _merged(gradient: Gradient) -> Gradient:
    if isinstance(gradient, np.ndarray):
        return gradient
    indices, values = gradient.merged()
    return IndexedSlices(values, indices, gradient.dense_shape)


def _values(gradient: Gradient) -> np.ndarray:
    return gradient if isinstance(gradient, np.ndarray) else gradient.values


def _scaled(gradient: Gradient, scale: float) -> Gradient:
    product = scaled(_values(gradient), scale)
    if isinstance(gradient, np.ndarray):
        return product
    return IndexedSlices(product, gradient.indices, gradient.dense_shape)
