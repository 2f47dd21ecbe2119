"""Time jumps, hangs are errors, and a seed draws the same order again."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import pickle
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from psync.testing import Deadlock, RealWorldError, VirtualClockLoop, run_virtual, settle
from psync.testing import clock as clock_module
from psync.testing.clock import Fence


def now() -> float:
    return asyncio.get_running_loop().time()


# Time.


def test_time_starts_at_zero_and_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        times = [now()]
        for delay in (3600.0, 0.25, 0.0):
            await asyncio.sleep(delay)
            times.append(now())
        return times

    assert run_virtual(main) == [0.0, 3600.0, 3600.25, 3600.25]


def test_a_timer_in_the_past_fires_though_others_keep_the_loop_busy() -> None:
    async def main() -> float:
        await asyncio.sleep(5.0)
        done = asyncio.Event()
        asyncio.get_running_loop().call_at(1.0, done.set)
        while not done.is_set():  # noqa: ASYNC110  # keeping the loop busy is the point
            await asyncio.sleep(0)
        return now()

    assert run_virtual(main) == 5.0


def test_cancelled_timers_do_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(10.0, pytest.fail, "it was cancelled").cancel()
        due = loop.call_later(0.0, pytest.fail, "it was cancelled")
        soon = loop.call_soon(pytest.fail, "it was cancelled")
        due.cancel()
        soon.cancel()
        await asyncio.sleep(20.0)
        return now()

    assert run_virtual(main) == 20.0


# Deadlocks.


def test_waiting_for_what_never_comes_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(1.5)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"no timer is set, at virtual time 1\.5 s"):
        run_virtual(main)


def test_a_timer_that_never_fires_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(math.inf, int)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="nothing is ready"):
        run_virtual(main)


def test_heartbeats_alone_do_not_keep_a_test_alive() -> None:
    async def main() -> None:
        async def heartbeat() -> None:
            while True:  # noqa: ASYNC110  # what heartbeats do
                await asyncio.sleep(60.0)

        async with asyncio.TaskGroup() as group:
            group.create_task(heartbeat())
            await asyncio.Event().wait()

    with (
        asyncio.Runner(loop_factory=lambda: VirtualClockLoop(time_limit_s=3600.0)) as runner,
        pytest.raises(Deadlock, match="no end within 3600 virtual seconds, at virtual time 3600 s"),
    ):
        runner.run(main())


def test_spinning_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110  # spinning is the point
            await asyncio.sleep(0)

    monkeypatch.setattr(clock_module, "SPIN_PASSES", 1000)
    with pytest.raises(Deadlock, match="1000 passes of the loop did not let the clock move"):
        run_virtual(main)


def test_after_a_deadlock_the_tasks_can_still_be_cancelled() -> None:
    ended = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    with pytest.raises(Deadlock):
        run_virtual(main)
    assert ended == ["cleaned up"]


# Order.


def order(seed: int | None, num_tasks: int = 6) -> list[int]:
    """The order in which tasks that are all ready get to run, twice each."""

    async def main() -> list[int]:
        ran: list[int] = []

        async def run(number: int) -> None:
            ran.append(number)
            await asyncio.sleep(0)
            ran.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(num_tasks):
                group.create_task(run(number))
        return ran

    return run_virtual(main, seed=seed)


def test_without_a_seed_tasks_take_turns() -> None:
    assert order(None) == [0, 1, 2, 3, 4, 5] * 2


def test_with_a_seed_the_order_is_drawn_and_can_be_drawn_again() -> None:
    orders = [order(seed) for seed in range(10)]
    assert orders == [order(seed) for seed in range(10)]
    assert len({tuple(entry) for entry in orders}) == 10
    assert all(sorted(entry) == sorted(orders[0]) for entry in orders)


@pytest.mark.parametrize("seed", range(5))
def test_callbacks_keep_their_order_with_every_seed(seed: int) -> None:
    async def main() -> list[int]:
        called: list[int] = []
        for number in range(50):
            asyncio.get_running_loop().call_soon(called.append, number)
            asyncio.create_task(asyncio.sleep(0)).add_done_callback(int_of_task)
        await settle()
        return called

    assert run_virtual(main, seed=seed) == list(range(50))


def int_of_task(task: asyncio.Task[None]) -> None:
    """A callback that is not a step of a task, though a task calls it."""


# What asyncio builds on a loop.


def test_callbacks_run_in_the_context_they_are_given() -> None:
    name = contextvars.ContextVar("name", default="none")

    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), []
        context = contextvars.copy_context()
        context.run(name.set, "given")
        for call in (loop.call_soon, loop.call_soon_threadsafe):
            call(lambda: seen.append(name.get()), context=context)
        loop.call_later(1.0, lambda: seen.append(name.get()), context=context)
        name.set("current")
        loop.call_soon(lambda: seen.append(name.get()))
        await asyncio.sleep(2.0)
        return seen

    assert run_virtual(main) == ["given", "given", "current", "given"]


# Functions that other loops run in threads.


def test_a_function_for_a_thread_runs_on_the_loop_as_one_step() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        thread = threading.get_ident()
        assert await asyncio.to_thread(threading.get_ident) == thread
        with ThreadPoolExecutor(1) as executor:
            loop.set_default_executor(executor)
            assert await loop.run_in_executor(executor, threading.get_ident) == thread
            assert await loop.run_in_executor(None, threading.get_ident) == thread
        steps = []
        future = loop.run_in_executor(None, steps.append, 1)
        assert steps == []  # not before the loop gets to it
        await future
        return steps

    assert run_virtual(main) == [1]


def test_such_a_function_may_end_the_program() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_virtual(asyncio.to_thread, leave)


@pytest.mark.parametrize("fails", [False, True])
def test_such_a_function_may_cancel_what_waits_for_it(fails: bool) -> None:
    async def main() -> None:
        def cancel() -> None:
            future.cancel()
            if fails:
                raise ZeroDivisionError

        future = asyncio.get_running_loop().run_in_executor(None, cancel)
        with pytest.raises(asyncio.CancelledError):
            await future

    run_virtual(main)


def test_another_thread_is_refused() -> None:
    async def main() -> None:
        loop, refused = asyncio.get_running_loop(), []

        def call() -> None:
            with pytest.raises(RealWorldError, match="another thread called into a loop") as caught:
                loop.call_soon_threadsafe(int)
            refused.append(caught.value)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(refused) == 1

    run_virtual(main)


# Running by hand.


def test_stop_ends_the_run_after_the_present_pass() -> None:
    loop, called = VirtualClockLoop(), []
    loop.call_soon(loop.stop)
    loop.call_soon(called.append, "same pass")
    loop.call_soon(lambda: loop.call_soon(called.append, "next pass"))
    loop.run_forever()
    assert called == ["same pass"]
    assert not loop.is_running()
    loop.stop()
    loop.run_forever()
    assert called == ["same pass", "next pass"]
    loop.stop()
    loop.run_forever()  # there is nothing to run
    loop.close()


def test_two_loops_do_not_run_in_one_another() -> None:
    async def main() -> None:
        loop, other = asyncio.get_running_loop(), VirtualClockLoop()
        with pytest.raises(RuntimeError, match="this event loop is running already"):
            loop.run_forever()
        with pytest.raises(RuntimeError, match="this event loop is running already"):
            loop.run_until_complete(loop.create_future())
        with pytest.raises(RuntimeError, match="another event loop is running in this thread"):
            other.run_forever()
        with pytest.raises(RuntimeError, match="cannot close a running event loop"):
            loop.close()
        other.close()

    run_virtual(main)


def test_a_closed_loop_takes_nothing() -> None:
    loop = VirtualClockLoop(1)
    loop.call_soon(int)
    loop.close()
    loop.close()
    assert loop.is_closed()
    for call in (
        lambda: loop.call_soon(int),
        lambda: loop.call_later(1.0, int),
        lambda: loop.run_until_complete(loop.create_future()),
        loop.run_forever,
    ):
        with pytest.raises(RuntimeError, match="the event loop is closed"):
            call()


def test_a_loop_that_is_not_closed_is_complained_of() -> None:
    with pytest.warns(ResourceWarning, match="unclosed event loop <VirtualClockLoop"):
        VirtualClockLoop()  # nobody holds it


def test_an_interrupt_ends_the_run() -> None:
    loop = VirtualClockLoop()

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        loop.call_soon(interrupt)
        raise ZeroDivisionError  # not to be reported as never seen

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(main())
    loop.close()


# settle().


@pytest.mark.parametrize("seed", [None, 4])
def test_settle_waits_for_all_that_is_ready_and_not_for_time(seed: int | None) -> None:
    async def main() -> None:
        steps = 0

        async def work() -> None:
            nonlocal steps
            for _ in range(1000):
                await asyncio.sleep(0)
                steps += 1
            await asyncio.sleep(1.0)
            steps = -1

        task = asyncio.create_task(work())
        await asyncio.gather(settle(), settle())
        assert steps == 1000
        assert now() == 0.0
        await settle()
        assert now() == 0.0
        await task
        assert steps == -1

    run_virtual(main, seed=seed)


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def call_it() -> None:
    await wait_for_ever()


def test_each_task_is_listed_with_the_lines_at_which_it_waits() -> None:
    async def main() -> None:
        task = asyncio.create_task(call_it(), name="reader")
        await task

    with pytest.raises(Deadlock) as caught:
        run_virtual(main)
    first, *rest = str(caught.value).splitlines()
    assert first == ("nothing is ready and no timer is set, at virtual time 0 s; 2 pending tasks:")
    names = [line for line in rest if not line.startswith("    ")]
    assert names[0].startswith("  Task-") or names[1].startswith("  Task-")
    assert "  reader (call_it) waits for a Future" in names
    assert any(line.endswith(".<locals>.main) waits for reader") for line in names)
    places = [line for line in rest if line.startswith("    ")]
    lines = {name: code.__code__.co_firstlineno + 1 for name, code in CODE.items()}
    assert f"    {__file__}:{lines['call_it']} in call_it: await wait_for_ever()" in places
    assert (
        f"    {__file__}:{lines['wait_for_ever']} in wait_for_ever: await asyncio.Event().wait()"
        in (places)
    )
    assert set(caught.value.tasks) > {"reader"}


CODE = {"call_it": call_it, "wait_for_ever": wait_for_ever}


def test_a_run_without_tasks_says_what_would_have_ended_it() -> None:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        loop = runner.get_loop()
        with pytest.raises(Deadlock, match=r"no task is pending: only stop\(\) could"):
            loop.run_forever()


def test_it_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(Deadlock("text", ("a", "b"))))
    assert (str(error), error.tasks) == ("text", ("a", "b"))
    assert isinstance(error, AssertionError)


FENCED = [name for name, value in vars(Fence).items() if type(value).__name__ == "_Fenced"]


@pytest.mark.parametrize("name", FENCED)
def test_what_reaches_the_real_world_is_refused(name: str) -> None:
    async def main() -> None:
        message = rf"{name}\(\) reaches out of a loop with a virtual clock"
        with pytest.raises(RealWorldError, match=message):
            getattr(asyncio.get_running_loop(), name)("an", argument=1)

    run_virtual(main)


def test_every_method_of_a_loop_is_there_or_fenced() -> None:
    methods = dict(inspect.getmembers(asyncio.AbstractEventLoop, inspect.isfunction))
    missing = [
        name for name, method in methods.items() if getattr(VirtualClockLoop, name) is method
    ]
    assert missing == []


async def count(ended: list[str], name: str) -> AsyncIterator[int]:
    try:
        yield 1
        yield 2
    finally:
        await asyncio.sleep(1.0)
        ended.append(name)


def test_generators_that_are_still_open_are_closed_at_the_end() -> None:
    ended: list[str] = []
    held = []

    async def main() -> None:
        for name in ("a", "b"):
            held.append(count(ended, name))
            await anext(held[-1])

    run_virtual(main)
    assert sorted(ended) == ["a", "b"]


def test_errors_that_nobody_awaits_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert loop.get_exception_handler() is None
        loop.call_soon(lambda: 1 // 0)
        await settle()
        loop.call_exception_handler({"protocol": "p"})

    with caplog.at_level(logging.ERROR, "asyncio"):
        run_virtual(main)
    first, second = caplog.records
    assert first.getMessage().startswith("Exception in callback")
    assert first.exc_info is not None
    assert first.exc_info[0] is ZeroDivisionError
    assert second.getMessage() == "unhandled exception in the event loop\nprotocol: 'p'"


def test_a_handler_gets_the_errors_instead(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop, reports = asyncio.get_running_loop(), []

        def handle(loop, report) -> None:
            reports.append(report["message"])
            if len(reports) == 2:
                raise ZeroDivisionError

        loop.set_exception_handler(handle)
        assert loop.get_exception_handler() is handle
        loop.call_exception_handler({"message": "one"})
        loop.call_exception_handler({"message": "two"})
        assert reports == ["one", "two"]

    run_virtual(main)
    (record,) = caplog.records
    assert record.getMessage() == "the exception handler failed\ncontext: {'message': 'two'}"
