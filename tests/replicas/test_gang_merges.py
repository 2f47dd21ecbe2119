"""What each replica is told of a collective."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asked import Reply
from local_training import at_once
from psync import PerReplica
from psync.replicas.gang_runner import merge
from psync.serialization.failures import rebuild_exception
from psync.serialization.payloads import Payload, pack, unpack
from psync.wire.limits import DEFAULT_LIMITS, Limits


async def merged(function: Any, *values: Any, limits: Limits = DEFAULT_LIMITS) -> list[Reply]:
    brought = [pack((function, value)) for value in values]
    return await merge("strategy", brought, limits, main_by_name=True)


def told(reply: Reply) -> Any:
    message, segments = reply
    payload = Payload.from_segments(list(segments))
    if message.error is not None:
        raise rebuild_exception("/job:chief/task:0", *message.error, payload=payload)
    return unpack(payload.data, payload.buffers)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda *_: 1 / 0, ZeroDivisionError, "division"),
        (lambda *_: PerReplica((1, 2, 3)), ValueError, "values of 3 replicas, expected 2"),
        (lambda *_: asyncio.Lock(), TypeError, "what the merge function returned"),
        (lambda *_: np.zeros(100_000), TypeError, "too large"),
    ],
)
def test_an_error_is_told_to_all(function, error, text):
    limits = Limits(segment_bytes=100_000, body_bytes=100_000)
    for reply in at_once(merged(function, 1, 2, limits=limits)):
        with pytest.raises(error, match=text):
            told(reply)
