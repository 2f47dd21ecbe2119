"""Ps tasks, workers and steps one by one, and what makes one process appear as several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from psync.api.optimizers.registry import optimizers_here
from psync.client.context import ClosureContext, inside
from psync.client.runtime import Runtime
from psync.net.platform import Platform
from psync.net.process_state import fresh_process as fresh_process
from psync.net.secret import Secret
from psync.net.transport import Network
from psync.ps_task import PsTask
from psync.worker_task import WorkerTask


def new_platform(network: Network, secret: bytes | Secret, **surroundings: Any) -> Platform:
    """Return the platform of one task.

    Args:
        network: Network of its host, such as ``MemoryNetwork().host("ps-0")``.
        secret: Secret of the cluster, of at least 32 bytes.
        surroundings: Other fields of ``Platform``.
    """
    known = secret if isinstance(secret, Secret) else Secret(secret)
    return Platform(network, known, **surroundings)


def new_task(platform: Platform, job: str, index: int, address: str) -> PsTask | WorkerTask:
    """Return a ps task or a worker, not started; ``start()`` and ``close()`` are coroutines."""
    if job == "ps":
        return platform.parts.of(PsTask)(platform, index, address)
    return WorkerTask(platform, index, address)


@contextlib.contextmanager
def inside_a_step(origin: str = "another program") -> Iterator[None]:
    """Run a block as a step of a program does on a worker in another process.

    Args:
        origin: Program whose step it is.
    """
    runtime = Runtime(cast(Any, None), origin)
    with inside(ClosureContext(worker_index=0, closure_id=1, runtime=runtime)):
        yield


def another_process() -> None:
    """Let optimizers that are made from now on be those of another process."""
    optimizers_here().begin_process()
