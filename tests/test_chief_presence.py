"""psync.chief_presence: how long a ps or worker goes without a chief, and what it says then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from psync.access import Secret
from psync.chief_presence import (
    FIRST_CHIEF_S,
    NEXT_CHIEF_S,
    ChiefPresence,
    chief_timeouts,
    until_told,
)
from psync.endpoint import Endpoint
from psync.errors import ConfigurationError, TrainingEnded
from psync.platform import Platform
from psync.testing import MemoryNetwork

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
        assert await chief.missed((30, 7)) == 30
        assert now() - began == 30
        assert not chief.has_come


@pytest.mark.virtual_time
async def test_another_chief_is_missed_since_the_last_connection_of_the_one_before() -> None:
    async with listening() as (chief, tasks):
        missed = asyncio.create_task(chief.missed((30, 7)))
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
        assert await missed == 7
        assert 7 <= now() - last < 7.1
        assert chief.has_come


@pytest.mark.virtual_time
async def test_without_a_limit_it_is_never_missed() -> None:
    async with listening() as (chief, tasks):
        missed = asyncio.create_task(chief.missed((None, None)))
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


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, None, (FIRST_CHIEF_S, NEXT_CHIEF_S)),
        ({"PSYNC_LAUNCHED": "1"}, None, (None, None)),
        ({"PSYNC_CHIEF_TIMEOUT": ""}, None, (FIRST_CHIEF_S, NEXT_CHIEF_S)),
        ({"PSYNC_CHIEF_TIMEOUT": "2.5"}, None, (2.5, 2.5)),
        ({"PSYNC_CHIEF_TIMEOUT": "60", "PSYNC_LAUNCHED": "1"}, None, (60, 60)),
        ({"PSYNC_CHIEF_TIMEOUT": "None"}, None, (None, None)),
        ({"PSYNC_CHIEF_TIMEOUT": "60"}, "none", (None, None)),
    ],
)
def test_how_long_that_is(
    environ: dict[str, str], given: str | None, expected: tuple[float | None, float | None]
) -> None:
    assert chief_timeouts(environ, given) == expected


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "1 h"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        chief_timeouts({"PSYNC_CHIEF_TIMEOUT": text})
    assert caught.value.message == (
        f"chief timeout: expected seconds above 0, or none, got {text!r}"
    )
