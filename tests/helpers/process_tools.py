"""What the tests of processes share: scripts to run, what they print, whether they live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psync.launch.processes import ProcessGroup

SCRIPTS = Path(__file__).parents[1] / "processes" / "scripts"
SECRET = "correct horse battery staple"


def script(name: str, *args: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *args]


class Screen:
    """What the user sees; waits for what tasks print."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.lines += text.splitlines()
        self._changed.set()

    async def wait_for(self, start: str) -> str:
        """The rest of the first line that starts so."""
        while True:
            for line in self.lines:
                if line.startswith(start):
                    return line.removeprefix(start)
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_number(self, start: str) -> int:
        return int(await self.wait_for(start))


def group(out: Screen | None = None, err: Screen | None = None, **options: Any) -> ProcessGroup:
    jobs = {"chief": 1, "ps": 1, "worker": 2}
    return ProcessGroup(jobs, out=out or Screen(), err=err or Screen(), **options)


@contextlib.contextmanager
def watching(pid: int) -> Iterator[select.poll]:
    """A poll object that is ready when the process ends, also if it is not a child of ours."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        yield poll
    finally:
        os.close(fd)


def is_running(pid: int) -> bool:
    """False also for a zombie whose parent has not looked yet."""
    try:
        with watching(pid) as end:
            return not end.poll(0)
    except ProcessLookupError:
        return False
