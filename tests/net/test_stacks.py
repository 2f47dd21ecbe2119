"""Where tasks and threads are, to the end of the chain of awaits."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from psync.net.task_reports import describe_tasks, describe_threads, stack_of_task


async def innermost(event: asyncio.Event) -> None:
    await event.wait()


async def outermost(event: asyncio.Event) -> None:
    await innermost(event)


async def generate(event: asyncio.Event):
    await innermost(event)
    yield 1


async def iterates(event: asyncio.Event) -> None:
    async with contextlib.aclosing(generate(event)) as values:
        async for _ in values:
            return


@pytest.mark.parametrize(
    ("waiting", "chain"),
    [
        (outermost, ["in outermost: await innermost(event)", "in innermost: await event.wait()"]),
        (iterates, ["in iterates"]),  # a generator in between is no end
    ],
)
async def test_the_chain_of_awaits_is_followed_to_its_end(waiting, chain):
    event = asyncio.Event()
    task = asyncio.create_task(waiting(event))
    await asyncio.sleep(0)
    text = stack_of_task(task)
    assert [said in line for said, line in zip(chain, text, strict=False)] == [True] * len(chain)
    event.set()
    await task


async def test_a_task_that_waits_for_another_one_names_it():
    event = asyncio.Event()
    other = asyncio.create_task(outermost(event), name="the other")

    async def waits() -> None:
        await other

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    assert stack_of_task(task)[-1] == "waits for the task the other"
    event.set()
    await task


async def test_tasks_that_wait_at_the_same_place_are_told_together():
    event = asyncio.Event()
    tasks = [asyncio.create_task(outermost(event), name=f"waiter {i}") for i in range(7)]
    await asyncio.sleep(0)
    lines = describe_tasks(asyncio.get_running_loop())
    assert lines[0] == "asyncio tasks: 8"
    assert "  waiter 0, waiter 1, waiter 2, waiter 3, waiter 4 and 2 more:" in lines
    assert sum("await innermost(event)" in line for line in lines) == 1
    assert any("runs just now" in line for line in lines)
    event.set()
    await asyncio.gather(*tasks)


async def test_more_stacks_than_anybody_reads_are_counted(monkeypatch):
    monkeypatch.setattr("psync.net.task_reports.MAX_STACKS", 1)
    task = asyncio.create_task(asyncio.sleep(3600))
    await asyncio.sleep(0)
    assert describe_tasks(asyncio.get_running_loop())[-1] == "  and 1 other stacks"
    task.cancel()
    await asyncio.wait([task])


def test_threads_are_told_by_name_while_somebody_holds_the_lock_of_threading():
    """A signal handler may have interrupted a thread's start."""
    entered, leave = threading.Event(), threading.Event()

    def hangs_here() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=hangs_here, name="the one that hangs")
    thread.start()
    entered.wait()
    with threading._active_limbo_lock:
        lines = describe_threads()
    leave.set()
    thread.join()
    assert "  the one that hangs:" in lines
    assert any("in hangs_here: leave.wait()" in line for line in lines)
    assert any("in test_threads_are_told" in line for line in lines)
