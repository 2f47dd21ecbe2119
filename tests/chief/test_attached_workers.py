"""Who takes part, who is ready for closures, and who hears what is said."""

from __future__ import annotations

from typing import Any

import pytest

from psync.chief.attached_workers import AttachedWorkers
from psync.errors import ConnectionLost
from psync.net.peer import Received
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.worker_messages import CancelClosures

W2, W10 = "/job:worker/task:2", "/job:worker/task:10"


class Connection:
    """As a Peer: notes what it is told, and answers or is lost."""

    def __init__(self, task: str, *, is_lost: bool = False) -> None:
        self.task = task
        self.heard: list[Message] = []
        self._is_lost = is_lost

    def notify(self, message: Message, segments: Any = ()) -> None:
        self.heard.append(message)

    async def call(self, message: Message) -> Received:
        if self._is_lost:
            raise ConnectionLost("gone")
        return Received(Done(), [])


@pytest.fixture
def lanes() -> dict[str, tuple[Any, Any]]:
    return {name: (Connection(name), Connection(name)) for name in (W10, W2)}


@pytest.fixture
def workers(lanes: dict[str, tuple[Any, Any]]) -> AttachedWorkers:
    workers = AttachedWorkers()
    for name, peers in lanes.items():
        workers.joined(name, *peers)
    return workers


def test_those_that_are_ready_come_in_the_order_of_their_indices(workers):
    assert len(workers) == 2
    assert workers.ready() == [W2, W10]
    workers.leaves(W2)
    assert len(workers) == 2
    assert workers.ready() == [W10]


def test_a_worker_that_has_left_may_come_again_with_other_connections(workers, lanes):
    workers.leaves(W2)
    workers.gone(W2)
    assert not workers.is_current(lanes[W2][0])
    again: Any = Connection(W2), Connection(W2)
    workers.joined(W2, *again)
    assert workers.ready() == [W2, W10]
    assert workers.is_current(again[1])
    assert not workers.is_current(lanes[W2][1])


def test_what_is_said_is_said_on_the_control_connection(workers, lanes):
    message = CancelClosures([3])
    workers.notify_all(message)
    workers.notify(W10, message)
    assert [len(control.heard) for control, _ in lanes.values()] == [2, 1]
    assert not any(bulk.heard for _, bulk in lanes.values())


async def test_a_worker_that_is_lost_meanwhile_is_left_out_of_the_answers(workers):
    lost: Any = Connection(W2, is_lost=True)
    workers.joined(W2, lost, lost)
    assert await workers.ask_all(Done()) == {W10: Done()}
