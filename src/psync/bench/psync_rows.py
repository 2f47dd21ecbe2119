"""psync's side of ``psync bench peers``: measures what it is ordered to, and checks the results.

Run as a program it is one of the systems that take turns: see ``peers`` for what orders and answers
are. All works run on one cluster of real processes, 2 ps and 2 workers; each has variables and an
optimizer of its own, and ends with an error if the variables are not what its pushes make of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TextIO

import numpy as np

from psync.api.cluster_coordinator import ClusterCoordinator
from psync.api.embeddings import embedding_lookup
from psync.api.pulls import empty_like, pull
from psync.api.strategy import ParameterServerStrategy
from psync.api.sync_replicas import SyncReplicasOptimizer
from psync.api.variables import Variable, get_or_create_global_step
from psync.bench.checks import WrongResultError
from psync.bench.peers import COLUMNS, IDS, ROWS_OF_TABLE, SMALL, SMALL_SHAPE
from psync.client.context import get_worker_index
from psync.errors import PsyncError
from psync.launch.cluster import LocalCluster
from psync.launch.process import loop_factory
from psync.optimizers import SGD
from psync.partitioners import MinSizePartitioner
from psync.wire.handshake import RELEASE

NUM_PS = NUM_WORKERS = 2
NUM_VARIABLES = 2  # of a model that is trained
RATE = 1e-3
WARM_UP_STEPS = 5
LIMIT_S = 120.0  # of one measurement

Outcome = tuple[int, float]
"""What was done, by all workers together, and the seconds from the first start to the last end."""


class Measured:
    """Works on one cluster.

    Args:
        cluster: A running one, of ``NUM_PS`` and ``NUM_WORKERS`` tasks.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    @contextlib.asynccontextmanager
    async def _training(
        self, ps_recovery: str = "checkpoint"
    ) -> AsyncGenerator[tuple[ClusterCoordinator, ParameterServerStrategy]]:
        """Return a coordinator whose variables are cut in two where that is worth it."""
        partitioner = MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=NUM_PS)
        strategy = ParameterServerStrategy(
            self._cluster.resolver, partitioner, ps_recovery=ps_recovery
        )
        async with ClusterCoordinator(strategy) as coordinator:
            yield coordinator, strategy

    async def closures(self, steps: int, mib: float) -> Outcome:
        """Schedule empty closures, and fetch what each returns."""

        async def nothing() -> int:
            return 1

        async with self._training() as (coordinator, _):
            await coordinator.schedule(nothing)
            began = time.perf_counter()
            values = [coordinator.schedule(nothing) for _ in range(steps)]
            await coordinator.join(LIMIT_S)
            total = sum(await coordinator.fetch(values))
            seconds = time.perf_counter() - began
        expect("closures", total, steps)
        return steps, seconds

    async def pull(self, steps: int, mib: float) -> Outcome:
        """Read one variable."""
        return await self._moved([_shape(mib)], steps, pulls=True, pushes=False)

    async def push(self, steps: int, mib: float) -> Outcome:
        """Push dense gradients for one variable; the ps applies SGD."""
        return await self._moved([_shape(mib)], steps, pulls=False, pushes=True)

    async def variables(self, steps: int, mib: float) -> Outcome:
        """Read many small variables in one pull, and push a gradient for each in one push."""
        return await self._moved([SMALL_SHAPE] * SMALL, steps, pulls=True, pushes=True)

    async def _moved(
        self, shapes: Sequence[tuple[int, ...]], steps: int, *, pulls: bool, pushes: bool
    ) -> Outcome:
        async with self._training() as (coordinator, strategy):
            with strategy.scope():
                variables = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
            optimizer = SGD(1.0)
            work = move, variables, optimizer, pulls, pushes
            for count in (WARM_UP_STEPS, steps):
                outcome = await _on_all(coordinator, *work, count)
            expected = -float((WARM_UP_STEPS + steps) * NUM_WORKERS) if pushes else 0.0
            for value in await pull(variables):  # whole numbers: exact in float32
                expect("a variable", value, expected)
        return outcome

    async def lookup(self, steps: int, mib: float) -> Outcome:
        """Look up rows of a large table, random ones in random order."""
        async with self._training() as (coordinator, strategy):
            with strategy.scope():
                table = Variable(
                    lambda shape, offset: np.full(shape, 0.5, np.float32),
                    shape=(ROWS_OF_TABLE, COLUMNS), dtype=np.float32,
                )  # fmt: skip
            await _on_all(coordinator, look_up, table, WARM_UP_STEPS)
            return await _on_all(coordinator, look_up, table, steps)

    async def synchronous(self, steps: int, mib: float) -> Outcome:
        """Train in step: an update is the mean of one gradient of each worker."""
        return await self._trained(steps, mib, synchronous=True)

    async def asynchronous(self, steps: int, mib: float) -> Outcome:
        """Train without waiting for others: each gradient is an update."""
        return await self._trained(steps, mib, synchronous=False)

    async def asynchronous_with_backup(self, steps: int, mib: float) -> Outcome:
        """Train so while each ps has a copy in the process of the other."""
        return await self._trained(steps, mib, synchronous=False, ps_recovery="backup")

    async def synchronous_closures(self, steps: int, mib: float) -> Outcome:
        """Train in step, one scheduled closure for each gradient."""
        return await self._trained(steps, mib, synchronous=True, scheduled=True)

    async def synchronous_closures_with_backup(self, steps: int, mib: float) -> Outcome:
        """Train so while each ps has a copy in the process of the other."""
        return await self._trained(
            steps, mib, synchronous=True, scheduled=True, ps_recovery="backup"
        )

    async def _trained(
        self,
        steps: int,
        mib: float,
        *,
        synchronous: bool,
        scheduled: bool = False,
        ps_recovery: str = "checkpoint",
    ) -> Outcome:
        shape = (int(mib * (1 << 20) / 4 / 10 / NUM_VARIABLES), 10)
        async with self._training(ps_recovery) as (coordinator, strategy):
            with strategy.scope():
                model = [Variable(np.zeros(shape, np.float32)) for _ in range(NUM_VARIABLES)]
                counter = Variable(np.float32(0), name="counter")
                global_step = get_or_create_global_step()
            optimizer: Any = SGD(RATE)
            if synchronous:
                optimizer = SyncReplicasOptimizer(SGD(RATE), replicas_to_aggregate=NUM_WORKERS)
            state = model, counter, global_step, optimizer
            run = _as_closures if scheduled else _in_loops
            await run(coordinator, state, WARM_UP_STEPS)
            seconds = await run(coordinator, state, steps)
            each = 1 if synchronous else NUM_WORKERS  # updates
            values = await pull((*model, counter, global_step))
            check_values(synchronous, (WARM_UP_STEPS + steps) * each, *values)
        return steps * each, seconds


