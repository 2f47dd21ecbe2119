"""ps and worker processes on which the tests of a module train, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvloop

import psync

Program = Callable[[psync.ParameterServerStrategy, psync.ClusterCoordinator], Any]


class SharedTasks:
    """Tasks that run. Each program gets a strategy of its own, and finds the ps tasks empty."""

    def __init__(self, runner: asyncio.Runner, cluster: psync.LocalCluster) -> None:
        self._runner = runner
        self.resolver = cluster.resolver

    def train(self, program: Program, *args: Any, **options: Any) -> Any:
        """Run ``program(strategy, coordinator)`` to its end and return its result."""

        async def main() -> Any:
            strategy = psync.ParameterServerStrategy(self.resolver, *args, **options)
            async with psync.ClusterCoordinator(strategy) as coordinator:
                return await program(strategy, coordinator)

        return self.run(main())

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run what makes its own strategy."""
        return self._runner.run(main)


def trains(*args: Any, **options: Any) -> Callable[[Program], Callable[[SharedTasks], None]]:
    """Make a test of a program that the tasks of its module run; arguments of the strategy."""

    def test_of(program: Program) -> Callable[[SharedTasks], None]:
        def test(tasks: SharedTasks) -> None:
            tasks.train(program, *args, **options)

        return test

    return test_of


@contextlib.contextmanager
def shared_tasks(num_ps: int, num_workers: int) -> Iterator[SharedTasks]:
    """Start the tasks, and stop them at the end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cluster = psync.LocalCluster(num_ps, num_workers)
        runner.run(cluster.start())
        try:
            yield SharedTasks(runner, cluster)
        finally:
            runner.run(cluster.stop())


async def on_each_worker(
    coordinator: psync.ClusterCoordinator,
    arrived: psync.Variable,
    step: Callable[..., Any],
    *args: Any,
) -> list[Any]:
    """Return what ``step`` returns on worker 0, and what it returns on worker 1."""
    together = int(await arrived.read()) + 2

    async def meets() -> tuple[int, Any]:
        await arrived.assign_add(1)
        while await arrived.read() < together:  # so nobody runs both
            pass
        return psync.get_worker_index(), await step(*args)

    found = dict(await coordinator.fetch([coordinator.schedule(meets) for _ in range(2)]))
    assert sorted(found) == [0, 1]
    return [found[0], found[1]]
