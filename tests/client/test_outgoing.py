"""A delivery has its numbers until all is answered, and is made again after a rollback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from psync.client.numbers import Numbers
from psync.client.outgoing import Outgoing
from psync.client.ps_link import Answers
from psync.errors import ClosedError, ParameterServerLost
from psync.testing import settle

pytestmark = pytest.mark.asyncio


class Asked(Answers[Any]):
    """Calls that are answered all at once, when the scene lets them."""

    def __init__(self, scene: Scene, answer: str) -> None:
        self._scene, self._answer = scene, answer
        self.given_up = False
        super().__init__(())

    def settled(self) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._scene.may_end.wait())  # type: ignore[return-value,arg-type]

    def give_up(self) -> None:
        self.given_up = True

    def messages(self) -> list[Any]:
        if self._scene.error is not None:
            raise self._scene.error
        return [self._answer]


class Scene(Outgoing):
    """Two places, and a delivery to both that is answered when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.places = [Numbers(), Numbers()]
        self.sent: list[list[int]] = []
        self.asked: list[Asked] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    def ask(self, calls: Any) -> Answers[Any]:
        self.sent.append(list(calls))
        self.asked.append(Asked(self, f"answer {len(self.sent)}"))
        return self.asked[-1]

    def begin(self) -> asyncio.Task[list[Any]]:
        return asyncio.create_task(self.deliver(self.places, self._calls_of))

    def _calls_of(self, numbers: Any) -> Any:
        return numbers  # that is all that matters here

    @property
    def acked_below(self) -> list[int]:
        return [place.acked_below for place in self.places]


@pytest.mark.virtual_time
async def test_its_numbers_are_acknowledged_when_all_is_answered() -> None:
    scene = Scene()
    scene.places[1].answered(scene.places[1].draw())
    delivery = scene.begin()
    await settle()
    assert (scene.sent, scene.acked_below) == ([[1, 2]], [1, 2])
    scene.may_end.set()
    assert await delivery == ["answer 1"]
    assert scene.acked_below == [2, 3]


@pytest.mark.virtual_time
async def test_after_a_rollback_all_is_sent_again_under_the_same_numbers() -> None:
    scene = Scene()
    delivery = scene.begin()
    await settle()
    scene.timeline += 1
    scene.may_end.set()
    assert await delivery == ["answer 2"]
    assert (scene.sent, scene.acked_below) == ([[1, 1], [1, 1]], [2, 2])


async def test_one_that_fails_is_not_wanted_any_more() -> None:
    scene = Scene()
    scene.error = ParameterServerLost("/job:ps/task:1")
    scene.may_end.set()
    with pytest.raises(ParameterServerLost):
        await scene.begin()
    assert (scene.sent, scene.acked_below) == ([[1, 1]], [2, 2])


@pytest.mark.virtual_time
async def test_a_shielded_one_goes_on_when_its_caller_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    delivery = scene.begin()
    await settle()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    draining = asyncio.create_task(scene.drain())
    await settle()
    assert not draining.done()
    assert not scene.asked[0].given_up
    assert scene.acked_below == [1, 1]
    scene.error = ParameterServerLost("/job:ps/task:1")
    with caplog.at_level(logging.DEBUG):
        scene.may_end.set()
        await draining
    assert "a push whose step was cancelled failed" in caplog.text
    assert (scene.acked_below, scene.begun) == ([2, 2], set())


async def test_one_that_is_not_shielded_is_under_way_as_long_as_its_block() -> None:
    scene = Scene()
    with contextlib.suppress(asyncio.CancelledError), scene.numbered(scene.places) as numbers:
        assert (list(numbers), scene.acked_below) == ([1, 1], [1, 1])
        raise asyncio.CancelledError
    assert (scene.acked_below, scene.begun) == ([2, 2], set())


@pytest.mark.virtual_time
async def test_closing_ends_what_was_begun() -> None:
    scene = Scene()
    delivery = scene.begin()
    await settle()
    await scene.close()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert scene.acked_below == [2, 2]
    assert scene.asked[0].given_up


@pytest.mark.virtual_time
async def test_closing_ends_what_goes_on_without_its_caller() -> None:
    scene = Scene()
    delivery = scene.begin()
    await settle()
    delivery.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await delivery
    assert len(scene.begun) > 0
    await scene.close()
    await settle()
    assert (scene.acked_below, scene.begun) == ([2, 2], set())
    assert scene.asked[0].given_up


@pytest.mark.virtual_time
async def test_closing_waits_for_as_long_as_is_said_for_what_was_begun() -> None:
    for answered in (True, False):
        scene = Scene()
        delivery = scene.begin()
        await settle()
        delivery.cancel()
        await settle()
        closing = asyncio.create_task(scene.close(1.0))
        await settle()
        assert not closing.done()
        with pytest.raises(ClosedError):
            await scene.begin()
        if answered:
            scene.may_end.set()
            await settle()
            assert closing.done()
        await closing
        assert scene.asked[0].given_up is not answered
        assert delivery.cancelled()


@pytest.mark.virtual_time
async def test_what_is_stopped_begins_nothing_else() -> None:
    """What is given back at the end, such as a lock, would keep the closing for ever."""
    scene = Scene()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await scene.shielded(asyncio.Event().wait)

    running = asyncio.ensure_future(scene.shielded(work))
    await settle()
    async with asyncio.timeout(60):
        await scene.close()
    with pytest.raises(ClosedError):
        await running
    assert scene.begun == set()
