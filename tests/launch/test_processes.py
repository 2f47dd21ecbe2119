"""The processes of a cluster on this machine: start, output, end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from process_tools import SECRET, Screen, group, is_running, script, watching
from psync.cluster import split_address
from psync.errors import BusyError, ClosedError, ConfigurationError
from psync.launch.processes import (
    Output,
    Process,
    ProcessGroup,
    RestartPolicy,
    TaskProcess,
    describe_exit,
    hint_of_crash,
)
from psync.net.shared.door_names import door_beside, name_of_door

# --- decisions ---------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_restarts_are_allowed_up_to_the_limit_within_a_minute() -> None:
    policy, none = RestartPolicy(2), RestartPolicy(0)
    allowed = []
    for now in (0.0, 1.0, 2.0, 59.5, 60.0, 60.5, 61.0, 62.0):
        await asyncio.sleep(now - asyncio.get_running_loop().time())
        allowed.append(policy.allow())
        assert not none.allow()
    assert allowed == [True, True, False, False, True, False, True, False]


# --- what a task is given ----------------------------------------------------------------------


async def report_of(group: ProcessGroup, screen: Screen, job: str, index: int) -> dict[str, Any]:
    task = group.start_task(job, index, script("report.py", "an argument"))
    assert await task.wait() == 0
    report: dict[str, Any] = json.loads(await screen.wait_for(f"[{job}-{index}] "))
    return report


@pytest.mark.processes
async def test_a_task_is_told_its_cluster_and_its_place_in_it() -> None:
    screen = Screen()
    async with group(screen) as processes:
        report = await report_of(processes, screen, "worker", 1)
    config = json.loads(report["environ"]["TF_CONFIG"])
    assert config == {"cluster": processes.cluster, "task": {"type": "worker", "index": 1}}
    assert {job: len(addresses) for job, addresses in config["cluster"].items()} == {
        "chief": 1,
        "ps": 1,
        "worker": 2,
    }
    addresses = [*itertools.chain(*config["cluster"].values())]
    assert len(set(addresses)) == 4
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert report["argv"] == ["an argument"]
    assert report["environ"]["PSYNC_LAUNCHED"] == "1"
    assert report["environ"]["PYTHONUNBUFFERED"] == "1"


@pytest.mark.processes
async def test_a_task_has_its_own_session_and_socket_the_lifeline_and_no_other_file() -> None:
    screen = Screen()
    async with group(screen) as processes:
        report = await report_of(processes, screen, "worker", 0)
    files = {int(fd): target for fd, target in report["files"].items()}
    listen_fd = int(report["environ"]["PSYNC_LISTEN_FD"])
    door_fd = int(report["environ"]["PSYNC_DOOR_FD"])
    lifeline_fd = int(report["environ"]["PSYNC_LIFELINE_FD"])
    assert set(files) == {0, 1, 2, listen_fd, door_fd, lifeline_fd}
    assert files[0] == "/dev/null"
    assert files[listen_fd].startswith("socket:")
    assert files[lifeline_fd].startswith("pipe:")
    assert report["pid"] == report["group"] == report["session"] != os.getsid(0)


@pytest.mark.processes
async def test_the_secret_is_in_the_environment_of_tasks_and_on_no_command_line() -> None:
    screen = Screen()
    async with group(screen, secret=SECRET) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py"))
        await screen.wait_for("[worker-0] ready ")
        assert SECRET.encode() in Path(f"/proc/{task.pid}/environ").read_bytes()
        assert SECRET.encode() not in Path(f"/proc/{task.pid}/cmdline").read_bytes()
    assert "PSYNC_SECRET" not in os.environ


@pytest.mark.processes
async def test_a_task_has_the_users_variables_further_ones_and_else_one_thread_to_compute() -> None:
    screen = Screen()
    async with group(screen, environ={"MKL_NUM_THREADS": "4", "HOME": "/"}) as processes:
        command = script("report.py")
        await processes.start_task("ps", 0, command, env={"MORE": "yes"}).wait()
        environ = json.loads(await screen.wait_for("[ps-0] "))["environ"]
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == "1"
    assert environ["MKL_NUM_THREADS"] == "4"
    assert environ["HOME"] == "/"
    assert environ["MORE"] == "yes"


@pytest.mark.processes
async def test_peers_can_connect_before_a_task_is_up_and_after_it_was_started_again() -> None:
    screen = Screen()
    async with group(screen) as processes:
        host, port = processes.cluster["worker"][0].split(":")
        for _ in range(2):
            with socket.create_connection((host, int(port)), timeout=10):
                report = await report_of(processes, screen, "worker", 0)
                assert json.loads(report["environ"]["TF_CONFIG"])["cluster"] == processes.cluster


@pytest.mark.processes
async def test_tasks_are_added_and_those_that_were_removed_are_not_named_any_more() -> None:
    screen = Screen()
    async with group(screen) as processes:
        before = list(processes.cluster["worker"])
        added = await processes.add_task("worker", 2)
        assert processes.cluster["worker"] == [*before, added]
        report = await report_of(processes, screen, "worker", 2)
        assert json.loads(report["environ"]["TF_CONFIG"])["cluster"] == processes.cluster
        processes.remove_task("worker", 1)
        assert processes.cluster["worker"] == [*before, added]  # a list has no gaps
        processes.remove_task("worker", 2)
        assert processes.cluster["worker"] == before[:1]
        again = await processes.add_task("worker", 1)
        assert processes.cluster["worker"] == [before[0], again]
        processes.remove_task("worker", 1)
        processes.remove_task("worker", 0)
        assert processes.cluster["worker"] == before[:1]  # a cluster without any is none


# --- the group ---------------------------------------------------------------------------------


async def start_sleepers(processes: ProcessGroup, screen: Screen, *kind: str) -> list[TaskProcess]:
    tasks = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    started = [processes.start_task(*task, script("sleeper.py", *kind)) for task in tasks]
    for task in started:
        await screen.wait_for(f"[{task.name}] ready ")
    return started


@pytest.mark.processes
async def test_leaving_the_group_stops_all_tasks_the_chief_first() -> None:
    ended: list[str] = []
    screen = Screen()
    async with group(screen) as processes:
        tasks = await start_sleepers(processes, screen)

        async def watch(task: TaskProcess) -> None:
            assert await task.wait() == -signal.SIGTERM
            ended.append(task.name)

        watchers = [asyncio.create_task(watch(task)) for task in tasks]
    await asyncio.gather(*watchers)
    assert ended[0] == "chief-0"
    assert sorted(ended) == ["chief-0", "ps-0", "worker-0", "worker-1"]


@pytest.mark.processes
@pytest.mark.parametrize("how", ["kill", "cancelled stop"])
async def test_killing_the_group_or_not_waiting_for_its_stop_leaves_nobody_time(how: str) -> None:
    screen = Screen()
    async with group(screen) as processes:
        tasks = await start_sleepers(processes, screen, "stubborn")
        if how == "kill":
            processes.kill()
        else:
            stop = asyncio.create_task(processes.stop(grace_s=3600))
            await asyncio.sleep(0)
            stop.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stop
        assert [await task.wait() for task in tasks] == [-signal.SIGKILL] * 4


@pytest.mark.processes
async def test_a_task_that_has_ended_can_be_started_again() -> None:
    screen = Screen()
    async with group(screen) as processes:
        first = await report_of(processes, screen, "worker", 0)
        screen.lines.clear()
        second = await report_of(processes, screen, "worker", 0)
    assert first["pid"] != second["pid"]
    assert first["environ"]["PSYNC_LISTEN_FD"] == second["environ"]["PSYNC_LISTEN_FD"]


@pytest.mark.processes
async def test_an_address_that_was_abandoned_refuses_connections() -> None:
    async with group() as processes:
        host, port = processes.cluster["ps"][0].split(":")
        socket.create_connection((host, int(port))).close()
        processes.abandon("ps", 0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        known = "one of chief-0, worker-0, worker-1, got 'ps-0'"
        with pytest.raises(ConfigurationError, match=known):
            processes.start_task("ps", 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("index", "stopped", "error", "told"),
    [
        pytest.param(
            0, False, BusyError, "cannot start worker-0: it is running as process {pid}",
            id="it runs",
        ),
        pytest.param(
            1, True, ClosedError,
            "cannot start worker-1: the process group is being stopped", id="all are stopped",
        ),
    ],
)  # fmt: skip
async def test_a_task_that_cannot_be_started_is_told_why(
    index: int, stopped: bool, error: type[Exception], told: str
) -> None:
    async with group() as processes:
        task = processes.start_task("worker", 0, script("sleeper.py"))
        if stopped:
            await processes.stop()
        with pytest.raises(error) as caught:
            processes.start_task("worker", index, script("sleeper.py"))
    assert str(caught.value) == told.format(pid=task.pid)


@pytest.mark.processes
async def test_a_program_that_does_not_exist_is_an_error_and_can_be_corrected() -> None:
    screen = Screen()
    async with group(screen) as processes:
        with pytest.raises(FileNotFoundError):
            processes.start_task("worker", 0, ["/nonexistent/program"])
        assert await report_of(processes, screen, "worker", 0)


@pytest.mark.processes
def test_a_group_that_cannot_be_made_leaves_no_socket_open() -> None:
    with pytest.raises(TypeError):
        ProcessGroup({"chief": 1, "worker": None})  # type: ignore[dict-item]


# --- doors ---------------------------------------------------------------------------------------


def doors_of(processes: ProcessGroup, job: str, index: int) -> int:
    """How many there are beside a task's address."""
    name = name_of_door(*split_address(processes.cluster[job][index])).replace("\0", "@")
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {name}") for line in sockets)


