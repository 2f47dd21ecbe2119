"""Copies of a variable, one for each worker: how they begin, and how they become one value.

They lie one after the other along a leading axis: a copy for each worker, by its index, and one
for the program. The program's is part of sums and of nothing else: it takes what the program
adds, and begins as zeros.
"""

from __future__ import annotations

import numpy as np

from psync.errors import ReplicaValueError
from psync.numerics.replica_sums import ReduceOp, reducing_arrays
from psync.numerics.sums import Pieces
from psync.specs import VariableAggregation

NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)


def repeated(value: np.ndarray, num_workers: int, aggregation: VariableAggregation) -> np.ndarray:
    """Return copies each of which has ``value``; that of the program has it if nothing is summed.

    Args:
        value: Of one copy.
        num_workers: How many copies there are, apart from the program's.
        aggregation: Of the variable.
    """
    copies = np.empty((num_workers + 1, *value.shape), value.dtype)
    copies[:] = value
    if aggregation is SUM:
        copies[num_workers] = 0
    return copies


def spread(value: np.ndarray, num_workers: int, aggregation: VariableAggregation) -> np.ndarray:
    """Return copies of which ``aggregating`` makes ``value``.

    For a sum each worker's copy is its share, value / num_workers, as in TensorFlow. Integers are
    shared out exactly: of 7, two workers have 4 and 3. (TensorFlow's have 3 and 3.)

    Args:
        value: Of the variable's dtype.
        num_workers: How many copies there are, apart from the program's.
        aggregation: Of the variable.
    """
    if aggregation is not SUM:
        return repeated(value, num_workers, aggregation)
    if value.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            share = np.asarray(value / np.asarray(num_workers, value.dtype), value.dtype)
        return repeated(share, num_workers, aggregation)
    wide = np.dtype(np.uint64 if value.dtype.kind == "u" else np.int64)
    share, rest = np.divmod(value.astype(wide), wide.type(num_workers))
    copies = repeated(share.astype(value.dtype), num_workers, aggregation)
    for worker in range(num_workers):
        copies[worker] += worker < rest
    return copies


def aggregating(
    copies: np.ndarray, aggregation: VariableAggregation, what: str
) -> Pieces[np.ndarray]:
    """Make the one value of all copies, a new array, in pieces, for event loops.

    SUM adds the copies of all workers and of the program, MEAN is that of the workers' (of
    integers: float64), ONLY_FIRST_REPLICA is worker 0's. Half precision is summed in float32.

    Args:
        copies: As ``repeated`` returns them.
        aggregation: Of the variable.
        what: Names the read, for messages.

    Raises:
        ReplicaValueError: The aggregation is NONE.
    """
    if aggregation is NONE:
        raise ReplicaValueError(
            f"{what}: each worker has a copy of its own, and there is no aggregation to make one "
            "value of them",
            hint="declare it with aggregation=psync.VariableAggregation.SUM (or MEAN, "
            "ONLY_FIRST_REPLICA), or read it in a step",
        )
    if aggregation is FIRST:
        return np.array(copies[0])
    if aggregation is SUM:
        return np.asarray((yield from reducing_arrays(ReduceOp.SUM, list(copies), None)))
    return np.asarray((yield from reducing_arrays(ReduceOp.MEAN, list(copies[:-1]), None)))
