"""Metrics of one ps or worker, served by its own process."""

from __future__ import annotations

import contextlib
import os
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

    async def metrics() -> str:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        process = CollectorRegistry()
        ProcessCollector(registry=process)
        return task_exposition(task.task, task.statistics()) + generate_latest(process).decode()

    server = StatusServer(address, metrics, who=task.task)
    await server.start()
    try:
        yield
    finally:
        await server.close()
