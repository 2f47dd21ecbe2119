"""Reports that tell all they can, and never break what they are about."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from psync.net import task_reports
from psync.net.task_reports import (
    add_description,
    describe_tasks,
    describe_threads,
    report_on_signal,
    report_text,
    stack_of_task,
)


@pytest.fixture
def signal_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_report_has_what_was_described_then_stacks_then_an_end(turns):
    remove = add_description(lambda: ["/job:ps/task:0: all is well"])
    lines = report_text("for a test").splitlines()
    remove()
    assert lines[0] == f"psync: report of process {os.getpid()}, for a test"
    assert lines[1] == "/job:ps/task:0: all is well"
    assert any(line.startswith("asyncio tasks: ") for line in lines)
    assert any(line.startswith("threads: ") for line in lines)
    assert lines[-1] == f"psync: end of the report of process {os.getpid()}"
    assert lines[1] not in report_text("again").splitlines()


def test_an_error_of_one_part_is_told_and_leaves_the_others():
    def fails() -> list[str]:
        raise RuntimeError("dictionary changed size during iteration")

    remove = add_description(fails)
    text = report_text("for a test")
    remove()
    remove()  # no harm
    assert "(this part of the report failed: RuntimeError: dictionary changed size" in text
    assert "threads: " in text


def test_without_a_loop_there_are_threads():
    assert "no event loop runs" in report_text("for a test")


def test_a_handler_of_the_programs_own_is_left_alone(signal_as_before):
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(True))
    report_on_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [True]


def test_a_signal_that_came_before_is_answered_once_it_can_be(signal_as_before, capfd):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.raise_signal(signal.SIGUSR1)  # for this thread alone: others do not block it
    report_on_signal()
    error = capfd.readouterr().err
    assert "asked for by SIGUSR1" in error
    assert "psync: end of the report" in error


def test_a_step_that_computes_on_the_loop_is_seen_in_the_middle_of_it(signal_as_before, capfd):
    async def main() -> None:
        report_on_signal()
        computes_for_long()

    def computes_for_long() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):
            pass

    asyncio.run(main())
    error = capfd.readouterr().err
    assert "Current thread" in error  # faulthandler's, from C
    assert "in computes_for_long" in error
    assert "runs just now: see the stack of its thread" in error


def test_where_nobody_reads_stderr_the_program_goes_on(signal_as_before, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(task_reports, "STDERR", write)
    task_reports._on_signal(signal.SIGUSR1, None)  # EPIPE
    os.close(write)
    task_reports._on_signal(signal.SIGUSR1, None)  # EBADF
    report_on_signal()
    assert signal.getsignal(signal.SIGUSR1) is task_reports._on_signal


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
    lines = describe_tasks()
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
    assert describe_tasks()[-1] == "  and 1 other stacks"
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
