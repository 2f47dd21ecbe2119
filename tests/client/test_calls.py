from __future__ import annotations

import asyncio

import pytest

from psync.client.calls import all_of

pytestmark = pytest.mark.asyncio


async def fail(error: Exception) -> int:
    raise error


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
