"""Collectives of replicas: their members, and the function that combines the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from psync.numerics.replica_sums import ReduceOp
from psync.numerics.replica_values import gather_values, reducing_values
from psync.replicas.chunks import in_turns

Collective = Callable[[Any, Sequence[Any]], Any]
"""What is done with the values of all replicas: called once, on the coordinator, with the strategy
and the values by replica id; may be a coroutine function. Its module must be importable there.
Each replica gets what it returns, of values for each replica its own."""


class GangMember(Protocol):
    """One replica of a gang, as the step on its worker sees it."""

    replica_id: int
    num_replicas: int

    async def collective(self, what: str, function: Collective, value: Any) -> Any:
        """Wait until all replicas are here; return what ``function`` makes of all the values.

        Args:
            what: Names it in errors. All replicas must come to the same: the first one's function
                is called.
            function: See `Collective`.
            value: This replica's.

        Raises:
            UsageError: The replicas came to different ones, or not all of them come.
            WorkerLost: The worker of another replica was lost.
            ClosureCancelled: Another replica failed, or the gang was cancelled.
            Exception: What the function raised; all replicas get it.

        Cancellation: The gang is over: no replica may be left out.
        """


async def reduce(strategy: Any, calls: Sequence[tuple[ReduceOp, Any]]) -> Any:
    """Return the sum or mean of what all replicas have."""
    return await in_turns(reducing_values(calls[0][0], [value for _, value in calls]))


def gather(strategy: Any, calls: Sequence[tuple[Any, int]]) -> Any:
    """Return what all replicas have, one after the other along an axis."""
    return gather_values([value for value, _ in calls], calls[0][1])
