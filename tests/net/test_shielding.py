"""Work goes on when whoever waits is cancelled, and the loop hears nothing of its errors."""

from __future__ import annotations

import asyncio

import pytest

from psync.net.shielding import first_of, most_are_cancelled, shielded


async def test_what_it_returns_or_raises_is_passed_on() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(shielded(work))
    work.set_result(3)
    assert await waiting == 3
    assert await shielded(work) == 3
    broken: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    broken.set_exception(ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        await shielded(broken)


async def test_work_goes_on_when_its_caller_is_cancelled() -> None:
    """That its error is reported to nobody is for the fixture ``clean_loop`` to see."""
    goes_on = asyncio.Event()

    async def fail() -> None:
        await goes_on.wait()
        raise ValueError("nobody waits for this")

    work = asyncio.ensure_future(fail())
    waiting = asyncio.ensure_future(shielded(work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not work.done()
    goes_on.set()
    await asyncio.wait((work,))
    assert isinstance(work.exception(), ValueError)


async def test_work_that_is_cancelled_itself_cancels_its_caller() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(shielded(work))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_end_of_a_loop_is_told_although_those_that_were_there_have_ended_first() -> None:
    loop = asyncio.get_running_loop()
    before = {loop.create_task(asyncio.sleep(60)) for _ in range(2)}
    newer = loop.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    assert not most_are_cancelled(before)
    for task in before:
        task.cancel()
    await asyncio.wait(before)
    assert most_are_cancelled(before)
    newer.cancel()


async def test_the_first_that_ends_counts_and_the_others_are_over() -> None:
    over = asyncio.Event()

    async def long() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            over.set()
        return 1

    async def failing() -> int:
        raise ValueError("first")

    assert await first_of(long(), asyncio.sleep(0, 2)) == 2
    assert over.is_set()
    with pytest.raises(ValueError, match="first"):
        await first_of(long(), failing())
    assert await first_of(asyncio.sleep(0, 3), asyncio.sleep(0, 4)) == 3
    over.clear()
    waiting = asyncio.create_task(first_of(long(), long()))
    await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert over.is_set()
