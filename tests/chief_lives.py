"""One chief after another, in one process, for tests: to the other tasks an end is an end."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator

import psync
from psync.optimizer_registry import optimizers_here


def another_process() -> None:
    """What was made so far belongs to another process, as it does where a chief was killed."""
    optimizers_here.process = os.urandom(8).hex()
    optimizers_here._numbers = itertools.count(1)


@contextlib.contextmanager
def own_process_again() -> Iterator[None]:
    """Afterwards this is the process that it was."""
    process, numbers = optimizers_here.process, optimizers_here._numbers
    try:
        yield
    finally:
        optimizers_here.process, optimizers_here._numbers = process, numbers


@contextlib.asynccontextmanager
async def life_of(
    strategy: psync.ParameterServerStrategy, *, attach: bool = True, **options: object
) -> AsyncIterator[psync.ClusterCoordinator]:
    """A chief, from its start to its end."""
    another_process()
    async with psync.ClusterCoordinator(strategy, attach=attach, **options) as coordinator:  # type: ignore[arg-type]
        yield coordinator