def _shape(mib: float) -> tuple[int]:
    return (int(mib * (1 << 20) / 4),)


async def _on_all(coordinator: ClusterCoordinator, work: Callable[..., Any], *args: Any) -> Outcome:
    """Run ``work(*args)`` on all workers at once; the last argument is a number of steps."""
    scheduled = [coordinator.schedule(work, args) for _ in range(NUM_WORKERS)]
    await coordinator.join(LIMIT_S)
    workers, starts, ends = zip(*await coordinator.fetch(scheduled), strict=True)
    expect("workers that took part", len(set(workers)), NUM_WORKERS)
    return args[-1] * NUM_WORKERS, max(ends) - min(starts)


async def _in_loops(coordinator: ClusterCoordinator, state: tuple[Any, ...], steps: int) -> float:
    _, seconds = await _on_all(coordinator, train, *state, steps)
    return seconds


async def _as_closures(
    coordinator: ClusterCoordinator, state: tuple[Any, ...], steps: int
) -> float:
    began = time.perf_counter()
    for _ in range(steps * NUM_WORKERS):
        coordinator.schedule(train, (*state, 1))
    await coordinator.join(LIMIT_S)
    return time.perf_counter() - began


# What workers run; each returns its worker and the times between which it was at it.


async def move(
    variables: list[Variable], optimizer: SGD, pulls: bool, pushes: bool, steps: int
) -> tuple[int, float, float]:
    """Pull all variables, push ones for all, or both, again and again."""
    gradients = empty_like(variables)
    for gradient in gradients:
        gradient.fill(1)
    began = time.perf_counter()
    for _ in range(steps):
        if pulls:
            await pull(variables)
        if pushes:
            await optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return get_worker_index(), began, time.perf_counter()


