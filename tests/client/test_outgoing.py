"""A delivery has its numbers until all is answered, and is made again after a rollback."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from psync.client.numbers import Numbers
from psync.client.outgoing import Outgoing
from psync.client.ps_link import Answers
from psync.errors import ClosedError
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
