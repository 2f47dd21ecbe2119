"""A status without a cluster, and who serves it over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from psync import Status
from psync.net.platform import Platform
from psync.net.trace_file import Reading
from psync.net.transport import SocketNetwork
from psync.status.serving import ServedStatus

STATUS = Status(1.0, 7, "train.py", 2.0, 3.0, "running", "nothing")


class Spans:
    """What tasks have recorded, without tasks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    async def read_all(self, name: str, *, last: bool = False) -> list[Reading]:
        self.asked.append((name, last))
        return [Reading("/job:chief/task:0", b"body", 1.0, 2.0)]


class Source:
    """A status without a cluster."""

    program = "train.py"

    def __init__(self) -> None:
        self.answer: Any = STATUS
        self.spans = Spans()

    async def status(self) -> Status:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer

    def begin(self) -> None: ...
    async def close(self) -> None: ...


def http_server(
    source: Any, address: str = "127.0.0.1:0"
) -> contextlib.AbstractAsyncContextManager[str]:
    """What serves the status of a source over HTTP; yields the URL."""
    server = ServedStatus(source, Platform(SocketNetwork()), address)._http
    assert server is not None
    return server


@contextlib.asynccontextmanager
async def serving_of(source: Any = None) -> AsyncIterator[ServedStatus]:
    status = ServedStatus(source or Source(), Platform(SocketNetwork()))
    await status.start()
    try:
        yield status
    finally:
        await status.close()
