"""One run of a gang on the coordinator: its replicas, and the values of open collectives.

``GangRunner`` drives it. A collective is computed when all replicas have come to it: from their
values to the result or error of each.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psync.closures.closure import Replica
from psync.closures.gang import Gang
from psync.closures.open import Barrier
from psync.errors import ClosureInputError, ReplicaValueError
from psync.net.connection import Answer
from psync.numerics.replicas import local_results
from psync.replicas.context import cross_replica
from psync.serialization.failures import describe_exception
from psync.serialization.functions import Function
from psync.serialization.payloads import Payload, check_size, pack, unpack
from psync.serialization.remote_value import RemoteValue
from psync.wire.limits import Limits
from psync.wire.messages import Merged


class Arrival(NamedTuple):
    """A replica in a collective, until it is answered."""

    payload: Payload  # (function, value)
    answer: asyncio.Future[Answer]


@dataclass(slots=True, eq=False)
class GangRun:
    """One call of ``run``."""

    strategy: Any  # whose ``run`` was called
    function: Function  # what each replica runs
    arguments: list[Payload]  # for each replica, or one for all
    barrier: Barrier  # its place in the queue
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of the caller: merge functions run in it."""
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    # Once it has begun:
    gang: Gang | None = None
    closures: list[Replica] = field(default_factory=list)
    values: list[RemoteValue[Any]] = field(default_factory=list)
    arrivals: list[dict[int, Arrival]] = field(default_factory=list)
    """Of each replica, by number, those not answered."""
    num_arrived: list[int] = field(default_factory=list)  # collectives that each has come to
    replies: dict[int, list[Answer]] = field(default_factory=dict)  # by number; for each replica
    merges: dict[int, asyncio.Task[list[Answer]]] = field(default_factory=dict)

    @property
    def begun(self) -> Gang:
        """The gang, which has begun."""
        assert self.gang is not None, f'run of "{self.function.name}" has not begun'
        return self.gang

    def replica_of(self, closure_id: int) -> int | None:
        """Return which of its replicas a closure is; None: it is none of them."""
        first = self.closures[0].id if self.closures else 0
        return closure_id - first if 0 <= closure_id - first < len(self.closures) else None

    def tell(self, error: BaseException | None) -> None:
        """Let the caller go on, unless it was told before."""
        if error is not None:
            fail(self.ended, error)
        elif not self.ended.done():
            self.ended.set_result(None)

    def arguments_for(self, count: int) -> list[Payload]:
        """Return the arguments of each of so many replicas.

        Raises:
            ReplicaValueError: There are values for another number of replicas.
            ClosureInputError: A RemoteValue among them has no value, and never will.
        """
        for payload in self.arguments:
            for value in payload.remote_values:
                if value._payload is None:  # all closures before the gang are final
                    cause = value._closure.error
                    raise ClosureInputError(
                        f'run of "{self.function.name}": its input, {value._closure}, has no value'
                    ) from cause
        if len(self.arguments) == 1:
            return self.arguments * count
        if len(self.arguments) != count:
            raise ReplicaValueError(
                f'run of "{self.function.name}": there are arguments for {len(self.arguments)} '
                f"replicas, but {count} workers",
                hint="workers have joined or left since the values were created; create them again",
            )
        return self.arguments


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a future with an error, if it has not ended; nobody may be there to see it."""
    if not future.done():
        future.set_exception(error)
        future.exception()


async def merge(
    strategy: Any, brought: Sequence[Payload], limits: Limits, *, main_by_name: bool
) -> list[Answer]:
    """Call the function of a collective with the values of all replicas.

    Args:
        strategy: What the function gets, and in whose cross-replica context it runs.
        brought: By replica id, the pickled (function, value); the first one's function is called.
        limits: For what is sent.
        main_by_name: Whether classes of ``__main__`` travel by name.

    Returns:
        What each replica is told: its part of the result, or the error, which all get.

    Cancellation: The function is cancelled.
    """
    count = len(brought)
    try:
        pairs = [unpack(payload.data, payload.buffers) for payload in brought]
        function = pairs[0][0]
        with cross_replica(strategy, num_replicas=count, merging=True):
            result = function(strategy, [value for _, value in pairs])
            result = await result if inspect.isawaitable(result) else result
        return _replies(result, count, limits, main_by_name)
    except Exception as exc:
        described = describe_exception(exc, main_by_name=main_by_name)
        error = (described.type_name, described.message, described.traceback_text)
        segments = described.payload.segments if described.payload is not None else ()
        return [(Merged(error), segments)] * count


def _replies(result: Any, count: int, limits: Limits, main_by_name: bool) -> list[Answer]:
    """Return each replica's part of what a merge function returned.

    Raises:
        ReplicaValueError: It has parts for another number of replicas.
        SerializationError: It cannot be sent.
    """
    parts = local_results(result)
    if len(parts) not in (1, count):
        raise ReplicaValueError(
            f"the merge function returned values of {len(parts)} replicas, expected {count}"
        )
    subject = "what the merge function returned"
    replies: list[Answer] = []
    for part in parts:
        payload = pack(part, subject=subject, main_by_name=main_by_name)
        check_size(payload, subject, limits)
        replies.append((Merged(None), payload.segments))
    return replies * (count // len(parts))
