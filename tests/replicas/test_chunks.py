"""Work in pieces: others have their turn in between."""

from __future__ import annotations

import asyncio

import pytest

from psync.numerics.sums import Pieces
from psync.replicas.chunks import in_turns


async def test_others_have_their_turn_between_pieces() -> None:
    seen: list[str] = []

    def work() -> Pieces[str]:
        for piece in ("a", "b"):
            seen.append(piece)
            yield
        return "done"

    async def other() -> None:
        for _ in range(2):
            seen.append("other")
            await asyncio.sleep(0)

    result, _ = await asyncio.gather(in_turns(work()), other())
    assert (result, seen) == ("done", ["a", "other", "b", "other"])


async def test_what_the_work_raises_is_raised() -> None:
    def work() -> Pieces[None]:
        yield
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        await in_turns(work())


async def test_work_that_is_cancelled_ends_where_it_is() -> None:
    def endless() -> Pieces[None]:
        while True:
            yield

    task = asyncio.create_task(in_turns(endless()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
