"""A task records while somebody asks, in a ring; and nothing before and after."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgpack
import pytest

from endpoints import PS, SECRET, connected, done
from psync.net.connection import Handler
from psync.net.platform import Platform
from psync.net.tracing import recorder as module
from psync.net.tracing.recorder import GRACE_S, LEASE_S, TICK_S, SpanRecorder
from psync.testing import MemoryNetwork
from psync.wire.messages import AskSpans, AskStatistics, Shutdown
from traced_by_hand import entries_of

pytestmark = pytest.mark.virtual_time


def new_recorder(**options: Any) -> SpanRecorder:
    now = asyncio.get_running_loop().time
    return SpanRecorder(Platform(MemoryNetwork(), SECRET, now=now), PS, **options)


def read(recorder: SpanRecorder, name: str = "r", *, last: bool = False) -> dict[str, Any]:
    body = recorder.read(name, last=last)
    reading: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
    return {**reading, "entries": entries_of(body)}


def notes(reading: dict[str, Any]) -> list[Any]:
    return [entry[2] for entry in reading["entries"]]


async def test_it_records_from_the_first_question_to_the_last() -> None:
    recorder = new_recorder()
    told: list[bool] = []
    recorder.watch(lambda which: told.append(which is recorder))
    assert not recorder.is_recording
    assert read(recorder)["entries"] == []
    assert (recorder.is_recording, told) == (True, [True])
    recorder.note("a", 1)
    assert notes(read(recorder)) == [1]
    recorder.note("a", 2)
    assert notes(read(recorder, last=True)) == [2]
    assert (recorder.is_recording, told) == (False, [True, False])
    assert notes(read(recorder)) == []
    recorder.close()


async def test_each_reader_gets_what_came_since_it_has_asked() -> None:
    recorder = new_recorder()
    read(recorder, "one")
    recorder.note("a", 1)
    read(recorder, "two")
    recorder.note("a", 2)
    assert notes(read(recorder, "one", last=True)) == [1, 2]
    assert notes(read(recorder, "two", last=True)) == [2]


async def test_facts_are_told_in_the_beginning_and_in_the_end() -> None:
    recorder = new_recorder(facts=lambda: {"variables": {1: "w"}})
    facts = [read(recorder, last=last)["facts"] for last in (False, False, True)]
    assert facts == [{"variables": {1: "w"}}, {}, {"variables": {1: "w"}}]


async def test_counters_are_looked_at_again_and_again() -> None:
    recorder = new_recorder(counters=lambda: {"queue": 3})
    assert notes(read(recorder)) == [{"queue": 3}]
    await asyncio.sleep(2.5 * TICK_S)
    assert notes(read(recorder, last=True)) == [{"queue": 3}] * 2
    await asyncio.sleep(2.5 * TICK_S)
    assert notes(read(recorder, last=True)) == [{"queue": 3}]  # it has begun again


async def test_what_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RING_BYTES", 10_000)
    async with connected(server={Shutdown: Handler(done)}) as pair:
        recorder = new_recorder()
        recorder.watch_endpoint(pair.server)
        read(recorder, "slow")
        read(recorder)
        for number in range(1, 5):
            await pair.peer.call(Shutdown("x" * 3000))
            reading = read(recorder)
            assert (reading["lost"], len(reading["entries"])) == (0, 2), number
        slow = read(recorder, "slow")
        assert (slow["lost"], len(slow["entries"])) == (2, 6)  # a question and its answer
        recorder.note("a", "x" * 20_000)
        assert read(recorder)["lost"] == 1
        assert read(recorder, "slow")["lost"] == 1
        recorder.close()


async def test_who_does_not_come_back_is_forgotten_after_a_while() -> None:
    recorder = new_recorder()
    read(recorder, "one")
    await asyncio.sleep(LEASE_S - 1)
    read(recorder, "one")
    await asyncio.sleep(LEASE_S + GRACE_S / 2)
    assert recorder.is_recording  # the question may be unread, if the loop was kept busy
    recorder.note("a", 1)
    assert notes(read(recorder, "one")) == [1]
    await asyncio.sleep(LEASE_S + GRACE_S + 0.1)
    assert not recorder.is_recording


async def test_it_sees_all_messages_of_connections_old_and_new() -> None:
    async with connected(server={AskStatistics: Handler(done)}) as pair:
        recorder = new_recorder()
        forget = recorder.watch_endpoint(pair.server)
        await pair.peer.call(AskStatistics())
        read(recorder)
        await pair.peer.call(AskStatistics())
        bulk = await pair.client.connect(pair.address, PS, "bulk")
        await bulk.call(AskStatistics())
        reading = read(recorder)
        assert [entry[2:4] for entry in reading["entries"]] == [
            [16, 2], [17 + 256, 2], [16, 1], [17 + 256, 1],
        ]  # fmt: skip
        assert [description for _, description in reading["connections"]] == [
            [PS, 1, "/job:worker/task:0", 2, "control"], [PS, 1, "/job:worker/task:0", 2, "bulk"],
        ]  # fmt: skip
        await bulk.call(AskStatistics())
        assert read(recorder)["connections"] == []  # each is described once
        forget()
        await bulk.call(AskStatistics())
        assert read(recorder, last=True)["entries"] == []
        assert bulk.tap is None


async def test_what_is_watched_later_begins_at_once() -> None:
    recorder = new_recorder()
    read(recorder)
    told: list[SpanRecorder | None] = []
    forget = recorder.watch(told.append)
    assert told == [recorder]
    forget()
    assert told == [recorder, None]
    recorder.close()
    recorder.watch(told.append)()
    assert told == [recorder, None]


async def test_it_answers_over_a_connection() -> None:
    recorder = new_recorder()
    async with connected(server={AskSpans: Handler(recorder.answer)}) as pair:
        received = await pair.peer.call(AskSpans("r", False))
        assert msgpack.unpackb(bytes(received.segments[0]))["lost"] == 0
        assert recorder.is_recording
        await pair.peer.call(AskSpans("r", True))
        assert not recorder.is_recording


async def test_a_request_costs_no_look_at_the_clock_while_nobody_asks() -> None:
    looks: list[int] = []

    def now() -> float:
        looks.append(1)
        return 0.0

    async with connected(server={AskStatistics: Handler(done)}) as pair:
        platform = dataclasses.replace(pair.server.platform, now=now)
        recorder = SpanRecorder(platform, PS)
        recorder.watch_endpoint(pair.server)
        await pair.peer.call(AskStatistics())
        assert looks == []
