"""Tasks of psync in the process of a Dask worker; see ``psync.integrations.dask``.

``keep`` is Dask's task for one of ours; all others are called out of band, on the worker's loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import distributed
from distributed.comm import get_address_host

from psync.errors import ClosedError
from psync.integrations.engines import HostedTask, Order
from psync.launch.process import configure_logging

LOOK_EVERY_S = 0.5
"""How often it is looked whether a task is still wanted."""


@dataclass
class Here:
    """A task of ours in this process."""

    kept: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    ending: concurrent.futures.Future[str] = field(default_factory=concurrent.futures.Future)
    task: HostedTask | None = None  # once it has begun
    context: contextvars.Context | None = None  # of Dask's task, once that runs

    def end(self, failure: str) -> None:
        """Let Dask's task end."""
        if not self.ending.done():
            self.ending.set_result(failure)


here_by_token: dict[str, Here] = {}
"""By token."""


def keep(token: str) -> str:
    """Be the Dask task of a task of ours; return what that failed of, or "".

    It ends when that ends, and ends that when it is not wanted any more: its client has let it go,
    or has gone, or the Dask worker closes.
    """
    worker = distributed.get_worker()
    key = worker.get_current_task()
    here = here_by_token.setdefault(token, Here())
    here.context = contextvars.copy_context()
    distributed.secede()
    here.kept.set_result(None)
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                return here.ending.result(LOOK_EVERY_S)
            known = worker.state.tasks.get(key)
            runs = worker.status in (distributed.Status.running, distributed.Status.paused)
            if known is None or known.state == "cancelled" or not runs:
                if here.task is not None:
                    here.task.stop_soon()
                    here.task.done.result()
                return ""
    finally:
        del here_by_token[token]


async def begin(token: str, order: Order, dask_worker: Any) -> str:
    """Begin a task, once Dask's task for it runs; return where it listens."""
    here = here_by_token.setdefault(token, Here())
    waits = [asyncio.wrap_future(each) for each in (here.kept, here.ending)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not here.kept.done():  # the worker's threads were busy, and nobody waits any more
        here_by_token.pop(token, None)
        raise ClosedError("the cluster was stopped before this task began")
    if not logging.getLogger("psync").handlers:
        configure_logging(order.environ.get("PSYNC_LOG_LEVEL", "info"))
    address = dask_worker.address
    host = "127.0.0.1" if address.startswith("inproc:") else get_address_host(address)
    here.task = HostedTask(order, host)
    here.task.done.add_done_callback(lambda done: here.end(done.result()))
    return await here.task.begin()


async def ended(token: str) -> str:
    """Wait for the end of a task; return what it failed of, or ""."""
    here = here_by_token.get(token)
    if here is None:  # it has ended before, and whoever asked did not get the answer
        return "it was not there any more"
    return await asyncio.shield(asyncio.wrap_future(here.ending))


async def know(token: str, places: Mapping[str, str]) -> None:
    here = here_by_token.get(token)
    if here is not None and here.task is not None:
        here.task.know(places)


async def leave(token: str) -> None:
    here = here_by_token.get(token)
    if here is not None and here.task is not None:
        await here.task.leave()


async def stop(token: str) -> None:
    here = here_by_token.get(token)
    if here is not None:
        if here.task is not None:
            await here.task.stop()
        here.end("")
