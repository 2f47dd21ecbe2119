"""One host of a run over ssh: the connection, the tasks there, and the connection's return.

``ssh HOST python -m psync.launch.host_agent`` runs as long as the run does, and speaks by lines of
JSON; see ``host_agent``. When it ends, so do the tasks there, whoever ended it: each is told of as
killed by SIGHUP. The next start of one connects again, at the ports that the tasks had, so that the
others find them where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.cluster import split_address
from psync.errors import ConfigurationError
from psync.launch.host_agent import GREETING, Message
from psync.launch.interfaces import PYTHON
from psync.launch.process_loop import GRACE_S
from psync.launch.remote_process import RemoteProcess
from psync.launch.task_output import Sink
from psync.launch.task_process import describe_exit
from psync.wire.handshake import RELEASE

CONNECT_S = 60.0
"""From the start of ssh to the answer of psync there, which may lie on a slow shared disk."""

ALIVE_EVERY_S = 5.0
SILENCE_S = 60.0
"""The tasks of a host end when they have heard nothing from the launcher for so long."""

RETURN_WITHIN_S = 2 * SILENCE_S
"""A host that is lost is looked for so long; until it has noticed, its ports are taken."""

RETRY_EVERY_S = 2.0

LAST_WORDS_S = 1.0  # for what ssh has written before its end

SSH_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",  # nobody is there to type a password
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=10",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip

NO_PSYNC = "No module named"
LINE_LIMIT = 1 << 24  # bytes; a piece of output is a line

NOT_THERE = (126, 127)  # exit codes of a shell that cannot run a program
SSH_FAILED = 255


class HostLost(Exception):
    """The connection ended. Never leaves this package."""


class RemoteListener:
    """The address of a task on another host.

    Args:
        host: Where.
        task: Its job and index.
        port: At which it listens.
    """

    def __init__(self, host: RemoteHost, task: tuple[str, int], port: int) -> None:
        self.host = host
        self.port = port
        self._task = task

    def close(self) -> None:
        """Give the address up."""
        if self.host.listeners.pop(self._task, None) is not None:
            self.host.tell(do="abandon", job=self._task[0], index=self._task[1])


@dataclass(eq=False)
class RemoteHost:
    """One host.

    Args:
        name: As ssh knows it.
        command: What runs ssh, and its options.
        python: The interpreter there.
        order: What is said to it first; see ``HostAgent``.
        python_path: In ``PYTHONPATH`` there from the beginning.
        out, err: Take what its tasks write.
        say: Takes what there is to say of the host.
    """

    name: str
    command: Sequence[str]
    python: str
    order: Message
    python_path: str
    out: Sink
    err: Sink
    say: Sink
    address: str = ""  # at which it was reached, once it is
    listeners: dict[tuple[str, int], RemoteListener] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._running: dict[int, RemoteProcess] = {}
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._ssh: asyncio.subprocess.Process | None = None  # while it is connected
        self._said: deque[str] = deque(maxlen=20)  # by ssh, on its stderr
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def is_connected(self) -> bool:
        """Whether its tasks can be told anything."""
        return self._ssh is not None

    # The connection.

    async def connect(self) -> None:
        """Connect. Raises ConfigurationError: says why not. Cancellation: safe."""
        path = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        own = {name: text for name, text in os.environ.items() if name != "PSYNC_SECRET"}
        there = ["exec", "env", *path, self.python, "-m", "psync.launch.host_agent"]
        try:
            ssh = await asyncio.create_subprocess_exec(
                *self.command, *SSH_OPTIONS, self.name, shlex.join(there),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=own, start_new_session=True, limit=LINE_LIMIT,
            )  # fmt: skip
        except OSError as exc:
            raise ConfigurationError(f"{self.command[0]}: {exc.strerror}") from exc
        self._said.clear()
        listening = self._begin(self._hear_errors(ssh))
        try:
            async with asyncio.timeout(CONNECT_S):
                self.address = await self._greet(ssh)
        except BaseException as exc:
            _kill(ssh)
            code = await ssh.wait()
            await asyncio.wait([listening], timeout=LAST_WORDS_S)
            ssh._transport.close()  # type: ignore[attr-defined]  # a pipe may end later than it
            if isinstance(exc, TimeoutError):
                raise ConfigurationError(
                    f"host {self.name}: psync has not answered within {CONNECT_S:g} s"
                ) from exc
            if isinstance(exc, HostLost):
                raise self._refusal(exc.args[0] if exc.args else code) from exc
            raise
        self._ssh = ssh
        self._begin(self._hear(ssh))
        self._begin(self._keep_alive(ssh))

    async def _greet(self, ssh: asyncio.subprocess.Process) -> str:
        assert ssh.stdout is not None
        assert ssh.stdin is not None
        while not (line := (await self._line(ssh)).decode(errors="replace")).startswith(GREETING):
            self._said.append(line.strip())
        greeting = json.loads(line.removeprefix(GREETING))
        theirs, ours = (greeting["psync"], greeting["python"]), (RELEASE, PYTHON)
        if theirs != ours:
            there, here = (
                f"psync {psync} with Python {python}" for psync, python in (theirs, ours)
            )
            raise ConfigurationError(
                f"host {self.name} has {there}, this machine has {here}",
                hint="all hosts need the same versions; --remote-python names another interpreter "
                "there",
            )
        ssh.stdin.write(json.dumps(self.order).encode() + b"\n")
        answer = json.loads(await self._line(ssh))
        if "error" in answer:
            raise ConfigurationError(f"host {self.name}: {answer['error']}")
        return str(answer["ready"])

    async def _line(self, ssh: asyncio.subprocess.Process) -> bytes:
        assert ssh.stdout is not None
        if line := await ssh.stdout.readline():
            return line
        raise HostLost(await ssh.wait())

    def _refusal(self, code: int) -> ConfigurationError:
        """Say why there is no connection, by ssh's exit code and last words."""
        words = [line for line in self._said if line and not line.startswith("Warning: Perm")]
        last = words[-1] if words else f"ssh {describe_exit(code)}"
        if code == SSH_FAILED:
            hint = (
                f"`ssh {self.name} true` must work without a question; names, ports and keys "
                "belong into ~/.ssh/config"
            )
            return ConfigurationError(f"host {self.name} is unreachable: {last}", hint=hint)
        if code in NOT_THERE:
            return ConfigurationError(
                f"host {self.name}: {self.python} cannot be run there: {last}",
                hint="--remote-python names the interpreter on the hosts",
            )
        if NO_PSYNC in last:
            return ConfigurationError(
                f"host {self.name}: {self.python} there has no psync, or another version: {last}",
                hint=f"install psync {RELEASE} there, or name another interpreter: --remote-python",
            )
        return ConfigurationError(f"host {self.name}: psync could not start there: {last}")

    async def _hear_errors(self, ssh: asyncio.subprocess.Process) -> None:
        assert ssh.stderr is not None
        while data := await ssh.stderr.readline():
            line = data.decode(errors="replace").rstrip()
            self._said.append(line)
            if self._ssh is ssh and not self._closing:
                self.err(f"[{self.name}] {line}\n")

    async def _hear(self, ssh: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(HostLost):
            while True:
                self._take(json.loads(await self._line(ssh)))
        code = ssh.returncode or 0
        was_used = self._ssh is ssh
        if was_used:
            self._ssh = None
        if was_used and not self._closing:
            last = f": {self._said[-1]}" if self._said else ""
            self.say(
                f"the connection to host {self.name} is lost, and its tasks end "
                f"(ssh {describe_exit(code)}{last})"
            )
        self._lose(code)

    def _lose(self, code: int) -> None:
        lost, self._running = self._running, {}
        for process in lost.values():
            process.ended(-signal.SIGHUP)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(HostLost(code))
        self._asked.clear()

    def _take(self, message: Message) -> None:
        match message:
            case {"out": text}:
                self.out(text)
            case {"err": text}:
                self.err(text)
            case {"started": number, "pid": pid} if number in self._running:
                self._running[number].pid = pid
            case {"ended": number, "code": code} if number in self._running:
                self._running.pop(number).ended(code)
            case {"listens": number} if number in self._asked:
                self._asked.pop(number).set_result(message)

    async def _keep_alive(self, ssh: asyncio.subprocess.Process) -> None:
        ended = asyncio.ensure_future(ssh.wait())
        while self._ssh is ssh:
            self.tell(do="alive")
            await asyncio.wait([ended], timeout=ALIVE_EVERY_S)

    def tell(self, **message: Any) -> None:
        """Say something; nothing happens while there is no connection."""
        stdin = None if self._ssh is None else self._ssh.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(message).encode() + b"\n")

    def cut(self) -> None:
        """End the connection at once, as when ssh dies."""
        if self._ssh is not None:
            _kill(self._ssh)

    async def close(self) -> None:
        """End all tasks there and the connection. Cancellation: ssh is killed."""
        self._closing = True
        ssh = self._ssh
        try:
            if ssh is not None and ssh.stdin is not None:
                ssh.stdin.close()
                async with asyncio.timeout(2 * GRACE_S):
                    await ssh.wait()
        except TimeoutError:
            self.say(f"host {self.name} does not answer any more; its tasks end by themselves")
        finally:
            if ssh is not None and ssh.returncode is None:
                _kill(ssh)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._lose(0)

    # Tasks.

    async def listen(self, job: str, index: int, port: int = 0) -> RemoteListener:
        """Let a task have an address there.

        Raises:
            OSError: There is no free port, or the port is in use, or no connection.

        Cancellation: It may have it.
        """
        if self._ssh is None:
            raise ConnectionResetError(f"host {self.name} is not connected")
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell(do="listen", number=number, job=job, index=index, port=port)
        try:
            answer = await answered
        except HostLost as exc:
            raise ConnectionResetError(f"host {self.name} is lost") from exc
        if "error" in answer:
            raise OSError(f"host {self.name}: {answer['error']}")
        bound = split_address(answer["address"])[1]
        assert bound is not None
        return RemoteListener(self, (job, index), bound)

    def start(
        self, job: str, index: int, slot: int, command: Sequence[str], env: Mapping[str, str],
        output: str, cluster: Mapping[str, Sequence[str]],
    ) -> RemoteProcess:  # fmt: skip
        """Start a process; one that cannot be started has ended.

        Args:
            job, index: Its task.
            slot: Which worker of this host it is.
            command: Its arguments, after the interpreter.
            env: Further environment variables.
            output: "prefixed" or "discarded".
            cluster: What it hears of the cluster.
        """
        process = RemoteProcess(job, f"{job}-{index}", self, next(self._numbers))
        message = {
            "do": "start", "number": process.number, "job": job, "index": index, "slot": slot,
            "command": list(command), "env": dict(env), "output": output,
            "cluster": {job: list(tasks) for job, tasks in cluster.items()},
        }  # fmt: skip
        if self._ssh is not None:
            self._running[process.number] = process
            self.tell(**message)
        else:
            self._begin(self._start_again(process, message))
        return process

    async def _start_again(self, process: RemoteProcess, message: Message) -> None:
        try:
            await self._return()
        except (ConfigurationError, OSError) as exc:
            self.say(str(exc))
        if process.returncode is None and self._ssh is not None:
            self._running[process.number] = process
            self.tell(**message)
        else:
            process.ended(-signal.SIGHUP)

    async def _return(self) -> None:
        """Connect again, with the addresses that tasks had; try that for a while."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETURN_WITHIN_S
        async with self._connecting:
            while self._ssh is None and not self._closing:
                try:
                    await self.connect()
                    for (job, index), listener in list(self.listeners.items()):
                        await self.listen(job, index, listener.port)
                    self.say(f"host {self.name} is connected again")
                except (ConfigurationError, OSError):
                    if (ssh := self._ssh) is not None and ssh.stdin is not None:
                        self._ssh = None  # its tasks of before have not ended yet
                        ssh.stdin.close()
                        await ssh.wait()
                    if loop.time() >= deadline:
                        raise
                    await asyncio.sleep(RETRY_EVERY_S)

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _kill(ssh: asyncio.subprocess.Process) -> None:
    """Kill ssh, and what it has started: a command that makes its connection, for one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ssh.pid, signal.SIGKILL)
