"""The processes of a cluster on several hosts, which are reached over ssh.

The chief is a process here, as in a local run; ps tasks are dealt out over the hosts in turn, and
workers fill the slots of the first host, then of the next one. Everything listens where the
launcher has reached its host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from psync.cluster import MAX_TASKS, is_loopback
from psync.errors import ConfigurationError
from psync.launch.host_agent import secret_file
from psync.launch.interfaces import interface_towards, joined_with
from psync.launch.processes import TUNING, Output, ProcessGroup
from psync.launch.remote_host import SILENCE_S, RemoteHost, RemoteListener
from psync.launch.task_output import Sink, say, write_stderr, write_stdout
from psync.launch.task_process import Process

OF_THIS_MACHINE = (
    "PSYNC_SECRET", "PSYNC_SECRET_FILE", "PSYNC_LISTEN_FD", "PSYNC_DOOR_FD", "PSYNC_LIFELINE_FD",
    "PSYNC_MEMBER_FD", "PSYNC_WORKERS_FD", "PSYNC_RUN_FD", "PSYNC_LAUNCHED",
)  # fmt: skip
"""Variables that mean nothing elsewhere, or must not be seen there."""

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
            group = HostsGroup(
                here, self, hosts, environ={**own, **variables}, secret_fd=fd,
                host=interface_towards(joined_with(away, 1)),
            )  # fmt: skip
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
    near = [host for host in hosts if is_loopback(joined_with(host.address, 1))]
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
        out, err: As of a ``ProcessGroup``.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        plan: HostsPlan,
        hosts: Mapping[str, RemoteHost],
        *,
        environ: Mapping[str, str],
        secret_fd: int,
        host: str,
        out: Sink = write_stdout,
        err: Sink = write_stderr,
    ) -> None:
        super().__init__(jobs, environ=environ, out=out, err=err, host=host)
        self._plan = plan
        self._hosts = hosts
        self._secret_fd = secret_fd

    async def add_task(self, job: str, index: int, *, port: int = 0) -> str:
        """As of a ``ProcessGroup``, on the host of the task."""
        host = self._hosts[self._plan.place(job, index)[0]]
        listener = await host.listen(job, index, port)
        host.listeners[job, index] = self._listeners[job, index] = listener
        address = joined_with(host.address, listener.port)
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
