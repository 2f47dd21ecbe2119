"""Who waits for a take, and when nobody does any more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from asked import Reply
from local_training import at_once
from psync.errors import ConnectionLost, UsageError
from psync.net.connection import AsIfFrom, Connection
from psync.ps.takes import TakeName, TakeWaits
from psync.wire.messages import Done

A = ("/job:worker/task:0", 7)
FIRST, SECOND = TakeName(A, "g", 1), TakeName(A, "g", 2)
ANSWER = Reply(Done())


class Scene:
    def __init__(self) -> None:
        self.left: list[Any] = []
        self.waits = TakeWaits("ps", lambda client, names: self.left.append((client, names)))


def connection() -> Connection:
    return cast(Connection, AsIfFrom(*A, {}))


def close(peer: Connection) -> None:
    for listener in peer.on_closed:
        listener(peer)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.usefixtures("turns")
def test_all_requests_for_a_take_get_its_answer_and_nobody_is_said_to_have_left(
    scene: Scene,
) -> None:
    peers = [connection(), connection()]
    futures = [scene.waits.add(FIRST, peer) for peer in peers]
    other = scene.waits.add(SECOND, peers[0])
    scene.waits.settle(FIRST, ANSWER)
    answers = [at_once(scene.waits.answer(FIRST, future)) for future in futures]
    assert answers == [ANSWER, ANSWER]
    assert not other.done()
    assert not scene.left
    assert peers[1].state["takes"] == set()


@pytest.mark.usefixtures("turns")
def test_takes_leave_together_when_the_last_connection_has_gone(scene: Scene) -> None:
    old, new = connection(), connection()
    waiting = [scene.waits.add(name, old) for name in (FIRST, SECOND)]
    again = scene.waits.add(FIRST, new)
    close(old)
    assert scene.left == [(A, [SECOND])]
    assert all(isinstance(each.exception(), ConnectionLost) for each in waiting)
    assert not again.done()
    close(new)
    assert scene.left[1:] == [(A, [FIRST])]


async def test_a_request_that_is_cancelled_leaves_once(scene: Scene) -> None:
    peer = connection()
    asking = asyncio.create_task(scene.waits.answer(FIRST, scene.waits.add(FIRST, peer)))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    close(peer)
    assert scene.left == [(A, [FIRST])]


@pytest.mark.usefixtures("turns")
def test_an_error_ends_all_waits(scene: Scene) -> None:
    futures = [scene.waits.add(name, connection()) for name in (FIRST, SECOND)]
    scene.waits.settle_all(UsageError("over"))
    for future in futures:
        with pytest.raises(UsageError, match="over"):
            future.result()
    assert not scene.left
