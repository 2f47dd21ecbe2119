"""The tasks of a cluster as real processes on this machine: start, output, end.

Used by ``psync run``, where the launcher is a process of its own, and by a local cluster, whose
launcher is the chief. What both need:

* **Addresses without races.** The group binds port 0 and listens for every task before the first
  one starts, and hands each its socket as an inherited descriptor. Peers can connect before a task
  is up; one that is started again finds its old address, and the connections that wait there.
* **Nothing is left behind.** Each task leads a session of its own, so Ctrl-C in a terminal reaches
  the launcher alone, which then stops the tasks in order; what a task has started is ended with
  it. The *lifeline* covers the launcher's own death: see ``launch.process``.
* **Output keeps its lines**, each with its task's name. They are written on the loop: if our output
  is no longer read, the tasks' pipes fill up, and not our memory.

Processes are started with ``subprocess`` and not through the loop: uvloop hands its children copies
of descriptors that they should not have, and forks, which takes long where the chief is large. A
thread of its own waits for the end of each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Self

from psync.cluster import join_address
from psync.errors import BusyError, ClosedError, ConfigurationError, check_fits
from psync.launch.process import GRACE_S, LineForwarder, Sink, write_stderr, write_stdout
from psync.net.shared.door_names import BACKLOG, door_beside, may_share
from psync.net.shielding import begin

SERVE_COMMAND = (sys.executable, "-m", "psync", "task")

# The processes share the cores, so each computes in one thread. Must be set before numpy is
# imported. A user's own setting wins.
TUNING = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Output = Literal["prefixed", "inherited", "discarded"]


class RestartPolicy:
    """How often one task may be started again: ``limit`` times a minute.

    Attributes:
        at_most: How often that is, for people.
        exceeded: Why it may not be started once more.
    """

    def __init__(self, limit: int) -> None:
        self.at_most = f"at most {limit} times a minute"
        self.exceeded = f"{limit + 1} deaths within a minute" if limit else "restarts are off"
        self._restarts: deque[float] = deque(maxlen=limit)  # the newest, in order

    def allow(self) -> bool:
        """Whether the task may be started again now; a yes is counted."""
        now, known = asyncio.get_running_loop().time(), self._restarts
        if len(known) == known.maxlen and not (known and now - known[0] >= 60.0):
            return False
        known.append(now)  # the oldest goes
        return True


@dataclass(eq=False, repr=False)
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
        processes: The newest process of each task, as "worker-0".

    Raises:
        OSError: If the machine has no free port or descriptor.
    """

    jobs: Mapping[str, int]
    _: KW_ONLY
    secret: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    out: Sink = write_stdout
    err: Sink = write_stderr
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        self.cluster: dict[str, list[str]] = {job: [] for job in self.jobs}
        self._environ = {**TUNING, **self.environ}
        if self.secret is not None:
            self._environ["PSYNC_SECRET"] = self.secret
        self._listeners: dict[tuple[str, int], Any] = {}  # what has an address, until closed
        self._doors: dict[tuple[str, int], socket.socket] = {}  # beside them
        self.processes: dict[str, Process] = {}
        self._chores: set[asyncio.Task[None]] = set()  # cleaning up after processes that have ended
        self._stopping = False
        with contextlib.ExitStack() as resources:
            self._lifeline, write_end = os.pipe()
            resources.callback(os.close, self._lifeline)
            resources.callback(os.close, write_end)
            for job, count in self.jobs.items():
                for index in range(count):
                    self._listen(resources, job, index)
            self._resources = resources.pop_all()  # closed by `stop`

    def _listen(self, resources: contextlib.ExitStack, job: str, index: int, port: int = 0) -> str:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, port), family=family, backlog=BACKLOG)
        self._listeners[job, index] = resources.enter_context(listener)
        if may_share(self._environ) and (door := door_beside(listener)) is not None:
            self._doors[job, index] = resources.enter_context(door)
        address = join_address(self.host, listener.getsockname()[1])
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
            ConfigurationError: If the group has no such task, or has abandoned it.
            BusyError: If it is running.
            ClosedError: If the group is being stopped.
            OSError: If the program cannot be started.
        """
        name = f"{job}-{index}"
        if self._stopping:
            raise ClosedError(f"cannot start {name}: the process group is being stopped")
        known = ", ".join(f"{job}-{index}" for job, index in self._listeners)
        check_fits((job, index) in self._listeners, f"start_task: expected one of {known}", name)
        process = self.processes.get(name)
        if process is not None and process.returncode is None:
            raise BusyError(f"cannot start {name}: it is running as process {process.pid}")
        process = self._start(job, index, command, env or {}, output, pass_fds)
        self.processes[name] = process
        return process

    def _start(
        self, job: str, index: int, command: Sequence[str], env: Mapping[str, str],
        output: Output, pass_fds: Sequence[int],
    ) -> Process:  # fmt: skip
        listener = self._listeners[job, index].fileno()
        door = self._doors.get((job, index))
        doors = {} if door is None else {"PSYNC_DOOR_FD": str(door.fileno())}
        config = {"cluster": self.cluster, "task": {"type": job, "index": index}}
        streams = {"prefixed": subprocess.PIPE, "inherited": None, "discarded": subprocess.DEVNULL}
        has_input = output == "inherited" and sys.stdin is not None and not sys.stdin.isatty()
        # One that is asked for a report while it still imports answers when it can, and lives.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            popen = subprocess.Popen(
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
        return TaskProcess(self, job, f"{job}-{index}", popen)

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
            if (listener := listening.pop((job, index), None)) is not None:
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
        return begin(work, self._chores)

    def signal_all(self, signum: int) -> None:
        """Send a signal to the process of every task that runs."""
        for process in self.processes.values():
            process.send_signal(signum)

    def kill(self) -> None:
        """Kill all processes now; `stop` must still be awaited."""
        for process in self.processes.values():
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
                turn = [p for p in self.processes.values() if (p.job == "chief") is chief]
                await asyncio.gather(*(process.stop(grace_s) for process in turn))
            while self._chores:
                await asyncio.wait(self._chores)
        except BaseException:
            self.kill()
            raise
        finally:
            self._resources.close()


SWEEP_S = 1.0  # for what a task left behind; multiprocessing's resource tracker needs a few ms
DRAIN_S = 1.0  # for output after the exit, should a stranger hold the pipe open
POLL_S = 0.02
READ_BYTES = 64 * 1024  # what a pipe of Linux holds


def describe_exit(code: int) -> str:
    """Say how a process ended; a negative code is the signal that killed it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-code}"


