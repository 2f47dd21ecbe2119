"""Start and supervise the tasks of a cluster as real processes on this machine.

Layer: L4. Imports: errors, task_output.

Used by ``psync run``, where the launcher is a process of its own, and by a local cluster, whose
launcher is the chief. What both need, and why it is so:

* **Addresses without races.** The group binds port 0 and listens for every task before the first
  one starts, and hands each its socket as an inherited descriptor. Peers can connect before a task
  is up; one that is started again finds its old address, and the connections that wait there.
* **Nothing is left behind.** Each task leads a session of its own, so Ctrl-C in a terminal reaches
  the launcher alone, which then stops the tasks in order; what a task has started is ended with
  it. The *lifeline* covers the launcher's own death: a pipe whose only write end the launcher
  holds, and whose other end every task reads.
* **Output keeps its lines**, each with its task's name. They are written on the loop: if nobody
  reads our output any more, the tasks' pipes fill up, and not our memory.

Processes are started with ``subprocess`` and not through the loop: uvloop hands its children copies
of descriptors that they should not have, and forks, which takes long where the chief is large. One
thread for each process waits for its end.
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
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import IO, Any, Literal, Self

from psync.errors import BusyError, ClosedError, ConfigurationError
from psync.task_output import LineForwarder, Sink, write_stderr, write_stdout

GRACE_S = 5.0  # between SIGTERM and SIGKILL
SWEEP_S = 1.0  # for what a task left behind; multiprocessing's resource tracker needs a few ms
DRAIN_S = 1.0  # for output after the exit, should a stranger hold the pipe open
POLL_S = 0.02
READ_BYTES = 64 * 1024  # what a pipe of Linux holds
BACKLOG = 1024  # all peers connect at once, and to tasks that are not up yet

SERVE_COMMAND = (sys.executable, "-m", "psync", "serve")

# The processes share the cores, so each computes in one thread. Must be set before numpy is
# imported. A user's own setting wins.
TUNING = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

Output = Literal["prefixed", "inherited", "discarded"]


class RestartPolicy:
    """How often one task may be started again: ``limit`` times within ``window_s`` seconds."""

    def __init__(self, limit: int, window_s: float = 60.0) -> None:
        self.limit = limit
        self.window_s = window_s
        self._restarts: deque[float] = deque()  # times of those within the window, oldest first

    def allow(self, now: float) -> bool:
        """Whether the task may be started again at ``now`` (seconds); a yes is counted."""
        while self._restarts and now - self._restarts[0] >= self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return False
        self._restarts.append(now)
        return True


def describe_exit(code: int) -> str:
    """Say how a process ended; a negative code is the signal that killed it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-code}"


def watch_lifeline(fd: int, *, grace_s: float = GRACE_S) -> None:
    """End this process when its launcher has gone, in whatever way that happened.

    A daemon thread reads the lifeline. At its end this process and all it has started get SIGTERM;
    if it is there ``grace_s`` seconds later, they are killed.

    Args:
        fd: Read end of the pipe, ``PSYNC_LIFELINE_FD``. Nobody else may use it from now on.
        grace_s: Seconds between SIGTERM and the end.
    """
    os.set_inheritable(fd, False)
    threading.Thread(
        target=_end_with_launcher, args=(fd, grace_s), name="psync-lifeline", daemon=True
    ).start()


