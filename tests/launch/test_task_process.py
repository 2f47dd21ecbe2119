"""One process of a task: what it prints, and how it ends. All are real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from process_tools import Screen, group, is_running, script, watching
from psync.launch.processes import Output
from psync.launch.task_process import describe_exit, hint_of_crash

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-(signal.SIGRTMIN + 5), f"was killed by signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_an_exit_is_described_by_code_or_signal(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize(
    ("code", "environ", "expected"),
    [
        (-signal.SIGSEGV, {}, True),
        (-signal.SIGBUS, {}, True),
        (-signal.SIGKILL, {}, False),
        (signal.SIGSEGV, {}, False),
        (-signal.SIGSEGV, {"PSYNC_SHARED_MEMORY": "0"}, False),
    ],
)
def test_the_hint_of_a_crash_names_copy_where_memory_is_shared(
    code: int, environ: dict[str, str], expected: bool
) -> None:
    assert ("pull with copy=True" in hint_of_crash(code, environ)) is expected


# --- what a task prints ------------------------------------------------------------------------


async def test_output_arrives_whole_on_its_own_stream_with_the_name_of_the_task() -> None:
    out, err = Screen(), Screen()
    count = 2000
    async with group(out, err) as processes:
        for index in range(2):
            processes.start_task("worker", index, script("flood.py", str(count)))
        for screen in (out, err):
            for index in range(2):
                await screen.wait_for(
                    f"[worker-{index}] {'out' if screen is out else 'err'} {count - 1} "
                )
    for name, screen in (("out", out), ("err", err)):
        for index in range(2):
            own = [line for line in screen.lines if line.startswith(f"[worker-{index}] ")]
            assert own == [f"[worker-{index}] {name} {i} {'x' * 100}" for i in range(count)]
        assert len(screen.lines) == 2 * count


async def test_all_that_a_task_printed_has_arrived_when_it_has_been_waited_for() -> None:
    out = Screen()
    async with group(out) as processes:
        task = processes.start_task("worker", 0, script("flood.py", "500"))
        await task.wait()
        assert len(out.lines) == 500


@pytest.mark.parametrize("output", ["discarded", "inherited"])
async def test_output_may_be_discarded_or_go_where_ours_goes(
    output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    out, err = Screen(), Screen()
    async with group(out, err) as processes:
        task = processes.start_task("chief", 0, script("flood.py", "1"), output=output)
        assert await task.wait() == 0
    captured = capfd.readouterr()
    shown = output == "inherited"
    assert captured.out == (f"out 0 {'x' * 100}" if shown else "")
    assert captured.err == (f"err 0 {'x' * 100}" if shown else "")
    assert out.lines == err.lines == []


# --- how a task ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 7])
async def test_the_exit_code_of_a_task_is_returned(code: int) -> None:
    async with group() as processes:
        command = [sys.executable, "-c", f"raise SystemExit({code})"]
        task = processes.start_task("worker", 0, command)
        assert await task.wait() == code
        assert task.returncode == code
        assert repr(task) == f"<TaskProcess worker-0: process {task.pid} exited with code {code}>"


async def test_a_task_killed_by_a_signal_returns_minus_the_signal() -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py"))
        assert await screen.wait_for_number("[worker-0] ready ") == task.pid
        assert repr(task) == f"<TaskProcess worker-0: process {task.pid} is running>"
        assert task.returncode is None
        os.kill(task.pid, signal.SIGKILL)
        assert await task.wait() == -signal.SIGKILL
        task.kill()  # too late, and no error
        task.send_signal(signal.SIGTERM)


async def test_waiting_for_a_task_can_be_cancelled_and_the_task_runs_on() -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py"))
        waiter = asyncio.create_task(task.wait())
        await screen.wait_for("[worker-0] ready ")
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert is_running(task.pid)
        assert await task.stop() == -signal.SIGTERM


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_task_that_ignores_sigterm_is_killed_after_its_grace_or_a_cancellation(
    cancelled: bool,
) -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py", "stubborn"))
        await screen.wait_for("[worker-0] ready ")
        stop = asyncio.create_task(task.stop(grace_s=3600 if cancelled else 0.05))
        await asyncio.sleep(0)
        if cancelled:
            stop.cancel()
        assert await task.wait() == -signal.SIGKILL
        await asyncio.wait([stop])
        assert stop.cancelled() is cancelled
        assert cancelled or stop.result() == -signal.SIGKILL


@pytest.mark.parametrize("kind", [(), ("stubborn",)])
async def test_what_a_task_has_started_ends_with_it(kind: tuple[str, ...]) -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py", "parent", *kind))
        child = await screen.wait_for_number("[worker-0] child ")
        await screen.wait_for("[worker-0] ready ")
        with watching(child) as end:
            os.kill(task.pid, signal.SIGKILL)
            assert await task.wait() == -signal.SIGKILL
            await asyncio.to_thread(end.poll)


async def test_output_held_open_by_a_stranger_does_not_hold_up_the_end() -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py", "daemon"))
        await screen.wait_for("[worker-0] ready ")
        stranger = await screen.wait_for_number("[worker-0] child ")
        with watching(stranger) as end:
            await task.stop()
            await processes.stop()
            assert not end.poll(0)
            os.kill(stranger, signal.SIGKILL)
            await asyncio.to_thread(end.poll)
