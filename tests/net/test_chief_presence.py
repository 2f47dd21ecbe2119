"""How long a ps or worker goes without a chief, and what it says then."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest

from psync.errors import TrainingEnded
from psync.net.chief_presence import (
    ALL_GONE_S,
    LOOK_EVERY_S,
    ChiefPresence,
    TrainingPresence,
    naming_who_is_awaited,
    until_told,
)
from psync.net.endpoint import Endpoint
from psync.net.platform import FIRST_CHIEF_S, NEXT_CHIEF_S, Platform, chief_timeouts
from psync.net.secret import Secret
from psync.testing import MemoryNetwork
from psync.wire.limits import Limits

CHIEF, WORKER, PS = "/job:chief/task:0", "/job:worker/task:0", "/job:ps/task:0"


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[ChiefPresence, dict[str, Endpoint]]]:
    """Whether a chief is at a ps; and the endpoints of a chief and a worker."""
    platform = Platform(MemoryNetwork(), Secret(b"a secret of the whole cluster"))
    ps = Endpoint(platform, PS, 1, {})
    tasks = {name: Endpoint(platform, name, 2, {}) for name in (CHIEF, WORKER)}
    chief = ChiefPresence(ps)
    await ps.listen("ps:1")
    try:
        yield chief, tasks
    finally:
        for endpoint in (*tasks.values(), ps):
            await endpoint.close()


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.virtual_time
async def test_the_first_chief_is_missed_from_the_start_on() -> None:
    async with listening() as (chief, tasks):
        await tasks[WORKER].connect("ps:1", PS)  # is none
        began = now()
        with pytest.raises(TrainingEnded, match="within 30 s since it started"):
            await chief.missed(PS, (30, 7))
        assert now() - began == 30
        assert not chief.has_come


@pytest.mark.virtual_time
async def test_another_chief_is_missed_since_the_last_connection_of_the_one_before() -> None:
    async with listening() as (chief, tasks):
        missed = asyncio.create_task(chief.missed(PS, (30, 7)))
        await asyncio.sleep(29)
        control = await tasks[CHIEF].connect("ps:1", PS)
        bulk = await tasks[CHIEF].connect("ps:1", PS, "bulk")
        await asyncio.sleep(1000)
        control.close()
        await asyncio.sleep(1000)
        assert not missed.done()
        bulk.close()
        await bulk.wait_closed()
        await asyncio.sleep(6)
        (await tasks[CHIEF].connect("ps:1", PS)).close()  # here, and gone: it counts anew
        last = now()
        with pytest.raises(TrainingEnded, match="within 7 s since the last one went"):
            await missed
        assert 7 <= now() - last < 7.1
        assert chief.has_come


@pytest.mark.virtual_time
async def test_without_a_limit_it_is_never_missed() -> None:
    async with listening() as (chief, tasks):
        missed = asyncio.create_task(chief.missed(PS, (None, None)))
        await asyncio.sleep(1e4)
        (await tasks[CHIEF].connect("ps:1", PS)).close()
        await asyncio.sleep(1e4)
        assert not missed.done()
        missed.cancel()


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("came", "since"), [(False, "10 s since it started"), (True, "20 s since the last one went")]
)
async def test_who_has_missed_it_says_so(came: bool, since: str) -> None:
    async with listening() as (chief, tasks):
        if came:
            (await tasks[CHIEF].connect("ps:1", PS)).close()
        with pytest.raises(TrainingEnded) as caught:
            await until_told(PS, asyncio.Event(), chief, (10, 20))
        assert caught.value.message == f"{PS} ends: no chief has connected within {since}"
        assert "PSYNC_CHIEF_TIMEOUT" in (caught.value.hint or "")


@pytest.mark.virtual_time
async def test_who_is_told_to_end_waits_no_longer() -> None:
    async with listening() as (chief, _):
        told = asyncio.Event()
        asyncio.get_running_loop().call_later(3, told.set)
        began = now()
        await until_told(PS, told, chief, (None, None))
        assert now() - began == 3


def test_how_long_that_is() -> None:
    for environ, given, expected in [
        ({}, None, (FIRST_CHIEF_S, NEXT_CHIEF_S)),
        ({"PSYNC_LAUNCHED": "1"}, None, (None, None)),
        ({"PSYNC_CHIEF_TIMEOUT": ""}, None, (FIRST_CHIEF_S, NEXT_CHIEF_S)),
        ({"PSYNC_CHIEF_TIMEOUT": "2.5"}, None, (2.5, 2.5)),
        ({"PSYNC_CHIEF_TIMEOUT": "60", "PSYNC_LAUNCHED": "1"}, None, (60, 60)),
        ({"PSYNC_CHIEF_TIMEOUT": "None"}, None, (None, None)),
        ({"PSYNC_CHIEF_TIMEOUT": "60"}, "none", (None, None)),
    ]:
        assert chief_timeouts(environ, given) == expected


# --- an evaluator --------------------------------------------------------------------------------


async def looks(presence: TrainingPresence) -> float:
    """Look every second until training has ended; return how long that took."""
    began = now()
    while True:
        await presence.look()
        if presence.has_ended():
            return now() - began
        await asyncio.sleep(1)


@pytest.mark.virtual_time
async def test_an_evaluator_ends_a_minute_after_all_have_gone() -> None:
    network = MemoryNetwork()
    presence = TrainingPresence(network, {PS: "ps:1", WORKER: "worker:1"}, (3600.0, 600.0))
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(looks(presence))
        await asyncio.sleep(1000)
        assert presence.describe().startswith(f"nobody trains yet ({PS} at ps:1, {WORKER} at work")
        listener = await network.listen("worker:1", asyncio.BufferedProtocol)
        await asyncio.sleep(10_000)
        assert presence.describe() == "training goes on"
        assert not looking.done()
        listener.close()
        await asyncio.sleep(LOOK_EVERY_S + 1)
        assert re.fullmatch(r"nobody trains any more .*ends in \d+ s", presence.describe())
    assert presence.describe().endswith(f"({PS} at ps:1, {WORKER} at worker:1)")
    assert 11_000 < await looking < 11_000 + ALL_GONE_S + LOOK_EVERY_S + 2


@pytest.mark.virtual_time
async def test_an_evaluator_that_evaluated_for_long_gives_a_restart_its_minute() -> None:
    """It last looked before its evaluation, and all tasks are being started again just now."""
    network = MemoryNetwork()
    presence = TrainingPresence(network, {PS: "ps:1"}, (3600.0, 600.0))
    listener = await network.listen("ps:1", asyncio.BufferedProtocol)
    await presence.look()
    await asyncio.sleep(1000)
    listener.close()
    await presence.look()
    assert not presence.has_ended()
    await asyncio.sleep(ALL_GONE_S - 1)
    assert not presence.has_ended()
    await network.listen("ps:1", asyncio.BufferedProtocol)
    await presence.look()
    assert presence.describe() == "training goes on"


@pytest.mark.virtual_time
async def test_an_impatient_evaluator_is_no_flood_of_strangers() -> None:
    network = MemoryNetwork()
    probes = 0

    def probed() -> asyncio.BufferedProtocol:
        nonlocal probes
        probes += 1
        return asyncio.BufferedProtocol()

    listener = await network.listen("ps:1", probed)
    presence = TrainingPresence(network, {PS: "ps:1"}, (2.0, 2.0))
    looking = asyncio.create_task(looks(presence))
    await asyncio.sleep(60)
    assert 2 < probes < Limits().handshake_failures
    listener.close()
    assert 60 < await looking < 75


@pytest.mark.virtual_time
@pytest.mark.parametrize(("first_s", "ends"), [(100.0, True), (None, False)])
async def test_an_evaluator_waits_for_the_first_as_long_as_workers_do(
    first_s: float | None, ends: bool
) -> None:
    presence = TrainingPresence(MemoryNetwork(), {PS: "ps:1"}, (first_s, None))
    await presence.look()
    await asyncio.sleep(60)
    presence.note_sign()  # a checkpoint: somebody trains whom it cannot reach
    await asyncio.sleep(90)
    assert not presence.has_ended()
    await asyncio.sleep(20)
    if not ends:
        assert not presence.has_ended()
        return
    with pytest.raises(TrainingEnded) as caught:
        presence.has_ended()
    assert caught.value.message == (
        f"the evaluator ends: within 100 s nobody has come who trains ({PS} at ps:1)"
    )


@pytest.mark.virtual_time
async def test_who_is_awaited_is_named_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psync.net.chief_presence")
    texts = ["waits for a", "", "waits for b"]
    with naming_who_is_awaited(lambda: texts.pop(0)):
        await asyncio.sleep(35)
    await asyncio.sleep(100)
    assert [record.getMessage() for record in caplog.records] == ["waits for a", "waits for b"]
