"""Requests and replies that are lost on purpose."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from endpoints import PLACES, PS, SECRET, WORKER, Gate, Handlers, new_endpoint, places, push
from psync.errors import ConfigurationError, ConnectionLost
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.testing.sabotage import Notes, SabotagedParts, notes_in
from psync.testing.sabotage.message_loss import (
    FORMS,
    LOOK_EVERY_S,
    VARIABLE,
    MessageLosses,
)
from psync.wire.codec import replace
from psync.wire.messages import Done, FinalBelow, Update

each_place = pytest.mark.parametrize("place", PLACES)


@contextlib.asynccontextmanager
async def losing(
    place: str, tmp_path: Path, plan: dict[str, Any], handlers: Handlers
) -> AsyncIterator[Connection]:
    """A ps that loses messages, as a worker sees it."""
    network, address = places(tmp_path)[place]()
    platform = Platform(network, SECRET, parts=SabotagedParts(losses=MessageLosses(plan)))
    ps, worker = Endpoint(platform, PS, 1, handlers), new_endpoint(network, WORKER)
    try:
        listener = await ps.listen(address)
        yield await worker.connect(listener.address, PS)
    finally:
        await worker.close()
        await ps.close()


class Served:
    """A handler that answers at once, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, request: Request[Any]) -> None:
        self.count += 1
        request.answer(Done())


@each_place
@pytest.mark.parametrize(("form", "count"), [("request", 0), ("reply", 1)])
async def test_a_lost_request_is_not_served_and_one_whose_reply_is_lost_was(
    place: str, form: str, count: int, tmp_path: Path
) -> None:
    served = Served()
    async with losing(place, tmp_path, {"Update": {form: 1}}, {Update: Handler(served)}) as peer:
        with pytest.raises(ConnectionLost):
            await peer.call(push())
        assert served.count == count
        assert peer.is_closed


@each_place
async def test_the_reply_can_be_lost_while_the_handler_still_works(
    place: str, tmp_path: Path
) -> None:
    gate = Gate()
    async with losing(
        place, tmp_path, {"Update": {"in_flight": 1}}, {Update: Handler(gate)}
    ) as peer:
        with pytest.raises(ConnectionLost):
            await peer.call(push())
        assert (gate.begun, gate.open.is_set(), gate.cancelled) == (1, False, 0)
        gate.open.set()  # its answer goes nowhere


@pytest.mark.parametrize(("form", "served"), [("request", 0), ("reply", 1), ("in_flight", 1)])
async def test_a_notification_is_lost_with_its_connection(
    tmp_path: Path, form: str, served: int
) -> None:
    heard = []

    def hears(*_: Any) -> None:
        heard.append(1)

    plan = {"FinalBelow": {form: 1}}
    async with losing("memory", tmp_path, plan, {FinalBelow: Handler(hears)}) as peer:
        peer.notify(FinalBelow(3))
        await peer.wait_closed()
        assert len(heard) == served


@each_place
async def test_late_requests_are_served_in_their_order_when_it_is_time(
    place: str, tmp_path: Path
) -> None:
    numbers: list[int] = []
    go, last = tmp_path / "go", asyncio.Event()
    notes = Notes(str(tmp_path), "ps-0")

    def served(request: Request[Any]) -> None:
        peer, message = request.peer, request.message
        assert peer.is_closed
        numbers.append(message.sequence)
        if message.sequence == 3:
            last.set()
        if message.sequence == 2:
            raise ConfigurationError("nobody hears of it")
        request.answer(Done())

    network, address = places(tmp_path)[place]()
    losses = MessageLosses({"Update": {"late": 1}, "until": str(go)}, notes)
    platform = Platform(network, SECRET, parts=SabotagedParts(losses=losses))
    ps = Endpoint(platform, PS, 1, {Update: Handler(served)})
    worker = new_endpoint(network, WORKER)
    try:
        listener = await ps.listen(address)
        for number in (1, 2, 3):
            peer = await worker.connect(listener.address, PS)
            with pytest.raises(ConnectionLost):
                await peer.call(replace(push(), sequence=number))
        await asyncio.sleep(3 * LOOK_EVERY_S)
        assert numbers == []
        go.touch()
        await last.wait()
    finally:
        await worker.close()
        await ps.close()
    assert numbers == [1, 2, 3]
    counts = notes_in(tmp_path)["ps-0"]
    assert counts["lost Update late"] == counts["served Update late"] == 3
    notes.close()


