"""Computing a collective: from what all replicas have brought to what each of them is told."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from psync.errors import ReplicaValueError
from psync.net.peer import Reply
from psync.numerics.replica_values import local_results
from psync.replicas.context import cross_replica
from psync.serialization.failures import describe_exception
from psync.serialization.payloads import Payload, check_size, pack, unpack
from psync.wire.limits import Limits
from psync.wire.worker_messages import Merged


async def merge(
    strategy: Any, brought: Sequence[Payload], limits: Limits, *, main_by_name: bool
) -> list[Reply]:
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
        return [Reply(Merged(error), segments)] * count


def _replies(result: Any, count: int, limits: Limits, main_by_name: bool) -> list[Reply]:
    """Return each replica's part of what a merge function returned.

    Raises:
        ReplicaValueError: It has parts for another number of replicas.
        CaptureError: It cannot be sent.
    """
    parts = local_results(result)
    if len(parts) not in (1, count):
        raise ReplicaValueError(
            f"the merge function returned values of {len(parts)} replicas, expected {count}"
        )
    subject = "what the merge function returned"
    replies = []
    for part in parts:
        payload = pack(part, subject=subject, main_by_name=main_by_name)
        check_size(payload, subject, limits)
        replies.append(Reply(Merged(None), payload.segments))
    return replies * (count // len(parts))
