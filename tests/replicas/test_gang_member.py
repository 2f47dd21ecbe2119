"""What a replica tells the coordinator, and what it makes of the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from local_training import at_once
from psync.client.context import ClosureContext
from psync.errors import (
    ConnectionLost,
    RemoteError,
    RemoteProtocolError,
    SerializationError,
    UsageError,
    WorkerLost,
)
from psync.replicas.collectives import reduce
from psync.replicas.gang_member import GangMember
from psync.serialization.failures import describe_exception
from psync.serialization.payloads import pack, unpack
from psync.testing import settle
from psync.wire.frames import Frame
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.messages import Done, Merged, ReachCollective


class Coordinator:
    """Answers as it is told to; notes what it was asked."""

    def __init__(self, *answers: Frame | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, list[Any]]] = []
        self.given_up = False
        self.waits = asyncio.Event()

    async def call(self, message: Any, segments: Any) -> Frame:
        self.asked.append((message, list(segments)))
        if not self.answers:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up = True
                raise
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def member_of(coordinator: Coordinator, limits: Limits = DEFAULT_LIMITS) -> GangMember:
    closure = ClosureContext(worker_index=1, closure_id=7)
    return GangMember(1, 3, closure, coordinator.call, limits, main_by_name=True)


def answer(value: object) -> Frame:
    return Frame(Merged(None), [memoryview(part) for part in pack(value).segments])


async def test_a_replica_sends_function_and_value_and_gets_what_was_made():
    coordinator = Coordinator(answer({"sum": np.ones(2)}), answer(None))
    member = member_of(coordinator)
    assert (member.replica_id, member.num_replicas) == (1, 3)
    found = await member.collective("all_reduce SUM", reduce, ("SUM", 5))
    assert found["sum"].tolist() == [1, 1]
    assert await member.collective("merge_call", reduce, None) is None
    message, segments = coordinator.asked[0]
    assert message == ReachCollective(7, "all_reduce SUM")
    assert unpack(segments[0], segments[1:]) == (reduce, ("SUM", 5))


async def test_what_the_function_raised_is_raised_with_where_it_was():
    described = describe_exception(ValueError("boom"))
    assert described.payload is not None
    error = (described.type_name, described.message, described.traceback_text)
    segments = [memoryview(part) for part in described.payload.segments]
    coordinator = Coordinator(
        Frame(Merged(error), segments), Frame(Merged(("Strange", "no", "")), [])
    )
    member = member_of(coordinator)
    with pytest.raises(ValueError, match="boom") as caught:
        await member.collective("merge_call", reduce, None)
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.task == "/job:chief/task:0"
    with pytest.raises(RemoteError, match="Strange on /job:chief/task:0: no"):
        await member.collective("merge_call", reduce, None)


async def test_errors_of_the_coordinator_and_the_network_come_through():
    lost = WorkerLost("/job:worker/task:0")
    member = member_of(Coordinator(lost, ConnectionLost("gone"), Frame(Done(), [])))
    with pytest.raises(WorkerLost, match="task:0"):
        await member.collective("merge_call", reduce, None)
    with pytest.raises(ConnectionLost, match="gone"):
        await member.collective("merge_call", reduce, None)
    with pytest.raises(RemoteProtocolError, match="merge_call: expected Merged, got Done"):
        await member.collective("merge_call", reduce, None)


def test_what_cannot_be_sent_is_refused_before_the_others_are_asked():
    coordinator = Coordinator()
    member = member_of(coordinator, Limits(segment_bytes=100_000, body_bytes=100_000))
    with pytest.raises(SerializationError, match="what replica 1 brings to merge_call"):
        at_once(member.collective("merge_call", reduce, asyncio.Lock()))
    with pytest.raises(SerializationError, match="too large"):
        at_once(member.collective("merge_call", reduce, np.zeros(100_000)))
    member.closure.closed = True
    with pytest.raises(UsageError, match="all_reduce SUM after the step has returned"):
        at_once(member.collective("all_reduce SUM", reduce, None))
    assert not coordinator.asked


@pytest.mark.parametrize("stopped", [True, False])
async def test_the_coordinator_is_told_that_a_step_gives_up_but_not_that_it_is_stopped(stopped):
    coordinator = Coordinator()
    member = member_of(coordinator)
    task = asyncio.create_task(member.collective("merge_call", reduce, None))
    await coordinator.waits.wait()
    (call,) = asyncio.all_tasks() - {task, asyncio.current_task()}
    if stopped:
        member.closure.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert coordinator.given_up is not stopped
    if stopped:
        call.cancel()
        await asyncio.wait((call,))


async def test_an_error_that_nobody_waits_for_any_more_is_seen():
    coordinator = Coordinator()
    failed = asyncio.get_running_loop().create_future()

    async def call(message: Any, segments: Any) -> Frame:
        coordinator.waits.set()
        return await failed

    coordinator.call = call  # type: ignore[method-assign]
    member = member_of(coordinator)
    task = asyncio.create_task(member.collective("merge_call", reduce, None))
    await coordinator.waits.wait()
    member.closure.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    failed.set_exception(ConnectionLost("gone"))
    await asyncio.sleep(0)
