"""Events of a coordinator: each stream has all of them, in order."""

from __future__ import annotations

import asyncio

import pytest

from psync import FailoverEvent, RollbackEvent
from psync.chief.watch import KEPT_NOTES, Events


def event(timeline: int) -> RollbackEvent:
    return RollbackEvent(("/job:ps/task:0",), timeline, 9, 5, (3,), 0.5, 4)


async def test_a_stream_has_what_happened_before_and_after_it_was_opened() -> None:
    events = Events()
    events.emit(event(1))
    seen: list[RollbackEvent] = []

    async def follow() -> None:
        async for one in events.stream():
            seen.append(one)  # noqa: PERF401  as they come

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    assert seen == [event(1)]
    events.emit(event(2))
    events.emit(event(3))
    events.close()
    await following
    assert seen == [event(1), event(2), event(3)]
    assert [one async for one in events.stream()] == seen


async def test_one_who_waits_may_give_up() -> None:
    events = Events()
    waiting = asyncio.ensure_future(anext(events.stream()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    events.emit(event(1))
    assert await anext(events.stream()) == event(1)


@pytest.mark.virtual_time
async def test_notes_are_for_people_and_the_newest_are_kept() -> None:
    events = Events()
    events.emit(event(1))
    events.emit(FailoverEvent(("/job:ps/task:0",), ("/job:ps/task:1",), 0.5))
    await asyncio.sleep(2)
    events.note("joined", "/job:worker/task:0 takes part")
    assert [(note.at, note.kind, note.text) for note in events.notes] == [
        (0.0, "rollback", "/job:ps/task:0 lost: from step 9 back to step 5; undone: 4 updates of "
         "1 closure"),
        (0.0, "failover", "/job:ps/task:0 lost: served by /job:ps/task:1"),
        (2.0, "joined", "/job:worker/task:0 takes part"),
    ]  # fmt: skip
    events.close()
    assert len([one async for one in events.stream()]) == 2
    for number in range(KEPT_NOTES):
        events.note("lost", str(number))
    assert [note.text for note in events.notes] == [str(each) for each in range(KEPT_NOTES)]


def test_what_a_rollback_costs_is_told_though_no_ps_knows_how_far_training_was() -> None:
    event = RollbackEvent(("/job:ps/task:0",), 1, 100, 100, tuple(range(929)), 0.5, 929)
    assert str(event) == (
        "/job:ps/task:0 lost: back to step 100; undone: 929 updates of 929 closures"
    )
