"""Plain steps run in order, in one daemon thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from psync.testing import settle
from psync.worker.session import StepThread

where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


async def test_functions_run_in_order_in_one_daemon_thread_that_ends_when_it_is_closed():
    thread, seen = StepThread(), []
    thread.close()  # there was none
    for i in range(20):
        await thread.call(lambda i=i: seen.append((i, threading.current_thread())))
    assert [i for i, _ in seen] == list(range(20))
    (ran_in,) = {thread for _, thread in seen}
    assert ran_in is not threading.current_thread()
    assert ran_in.daemon
    thread.close()
    await asyncio.to_thread(ran_in.join, 20)
    assert not ran_in.is_alive()


async def test_a_call_returns_or_raises_what_the_function_does_which_sees_the_context():
    thread = StepThread()
    where.set("here")

    def step() -> str:
        found = where.get()
        where.set("there")
        return found

    assert await thread.call(step) == where.get() == "here"
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    with pytest.raises(SystemExit, match="no"):
        await thread.call(lambda: exit("no"))
    thread.close()


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
        call = asyncio.create_task(StepThread().call(slow))
        await asyncio.to_thread(started.wait, 20)
        call.cancel()

    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    go_on.set()
    found[0].join(20)
    assert not found[0].is_alive()


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
    assert await thread.call(lambda: 1) == 1, "the thread has come to no harm"
    thread.close()
