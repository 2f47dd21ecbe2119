"""Plain steps run in order, in one daemon thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from psync.testing import settle
from psync.worker.step_thread import StepThread

where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


async def test_functions_run_in_order_in_one_thread_of_their_own():
    thread = StepThread()
    seen: list[tuple[int, int]] = []
    jobs = [thread.run(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(20)]
    await asyncio.gather(*jobs)
    assert [i for i, _ in seen] == list(range(20))
    idents = {ident for _, ident in seen}
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    thread.close()


async def test_an_outcome_is_a_value_or_an_exception():
    thread = StepThread()
    assert await thread.run(lambda: 3) == (3, None)
    error = SystemExit("no")

    def fail() -> None:
        raise error

    assert await thread.run(fail) == (None, error)
    thread.close()


async def test_the_callers_context_is_seen_and_not_changed():
    thread = StepThread()
    where.set("here")

    def step() -> str:
        found = where.get()
        where.set("there")
        return found

    assert await thread.run(step) == ("here", None)
    assert where.get() == "here"
    thread.close()


async def test_a_cancelled_future_stops_nothing_and_harms_nothing():
    thread = StepThread()
    started, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        go_on.wait(20)

    job = thread.run(slow)
    await asyncio.to_thread(started.wait, 20)
    job.cancel()
    go_on.set()
    assert await thread.run(lambda: 1) == (1, None)
    thread.close()


async def test_the_thread_starts_with_the_first_function_and_ends_when_it_is_closed():
    thread = StepThread()
    thread.close()  # there was none
    found: list[threading.Thread] = []
    await thread.run(lambda: found.append(threading.current_thread()))
    assert found[0].daemon
    thread.close()
    await asyncio.to_thread(found[0].join, 20)
    assert not found[0].is_alive()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop])
def test_a_loop_that_is_closed_meanwhile_ends_the_thread(new_loop):
    loop = new_loop()
    started, go_on = threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def slow() -> None:
        found.append(threading.current_thread())
        started.set()
        go_on.wait(20)

    async def main() -> None:
        StepThread().run(slow)
        await asyncio.to_thread(started.wait, 20)

    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    go_on.set()
    found[0].join(20)
    assert not found[0].is_alive()


async def test_a_call_returns_or_raises_what_the_function_does():
    thread = StepThread()
    assert await thread.call(lambda: 3, lambda: False) == 3
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0, lambda: False)
    thread.close()


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_call_that_is_cancelled_waits_for_the_function_unless_all_is_over(is_over):
    thread, release, ran = StepThread(), threading.Event(), []

    def slow() -> None:
        release.wait(20)
        ran.append(True)

    call = asyncio.create_task(thread.call(slow, lambda: is_over))
    await asyncio.sleep(0)
    call.cancel()
    await settle()
    assert call.done() is is_over
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    if not is_over:
        assert ran == [True]
    thread.close()
