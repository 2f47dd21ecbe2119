"""Side channels in memory: as those of sockets, see tests/net/shared/test_channel.py."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from endpoints import connected
from psync.net.connection import Handler, Request
from psync.net.shared.doors import SideChannel
from psync.net.shared.regions import region_of
from psync.testing import MemoryNetwork, memory_sharing
from psync.testing.memory_sharing import MemoryChannel, channels
from psync.wire.messages import Pull, Pulled
from turns import Turns


@pytest.fixture(autouse=True)
def every_region_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_sharing, "REFUSED", 0.0)


@pytest.fixture
def ends() -> Iterator[tuple[MemoryChannel, MemoryChannel]]:
    made = channels(random.Random(0), Counter())
    yield made
    for end in made:
        end.close()


def test_regions_arrive_at_once_in_order_and_cannot_be_written(
    ends: tuple[SideChannel, SideChannel],
) -> None:
    ours, theirs = ends
    made = [ours.make(number, 10) for number in (1, 2)]
    assert all(ours.give(each.region) for each in made)
    np.frombuffer(made[1], np.uint8)[:] = 5
    taken = dict(theirs.take())
    assert list(taken) == [1, 2]
    assert bytes(taken[2]) == b"\5" * 10
    assert taken[2].readonly
    assert list(theirs.take()) == list(ours.take()) == []


@pytest.mark.parametrize("how", ["end", "close"])
@pytest.mark.parametrize("early", [False, True])
def test_the_end_is_told_once(
    how: str, early: bool, turns: Turns, ends: tuple[SideChannel, SideChannel]
) -> None:
    ours, theirs = ends
    told: list[str] = []
    if early:
        getattr(ours, how)()
    theirs.when_ended(lambda: told.append("ended"))
    if not early:
        turns.settle()
        assert told == []
        getattr(ours, how)()
    assert told == []  # not before the next turn
    turns.settle()
    getattr(ours, how)()
    turns.settle()
    assert told == ["ended"]


def test_some_regions_cannot_be_given_as_a_seed_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_sharing, "REFUSED", 0.3)

    def given(seed: int) -> tuple[list[bool], Counter[str]]:
        seen: Counter[str] = Counter()
        ours, theirs = channels(random.Random(seed), seen)
        made = ours.make(1, 10)
        outcome = [ours.give(made.region) for _ in range(50)]
        assert len(list(theirs.take())) == sum(outcome)
        return outcome, seen

    outcome, seen = given(1)
    assert {True, False} == set(outcome)
    assert given(1) == (outcome, seen)
    assert given(2) != (outcome, seen)
    assert seen == {
        "memory is lent": sum(outcome),
        "memory cannot be lent": 50 - sum(outcome),
    }


@pytest.mark.virtual_time
async def test_tasks_of_a_network_in_memory_share_it() -> None:
    """A large answer comes from the memory of who gives it, and its region is forgotten."""
    network = MemoryNetwork(shares_memory=True)
    regions: list[object] = []

    def values(request: Request[Pull]) -> None:
        root = pair.server.platform.memory.take(20 << 20)
        root[:] = 3
        regions.append(region_of(root.data) is not None)
        request.answer(Pulled([]), [root.data])

    async with connected(network, {Pull: Handler(values)}) as pair:
        for _ in range(3):
            answer = await pair.peer.call(Pull(1, None, -1, ""))
            assert bytes(answer.segments[0]) == b"\3" * (20 << 20)
            del answer
            await asyncio.sleep(1)
        assert regions == [True] * 3
        sharing, back = pair.peer.sharing, pair.back.sharing
        assert sharing is not None
        assert back is not None
        assert back.bytes_lent == sharing.bytes_borrowed == 60 << 20
        assert not back._lent
        assert not sharing._regions
        assert not back._given
        assert pair.server.platform.memory.statistics()["shared_regions"] == 0
        assert pair.back.bytes_sent < 2000
    assert network.lent["memory is lent"] == 3