def _end_with_launcher(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):  # nobody writes to it; its end is the message
        continue
    leads = os.getpgrp() == os.getpid()  # else others are in the group, which we did not start
    signal_all = os.killpg if leads else os.kill
    signal_all(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    signal_all(os.getpid(), signal.SIGKILL)


class TaskProcess:
    """One process of a task. Made by `ProcessGroup.start_task`.

    Attributes:
        job: The job of its task.
        name: Name of its task, as in ``worker-0``.
        pid: Process id, also that of its session and process group.
    """

    def __init__(
        self, job: str, name: str, popen: subprocess.Popen[bytes], group: ProcessGroup
    ) -> None:
        self.job = job
        self.name = name
        self.pid = popen.pid
        self._popen = popen
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._drained: asyncio.Future[None] = self._loop.create_future()  # both pipes at their end
        self._pipes: dict[IO[bytes], LineForwarder] = {}  # those that are open
        for pipe, sink in ((popen.stdout, group.out), (popen.stderr, group.err)):
            if pipe is not None:
                self._pipes[pipe] = LineForwarder(f"[{name}] ", sink)
                self._loop.add_reader(pipe, self._read, pipe)
        if not self._pipes:
            self._drained.set_result(None)
        threading.Thread(target=self._reap, name=f"psync-wait-{name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "is running" if self.returncode is None else describe_exit(self.returncode)
        return f"<TaskProcess {self.name}: process {self.pid} {state}>"

    @property
    def returncode(self) -> int | None:
        """None while it runs, then its exit code, or minus the signal that killed it."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Wait until the process has ended and its output is forwarded; return its exit code.

        If what the process has started holds its output open, that is waited for 1 s at most.

        Cancellation: Safe; the process runs on.
        """
        await asyncio.wait([self._exited])
        await asyncio.wait([self._drained], timeout=DRAIN_S)
        return self._exited.result()

    async def stop(self, grace_s: float = GRACE_S) -> int:
        """Ask the process to end (SIGTERM), kill it after ``grace_s`` seconds, wait for it.

        Cancellation: Kills it at once.
        """
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait([self._exited], timeout=grace_s)
        finally:
            self.kill()
        return await self.wait()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process alone; nothing happens if it has ended."""
        self._popen.send_signal(signum)

    def kill(self) -> None:
        """Kill the process and all it has started; nothing happens if it has ended."""
        if self.returncode is None:
            _signal_group(self.pid, signal.SIGKILL)

    def _read(self, pipe: IO[bytes]) -> None:
        if data := os.read(pipe.fileno(), READ_BYTES):
            self._pipes[pipe].feed(data)
        else:
            self._let_go(pipe)

    def _let_go(self, pipe: IO[bytes]) -> None:
        self._loop.remove_reader(pipe)
        self._pipes.pop(pipe).close()
        pipe.close()
        if not self._pipes:
            self._drained.set_result(None)

    def _reap(self) -> None:
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed, and the process left alone
            self._loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self._exited.set_result(code)
        self._group.own(self._clean_up())

    async def _clean_up(self) -> None:
        """End what the process has left behind, then let go of its pipes."""
        # The process id is free now. While its group has members nobody else gets it, and ids are
        # handed out in turn, so the moment before the first signal is no danger either.
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if not _signal_group(self.pid, signum):
                break
            deadline = self._loop.time() + SWEEP_S
            while self._loop.time() < deadline and _signal_group(self.pid, 0):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # an empty process group has no event
        await asyncio.wait([self._drained], timeout=DRAIN_S)
        for pipe in list(self._pipes):
            self._let_go(pipe)


def _signal_group(pgid: int, signum: int) -> bool:
    """Signal a process group; False if nobody is in it."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):  # the latter on macOS: only zombies are left
        return False
    return True


class ProcessGroup:
    """The processes of one cluster on this machine: starts them, forwards output, stops them.

    An async context manager: when it is left, no process of any task is left. It has a
    single owner and lives on one event loop, stock asyncio or uvloop.

    Args:
        jobs: Number of tasks of each job, as in ``{"chief": 1, "ps": 2, "worker": 2}``. Each gets
            an address on 127.0.0.1, also one that is never started here.
        secret: The cluster's secret, handed to tasks in their environment. None: ``environ`` has
            it, or the cluster has none.
        environ: What tasks inherit; by default the environment of this process.
        out: Takes the lines that tasks write to stdout; by default ``sys.stdout``.
        err: Takes the lines that tasks write to stderr; by default ``sys.stderr``.

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
    ) -> None:
        self.out = out
        self.err = err
        self.cluster: dict[str, list[str]] = {job: [] for job in jobs}
        self._environ = {**TUNING, **(os.environ if environ is None else environ)}
        if secret is not None:
            self._environ["PSYNC_SECRET"] = secret
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._processes: dict[tuple[str, int], TaskProcess] = {}  # the latest of each task
        self._chores: set[asyncio.Task[None]] = set()  # cleaning up after processes that have ended
        self._stopping = False
        with contextlib.ExitStack() as resources:
            self._lifeline, write_end = os.pipe()
            resources.callback(os.close, self._lifeline)
            resources.callback(os.close, write_end)
            for job, count in jobs.items():
                for index in range(count):
                    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
                    self._listeners[job, index] = resources.enter_context(listener)
                    self.cluster[job].append(f"127.0.0.1:{listener.getsockname()[1]}")
            self._resources = resources.pop_all()  # closed by `stop`

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
    ) -> TaskProcess:
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
        popen = self._spawn(job, index, command, env or {}, output, pass_fds)
        process = self._processes[job, index] = TaskProcess(job, name, popen, self)
        return process

    def _spawn(
        self, job: str, index: int, command: Sequence[str], env: Mapping[str, str],
        output: Output, pass_fds: Sequence[int],
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        listener = self._listeners[job, index].fileno()
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
                    "PSYNC_LIFELINE_FD": str(self._lifeline),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(listener, self._lifeline, *pass_fds),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def abandon(self, job: str, index: int) -> None:
        """Give up the address of a task that has ended and is not started again.

        Who connects to it then is refused, and does not wait for an answer.
        """
        self._listeners.pop((job, index)).close()

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
