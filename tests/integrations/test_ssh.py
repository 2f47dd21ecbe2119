"""Tasks on hosts that ssh reaches; what stands for ssh runs its command here.

Whole runs: tests/processes/test_hosts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from process_tools import SCRIPTS, SECRET, Screen
from psync.errors import ConfigurationError
from psync.integrations.ssh import (
    GREETING,
    HostsPlan,
    RemoteHost,
    RemoteProcess,
    connect_all,
    parse_hosts,
)
from psync.launch.process import GRACE_S, PYTHON
from psync.wire.handshake import RELEASE
from tasks_by_hand import wait_until_gone


def test_hosts_are_named_with_their_room() -> None:
    for text, slots in [
        ("a", {"a": 1}),
        ("a:2, user@b:3", {"a": 2, "user@b": 3}),
        ("10.0.0.1:4", {"10.0.0.1": 4}),
    ]:
        assert parse_hosts(text) == slots


def test_what_names_no_hosts_is_an_error() -> None:
    for text, error in [
        ("", "expected names with numbers of workers, as in a:2,b:2, got ''"),
        ("a,,b", "expected names"),
        ("-oProxyCommand=x", "expected names"),  # or ssh would take it for an option
        ("a b", "expected names"),
        ("a:0", "expected a number of workers above 0 after a:, got '0'"),
        ("a:-1", "expected a number of workers above 0"),
        ("a:1,a:1", "a is named twice"),
        ("a:1,b:1048576", "expected at most 1048576 workers, got 'a:1,b:1048576'"),
        (f"a:{'9' * 5000}", "expected at most 1048576 workers"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            parse_hosts(text)
        assert error in str(caught.value)


def test_an_ssh_that_is_no_command_is_an_error() -> None:
    for ssh, error in [
        ("", "ssh: expected a command, got ''"),
        (" ", "ssh: expected a command, got ' '"),
        ("ssh 'x", 'ssh: "ssh \'x" is not a command: No closing quotation'),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            HostsPlan({"a": 1}, ssh)
        assert str(caught.value) == error


def test_workers_fill_one_host_after_the_other_and_ps_tasks_are_dealt_out() -> None:
    plan = HostsPlan({"a": 2, "b": 1})
    assert [plan.place("worker", index) for index in range(3)] == [("a", 0), ("a", 1), ("b", 0)]
    assert [plan.place("ps", index)[0] for index in range(3)] == ["a", "b", "a"]
    plan.check(3)
    with pytest.raises(ConfigurationError, match="4 workers, but a:2,b:1 has room for 3"):
        plan.check(4)


def test_tasks_there_get_what_is_psyncs_and_what_is_named_but_no_secret() -> None:
    environ = {
        "PSYNC_SECRET": "x", "PSYNC_SECRET_FILE": "x", "PSYNC_LISTEN_FD": "3",
        "PSYNC_LOOP": "asyncio",
        "PYTHONPATH": "/src", "OMP_NUM_THREADS": "4", "HOME": "/root", "HF_HOME": "/models",
    }  # fmt: skip
    forwarded = HostsPlan({"a": 1}, variables=["HF_HOME", "NOT_SET"]).environ(environ)
    assert forwarded == {
        "PSYNC_LOOP": "asyncio", "PYTHONPATH": "/src", "OMP_NUM_THREADS": "4", "HF_HOME": "/models",
    }  # fmt: skip


class Reached(RemoteHost):
    """A host that is there at once."""

    async def connect(self) -> None:
        await asyncio.sleep(0)
        self.address = self.name


async def test_hosts_that_cannot_reach_each_other_are_refused() -> None:
    def host(address: str) -> RemoteHost:
        return Reached(address, ["ssh"], "python3", {}, "", print, print, print)

    await connect_all([host("127.0.0.2"), host("127.0.0.3")])
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.2 is this machine"):
        await connect_all([host("127.0.0.2"), host("10.0.0.3")])


class Host:
    """Notes what it is told, and kills when it is asked to."""

    name = "b"

    def __init__(self, *, connected: bool = True) -> None:
        self.is_connected = connected
        self.told: list[Any] = []
        self.process = RemoteProcess("worker", "worker-0", self, 7)

    def tell(self, **message: Any) -> None:
        self.told.append(message["signal"] if message["do"] == "signal" else message["do"])


async def test_it_says_where_it_is_and_how_it_has_ended() -> None:
    process = Host().process
    process.pid = 4711
    assert process.describe() == "process 4711 on b is running"
    process.ended(3)
    process.ended(4)  # who said it first is right
    assert await process.wait() == process.returncode == 3
    assert process.describe() == "process 4711 on b exited with code 3"


@pytest.mark.virtual_time
async def test_stopping_asks_then_kills_then_does_not_wait_for_a_silent_host() -> None:
    host, loop = Host(), asyncio.get_running_loop()
    began = loop.time()
    assert await host.process.stop() == -signal.SIGKILL
    assert host.told == [signal.SIGTERM, "kill"]
    assert loop.time() - began == 2 * GRACE_S
    host.process.send_signal(signal.SIGUSR1)
    host.process.kill()
    assert len(host.told) == 2


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


@pytest.mark.processes
async def test_a_task_starts_there_and_ends_when_it_is_asked_to() -> None:
    async with connected() as scene:
        assert scene.host.address == "127.0.0.5"
        task = await scene.start()
        await scene.screen.wait_for("[worker-0] ready")
        assert task.pid > 0
        assert await task.stop() == -signal.SIGTERM


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
async def test_what_is_asked_of_a_host_that_is_lost_is_an_error() -> None:
    async with connected() as scene:
        task = await scene.start()
        asked = asyncio.ensure_future(scene.host.listen("ps", 0))
        scene.host.cut()
        await task.wait()
        await asyncio.gather(asked, return_exceptions=True)
        with pytest.raises(ConnectionResetError, match="host b is not connected"):
            await scene.host.listen("ps", 1)


ORDER = {
    "directory": str(SCRIPTS), "script": "sleeper.py", "environ": {"FROM_HERE": "yes"},
    "secret": SECRET, "gpus": None, "slots": 2, "silence_s": 60.0,
}  # fmt: skip


class Agent:
    """One, and the pipes to it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "psync.integrations.ssh"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "SSH_CONNECTION": "127.0.0.1 40000 127.0.0.4 22"},
        )  # fmt: skip
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()
        assert greeting.startswith(GREETING)
        assert json.loads(greeting.removeprefix(GREETING)) == {"psync": RELEASE, "python": PYTHON}

    def say(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(message)}\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> dict[str, Any]:
        """The next message that has the word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in (message := json.loads(line)):
                return message
        raise AssertionError(f"it has said nothing of {word!r}")

    def order(self, **changes: Any) -> None:
        self.say(**{**ORDER, **changes})

    def begin(self, *command: str, **changes: Any) -> int:
        """Let it start a worker; return its process id."""
        self.order(**changes)
        assert self.hear("ready")["ready"] == "127.0.0.4"
        self.say(do="listen", number=1, job="worker", index=0, port=0)
        address = self.hear("listens")["address"]
        assert address.startswith("127.0.0.4:")
        self.say(
            do="start", number=2, job="worker", index=0, slot=0, command=command, env={},
            output="prefixed", cluster={"worker": [address]},
        )  # fmt: skip
        pid = self.hear("started")["pid"]
        assert isinstance(pid, int)
        return pid


@pytest.fixture
def agent() -> Iterator[Agent]:
    running = Agent()
    with running.process as process:
        yield running
        process.kill()


@pytest.mark.processes
def test_tasks_have_the_secret_in_a_file_without_a_name(agent: Agent) -> None:
    code = (
        "import os; from psync.net.secret import load_secret; "
        "print(load_secret(os.environ).value.decode(), os.environ['FROM_HERE'])"
    )
    pid = agent.begin("-c", f"{code}; input()")
    assert agent.hear("out")["out"] == f"[worker-0] {SECRET} yes\n"
    ended = agent.hear("ended")  # it has no stdin
    assert ended["code"] == 1
    wait_until_gone({"worker-0": pid})


@pytest.mark.processes
def test_nobody_sees_the_secret(agent: Agent) -> None:
    pid = agent.begin("sleeper.py")
    agent.hear("out")
    for each in (pid, agent.process.pid):
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{each}/{name}").read_bytes()


@pytest.mark.processes
def test_signals_are_passed_on_and_ends_are_told(agent: Agent) -> None:
    agent.begin("sleeper.py")
    agent.hear("out")
    agent.say(do="signal", number=2, signal=int(signal.SIGKILL))
    assert agent.hear("ended") == {"ended": 2, "code": -signal.SIGKILL}


@pytest.mark.processes
@pytest.mark.parametrize("how", ["the end of stdin", "silence", "SIGTERM", "SIGKILL"])
def test_its_tasks_end_with_it(agent: Agent, how: str) -> None:
    pid = agent.begin("sleeper.py", silence_s=1.0 if how == "silence" else 60.0)
    assert agent.process.stdin is not None
    if how == "the end of stdin":
        agent.process.stdin.close()
    elif how == "SIGTERM":
        agent.process.terminate()
    elif how == "SIGKILL":
        agent.process.kill()
    assert agent.process.wait() == (-signal.SIGKILL if how == "SIGKILL" else 0)
    wait_until_gone({"worker-0": pid})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"directory": "/no/such"}, "/no/such: No such file or directory"),
        ({"script": "none.py"}, f"{SCRIPTS}/none.py does not exist"),
        ({"gpus": 1, "environ": {"CUDA_VISIBLE_DEVICES": "0"}}, "2 workers with 1 each need 2"),
    ],
)
def test_what_is_not_there_is_an_error(agent: Agent, changes: dict[str, Any], error: str) -> None:
    agent.order(**changes)
    assert error in agent.hear("error")["error"]
    assert agent.process.wait() == 0
