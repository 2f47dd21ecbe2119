"""The chief's door: who gets in, under which index, and when one is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping

import pytest

from psync.closures.scaling_rule import Load
from psync.errors import AuthenticationError, ConfigurationError
from psync.launch.door import FIRST_JOINED, FORGET_AFTER_S, Door
from psync.launch.interfaces import PYTHON
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.net.workforce import Workforce
from psync.testing import MemoryNetwork
from psync.wire.messages import JoinCluster, Joined, LeaveCluster

CHIEF = "/job:chief/task:0"


class Scene:
    """A door, and what coordinators hear through it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.platform = Platform(self.network, Secret(b"a secret of the whole cluster"))
        self.workforce = Workforce()
        self.added: dict[str, str] = {}
        self.heard: list[object] = []
        self._endpoints: list[Endpoint] = []
        self.workforce.follow(self)

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        self.heard += [dict(added)] if added else list(removed)
        return []

    def load(self) -> Load:
        return Load()

    async def knock(self, platform: Platform | None = None) -> Connection:
        endpoint = Endpoint(platform or self.platform, "/job:worker/joining", 1, {})
        self._endpoints.append(endpoint)
        return await endpoint.connect("chief:1", CHIEF)

    async def join(self, address: str, index: int = -1) -> tuple[Connection, int]:
        peer = await self.knock()
        answer = (await peer.call(JoinCluster(address, index, PYTHON))).message
        assert isinstance(answer, Joined)
        return peer, answer.index

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()


@contextlib.asynccontextmanager
async def open_door() -> AsyncIterator[Scene]:
    scene = Scene()
    async with Door(scene.platform, "chief:1", scene.workforce, scene.added):
        yield scene
    await scene.close()


async def test_workers_get_indices_above_those_of_launchers_and_coordinators_hear_of_them() -> None:
    async with open_door() as scene:
        _, first = await scene.join("b:1")
        _, second = await scene.join("c:1")
        assert (first, second) == (FIRST_JOINED, FIRST_JOINED + 1)
        assert scene.heard == [{first: "b:1"}, {second: "c:1"}]
        assert list(scene.added) == [f"/job:worker/task:{index}" for index in (first, second)]


async def test_one_that_leaves_is_forgotten_and_its_index_is_not_given_again() -> None:
    async with open_door() as scene:
        peer, first = await scene.join("b:1")
        await peer.call(LeaveCluster("it has left"))
        assert scene.heard == [{first: "b:1"}, first]
        assert scene.added == {}
        _, second = await scene.join("b:2")
        assert second == first + 1


@pytest.mark.virtual_time
async def test_one_that_is_lost_may_come_back_under_its_index_for_a_while() -> None:
    async with open_door() as scene:
        peer, index = await scene.join("b:1")
        peer.abort()
        await asyncio.sleep(FORGET_AFTER_S / 2)
        peer, again = await scene.join("b:1", index)
        assert again == index
        await asyncio.sleep(FORGET_AFTER_S)
        assert scene.heard == [{index: "b:1"}] * 2
        peer.abort()
        await asyncio.sleep(FORGET_AFTER_S + 1)
        assert scene.heard[2:] == [index]


async def test_a_new_chief_knows_nobody_and_lets_them_keep_their_indices() -> None:
    async with open_door() as scene:
        _, kept = await scene.join("b:1", FIRST_JOINED + 5)
        assert kept == FIRST_JOINED + 5
        _, other = await scene.join("c:1", FIRST_JOINED + 5)  # which is taken
        assert other == FIRST_JOINED + 6


async def test_another_python_is_refused_with_both_versions() -> None:
    async with open_door() as scene:
        peer = await scene.knock()
        with pytest.raises(ConfigurationError) as caught:
            await peer.call(JoinCluster("b:1", -1, "2.7"))
        assert f"the chief runs Python {PYTHON}, but the worker at b:1 runs 2.7" in str(
            caught.value
        )
        with pytest.raises(ConfigurationError, match="address 'b'"):
            await peer.call(JoinCluster("b", -1, PYTHON))
        assert scene.heard == []


async def test_without_the_secret_nobody_gets_in() -> None:
    async with open_door() as scene:
        stranger = Platform(scene.network, Secret(b"a secret of another cluster"))
        with pytest.raises(AuthenticationError, match="does not have the same secret"):
            await scene.knock(stranger)
