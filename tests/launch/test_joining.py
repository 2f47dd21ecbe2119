"""Workers join a running cluster through the door of its chief, come back, and leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping

import pytest

from psync.closures.scaling import Load
from psync.errors import AuthenticationError, ConfigurationError, ConnectFailed
from psync.launch.process import PYTHON
from psync.launch.tasks import FIRST_JOINED, FORGET_AFTER_S, Door, Membership, join
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform, Workforce
from psync.net.secret import Secret
from psync.testing import MemoryNetwork
from psync.wire.messages import JoinCluster, LeaveCluster, Number

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
        assert isinstance(answer, Number)
        return peer, answer.value

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


def platform() -> Platform:
    return Platform(MemoryNetwork(), Secret(b"a secret of the whole cluster"))


@pytest.mark.virtual_time
async def test_a_member_comes_back_to_a_new_chief_under_its_index() -> None:
    shared, added = platform(), dict[str, str]()
    member = Membership(shared, "chief:1", "b:1")
    async with Door(shared, "chief:1", Workforce(), {}):
        await member.begin()
        assert member.index == FIRST_JOINED
    keeping = asyncio.ensure_future(member.keep())
    await asyncio.sleep(30)
    async with Door(shared, "chief:1", Workforce(), added):
        await asyncio.sleep(30)
        assert added == {f"/job:worker/task:{FIRST_JOINED}": "b:1"}
        await member.end()
        assert added == {}
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.virtual_time
async def test_one_whose_index_was_given_away_is_told_to_start_again() -> None:
    shared = platform()
    member, other = Membership(shared, "chief:1", "b:1"), Membership(shared, "chief:1", "c:1")
    async with Door(shared, "chief:1", Workforce(), {}):
        await member.begin()
    async with Door(shared, "chief:1", Workforce(), {}):
        await other.begin()
        with pytest.raises(ConfigurationError, match="its index"):
            await member.keep()
        await other.end()
    await member.end()


async def test_where_nobody_answers_the_hint_says_what_a_chief_needs() -> None:
    member = Membership(platform(), "chief:1", "b:1")
    with pytest.raises(ConnectFailed) as caught:
        await member.begin()
    assert "only if it ends in psync.run(main)" in str(caught.value.hint)
    await member.end()


@pytest.mark.parametrize(
    ("chief", "secret", "text"),
    [
        ("a", "x" * 32, "expected a port from 0 to 65535"),
        ("a:0", "x" * 32, "expected host:port of the chief, got 'a:0'"),
        ("a:1", "", "PSYNC_SECRET: expected at least 16 bytes"),
        ("a:1", None, "no secret is set, and joining requires the cluster's secret"),
        ("nobody.invalid:1", "x" * 32, "nobody.invalid:1 is unreachable: "),
    ],
)
async def test_what_cannot_be_used_is_an_error_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch, chief: str, secret: str | None, text: str
) -> None:
    monkeypatch.delenv("PSYNC_SECRET_FILE", raising=False)
    monkeypatch.delenv("PSYNC_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("PSYNC_SECRET", secret)
    with pytest.raises(ConfigurationError) as caught:
        await join(chief)
    assert text in str(caught.value)
