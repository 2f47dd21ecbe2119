"""What runs on a host: it starts what it is told, and ends with who told it. All is real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from process_tools import SCRIPTS, SECRET
from psync.launch.host_agent import GREETING, own_address
from psync.launch.interfaces import PYTHON
from psync.wire.handshake import RELEASE
from tasks_by_hand import wait_until_gone

pytestmark = pytest.mark.processes

ORDER = {
    "directory": str(SCRIPTS), "script": "sleeper.py", "environ": {"FROM_HERE": "yes"},
    "secret": SECRET, "gpus": None, "slots": 2, "silence_s": 60.0,
}  # fmt: skip


class Agent:
    """One, and the pipes to it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "psync.launch.host_agent"],
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


def test_nobody_sees_the_secret(agent: Agent) -> None:
    pid = agent.begin("sleeper.py")
    agent.hear("out")
    for each in (pid, agent.process.pid):
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{each}/{name}").read_bytes()


def test_signals_are_passed_on_and_ends_are_told(agent: Agent) -> None:
    agent.begin("sleeper.py")
    agent.hear("out")
    agent.say(do="signal", number=2, signal=int(signal.SIGKILL))
    assert agent.hear("ended") == {"ended": 2, "code": -signal.SIGKILL}


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


def test_it_ends_also_while_nobody_reads_what_its_tasks_print(agent: Agent) -> None:
    pid = agent.begin("-c", "while True: print('x' * 1000)", silence_s=2.0)
    assert agent.process.wait() == 0
    wait_until_gone({"worker-0": pid})


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


def test_a_port_that_is_in_use_is_said(agent: Agent) -> None:
    agent.order()
    agent.say(do="listen", number=1, job="worker", index=0, port=0)
    port = int(agent.hear("listens")["address"].rpartition(":")[2])
    agent.say(do="listen", number=2, job="worker", index=1, port=port)
    assert "in use" in agent.hear("error")["error"]


def test_its_address_is_where_ssh_has_reached_it() -> None:
    assert own_address({"SSH_CONNECTION": "10.0.0.1 1 fe80::2%eth0 22"}) == "fe80::2"
    assert own_address({})
