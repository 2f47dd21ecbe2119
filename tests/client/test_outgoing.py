"""A delivery has its numbers until all is answered, and is made again after a rollback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from psync.client.numbers import Numbers
from psync.client.outgoing import Outgoing
from psync.errors import ParameterServerLost

pytestmark = pytest.mark.asyncio


class Scene:
    """Two places, and a delivery to both that ends when it is let."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.places = [Numbers(), Numbers()]
        self.sent: list[list[int]] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def send(self, numbers: Sequence[int]) -> str:
        self.sent.append(list(numbers))
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return f"answer {len(self.sent)}"

    def begin(self, *, shielded: bool = True) -> asyncio.Task[str]:
        return asyncio.create_task(self.outgoing.deliver(self.places, self.send, shielded=shielded))

    @property
    def acked_below(self) -> list[int]:
        return [place.acked_below for place in self.places]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("shielded", [True, False])
async def test_its_numbers_are_acknowledged_when_all_is_answered(shielded: bool) -> None:
    scene = Scene()
    scene.places[1].answered(scene.places[1].draw())
    delivery = scene.begin(shielded=shielded)
    await turns()
    assert (scene.sent, scene.acked_below) == ([[1, 2]], [1, 2])
    scene.may_end.set()
    assert await delivery == "answer 1"
    assert scene.acked_below == [2, 3]


async def test_after_a_rollback_all_is_sent_again_under_the_same_numbers() -> None:
    scene = Scene()
    delivery = scene.begin()
    await turns()
    scene.outgoing.timeline += 1
    scene.may_end.set()
    assert await delivery == "answer 2"
    assert (scene.sent, scene.acked_below) == ([[1, 1], [1, 1]], [2, 2])


async def test_one_that_fails_is_not_wanted_any_more() -> None:
    scene = Scene()
    scene.error = ParameterServerLost("/job:ps/task:1")
    scene.may_end.set()
    with pytest.raises(ParameterServerLost):
        await scene.begin()
    assert (scene.sent, scene.acked_below) == ([[1, 1]], [2, 2])


async def test_a_shielded_one_goes_on_when_its_caller_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    delivery = scene.begin()
    await turns()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    draining = asyncio.create_task(scene.outgoing.drain())
    await turns()
    assert not draining.done()
    assert scene.acked_below == [1, 1]
    scene.error = ParameterServerLost("/job:ps/task:1")
    with caplog.at_level(logging.INFO):
        scene.may_end.set()
        await draining
    assert "a push whose step was cancelled failed" in caplog.text
    assert (scene.acked_below, scene.outgoing.begun) == ([2, 2], set())


async def test_another_one_is_given_up() -> None:
    scene = Scene()
    delivery = scene.begin(shielded=False)
    await turns()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert (scene.acked_below, scene.outgoing.begun) == ([2, 2], set())


async def test_closing_ends_what_was_begun() -> None:
    scene = Scene()
    delivery = scene.begin()
    await turns()
    await scene.outgoing.close()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert scene.acked_below == [2, 2]
