from __future__ import annotations

import asyncio

import pytest

from psync.client.calls import all_of

pytestmark = pytest.mark.asyncio


async def fail(error: Exception) -> int:
    raise error


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_all_calls_are_made_at_once_and_answered_in_order() -> None:
    assert await all_of([give(1), give(2), give(3)]) == [1, 2, 3]


async def test_the_first_error_is_raised_once_all_have_ended() -> None:
    ended: list[int] = []

    async def end_later() -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended.append(1)
        return 1

    with pytest.raises(ValueError, match="first"):
        await all_of([fail(ValueError("first")), end_later(), fail(ValueError("last"))])
    assert ended == [1]


async def test_who_is_cancelled_cancels_all() -> None:
    cancelled: list[int] = []

    async def wait(number: int) -> int:
        try:
            return await asyncio.Event().wait()
        finally:
            cancelled.append(number)

    task = asyncio.ensure_future(all_of([wait(1), wait(2)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [1, 2]
