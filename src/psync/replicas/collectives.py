"""Collectives of replicas: their members, and the function that combines the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psync.numerics.replicas import ReduceOp, gather_values, reducing_values, regroup
from psync.replicas.chunks import in_turns

Collective = Callable[[Any, Sequence[Any]], Any]
"""What is done with the values of all replicas: called once, on the coordinator, with the strategy
and the values by replica id; may be a coroutine function. Its module must be importable there.
Each replica gets what it returns, of values for each replica its own."""


async def reduce(strategy: Any, calls: Sequence[tuple[ReduceOp, Any]]) -> Any:
    """Return the sum or mean of what all replicas have."""
    return await in_turns(reducing_values(calls[0][0], [value for _, value in calls]))


def gather(strategy: Any, calls: Sequence[tuple[Any, int]]) -> Any:
    """Return what all replicas have, one after the other along an axis."""
    return gather_values([value for value, _ in calls], calls[0][1])


def merge(strategy: Any, calls: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Return the result of the first merge function for the regrouped arguments of all."""
    merge_fn = calls[0][0]
    args, kwargs = regroup([(args, kwargs) for _, args, kwargs in calls])
    return merge_fn(strategy, *args, **kwargs)
