"""Processes of a cluster: what they are given, what they print, how they end. All are real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psync.errors import BusyError, ClosedError, ConfigurationError
from psync.processes import ProcessGroup, RestartPolicy, TaskProcess, describe_exit

SCRIPTS = Path(__file__).parent / "processes" / "scripts"
SECRET = "correct horse battery staple"

pytestmark = pytest.mark.processes


def script(name: str, *args: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *args]


class Screen:
    """What the user sees; waits for what tasks print."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.lines += text.splitlines()
        self._changed.set()

    async def wait_for(self, start: str) -> str:
        """The rest of the first line that starts so."""
        while True:
            for line in self.lines:
                if line.startswith(start):
                    return line.removeprefix(start)
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_number(self, start: str) -> int:
        return int(await self.wait_for(start))


def group(out: Screen | None = None, err: Screen | None = None, **options: Any) -> ProcessGroup:
    jobs = {"chief": 1, "ps": 1, "worker": 2}
    return ProcessGroup(jobs, out=out or Screen(), err=err or Screen(), **options)


@contextlib.contextmanager
def watching(pid: int) -> Iterator[select.poll]:
    """A poll object that is ready when the process ends, also if it is not a child of ours."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        yield poll
    finally:
        os.close(fd)


def is_running(pid: int) -> bool:
    """False also for a zombie whose parent has not looked yet."""
    try:
        with watching(pid) as end:
            return not end.poll(0)
    except ProcessLookupError:
        return False


# --- decisions ---------------------------------------------------------------------------------


def test_restarts_are_allowed_up_to_the_limit_within_the_window() -> None:
    policy = RestartPolicy(2, window_s=60.0)
    assert [policy.allow(now) for now in (0.0, 1.0, 2.0, 59.9)] == [True, True, False, False]


def test_a_restart_is_forgotten_when_it_has_left_the_window() -> None:
    policy = RestartPolicy(2, window_s=60.0)
    asked = (0.0, 1.0, 60.0, 60.5, 61.0, 62.0)
    assert [policy.allow(now) for now in asked] == [True, True, True, False, True, False]


def test_a_limit_of_zero_allows_no_restart() -> None:
    assert not RestartPolicy(0).allow(0.0)


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


# --- what a task is given ----------------------------------------------------------------------


async def report_of(group: ProcessGroup, screen: Screen, job: str, index: int) -> dict[str, Any]:
    task = group.start_task(job, index, script("report.py", "an argument"))
    assert await task.wait() == 0
    report: dict[str, Any] = json.loads(await screen.wait_for(f"[{job}-{index}] "))
    return report


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


async def test_a_task_inherits_its_listening_socket_and_the_lifeline_and_no_other_file() -> None:
    screen = Screen()
    async with group(screen) as processes:
        report = await report_of(processes, screen, "worker", 0)
    files = {int(fd): target for fd, target in report["files"].items()}
    listen_fd = int(report["environ"]["PSYNC_LISTEN_FD"])
    lifeline_fd = int(report["environ"]["PSYNC_LIFELINE_FD"])
    assert set(files) == {0, 1, 2, listen_fd, lifeline_fd}
    assert files[0] == "/dev/null"
    assert files[listen_fd].startswith("socket:")
    assert files[lifeline_fd].startswith("pipe:")


async def test_a_task_leads_a_session_of_its_own() -> None:
    screen = Screen()
    async with group(screen) as processes:
        report = await report_of(processes, screen, "ps", 0)
    assert report["pid"] == report["group"] == report["session"] != os.getsid(0)


async def test_the_secret_is_in_the_environment_of_tasks_and_on_no_command_line() -> None:
    screen = Screen()
    async with group(screen, secret=SECRET) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py"))
        await screen.wait_for("[worker-0] ready ")
        assert SECRET.encode() in Path(f"/proc/{task.pid}/environ").read_bytes()
        assert SECRET.encode() not in Path(f"/proc/{task.pid}/cmdline").read_bytes()
    assert "PSYNC_SECRET" not in os.environ


async def test_tasks_compute_in_one_thread_unless_the_user_has_said_otherwise() -> None:
    screen = Screen()
    async with group(screen, environ={"MKL_NUM_THREADS": "4", "HOME": "/"}) as processes:
        environ = (await report_of(processes, screen, "ps", 0))["environ"]
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == "1"
    assert environ["MKL_NUM_THREADS"] == "4"
    assert environ["HOME"] == "/"


async def test_a_task_can_be_given_further_variables() -> None:
    screen = Screen()
    async with group(screen) as processes:
        command = script("report.py")
        await processes.start_task("ps", 0, command, env={"MORE": "yes"}).wait()
    report = json.loads(await screen.wait_for("[ps-0] "))
    assert report["environ"]["MORE"] == "yes"


async def test_peers_can_connect_before_a_task_is_up_and_after_it_was_started_again() -> None:
    screen = Screen()
    async with group(screen) as processes:
        host, port = processes.cluster["worker"][0].split(":")
        for _ in range(2):
            with socket.create_connection((host, int(port)), timeout=10):
                report = await report_of(processes, screen, "worker", 0)
                assert json.loads(report["environ"]["TF_CONFIG"])["cluster"] == processes.cluster


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


async def test_discarded_output_is_not_shown() -> None:
    out, err = Screen(), Screen()
    async with group(out, err) as processes:
        task = processes.start_task("worker", 0, script("flood.py", "10"), output="discarded")
        assert await task.wait() == 0
    assert out.lines == err.lines == []


async def test_inherited_output_goes_where_ours_goes(capfd: pytest.CaptureFixture[str]) -> None:
    async with group() as processes:
        task = processes.start_task("chief", 0, script("flood.py", "1"), output="inherited")
        assert await task.wait() == 0
    captured = capfd.readouterr()
    assert captured.out == f"out 0 {'x' * 100}"
    assert captured.err == f"err 0 {'x' * 100}"


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


async def test_a_task_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py", "stubborn"))
        await screen.wait_for("[worker-0] ready ")
        assert await task.stop(grace_s=0.05) == -signal.SIGKILL


async def test_stopping_a_task_kills_it_at_once_when_it_is_cancelled() -> None:
    screen = Screen()
    async with group(screen) as processes:
        task = processes.start_task("worker", 0, script("sleeper.py", "stubborn"))
        await screen.wait_for("[worker-0] ready ")
        stop = asyncio.create_task(task.stop(grace_s=3600))
        await asyncio.sleep(0)
        stop.cancel()
        assert await task.wait() == -signal.SIGKILL
        with pytest.raises(asyncio.CancelledError):
            await stop


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


# --- the group ---------------------------------------------------------------------------------


async def start_sleepers(processes: ProcessGroup, screen: Screen, *kind: str) -> list[TaskProcess]:
    tasks = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    started = [processes.start_task(*task, script("sleeper.py", *kind)) for task in tasks]
    for task in started:
        await screen.wait_for(f"[{task.name}] ready ")
    return started


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


async def test_killing_the_group_leaves_nobody_time() -> None:
    screen = Screen()
    async with group(screen) as processes:
        tasks = await start_sleepers(processes, screen, "stubborn")
        processes.kill()
        assert [await task.wait() for task in tasks] == [-signal.SIGKILL] * 4


async def test_stopping_the_group_kills_at_once_when_it_is_cancelled() -> None:
    screen = Screen()
    async with group(screen) as processes:
        tasks = await start_sleepers(processes, screen, "stubborn")
        stop = asyncio.create_task(processes.stop(grace_s=3600))
        await asyncio.sleep(0)
        stop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stop
        assert [await task.wait() for task in tasks] == [-signal.SIGKILL] * 4


async def test_a_task_that_has_ended_can_be_started_again() -> None:
    screen = Screen()
    async with group(screen) as processes:
        first = await report_of(processes, screen, "worker", 0)
        screen.lines.clear()
        second = await report_of(processes, screen, "worker", 0)
    assert first["pid"] != second["pid"]
    assert first["environ"]["PSYNC_LISTEN_FD"] == second["environ"]["PSYNC_LISTEN_FD"]


async def test_an_address_that_was_abandoned_refuses_connections() -> None:
    async with group() as processes:
        host, port = processes.cluster["ps"][0].split(":")
        socket.create_connection((host, int(port))).close()
        processes.abandon("ps", 0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        with pytest.raises(ConfigurationError, match="expected a task of the cluster"):
            processes.start_task("ps", 0)


async def test_a_task_that_runs_cannot_be_started_again() -> None:
    async with group() as processes:
        task = processes.start_task("ps", 0, script("sleeper.py"))
        with pytest.raises(BusyError) as caught:
            processes.start_task("ps", 0, script("sleeper.py"))
        assert str(caught.value) == f"cannot start ps-0: it is running as process {task.pid}"


async def test_a_task_that_the_cluster_does_not_have_cannot_be_started() -> None:
    async with group() as processes:
        with pytest.raises(ConfigurationError) as caught:
            processes.start_task("worker", 2, script("sleeper.py"))
    assert str(caught.value) == (
        "expected a task of the cluster (1 chief, 1 ps, 2 worker), got worker-2"
    )


async def test_nothing_can_be_started_once_the_group_is_stopped() -> None:
    async with group() as processes:
        await processes.stop()
        with pytest.raises(ClosedError) as caught:
            processes.start_task("worker", 1)
    assert str(caught.value) == "cannot start worker-1: the process group is being stopped"


async def test_a_program_that_does_not_exist_is_an_error_and_can_be_corrected() -> None:
    screen = Screen()
    async with group(screen) as processes:
        with pytest.raises(FileNotFoundError):
            processes.start_task("worker", 0, ["/nonexistent/program"])
        assert await report_of(processes, screen, "worker", 0)


def test_a_group_that_cannot_be_made_leaves_no_socket_open() -> None:
    with pytest.raises(TypeError):
        ProcessGroup({"chief": 1, "worker": None})  # type: ignore[dict-item]


# --- the lifeline ------------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_lifeline(*kind: str) -> Iterator[tuple[list[int], list[select.poll], int]]:
    """A sleeper that leads a session: its process ids, their ends, our end of its lifeline."""
    read_end, write_end = os.pipe()
    command = script("sleeper.py", *kind)
    environ = {**os.environ, "PSYNC_LIFELINE_FD": str(read_end)}
    with contextlib.ExitStack() as stack:
        with open(read_end, "rb"):
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environ,
                    stdout=subprocess.PIPE,
                    pass_fds=[read_end],
                    start_new_session=True,
                )
            )
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2 if kind else 1)]
        ends = [stack.enter_context(watching(pid)) for pid in pids]
        yield pids, ends, write_end


@pytest.mark.parametrize("kind", [(), ("parent",), ("parent", "stubborn")])
def test_a_task_and_what_it_has_started_end_when_the_launcher_has_gone(
    kind: tuple[str, ...],
) -> None:
    with on_a_lifeline(*kind) as (_, ends, write_end):
        assert not any(end.poll(0) for end in ends)
        os.close(write_end)
        for end in ends:
            end.poll()
