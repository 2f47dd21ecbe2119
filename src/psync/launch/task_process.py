"""One process of a task: its output, its end, and the end of its children.

A thread of its own waits for the end of each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import IO, Any, Protocol

from psync.launch.process_loop import GRACE_S
from psync.launch.task_output import LineForwarder, Sink

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
    from psync.closures.open import WROTE_TO_PULLED
    from psync.net.environment import shares_memory
    from psync.net.tls_config import load_tls

    if load_tls(environ) is not None or not shares_memory(environ):
        return ""
    return f"hint: the cause is {WROTE_TO_PULLED}"


class Process(Protocol):
    """A process of a task, on this machine or another one; see ``TaskProcess``, which is one."""

    job: str
    name: str
    pid: int

    @property
    def returncode(self) -> int | None: ...

    def describe(self) -> str: ...

    async def wait(self) -> int: ...

    async def stop(self, grace_s: float = ...) -> int: ...

    def send_signal(self, signum: int) -> None: ...

    def kill(self) -> None: ...


class TaskProcess:
    """One process of a task. Made by `ProcessGroup.start_task`.

    Args:
        job: The job of its task.
        name: Name of its task, as in ``worker-0``.
        popen: The process.
        out: Where its output goes.
        err: Where its errors go.
        own: Runs what must be over before the group is.

    Attributes:
        job: As it was given, like ``name``.
        pid: Process id, also that of its session and process group.
    """

    def __init__(
        self,
        job: str,
        name: str,
        popen: subprocess.Popen[bytes],
        out: Sink,
        err: Sink,
        own: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.job = job
        self.name = name
        self.pid = popen.pid
        self._popen = popen
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._drained: asyncio.Future[None] = self._loop.create_future()  # both pipes at their end
        self._pipes: dict[IO[bytes], LineForwarder] = {}  # those that are open
        for pipe, sink in ((popen.stdout, out), (popen.stderr, err)):
            if pipe is not None:
                self._pipes[pipe] = LineForwarder(f"[{name}] ", sink)
                self._loop.add_reader(pipe, self._read, pipe)
        if not self._pipes:
            self._drained.set_result(None)
        threading.Thread(target=self._reap, name=f"psync-wait-{name}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<TaskProcess {self.name}: {self.describe()}>"

    def describe(self) -> str:
        """Return "process 4711 is running", or how it has ended."""
        state = "is running" if self.returncode is None else describe_exit(self.returncode)
        return f"process {self.pid} {state}"

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