async def test_a_slow_request_is_served_after_one_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def served(request: Request[Any]) -> None:
        message = request.message
        numbers.append(message.sequence)
        request.answer(Done())

    slowness = iter([0.02, 0.01])
    monkeypatch.setattr(MessageLosses, "slowness", lambda _: next(slowness))
    async with losing(
        "memory", tmp_path, {"Update": {"slow": 1}}, {Update: Handler(served)}
    ) as peer:
        await asyncio.gather(*(peer.call(replace(push(), sequence=number)) for number in (1, 2)))
    assert numbers == [2, 1]


# --- which ----------------------------------------------------------------------------------------


def drawn(plan: dict[str, Any], kinds: list[str], notes: Notes | None = None) -> list[str | None]:
    losses = MessageLosses(plan, notes)
    return [losses.draw(kind) for kind in kinds]


def test_the_same_seed_loses_the_same() -> None:
    plan = {"Update": {"request": 0.1, "reply": 0.1, "in_flight": 0.1}, "seed": 7}
    kinds = ["Update", "Read"] * 500
    first = drawn(plan, kinds)
    assert first == drawn(plan, kinds)
    assert first != drawn({**plan, "seed": 8}, kinds)
    counts = Counter(first)
    assert all(20 < counts[form] < 90 for form in FORMS)
    assert counts[None] > 700


def test_rare_kinds_get_their_minimum_of_each_form() -> None:
    losses = MessageLosses({"*": {"min_each": 2}, "seed": 1})
    assert [losses.draw("StagePush") for _ in range(7)] == [
        *sorted(FORMS * 2, key=FORMS.index),
        None,
    ]
    assert losses.lost == {("StagePush", form): 2 for form in FORMS}
    assert losses.seen == {"StagePush": 7}


def test_a_later_life_of_the_task_goes_on_where_the_earlier_one_was(tmp_path: Path) -> None:
    notes = Notes(str(tmp_path), "ps-0")
    plan = {"*": {"request": 0.3, "min_each": 1}, "seed": 3}
    first = drawn(plan, ["Update"] * 20, notes)
    second = MessageLosses(plan, notes)
    again = [second.draw("Update") for _ in range(20)]
    assert first[:3] == list(FORMS)
    assert again[:3] != list(FORMS), "the minimum is there"
    counts = notes_in(tmp_path)["ps-0"]
    assert counts["met Update"] == 1
    total = sum(count for line, count in counts.items() if line.startswith("lost Update "))
    assert total == second.lost.total() == 40 - first.count(None) - again.count(None)
    notes.close()


def test_nothing_is_lost_unless_the_file_is_there(tmp_path: Path) -> None:
    file = tmp_path / "lose"
    losses = MessageLosses({"Update": {"reply": 1}, "while": str(file)})
    assert losses.draw("Update") is None
    file.touch()
    assert losses.draw("Update") == "reply"
    file.unlink()
    assert losses.draw("Update") is None
    assert losses.lost == {("Update", "reply"): 1}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no JSON"),
        ("[]", "expected an object"),
        ('{"Shove": {}}', "no message 'Shove'"),
        ('{"Update": 1}', "Update: expected shares"),
        ('{"Update": {"request": 0.6, "reply": 0.6}}', "make at most 1"),
        ('{"Update": {"min_each": 0.5}}', "min_each"),
        ('{"Update": {"request": 0.6, "late": 0.6}}', "make at most 1"),
        ('{"Update": {"response": 0.5}}', "expected shares"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        MessageLosses.from_environment({VARIABLE: text})