def hint_of_crash(code: int, environ: Mapping[str, str]) -> str:
    """Return what a task that runs the user's code has probably done to end so; "": unknown."""
    if -code not in (signal.SIGSEGV, signal.SIGBUS):
        return ""
    # Here, because a launcher must not load what these import.
    from psync.closures.queue import WROTE_TO_PULLED
    from psync.net.certificates import load_tls
    from psync.net.shared.doors import shares_memory

    if load_tls(environ) is not None or not shares_memory(environ):
        return ""
    return f"hint: the cause is {WROTE_TO_PULLED}"


class Process(ABC):
    """A process of a task, on this machine or another one.

    Args:
        job: The job of its task.
        name: Name of its task, as in ``worker-0``.
        pid: Process id; 0: it has not started yet.
    """

    place = ""  # as in " on b"

    def __init__(self, job: str, name: str, pid: int) -> None:
        self.job = job
        self.name = name
        self.pid = pid
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.describe()}>"

    def describe(self) -> str:
        """Return "process 4711 is running", or how it has ended."""
        state = "is running" if self.returncode is None else describe_exit(self.returncode)
        return f"process {self.pid}{self.place} {state}"

    @property
    def returncode(self) -> int | None:
        """None while it runs, then its exit code, or minus the signal that killed it."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code. Cancellation: it runs on."""
        await asyncio.wait([self._exited])
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

    @abstractmethod
    def send_signal(self, signum: int) -> None:
        """Send a signal to the process alone; nothing happens if it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and all it has started; nothing happens if it has ended."""


