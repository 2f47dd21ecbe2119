"""Several coroutines at once: their results in order, and the first error when all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first error wins once all have ended, so nothing is left running.

    Like ``asyncio.gather``, but the last one needs no task.
    """
    others = [asyncio.ensure_future(call) for call in calls[:-1]]
    try:
        outcomes = [await _outcome(call) for call in (calls[-1], *reversed(others))]
    except BaseException:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        raise
    results: list[T] = []
    for outcome in reversed(outcomes):
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


async def _outcome(call: Awaitable[T]) -> T | Exception:
    try:
        return await call
    except Exception as exc:
        return exc
