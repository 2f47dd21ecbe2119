"""What ps 0 hears of a coordinator's schedule, and how often."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import psync
from inside import clocks_of
from memory_cluster import MemoryCluster, coordinating
from psync.chief.schedule_reporter import FinalClosures
from psync.closures.closure import Closure
from psync.closures.queue import ClosureQueue
from psync.net.connection import Connection
from psync.net.platform import fresh_process
from psync.wire.codec import Message
from psync.wire.messages import ReportSchedule

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReportSchedule]]:
    """All reports that were sent, repetitions too, of a program that begins with no optimizer."""
    sent: list[ReportSchedule] = []
    call = Connection.call

    async def recording(self: Connection, message: Message, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, ReportSchedule):
            assert self.task == "/job:ps/task:0"
            sent.append(message)
        return await call(self, message, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", recording)
    with fresh_process():
        yield sent


@pytest.fixture
def reports(sent: list[ReportSchedule]) -> list[ReportSchedule]:
    """The same where ps 0 wants them, see ``reporting``."""
    return sent


@asynccontextmanager
async def reporting(
    num_ps: int = 1, num_workers: int = 1
) -> AsyncIterator[tuple[MemoryCluster, psync.ClusterCoordinator]]:
    """A cluster on whose ps 0 somebody has waited for others."""
    async with coordinating(num_ps, num_workers) as (cluster, coordinator):
        clocks_of(cluster.tasks["ps-0"]).wanted.set()
        yield cluster, coordinator


# --- which closures are final ------------------------------------------------------------------


def test_ps_tasks_refuse_all_that_was_scheduled_before_an_error_once_it_is_there():
    told: list[int] = []
    queue = ClosureQueue()
    final = FinalClosures(queue, lambda below, _: told.append(below))
    for number in range(2):
        queue.schedule(Closure(number, name="step"))
    final.look_for_errors()
    queue.fail(ValueError("no"))
    final.look_for_errors()
    final.look_for_errors()
    assert told == [2]
    queue.collect_error()
    final.look_for_errors()
    assert told == [2], "what is scheduled from now on is served"