class TaskProcess(Process):
    """One on this machine: its output, its end, and the end of what it has started.

    Args:
        group: Takes its output, and waits for what has to be done after its end.
        job, name: As of a ``Process``.
        popen: The process, which leads a session and process group.
    """

    def __init__(
        self, group: ProcessGroup, job: str, name: str, popen: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(job, name, popen.pid)
        self._popen = popen
        self._own = group.own
        self._loop = asyncio.get_running_loop()
        self._drained: asyncio.Future[None] = self._loop.create_future()  # both pipes at their end
        self._pipes: dict[IO[bytes], LineForwarder] = {}  # those that are open
        for pipe, sink in ((popen.stdout, group.out), (popen.stderr, group.err)):
            if pipe is not None:
                self._pipes[pipe] = LineForwarder(f"[{name}] ", sink)
                self._loop.add_reader(pipe, self._read, pipe)
        if not self._pipes:
            self._drained.set_result(None)
        threading.Thread(target=self._reap, name=f"psync-wait-{name}", daemon=True).start()

    async def wait(self) -> int:
        """Wait until it has ended and its output is forwarded; return its exit code.

        If what the process has started holds its output open, that is waited for 1 s at most.

        Cancellation: Safe; the process runs on.
        """
        await asyncio.wait([self._exited])
        await asyncio.wait([self._drained], timeout=DRAIN_S)
        return self._exited.result()

    def send_signal(self, signum: int) -> None:
        self._popen.send_signal(signum)

    def kill(self) -> None:
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
        self._own(self._clean_up())

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


VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
LISTING_S = 20.0
"""``nvidia-smi`` waits for the driver, which a first call after boot has to load."""


class GpuShares:
    """Which devices each task of a cluster sees.

    Args:
        per_worker: Number for each worker; 0: workers see none; None: nothing is changed.
        environ: The environment of tasks, whose ``CUDA_VISIBLE_DEVICES`` is what there is to share
            out; where it is not set, all devices of the machine are.

    Raises:
        ConfigurationError: ``per_worker`` is no such number.
    """

    def __init__(self, per_worker: int | None, environ: Mapping[str, str]) -> None:
        fits = per_worker is None or (type(per_worker) is int and per_worker >= 0)
        check_fits(fits, "gpus_per_worker: expected a whole number, 0 or above", per_worker)
        self._per_worker = per_worker
        self._environ = environ
        self._found: tuple[list[str], str] | None = None  # None until they are looked for

    def check(self, num_workers: int) -> None:
        """Are there enough for so many workers? The first call may start ``nvidia-smi``.

        Raises:
            ConfigurationError: No; says what there is.
        """
        if not self._per_worker:
            return
        if self._found is None:
            self._found = visible_gpus(self._environ)
        (devices, source), needed = self._found, num_workers * self._per_worker
        if len(devices) < needed:
            shown = f" ({', '.join(devices)})" if devices else ""
            raise ConfigurationError(
                f"gpus_per_worker: {num_workers} workers with {self._per_worker} each need "
                f"{needed} GPUs, but {source} shows {len(devices)}{shown}",
                hint="ask for fewer workers, or fewer GPUs for each; 0 hides all of them",
            )

    def environ_of(self, job: str, index: int) -> dict[str, str]:
        """Return what a task has in its environment for this; call ``check`` before."""
        if self._per_worker is None or job not in ("ps", "worker"):
            return {}
        devices = self._found[0] if self._found is not None and job == "worker" else []
        first = index * self._per_worker
        return {VARIABLE: ",".join(devices[first : first + self._per_worker])}


def visible_gpus(environ: Mapping[str, str], driver: Path = DRIVER) -> tuple[list[str], str]:
    """Return the GPUs that programs of this process see, and where that was read.

    By number if the variable gives numbers, else by UUID: what ``nvidia-smi`` and CUDA number
    differs where GPUs are of several models.

    Args:
        environ: Where ``CUDA_VISIBLE_DEVICES`` and ``PATH`` are looked up.
        driver: The driver's directory, read where there is no ``nvidia-smi``, as in containers.
    """
    given = environ.get(VARIABLE)
    if given is not None:
        return _listed(given), f"{VARIABLE}={given!r}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environ), capture_output=True, text=True, timeout=LISTING_S, check=True,
        ).stdout  # fmt: skip
        return _uuids(listing.splitlines()), "nvidia-smi -L"
    lines: list[str] = []
    for information in sorted(driver.glob("*/information")):
        with contextlib.suppress(OSError):
            lines += information.read_text(encoding="utf-8", errors="replace").splitlines()
    return _uuids(lines), "this machine"


def _listed(given: str) -> list[str]:
    """Return the devices of a value of the variable; as CUDA reads it, -1 ends the list."""
    parts = (part.strip() for part in given.split(","))
    return list(itertools.takewhile(lambda part: part and not part.startswith("-"), parts))


def _uuids(lines: Sequence[str]) -> list[str]:
    """Return GPUs, or in the place of one that is partitioned its MIG devices."""
    devices: list[str] = []
    for line in lines:
        for kind, uuid in re.findall(r"UUID:\s*((?:GPU|MIG)-)([^\s)]+)", line):
            if kind == "MIG-" and devices and devices[-1].startswith("GPU-"):
                devices.pop()  # the one that it is a part of
            devices.append(kind + uuid)
    return devices
