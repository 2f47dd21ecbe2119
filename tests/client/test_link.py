"""The link to a ps: who waits for a connection of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from psync.client.link import PsLink
from psync.errors import ConnectFailed, ParameterServerLost


class Peer:
    """A connection."""

    incarnation = 1

    def __init__(self) -> None:
        self.is_open = True
        self.state: dict[str, Any] = {}

    def close(self) -> None:
        self.is_open = False


class Attempts:
    """An endpoint whose attempts end as a test says."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.by_lane = {lane: loop.create_future() for lane in ("control", "bulk")}

    async def connect_retrying(self, address: str, task: str, lane: str, **_: float) -> Any:
        return await self.by_lane[lane]


async def test_a_connection_that_comes_after_the_ps_was_lost_is_closed() -> None:
    attempts: Any = Attempts()
    link = PsLink(attempts, 1, "127.0.0.1:1", 5.0)
    waiting = [asyncio.create_task(link.peer(lane)) for lane in ("control", "bulk")]
    attempts.by_lane["control"].set_exception(ConnectFailed("nobody listens"))
    await asyncio.wait(waiting[:1])
    late = Peer()
    attempts.by_lane["bulk"].set_result(late)
    for each in waiting:
        with pytest.raises(ParameterServerLost, match="nobody listens"):
            await each
    assert not late.is_open
    assert not link.is_open
    assert link.close() == []
