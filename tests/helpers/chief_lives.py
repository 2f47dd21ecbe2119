"""One chief after another, in one process, for tests: to the other tasks an end is an end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import psync
from psync.api.optimizers.registry import optimizers_here


def another_process() -> None:
    """What was made so far belongs to another process, as it does where a chief was killed."""
    optimizers_here().begin_process()


@contextlib.asynccontextmanager
async def life_of(
    strategy: psync.ParameterServerStrategy, *, attach: bool = True, **options: object
) -> AsyncIterator[psync.ClusterCoordinator]:
    """A chief, from its start to its end."""
    another_process()
    async with psync.ClusterCoordinator(strategy, attach=attach, **options) as coordinator:  # type: ignore[arg-type]
        yield coordinator
