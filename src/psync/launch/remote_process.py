"""One process of a task on another host, as the launcher sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any, Protocol

from psync.launch.process_loop import GRACE_S
from psync.launch.task_process import describe_exit


class Teller(Protocol):
    """The host of a process."""

    name: str

    @property
    def is_connected(self) -> bool: ...

    def tell(self, **message: Any) -> None: ...


class RemoteProcess:
    """A process of a task on another host; a ``task_process.Process``.

    Attributes:
        job, name, pid: As of a ``TaskProcess``; ``pid`` is 0 until it has started.
    """

    def __init__(self, job: str, name: str, host: Teller, number: int) -> None:
        self.job = job
        self.name = name
        self.pid = 0
        self.number = number
        self._host = host
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def describe(self) -> str:
        """Return "process 4711 on b is running", or how it has ended."""
        state = "is running" if self.returncode is None else describe_exit(self.returncode)
        return f"process {self.pid} on {self._host.name} {state}"

    @property
    def returncode(self) -> int | None:
        """None while it runs, then its exit code, or minus the signal that killed it."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Wait for its end; return its exit code. Cancellation: safe, it runs on."""
        await asyncio.wait([self._exited])
        return self._exited.result()

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
        """Send a signal to the process alone; nothing happens if it has ended."""
        if not self._exited.done():
            self._host.tell(do="signal", number=self.number, signal=int(signum))
            if not self._host.is_connected and signum == signal.SIGTERM:  # it is not there yet
                self.ended(-signum)

    def kill(self) -> None:
        """Kill it and all it has started; nothing happens if it has ended."""
        if not self._exited.done():
            self._host.tell(do="kill", number=self.number)

    def ended(self, code: int) -> None:
        """It has."""
        if not self._exited.done():
            self._exited.set_result(code)
