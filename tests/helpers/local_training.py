"""A whole cluster in this process, for tests of the user's API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import psync
from psync.testing.seams import inside_a_step as inside_a_step

shared: dict[str, Any] = {}
"""What a step in this process shares with its test: steps capture by value, but not modules."""


@contextlib.asynccontextmanager
async def training(
    num_ps: int = 2, num_workers: int = 1, partitioner: Callable[..., Any] | None = None
) -> AsyncIterator[tuple[psync.ParameterServerStrategy, psync.ClusterCoordinator]]:
    """A strategy and its running coordinator, on a cluster joined by memory."""
    async with psync.LocalCluster(num_ps, num_workers, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver, partitioner)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            yield strategy, coordinator


def strategy_of(
    num_ps: int = 2, partitioner: Callable[..., Any] | None = None
) -> psync.ParameterServerStrategy:
    """A strategy without a coordinator, for what is decided at declaration."""
    cluster = psync.ClusterSpec(
        {
            "chief": ["localhost:1"],
            "ps": [f"localhost:{2 + index}" for index in range(num_ps)],
            "worker": ["localhost:100"],
        }
    )
    return psync.ParameterServerStrategy(
        psync.SimpleClusterResolver(cluster, task_type="chief", task_id=0), partitioner
    )


def at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a call that ends, or raises, before it waits: nothing was sent."""
    try:
        call.send(None)
    except StopIteration as ended:
        return ended.value
    finally:
        call.close()
    raise AssertionError("it waits for something")


async def in_step(coordinator: psync.ClusterCoordinator, step: Callable[..., Any]) -> Any:
    """Run one step, and return its result."""
    value = coordinator.schedule(step)
    await coordinator.join()
    return await value


def in_update_context() -> bool:
    """Whether a function given to ``update`` runs here: neither a replica nor all of them do."""
    return psync.get_replica_context() is None and not psync.in_cross_replica_context()


def declare(strategy: psync.ParameterServerStrategy, /, **values: Any) -> Any:
    """Variables by name with these first values; one alone if there is only one."""
    with strategy.scope():
        variables = [psync.Variable(value, name=name) for name, value in values.items()]
    return variables if len(variables) > 1 else variables[0]


def declared(num_ps: int = 2, partitioner: Any = None, /, **values: Any) -> Any:
    """As ``declare``, of a strategy without a coordinator."""
    return declare(strategy_of(num_ps, partitioner), **values)


@contextlib.asynccontextmanager
async def training_of(
    num_ps: int = 2, num_workers: int = 1, partitioner: Any = None, /, **values: Any
) -> AsyncIterator[Any]:
    """A running coordinator, and variables by name with these first values."""
    async with training(num_ps, num_workers, partitioner) as (strategy, coordinator):
        variables = declare(strategy, **values)
        yield coordinator, *(variables if len(values) > 1 else [variables])
