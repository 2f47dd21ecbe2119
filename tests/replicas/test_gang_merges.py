"""What each replica is told of a collective."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from local_training import at_once
from psync.net.peer import Reply
from psync.numerics.replicas import PerReplica
from psync.replicas.context import (
    forbid_in_merge,
    get_strategy,
    in_cross_replica_context,
    replicas_in_sync,
)
from psync.replicas.gang_run import merge
from psync.serialization.failures import rebuild_exception
from psync.serialization.payloads import Payload, pack, unpack
from psync.wire.limits import DEFAULT_LIMITS, Limits


async def merged(function: Any, *values: Any, limits: Limits = DEFAULT_LIMITS) -> list[Reply]:
    brought = [pack((function, value)) for value in values]
    return await merge("strategy", brought, limits, main_by_name=True)


def told(reply: Reply) -> Any:
    payload = Payload.from_segments(list(reply.segments))
    if reply.message.error is not None:
        raise rebuild_exception("/job:chief/task:0", *reply.message.error, payload=payload)
    return unpack(payload.data, payload.buffers)


@pytest.mark.parametrize(
    ("function", "expected", "pickled_once"),
    [
        (lambda strategy, values: (strategy, "".join(values)), [("strategy", "abc")] * 3, True),
        (lambda *_: None, [None] * 3, True),
        (
            lambda _, values: {"own": PerReplica(values), "all": 0},
            [{"own": own, "all": 0} for own in "abc"],
            False,
        ),
    ],
    ids=["one for all", "nothing", "for each its own"],
)
def test_all_get_what_the_function_makes_of_all_values(function, expected, pickled_once):
    replies = at_once(merged(function, "a", "b", "c"))
    assert [told(reply) for reply in replies] == expected
    assert (replies[0].segments is replies[2].segments) is pickled_once


async def test_a_coroutine_function_runs_in_cross_replica_context():
    async def function(strategy, values):
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="join in a merge function"):
            forbid_in_merge("join")
        return in_cross_replica_context(), get_strategy(), replicas_in_sync()

    (reply, _) = await merged(function, 1, 2)
    assert told(reply) == (True, "strategy", 2)
    assert not in_cross_replica_context()


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
