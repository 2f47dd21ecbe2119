"""Metrics of one ps or worker, served by its own process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from psync.status.exposition import task_exposition
from psync.status.http import StatusServer

VARIABLE = "PSYNC_TASK_METRICS"


class Counting(Protocol):
    """A ps or worker task."""

    task: str

    def statistics(self) -> dict[str, Any]:
        """Return its counters."""


@contextlib.asynccontextmanager
async def serving_metrics(
    task: Counting, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[None]:
    """Return a context in which Prometheus may ask a task, if ``PSYNC_TASK_METRICS`` says where.

    Args:
        task: Whose counters they are.
        environ: With "host:port", port 0 for a free one; the log has the URL.

    Raises:
        ConfigurationError: That is no address, or one that is in use.
    """
    address = environ.get(VARIABLE)
    if not address:
        yield
        return
    began = time.time()

    async def metrics() -> str:
        return task_exposition(task.task, task.statistics(), process_metrics(began))

    server = StatusServer(address, metrics, who=task.task)
    await server.start()
    try:
        yield
    finally:
        await server.close()


def process_metrics(began: float) -> dict[str, float]:
    """Return what Prometheus's own clients tell of a process; memory and files only on Linux."""
    found = {
        "process_cpu_seconds_total": time.process_time(),
        "process_start_time_seconds": began,
    }
    with contextlib.suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        found["process_resident_memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        found["process_open_fds"] = len(os.listdir("/proc/self/fd"))
    return found
