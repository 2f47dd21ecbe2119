"""A connection to a host; what stands for ssh runs its command here. All processes are real."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from process_tools import SCRIPTS, SECRET, Screen
from psync.errors import ConfigurationError
from psync.launch.remote_host import RemoteHost
from psync.launch.remote_process import RemoteProcess

pytestmark = pytest.mark.processes

HERE = 'for last; do :; done; export SSH_CONNECTION="127.0.0.1 1 127.0.0.5 22"; exec sh -c "$last"'


class Scene:
    def __init__(self, command: str = HERE, python: str = sys.executable) -> None:
        self.screen = Screen()
        order = {
            "directory": str(SCRIPTS), "script": "sleeper.py", "environ": {}, "secret": SECRET,
            "gpus": None, "slots": 1, "silence_s": 60.0,
        }  # fmt: skip
        self.host = RemoteHost(
            "b", ["sh", "-c", command, "ssh"], python, order, ":".join(sys.path),
            self.screen, self.screen, lambda text: self.screen(f"psync: {text}\n"),
        )  # fmt: skip

    async def start(self) -> RemoteProcess:
        port = self.host.listeners["worker", 0].port
        cluster = {"worker": [f"127.0.0.5:{port}"]}
        return self.host.start("worker", 0, 0, ["sleeper.py"], {}, "prefixed", cluster)


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Scene]:
    scene = Scene()
    try:
        await scene.host.connect()
        listener = await scene.host.listen("worker", 0)
        scene.host.listeners["worker", 0] = listener
        yield scene
    finally:
        await scene.host.close()


async def test_a_task_starts_there_and_ends_when_it_is_asked_to() -> None:
    async with connected() as scene:
        assert scene.host.address == "127.0.0.5"
        task = await scene.start()
        await scene.screen.wait_for("[worker-0] ready")
        assert task.pid > 0
        assert await task.stop() == -signal.SIGTERM


async def test_closing_ends_what_runs_there() -> None:
    async with connected() as scene:
        task = await scene.start()
        await scene.screen.wait_for("[worker-0] ready")
    assert task.returncode is not None


async def test_a_connection_that_is_lost_takes_its_tasks_and_comes_back_at_their_ports() -> None:
    async with connected() as scene:
        task = await scene.start()
        agent = await scene.screen.wait_for_number("[worker-0] ready ")
        assert agent == task.pid
        port = scene.host.listeners["worker", 0].port
        scene.host.cut()
        assert await task.wait() == -signal.SIGHUP
        await scene.screen.wait_for("psync: the connection to host b is lost")
        again = await scene.start()
        await scene.screen.wait_for("psync: host b is connected again")
        assert scene.host.listeners["worker", 0].port == port
        assert await again.stop() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "python", "error", "hint"),
    [
        ("echo no route >&2; exit 255", "python3", "b is unreachable: no route", "`ssh b true`"),
        (HERE, "/no/such", "/no/such cannot be run there: ", "--remote-python"),
        (
            "echo \"No module named 'psync'\" >&2; exit 1", "python3",
            "python3 there has no psync, or another version", "install psync",
        ),
        ("echo boom >&2; exit 3", "python3", "psync could not start there: boom", None),
        ("exit 4", "python3", "psync could not start there: ssh exited with code 4", None),
        (
            "echo 'PSYNC-HOST {\"psync\": \"0\", \"python\": \"2.7\"}'; cat", "python3",
            "host b has psync 0 with Python 2.7, this machine has psync", "--remote-python",
        ),
    ],
)  # fmt: skip
async def test_a_host_that_cannot_be_used_says_why(
    command: str, python: str, error: str, hint: str | None
) -> None:
    scene = Scene(command, python)
    with pytest.raises(ConfigurationError) as caught:
        await scene.host.connect()
    assert error in caught.value.message
    assert (hint or "") in (caught.value.hint or "")
    await scene.host.close()


async def test_a_command_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    scene = Scene()
    scene.host.command = [str(tmp_path / "nossh")]
    with pytest.raises(ConfigurationError, match="nossh: No such file"):
        await scene.host.connect()


async def test_what_is_asked_of_a_host_that_is_lost_is_an_error() -> None:
    async with connected() as scene:
        task = await scene.start()
        asked = asyncio.ensure_future(scene.host.listen("ps", 0))
        scene.host.cut()
        await task.wait()
        await asyncio.gather(asked, return_exceptions=True)
        with pytest.raises(ConnectionResetError, match="host b is not connected"):
            await scene.host.listen("ps", 1)
