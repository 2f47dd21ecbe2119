"""A cluster on several hosts, which are reached over ssh: ``psync run --hosts``.

The chief is a process here, as in a local run; ps tasks are dealt out over the hosts in turn, and
workers fill the slots of the first host, then of the next one. Everything listens where the
launcher has reached its host.

``ssh HOST python -m psync.integrations.ssh`` runs as long as the run does. What runs there, a
``HostAgent``, is a ``ProcessGroup`` that is told by lines of JSON on stdin what to start, and says
on stdout what became of it. All that holds for tasks of a local run holds there: one that dies is
started again at its old address, and nothing is left behind. The connection is the life of it:

    end of stdin               the launcher, its machine or the connection has ended in order
    silence for ``silence_s``  the network is cut, or the launcher's machine has no power
    SIGTERM, SIGHUP, SIGINT    somebody ends it there

and each stops all tasks in order. If the agent is killed, the lifeline of its tasks ends them. Here
each of them is told of as killed by SIGHUP. The next start of one connects again, at the ports that
the tasks had, so that the others find them where they were.

The secret comes by stdin. Tasks get it by a file without a name, that they inherit: neither their
command line nor their environment has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.cluster import MAX_TASKS, is_loopback, join_address, split_address
from psync.errors import ConfigurationError
from psync.launch.process import (
    GRACE_S,
    PYTHON,
    Sink,
    release_blocked_output,
    say,
    write_stderr,
    write_stdout,
)
from psync.launch.processes import TUNING, GpuShares, Output, Process, ProcessGroup, describe_exit
from psync.net.resolvers import interface_towards
from psync.wire.handshake import RELEASE

OF_THIS_MACHINE = (
    "PSYNC_SECRET", "PSYNC_SECRET_FILE", "PSYNC_LISTEN_FD", "PSYNC_DOOR_FD", "PSYNC_LIFELINE_FD",
    "PSYNC_MEMBER_FD", "PSYNC_WORKERS_FD", "PSYNC_RUN_FD", "PSYNC_LAUNCHED",
)  # fmt: skip
"""Variables that mean nothing elsewhere, or must not be seen there."""

SILENCE_S = 60.0
"""The tasks of a host end when they have heard nothing from the launcher for so long."""

REMOTE_JOBS = ("ps", "worker")


def parse_hosts(text: str) -> dict[str, int]:
    """Return how many workers each host has room for: ``a:2,b:2,user@c``.

    Raises:
        ConfigurationError: It is not such a list.
    """
    slots: dict[str, int] = {}
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        if not name or name.startswith("-") or any(c.isspace() for c in name):
            raise ConfigurationError(
                f"hosts: expected names with numbers of workers, as in a:2,b:2, got {text!r}"
            )
        if not (count.isascii() and count.isdigit() and count.strip("0")):
            raise ConfigurationError(
                f"hosts: expected a number of workers above 0 after {name}:, got {count!r}"
            )
        if name in slots:
            raise ConfigurationError(
                f"hosts: {name} is named twice",
                hint=f"list the host once, with all its workers: {name}:2",
            )
        count = count.lstrip("0")
        if len(count) > len(str(MAX_TASKS)) or sum(slots.values()) + int(count) > MAX_TASKS:
            raise ConfigurationError(f"hosts: expected at most {MAX_TASKS} workers, got {text!r}")
        slots[name] = int(count)
    return slots


@dataclass(frozen=True)
class HostsPlan:
    """What is wanted of hosts.

    Args:
        slots: Number of workers that each has room for, in order.
        ssh: The command, with options, as one text.
        python: The interpreter there.
        variables: Further names of environment variables that tasks there get from here.
        gpus_per_worker: As of ``launch``.
        silence_s: How long tasks live that hear nothing from here.

    Raises:
        ConfigurationError: ``ssh`` is no command.
    """

    slots: Mapping[str, int]
    ssh: str = "ssh"
    python: str = sys.executable
    variables: Sequence[str] = ()
    gpus_per_worker: int | None = None
    silence_s: float = SILENCE_S
    places: list[tuple[str, int]] = field(init=False)  # of each worker: host, and slot there
    command: list[str] = field(init=False)  # of ``ssh``

    def __post_init__(self) -> None:
        try:
            command = shlex.split(self.ssh)
        except ValueError as exc:
            raise ConfigurationError(f"ssh: {self.ssh!r} is not a command: {exc}") from None
        if not command:
            raise ConfigurationError(f"ssh: expected a command, got {self.ssh!r}")
        object.__setattr__(self, "command", command)
        places = [(host, slot) for host, count in self.slots.items() for slot in range(count)]
        object.__setattr__(self, "places", places)

    def check(self, num_workers: int) -> None:
        """Is there room? Raises ConfigurationError: there is not."""
        if num_workers > len(self.places):
            listed = ",".join(f"{host}:{count}" for host, count in self.slots.items())
            raise ConfigurationError(
                f"hosts: {num_workers} workers, but {listed} has room for {len(self.places)}"
            )

    def place(self, job: str, index: int) -> tuple[str, int]:
        """Return the host of a task, and its slot there."""
        if job == "worker":
            return self.places[index]
        hosts = list(self.slots)
        return hosts[index % len(hosts)], 0

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what tasks there get of an environment."""
        names = {"PYTHONPATH", *TUNING, *self.variables}
        return {
            name: text
            for name, text in environ.items()
            if (name.startswith("PSYNC_") or name in names) and name not in OF_THIS_MACHINE
        }

    @contextlib.asynccontextmanager
    async def group(
        self, jobs: Mapping[str, int], secret: str, environ: Mapping[str, str], script: str
    ) -> AsyncIterator[HostsGroup]:
        """Return a context manager: connect to all hosts, and have an address for each task.

        Args:
            jobs: As of a ``ProcessGroup``.
            secret: Of the cluster.
            environ: Of tasks here, and in part of those there.
            script: The program, which must be there, too; "": a module, which Python looks for.

        Raises:
            ConfigurationError: A host cannot be reached, or cannot run the program.
            OSError: There is no free port.

        Cancellation: Connections are closed, and all there has ended, or does in some seconds.
        """
        forwarded = {**TUNING, **self.environ(environ)}
        hosts = {
            name: RemoteHost(
                name,
                self.command,
                self.python,
                {
                    "directory": os.getcwd(), "script": script, "environ": forwarded,
                    "secret": secret, "gpus": self.gpus_per_worker, "slots": slots,
                    "silence_s": self.silence_s,
                },
                forwarded.get("PYTHONPATH", ""),
                write_stdout, write_stderr, say,
            )
            for name, slots in self.slots.items()
        }  # fmt: skip
        async with contextlib.AsyncExitStack() as stack:
            for host in hosts.values():
                stack.push_async_callback(host.close)
            await connect_all(list(hosts.values()))
            here = {job: count for job, count in jobs.items() if job not in REMOTE_JOBS}
            variables, fd = stack.enter_context(secret_file(secret))
            own = {name: text for name, text in environ.items() if name != "PSYNC_SECRET"}
            away = next(iter(hosts.values())).address
            try:
                near, _ = interface_towards(away, 1)
            except OSError as exc:
                raise ConfigurationError(
                    f"{join_address(away, 1)} is unreachable: {exc.strerror or exc}"
                ) from exc
            group = HostsGroup(here, self, hosts, {**own, **variables}, fd, near)
            async with group:
                for job in REMOTE_JOBS:
                    group.cluster[job] = []
                    for index in range(jobs[job]):
                        await group.add_task(job, index)
                yield group
                await group.stop()


