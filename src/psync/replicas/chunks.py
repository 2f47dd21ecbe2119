"""Chunked work on an event loop, which runs between the chunks."""

from __future__ import annotations

import asyncio
from typing import TypeVar, cast

from psync.numerics.sums import Pieces

T = TypeVar("T")


async def in_turns(pieces: Pieces[T]) -> T:
    """Do all the work, with the loop running between the pieces; return its result.

    Raises:
        Exception: What the work raises.

    Cancellation: The work ends where it is.
    """
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return cast(T, end.value)
        await asyncio.sleep(0)
