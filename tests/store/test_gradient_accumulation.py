"""Gradients that are summed until they make an update, block by block."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from psync.numerics.memory import BlockArray, BlockPool
from psync.store.work import GradientAccumulator, Workspace


def push(
    sums: BlockArray, gradient: np.ndarray, *, due: bool, pool: BlockPool | None = None
) -> tuple[np.ndarray | None, int]:
    """What comes of one push of three, and how many blocks it replaced."""
    accumulator, space = GradientAccumulator(sums, 3, due, pool or BlockPool()), Workspace()
    if not due:
        accumulator.adding(0, lambda _: gradient).do(space)
        return None, accumulator.copies
    take, commit = accumulator.taking(0, lambda _: gradient)
    mean = take(space)
    commit()
    return mean, accumulator.copies


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_mean_comes_with_the_last_gradient_and_then_the_sum_is_zero(dtype: object) -> None:
    sums = BlockArray(4, np.dtype(np.float32))
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    gradients = [np.array([1, 2, -1, 0], kind) * scale for scale in (1, 2, 6)]
    gradients = [gradient.astype(kind) for gradient in gradients]
    assert push(sums, gradients[0], due=False) == (None, 0)
    assert push(sums, gradients[1], due=False) == (None, 0)
    assert sums.block(0).array.tolist() == [3, 6, -3, 0]
    mean, _ = push(sums, gradients[2], due=True)
    assert mean is not None
    assert mean.dtype == np.float32
    assert mean.tolist() == [3, 6, -3, 0]
    assert sums.block(0).array.tolist() == [0, 0, 0, 0]


def test_to_look_at_the_mean_changes_nothing() -> None:
    sums = BlockArray(2, np.dtype(np.float64))
    push(sums, np.array([1.0, 2.0]), due=False)
    accumulator = GradientAccumulator(sums, 3, False, BlockPool())
    mean = accumulator.mean(accumulator.sum(0), np.array([5.0, 1.0]), Workspace())
    assert mean.tolist() == [2, 1]
    assert sums.block(0).array.tolist() == [1, 2]


def test_who_reads_the_sums_keeps_what_was_read() -> None:
    sums = BlockArray(2, np.dtype(np.float32))
    pool = BlockPool()
    for due, expected in ((False, [0, 0]), (True, [1, 1])):
        (view,) = sums.export()
        _, copies = push(sums, np.ones(2, np.float32), due=due, pool=pool)
        assert copies == 1
        assert np.frombuffer(view, np.float32).tolist() == expected
    assert sums.block(0).array.tolist() == [0, 0]


def test_overflow_is_a_result_and_no_warning() -> None:
    sums = BlockArray(1, np.dtype(np.float32))
    huge = np.array([3e38], np.float32)
    push(sums, huge, due=False)
    mean, _ = push(sums, huge, due=True)
    assert mean is not None
    assert mean.tolist() == [np.inf]
    push(sums, huge, due=False)
    push(sums, huge, due=False)
    assert sums.block(0).array.tolist() == [np.inf]
