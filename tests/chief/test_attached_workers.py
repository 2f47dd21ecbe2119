"""Who takes part, who is ready for closures, and who hears what is said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from psync.chief.links import AttachedWorkers, WorkerRecord
from psync.errors import ConnectionLost
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import Done

W2, W10, AWAY = (f"/job:worker/task:{index}" for index in (2, 10, 11))


class Connection:
    """As a Connection: notes what it is told, and answers or is lost."""

    def __init__(self, task: str, *, is_lost: bool = False) -> None:
        self.task = task
        self.heard: list[Message] = []
        self._is_lost = is_lost

    def notify(self, message: Message, segments: Any = ()) -> None:
        self.heard.append(message)

    async def call(self, message: Message) -> Frame:
        if self._is_lost:
            raise ConnectionLost("gone")
        return Frame(Done(), [])


@pytest.fixture
def records() -> dict[str, WorkerRecord]:
    records = {name: WorkerRecord(name, "w:1", 0) for name in (W10, W2, AWAY)}
    for name in (W10, W2):
        records[name].peers = peers(name)
    return records


@pytest.fixture
def workers(records: dict[str, WorkerRecord]) -> AttachedWorkers:
    return AttachedWorkers(records)


def peers(name: str, *, is_lost: bool = False) -> Any:
    """Its control and its bulk connection."""
    return Connection(name, is_lost=is_lost), Connection(name, is_lost=is_lost)


@pytest.mark.virtual_time
async def test_what_is_known_of_a_worker_stays_with_it(workers, records):
    await asyncio.sleep(3)
    assert workers.heard(records[W2].peers[0])
    workers.note_error(W2, "closure 1 (step): ValueError: no")
    await asyncio.sleep(1)
    assert not workers.heard(peers(W2)[0])  # a connection that was given up
    assert (records[W2].heard_at, records[W10].heard_at) == (3.0, 0.0)
    assert records[W2].last_error == (3.0, "closure 1 (step): ValueError: no")
    records[W2].peers = peers(W2)  # it comes again
    assert records[W2].failed == 1
