"""Work in pieces: others have their turn in between."""

from __future__ import annotations

import asyncio

import pytest

from psync.numerics.sums import Pieces
from psync.replicas.context import in_turns


async def test_work_that_is_cancelled_ends_where_it_is() -> None:
    def endless() -> Pieces[None]:
        while True:
            yield

    task = asyncio.create_task(in_turns(endless()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