async def look_up(table: Variable, steps: int) -> tuple[int, float, float]:
    """Look up random rows of a table, again and again."""
    sets = np.random.default_rng(get_worker_index()).integers(0, ROWS_OF_TABLE, (16, IDS))
    began = time.perf_counter()
    for step in range(steps):
        rows = await embedding_lookup(table, sets[step % len(sets)])
    expect("a row", rows, 0.5)
    return get_worker_index(), began, time.perf_counter()


async def train(
    model: list[Variable], counter: Variable, global_step: Variable, optimizer: Any, steps: int
) -> tuple[int, float, float]:
    """Train: the loss is the sum of (w - 1)² over the model."""
    gradients = empty_like(model)
    one = np.float32(-1)  # minus: the counter counts upwards
    began = time.perf_counter()
    values = await pull(model)
    for left in reversed(range(steps)):
        for value, gradient in zip(values, gradients, strict=True):
            np.subtract(value, 1, out=gradient)
            gradient *= 2
        pairs = [*zip(gradients, model, strict=True), (one, counter)]
        wanted = model if left else []
        _, values = await optimizer.push_pull(pairs, pull=wanted, global_step=global_step)
    return get_worker_index(), began, time.perf_counter()


# Checks.


def expect(what: str, got: Any, expected: float) -> None:
    """Raise WrongResultError unless all of ``got`` equals ``expected``."""
    if not np.all(np.asarray(got) == expected):
        raise WrongResultError(f"wrong result: {what}: expected {expected}, got {got!r:.200}")


def check_values(synchronous: bool, updates: int, *values: np.ndarray) -> None:
    """Compare all variables of training with their closed form.

    The counter gains the learning rate with each update, the global step one. Each synchronous
    update leaves 1 - 2·rate of the model's distance to 1; asynchronous gradients belong to
    older values, and so leave less.

    Args:
        synchronous: How it was trained.
        updates: How many there must have been.
        values: Of the model's variables, the counter and the global step.

    Raises:
        WrongResultError: They differ.
    """
    *model, counter, global_step = values
    fresh = 1 - (1 - 2 * RATE) ** updates
    highest = fresh if synchronous else 2 * RATE * updates  # all of the first values
    for what, lowest, value, highest, slack in (
        ("global step", updates, global_step, updates, 0.0),
        ("counter / learning rate", updates, counter / RATE, updates, 0.25),
        *(("model", fresh, value, highest, 1e-4) for value in model),
    ):
        if not (lowest - slack <= value.min() and value.max() <= highest + slack):
            raise WrongResultError(
                f"wrong result: {what}: expected {lowest:.7g} to {highest:.7g}, got "
                f"{value.min():.7g} to {value.max():.7g}"
            )


# The program.

WORKS: dict[str, Callable[[Measured, int, float], Awaitable[Outcome]]] = {
    "closures": Measured.closures,
    "pull": Measured.pull,
    "push": Measured.push,
    "variables": Measured.variables,
    "lookup": Measured.lookup,
    "synchronous": Measured.synchronous,
    "asynchronous": Measured.asynchronous,
    "asynchronous, with a backup": Measured.asynchronous_with_backup,
    "synchronous closures": Measured.synchronous_closures,
    "synchronous closures, with a backup": Measured.synchronous_closures_with_backup,
}


async def serve(orders: TextIO, answers: TextIO) -> None:
    """Do what is ordered until there are no more orders."""

    def say(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    async with LocalCluster(NUM_PS, NUM_WORKERS) as cluster:
        measured = Measured(cluster)
        say({"name": "psync", "version": RELEASE, "works": list(WORKS)})
        while line := await asyncio.to_thread(orders.readline):
            order = json.loads(line)
            try:
                done, seconds = await WORKS[order["work"]](measured, order["steps"], order["mib"])
            except PsyncError as exc:
                say({"error": str(exc)})
            else:
                say({"done": done, "seconds": seconds})


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(sys.stdin, sys.stdout))
