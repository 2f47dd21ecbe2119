"""Who waits for a take, and when nobody does any more."""

from __future__ import annotations

from typing import Any, cast

import pytest

from asked import peer_of
from psync.errors import ConnectionLost
from psync.net.connection import Connection
from psync.ps.takes import TakeName, TakeWaits

A = ("/job:worker/task:0", 7)
FIRST, SECOND = TakeName(A, "g", 1), TakeName(A, "g", 2)


class Scene:
    def __init__(self) -> None:
        self.left: list[Any] = []
        self.waits = TakeWaits("ps", lambda client, names: self.left.append((client, names)))


def connection() -> Connection:
    return cast(Connection, peer_of(A))


def close(peer: Connection) -> None:
    for listener in peer.on_closed:
        listener(peer)


@pytest.fixture
def scene() -> Scene:
    return Scene()


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