async def connect_all(hosts: Sequence[RemoteHost]) -> None:
    """Connect to all hosts at once.

    Raises:
        ConfigurationError: One cannot be reached; or some are reached at a loopback address, where
            tasks on the others would not find theirs.

    Cancellation: Safe.
    """
    connecting = [asyncio.ensure_future(host.connect()) for host in hosts]
    try:
        await asyncio.gather(*connecting)
    finally:
        for each in connecting:
            each.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
    near = [host for host in hosts if is_loopback(join_address(host.address, 1))]
    if near and len(near) < len(hosts):
        raise ConfigurationError(
            f"hosts: {near[0].name} is this machine, at {near[0].address}, where the other hosts "
            "cannot reach it",
            hint="use the name by which the other hosts reach this machine",
        )


class HostsGroup(ProcessGroup):
    """The processes of a cluster, of which ps tasks and workers are on other hosts.

    Args:
        jobs: Those of this machine.
        plan: Says where the others are.
        hosts: Connected.
        environ: As of a ``ProcessGroup``, without the secret.
        secret_fd: What tasks inherit to read it.
        host: The interface at which tasks here listen.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        plan: HostsPlan,
        hosts: Mapping[str, RemoteHost],
        environ: Mapping[str, str],
        secret_fd: int,
        host: str,
    ) -> None:
        super().__init__(jobs, environ=environ, host=host)
        self._plan = plan
        self._hosts = hosts
        self._secret_fd = secret_fd

    async def add_task(self, job: str, index: int, *, port: int = 0) -> str:
        """As of a ``ProcessGroup``, on the host of the task."""
        host = self._hosts[self._plan.place(job, index)[0]]
        listener = await host.listen(job, index, port)
        host.listeners[job, index] = self._listeners[job, index] = listener
        address = join_address(host.address, listener.port)
        self._name(job, index, address)
        return address

    def _start(
        self, job: str, index: int, command: Sequence[str], env: Mapping[str, str],
        output: Output, pass_fds: Sequence[int],
    ) -> Process:  # fmt: skip
        listener = self._listeners[job, index]
        if isinstance(listener, RemoteListener):
            slot = self._plan.place(job, index)[1]
            return listener.host.start(job, index, slot, command[1:], env, output, self.cluster)
        fds = (*pass_fds, self._secret_fd)
        return super()._start(job, index, command, env, output, fds)


CONNECT_S = 60.0
"""From the start of ssh to the answer of psync there, which may lie on a slow shared disk."""

ALIVE_EVERY_S = 5.0
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
        there = ["exec", "env", *path, self.python, "-m", "psync.integrations.ssh"]
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


class RemoteProcess(Process):
    """A process of a task on another host, as the launcher sees it."""

    def __init__(self, job: str, name: str, host: RemoteHost, number: int) -> None:
        super().__init__(job, name, 0)
        self.place = f" on {host.name}"
        self.number = number
        self._host = host

    async def stop(self, grace_s: float = GRACE_S) -> int:
        """As of a ``TaskProcess``. Cancellation: kills it at once."""
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait([self._exited], timeout=grace_s)
        finally:
            self.kill()
        with contextlib.suppress(TimeoutError):  # it does not answer: the end of ssh will tell
            async with asyncio.timeout(grace_s):
                await asyncio.wait([self._exited])
        self.ended(-signal.SIGKILL)
        return self._exited.result()

    def send_signal(self, signum: int) -> None:
        if not self._exited.done():
            self._host.tell(do="signal", number=self.number, signal=int(signum))
            if not self._host.is_connected and signum == signal.SIGTERM:  # it is not there yet
                self.ended(-signum)

    def kill(self) -> None:
        if not self._exited.done():
            self._host.tell(do="kill", number=self.number)

    def ended(self, code: int) -> None:
        """It has."""
        if not self._exited.done():
            self._exited.set_result(code)


GREETING = "PSYNC-HOST "
"""Begins the first line that is ours: what a login prints comes before."""

Message = dict[str, Any]


@contextlib.contextmanager
def secret_file(secret: str) -> Iterator[tuple[dict[str, str], int]]:
    """Return a context for (what tasks have in their environment, what file they inherit)."""
    with tempfile.TemporaryFile() as file:  # it has no name, and mode 600
        file.write(secret.encode())
        file.flush()
        yield {"PSYNC_SECRET_FILE": f"/dev/fd/{file.fileno()}"}, file.fileno()


class HostAgent:
    """Starts and ends tasks as it is told.

    Args:
        order: The launcher's first line: ``directory`` and ``script`` of the program, ``environ``
            and ``secret`` of tasks, ``gpus`` for each of ``slots`` workers.
        say: Sends a line.

    Raises:
        ConfigurationError: Something that it names is not here.
    """

    def __init__(self, order: Message, say: Callable[[Message], None]) -> None:
        self._say = say
        self.address = own_address(os.environ)
        self._secret: tuple[dict[str, str], int] = {}, -1
        self._order = order
        self._tasks: dict[int, Process] = {}  # by the launcher's number of each process
        self._watchers: set[asyncio.Task[None]] = set()
        enter(order["directory"], order["script"])
        environ = {**os.environ, **order["environ"]}
        environ.pop("PSYNC_SECRET", None)
        self._gpus = GpuShares(order["gpus"], environ)
        self._gpus.check(order["slots"])
        self._group = ProcessGroup(
            {"ps": 0, "worker": 0},
            environ=environ, host=self.address,
            out=lambda text: say({"out": text}), err=lambda text: say({"err": text}),
        )  # fmt: skip

    async def run(self, told: asyncio.Queue[Message | None]) -> None:
        """Do what is told until None comes, then stop all tasks. Cancellation: kills them."""
        with secret_file(self._order["secret"]) as self._secret:
            async with self._group:
                while (message := await told.get()) is not None:
                    await self._do(message)
                for watcher in list(self._watchers):
                    watcher.cancel()

    async def _do(self, message: Message) -> None:
        match message["do"]:
            case "listen":
                try:
                    address = await self._group.add_task(
                        message["job"], message["index"], port=message["port"]
                    )
                    self._say({"listens": message["number"], "address": address})
                except OSError as exc:
                    self._say({"listens": message["number"], "error": exc.strerror or str(exc)})
            case "abandon":
                self._group.abandon(message["job"], message["index"])
            case "start":
                self._start(message)
            case "signal":
                if (task := self._tasks.get(message["number"])) is not None:
                    task.send_signal(message["signal"])
            case "kill":
                if (task := self._tasks.get(message["number"])) is not None:
                    task.kill()

    def _start(self, message: Message) -> None:
        number, job, index = message["number"], message["job"], message["index"]
        self._group.cluster = message["cluster"]
        environ, fd = self._secret
        try:
            task = self._group.start_task(
                job, index, [sys.executable, *message["command"]],
                env={**message["env"], **self._gpus.environ_of(job, message["slot"]), **environ},
                output=message["output"], pass_fds=(fd,),
            )  # fmt: skip
        except OSError as exc:
            self._say({"err": f"[{job}-{index}] could not be started: {exc}\n"})
            self._say({"ended": number, "code": 127})
            return
        self._tasks[number] = task
        self._say({"started": number, "pid": task.pid})
        watcher = asyncio.get_running_loop().create_task(self._watch(number, task))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, number: int, task: Process) -> None:
        code = await task.wait()
        del self._tasks[number]
        self._say({"ended": number, "code": code})


def own_address(environ: Mapping[str, str]) -> str:
    """Return the address at which the launcher has reached this host: others reach it there, too.

    Args:
        environ: ``SSH_CONNECTION`` is client, its port, server, its port.
    """
    connection = environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return connection[2].partition("%")[0]
    return socket.gethostbyname(socket.gethostname())


def enter(directory: str, script: str) -> None:
    """Go where the launcher is.

    Raises:
        ConfigurationError: There is no such directory, or the script is not there.
    """
    hint = "the program lies under the same path on all hosts: share the directory, or copy it"
    try:
        os.chdir(directory)
    except OSError as exc:
        raise ConfigurationError(f"{directory}: {exc.strerror}", hint=hint) from exc
    if script and not os.path.exists(script):
        raise ConfigurationError(f"{os.path.join(directory, script)} does not exist", hint=hint)


def _listen(tell: Callable[[Message | None], None], rest: bytes, silence_s: float) -> None:
    """Read what the launcher says. Runs in a thread, for the loop may wait to write output."""
    while select.select([0], [], [], silence_s)[0] and (data := os.read(0, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            tell(json.loads(line))
    tell(None)
    os.kill(os.getpid(), signal.SIGTERM)  # which interrupts such a write


def _say(message: Message, prefix: str = "") -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        write_stdout(f"{prefix}{json.dumps(message)}\n")


def _first_line() -> tuple[bytes, bytes]:
    data = b""
    while b"\n" not in data and (more := os.read(0, 1 << 16)):
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


async def _serve(order: Message, rest: bytes) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Message | None] = asyncio.Queue()

    def tell(message: Message | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told.put_nowait, message)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(signum, told.put_nowait, None)
        signal.signal(signum, release_blocked_output)
    agent = HostAgent(order, _say)
    _say({"ready": agent.address, "pid": os.getpid()})
    *lines, rest = rest.split(b"\n")
    for line in lines:
        told.put_nowait(json.loads(line))
    threading.Thread(target=_listen, args=(tell, rest, order["silence_s"]), daemon=True).start()
    await agent.run(told)


def main() -> None:
    """Greet, take the order, and serve until the connection ends."""
    _say({"psync": RELEASE, "python": PYTHON}, GREETING)
    line, rest = _first_line()
    if not line:
        return  # the launcher does not want it
    try:
        asyncio.run(_serve(json.loads(line), rest))
    except (ConfigurationError, OSError) as exc:
        _say({"error": str(exc)})


if __name__ == "__main__":
    main()
