"""What a replica tells the coordinator, and what it makes of the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asked import frame_of
from psync.client.context import ClosureContext
from psync.errors import (
    ConnectionLost,
    RemoteProtocolError,
    WorkerLost,
)
from psync.replicas.context import GangMember, reduce_all
from psync.serialization.payloads import pack
from psync.testing import settle
from psync.wire.frames import Frame
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.messages import Done, Merged


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
    return frame_of(Merged(None), [memoryview(part) for part in pack(value).segments])


async def test_errors_of_the_coordinator_and_the_network_come_through():
    lost = WorkerLost("/job:worker/task:0")
    member = member_of(Coordinator(lost, ConnectionLost("gone"), frame_of(Done())))
    with pytest.raises(WorkerLost, match="task:0"):
        await member.collective("merge_call", reduce_all, None)
    with pytest.raises(ConnectionLost, match="gone"):
        await member.collective("merge_call", reduce_all, None)
    with pytest.raises(RemoteProtocolError, match="merge_call: expected Merged, got Done"):
        await member.collective("merge_call", reduce_all, None)


@pytest.mark.parametrize("stopped", [True, False])
async def test_the_coordinator_is_told_that_a_step_gives_up_but_not_that_it_is_stopped(stopped):
    coordinator = Coordinator()
    member = member_of(coordinator)
    task = asyncio.create_task(member.collective("merge_call", reduce_all, None))
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