@pytest.mark.processes
async def test_there_is_a_door_beside_each_address_until_it_is_abandoned_or_closed() -> None:
    async with group() as processes:
        tasks = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
        assert [doors_of(processes, *task) for task in tasks] == [1] * 4
        processes.abandon("worker", 1)
        assert [doors_of(processes, *task) for task in tasks] == [1, 1, 1, 0]
        await processes.add_task("worker", 1)
        assert doors_of(processes, "worker", 1) == 1
    assert [doors_of(processes, *task) for task in tasks] == [0] * 4


@pytest.mark.processes
async def test_a_task_that_is_not_started_here_opens_its_own_door() -> None:
    """In that of the group its peers would wait in vain."""
    async with group() as processes:
        with processes.listener_of("chief", 0) as listening:
            assert doors_of(processes, "chief", 0) == 0
            door = door_beside(listening)
            assert door is not None
            door.close()


@pytest.mark.processes
async def test_without_shared_memory_there_are_no_doors() -> None:
    screen = Screen()
    environ = {**os.environ, "PSYNC_SHARED_MEMORY": "0"}
    async with group(screen, environ=environ) as processes:
        assert doors_of(processes, "ps", 0) == 0
        report = await report_of(processes, screen, "ps", 0)
        assert "PSYNC_DOOR_FD" not in report["environ"]


