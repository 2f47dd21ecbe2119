"""Start and supervision of the tasks of a cluster as real processes on this machine.

Used by ``psync run``, where the launcher is a process of its own, and by a local cluster, whose
launcher is the chief. What both need:

* **Addresses without races.** The group binds port 0 and listens for every task before the first
  one starts, and hands each its socket as an inherited descriptor. Peers can connect before a task
  is up; one that is started again finds its old address, and the connections that wait there.
* **Nothing is left behind.** Each task leads a session of its own, so Ctrl-C in a terminal reaches
  the launcher alone, which then stops the tasks in order; what a task has started is ended with
  it. The *lifeline* covers the launcher's own death: see ``process_loop``.
* **Output keeps its lines**, each with its task's name. They are written on the loop: if our output
  is no longer read, the tasks' pipes fill up, and not our memory.

Processes are started with ``subprocess`` and not through the loop: uvloop hands its children copies
of descriptors that they should not have, and forks, which takes long where the chief is large.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from psync.errors import BusyError, ClosedError, ConfigurationError
from psync.launch.interfaces import joined_with
from psync.launch.process_loop import GRACE_S
from psync.launch.task_output import Sink, write_stderr, write_stdout
from psync.launch.task_process import Process, TaskProcess
from psync.net.shared.door_names import door_beside, may_share

BACKLOG = 1024  # all peers connect at once, and to tasks that are not up yet

SERVE_COMMAND = (sys.executable, "-m", "psync", "task")

# The processes share the cores, so each computes in one thread. Must be set before numpy is
# imported. A user's own setting wins.
TUNING = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

Output = Literal["prefixed", "inherited", "discarded"]


@dataclass(eq=False)
class RestartPolicy:
    """How often one task may be started again: ``limit`` times within ``window_s`` seconds."""

    limit: int
    window_s: float = 60.0
    _restarts: deque[float] = field(default_factory=deque)  # of those within the window, in order

    @property
    def exceeded(self) -> str:
        """Why it may not be started once more."""
        return f"{self.limit + 1} deaths within a minute" if self.limit else "restarts are off"

    def allow(self, now: float) -> bool:
        """Whether the task may be started again at ``now`` (seconds); a yes is counted."""
        while self._restarts and now - self._restarts[0] >= self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return False
        self._restarts.append(now)
        return True


class ProcessGroup:
    """The processes of one cluster on this machine: starts them, forwards output, stops them.

    An async context manager: when it is left, no process of any task is left. It has a
    single owner and lives on one event loop, stock asyncio or uvloop.

    Args:
        jobs: Number of tasks of each job, as in ``{"chief": 1, "ps": 2, "worker": 2}``. Each gets
            an address on ``host``, also one that is never started here.
        secret: The cluster's secret, handed to tasks in their environment. None: ``environ`` has
            it, or the cluster has none.
        environ: What tasks inherit; by default the environment of this process.
        out: Takes the lines that tasks write to stdout; by default ``sys.stdout``.
        err: Takes the lines that tasks write to stderr; by default ``sys.stderr``.
        host: The interface at which tasks listen.

    Attributes:
        cluster: Addresses by job, as in ``TF_CONFIG``.

    Raises:
        OSError: If the machine has no free port or descriptor.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        *,
        secret: str | None = None,
        environ: Mapping[str, str] | None = None,
        out: Sink = write_stdout,
        err: Sink = write_stderr,
        host: str = "127.0.0.1",
    ) -> None:
        self.out = out
        self._host = host
        self.err = err
        self.cluster: dict[str, list[str]] = {job: [] for job in jobs}
        self._environ = {**TUNING, **(os.environ if environ is None else environ)}
        if secret is not None:
            self._environ["PSYNC_SECRET"] = secret
        self._listeners: dict[tuple[str, int], Any] = {}  # what has an address, until closed
        self._doors: dict[tuple[str, int], socket.socket] = {}  # beside them
        self._processes: dict[tuple[str, int], Process] = {}  # the latest of each task
        self._chores: set[asyncio.Task[None]] = set()  # cleaning up after processes that have ended
        self._stopping = False
        with contextlib.ExitStack() as resources:
            self._lifeline, write_end = os.pipe()
            resources.callback(os.close, self._lifeline)
            resources.callback(os.close, write_end)
            for job, count in jobs.items():
                for index in range(count):
                    self._listen(resources, job, index)
            self._resources = resources.pop_all()  # closed by `stop`

    def _listen(self, resources: contextlib.ExitStack, job: str, index: int, port: int = 0) -> str:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, port), family=family, backlog=BACKLOG)
        self._listeners[job, index] = resources.enter_context(listener)
        if may_share(self._environ) and (door := door_beside(listener)) is not None:
            self._doors[job, index] = resources.enter_context(door)
        address = joined_with(self._host, listener.getsockname()[1])
        self._name(job, index, address)
        return address

    def _name(self, job: str, index: int, address: str) -> None:
        self.cluster[job][index:] = [address, *self.cluster[job][index + 1 :]]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def start_task(
        self,
        job: str,
        index: int,
        command: Sequence[str] = SERVE_COMMAND,
        *,
        env: Mapping[str, str] | None = None,
        output: Output = "prefixed",
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start a task, or start it again, at the same address, after it has ended.

        Blocks for the millisecond or two until the program has been loaded.

        Args:
            job: One of the jobs of the group.
            index: Which task of the job.
            command: Program and arguments, by default the one that serves as a ps or a worker.
                Everybody on the machine can read them: no secrets.
            env: Further environment variables.
            output: ``prefixed`` sends its lines to ``out`` and ``err``. ``inherited`` gives it the
                stdin, stdout and stderr of this process (not a stdin that is a terminal: tasks
                are not in its foreground, and would get errors for input).
            pass_fds: Further descriptors that it inherits, under the same numbers.

        Raises:
            ConfigurationError: If the group has no such task.
            BusyError: If it is running.
            ClosedError: If the group is being stopped.
            OSError: If the program cannot be started.
        """
        name = f"{job}-{index}"
        if (job, index) not in self._listeners:
            counts = ", ".join(f"{len(a)} {job}" for job, a in self.cluster.items())
            raise ConfigurationError(f"expected a task of the cluster ({counts}), got {name}")
        if self._stopping:
            raise ClosedError(f"cannot start {name}: the process group is being stopped")
        process = self._processes.get((job, index))
        if process is not None and process.returncode is None:
            raise BusyError(f"cannot start {name}: it is running as process {process.pid}")
        process = self._start(job, index, command, env or {}, output, pass_fds)
        self._processes[job, index] = process
        return process

    def _start(
        self, job: str, index: int, command: Sequence[str], env: Mapping[str, str],
        output: Output, pass_fds: Sequence[int],
    ) -> Process:  # fmt: skip
        popen = self._spawn(job, index, command, env, output, pass_fds)
        return TaskProcess(job, f"{job}-{index}", popen, self.out, self.err, self.own)

    def _spawn(
        self, job: str, index: int, command: Sequence[str], env: Mapping[str, str],
        output: Output, pass_fds: Sequence[int],
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        listener = self._listeners[job, index].fileno()
        door = self._doors.get((job, index))
        doors = {} if door is None else {"PSYNC_DOOR_FD": str(door.fileno())}
        config = {"cluster": self.cluster, "task": {"type": job, "index": index}}
        streams = {"prefixed": subprocess.PIPE, "inherited": None, "discarded": subprocess.DEVNULL}
        has_input = output == "inherited" and sys.stdin is not None and not sys.stdin.isatty()
        # One that is asked for a report while it still imports answers when it can, and lives.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            return subprocess.Popen(
                command,
                stdin=None if has_input else subprocess.DEVNULL,
                stdout=streams[output],
                stderr=streams[output],
                env={
                    **self._environ,
                    **env,
                    "TF_CONFIG": json.dumps(config),
                    "PSYNC_LAUNCHED": "1",
                    "PSYNC_LISTEN_FD": str(listener),
                    **doors,
                    "PSYNC_LIFELINE_FD": str(self._lifeline),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(listener, self._lifeline, *map(int, doors.values()), *pass_fds),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def listener_of(self, job: str, index: int) -> socket.socket:
        """Return a copy of a task's socket, for a task that is not started here.

        It opens its own door beside it: in the group's, nobody would let its peers in.
        """
        if (door := self._doors.pop((job, index), None)) is not None:
            door.close()
        copy: socket.socket = self._listeners[job, index].dup()
        return copy

    def abandon(self, job: str, index: int) -> None:
        """Give up the address of a task that has ended and is not started again.

        Who connects to it then is refused, and does not wait for an answer.
        """
        for listening in (self._listeners, self._doors):
            listener = listening.pop((job, index), None)
            if listener is not None:
                listener.close()

    async def add_task(self, job: str, index: int, *, port: int = 0) -> str:
        """Make an address for another task, to be started; return it.

        Args:
            job: One of the jobs of the group.
            index: At most that of the last task and one more. One that was abandoned gets a new
                address.
            port: Of the address; 0: one that is free.

        Raises:
            OSError: The machine has no free port or descriptor, or the port is in use.

        Cancellation: Safe.
        """
        return self._listen(self._resources, job, index, port)

    def remove_task(self, job: str, index: int) -> None:
        """Abandon a task; tasks that are started from now on do not hear of the last ones."""
        self.abandon(job, index)
        tasks = self.cluster[job]
        while len(tasks) > 1 and (job, len(tasks) - 1) not in self._listeners:
            tasks.pop()

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must be over before the group is."""
        chore = asyncio.get_running_loop().create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)
        return chore

    def signal_all(self, signum: int) -> None:
        """Send a signal to the process of every task that runs."""
        for process in self._processes.values():
            process.send_signal(signum)

    def kill(self) -> None:
        """Kill all processes now; `stop` must still be awaited."""
        for process in self._processes.values():
            process.kill()

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop all processes: SIGTERM, ``grace_s`` seconds, SIGKILL.

        The chief goes first, so that what it does at its end still finds the others. Nothing can be
        started from this call on. Calling it again does nothing.

        Cancellation: Kills at once what is left, without waiting for it.
        """
        self._stopping = True
        try:
            for chief in (True, False):
                turn = [p for p in self._processes.values() if (p.job == "chief") is chief]
                await asyncio.gather(*(process.stop(grace_s) for process in turn))
            while self._chores:
                await asyncio.wait(self._chores)
        except BaseException:
            self.kill()
            raise
        finally:
            self._resources.close()
