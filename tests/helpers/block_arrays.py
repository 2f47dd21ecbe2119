"""Arrays in blocks, made of ordinary ones."""

from __future__ import annotations

import numpy as np

from psync.numerics.memory import BlockArray, BlockPool, bytes_of


def array_of(values: np.ndarray, pool: BlockPool | None = None) -> BlockArray:
    array = BlockArray(values.size, values.dtype, pool=pool)
    array.load(bytes_of(values), pool or BlockPool())
    return array