def test_an_exit_is_described_by_code_or_signal() -> None:
    for code, text in [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-(signal.SIGRTMIN + 5), f"was killed by signal {signal.SIGRTMIN + 5}"),
    ]:
        assert describe_exit(code) == text


def test_the_hint_of_a_crash_names_copy_where_memory_is_shared() -> None:
    for code, environ, expected in [
        (-signal.SIGSEGV, {}, True),
        (-signal.SIGBUS, {}, True),
        (-signal.SIGKILL, {}, False),
        (signal.SIGSEGV, {}, False),
        (-signal.SIGSEGV, {"PSYNC_SHARED_MEMORY": "0"}, False),
    ]:
        assert ("pull with copy=True" in hint_of_crash(code, environ)) is expected


# --- what a task prints ------------------------------------------------------------------------


@pytest.mark.processes
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


@pytest.mark.processes
async def test_all_that_a_task_printed_has_arrived_when_it_has_been_waited_for() -> None:
    out = Screen()
    async with group(out) as processes:
        task = processes.start_task("worker", 0, script("flood.py", "500"))
        await task.wait()
        assert len(out.lines) == 500


@pytest.mark.processes
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


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 7])
async def test_the_exit_code_of_a_task_is_returned(code: int) -> None:
    async with group() as processes:
        command = [sys.executable, "-c", f"raise SystemExit({code})"]
        task = processes.start_task("worker", 0, command)
        assert await task.wait() == code
        assert task.returncode == code
        assert repr(task) == f"<TaskProcess worker-0: process {task.pid} exited with code {code}>"


@contextlib.asynccontextmanager
async def sleeping(*kind: str) -> AsyncIterator[tuple[ProcessGroup, Process, Screen]]:
    """A group whose worker 0 sleeps, that worker, and what it has printed."""
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py", *kind))
        await screen.wait_for("[worker-0] ready ")
        yield processes, task, screen


@pytest.mark.processes
async def test_a_task_killed_by_a_signal_returns_minus_the_signal() -> None:
    async with sleeping() as (_, task, screen):
        assert await screen.wait_for_number("[worker-0] ready ") == task.pid
        assert repr(task) == f"<TaskProcess worker-0: process {task.pid} is running>"
        assert task.returncode is None
        os.kill(task.pid, signal.SIGKILL)
        assert await task.wait() == -signal.SIGKILL
        task.kill()  # too late, and no error
        task.send_signal(signal.SIGTERM)


@pytest.mark.processes
async def test_waiting_for_a_task_can_be_cancelled_and_the_task_runs_on() -> None:
    async with sleeping() as (_, task, _):
        waiter = asyncio.create_task(task.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert is_running(task.pid)
        assert await task.stop() == -signal.SIGTERM


@pytest.mark.processes
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_task_that_ignores_sigterm_is_killed_after_its_grace_or_a_cancellation(
    cancelled: bool,
) -> None:
    async with sleeping("stubborn") as (_, task, _):
        stop = asyncio.create_task(task.stop(grace_s=3600 if cancelled else 0.05))
        await asyncio.sleep(0)
        if cancelled:
            stop.cancel()
        assert await task.wait() == -signal.SIGKILL
        await asyncio.wait([stop])
        assert stop.cancelled() is cancelled
        assert cancelled or stop.result() == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.parametrize("kind", [(), ("stubborn",)])
async def test_what_a_task_has_started_ends_with_it(kind: tuple[str, ...]) -> None:
    async with sleeping("parent", *kind) as (_, task, screen):
        with watching(await screen.wait_for_number("[worker-0] child ")) as end:
            os.kill(task.pid, signal.SIGKILL)
            assert await task.wait() == -signal.SIGKILL
            await asyncio.to_thread(end.poll)


@pytest.mark.processes
async def test_output_held_open_by_a_stranger_does_not_hold_up_the_end() -> None:
    async with sleeping("daemon") as (processes, task, screen):
        stranger = await screen.wait_for_number("[worker-0] child ")
        with watching(stranger) as end:
            await task.stop()
            await processes.stop()
            assert not end.poll(0)
            os.kill(stranger, signal.SIGKILL)
            await asyncio.to_thread(end.poll)
