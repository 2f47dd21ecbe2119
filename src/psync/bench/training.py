"""One timed run: all workers train in one mode, and every push is on record.

The same code runs in real processes and in virtual time: seconds are those of the running loop.
On one machine the loops of all processes count the same seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from psync.api.cluster_coordinator import ClusterCoordinator
from psync.api.pulls import pull
from psync.api.strategy import ParameterServerStrategy
from psync.api.variables import Variable, get_or_create_global_step
from psync.bench import digits
from psync.bench.modes import Mode
from psync.client.context import get_worker_index
from psync.launch.cluster import LocalCluster

TARGET_LOSS = 0.5  # nats, of the test snapshots; the untrained model has about 2.4
QUICK_LOSS = 1.75  # of quick runs, which are over long before the other one is reached
CLUSTER_RATE = 0.5  # learning rate of one gradient from every worker


class Push(NamedTuple):
    """One call of ``apply_gradients``."""

    ended: float  # loop time, s
    seconds: float  # that computing it took; those of a sleep
    outcome: str  # "accepted" or "stale"
    step: int  # of the optimizer, afterwards
    staleness: int  # as PushResult has it
    counted: int  # gradients in its step; 0 where that was not closed yet
    partial: bool  # its step was closed with fewer than were wanted


class Pace(Protocol):
    """How long gradients take. It travels to the workers."""

    def seconds(self, worker: int, index: int) -> float:
        """Return the seconds of a worker's gradient number ``index``."""

    @property
    def patience_s(self) -> float:
        """A gradient that takes longer is given up once its step is closed."""


@dataclass(frozen=True)
class Job:
    """What every worker does until ``steps`` steps or ``duration_s`` seconds are over."""

    pace: Pace
    batch: int  # snapshots
    seed: int  # of the batches
    synchronous: bool
    steps: float = math.inf  # global ones in synchronous training, else the worker's own
    duration_s: float = math.inf
    target_loss: float = TARGET_LOSS


@dataclass
class Run:
    """What one run left behind; times in seconds since its first gradient began."""

    mode: Mode
    job: Job
    pushes: list[list[Push]]  # of each worker
    losses: list[tuple[float, float]]  # (time, loss of the test snapshots)
    rate: float  # learning rate of an update
    global_step: int = 0
    counter: np.ndarray = field(default_factory=lambda: np.zeros(0))  # shape (workers,)

    @property
    def seconds(self) -> float:
        """How long all workers worked: what ended later does not count for rates."""
        return min(self.job.duration_s, max(push.ended for own in self.pushes for push in own))

    def all(self, outcome: str) -> list[Push]:
        """Return the pushes with that outcome."""
        return [push for own in self.pushes for push in own if push.outcome == outcome]

    @property
    def closed_steps(self) -> dict[int, Push]:
        """For each step that is known to be closed, an accepted push that waited for it.

        The push that fills a step always waits. One that found a token left does not.
        """
        return {push.step: push for push in self.all("accepted") if push.counted}

    @property
    def unwaited(self) -> int:
        """How many gradients were accepted for a last step, for which nobody waited.

        It is closed with what it has when ``join`` finds that nothing is left to do.
        """
        known = sum(push.counted for push in self.closed_steps.values())
        return len(self.all("accepted")) - known if self.mode.synchronous else 0

    @property
    def updates(self) -> int:
        """What the global step must be: accepted pushes, or the steps that they make."""
        if self.mode.synchronous:
            return len(self.closed_steps) + (self.unwaited > 0)
        return len(self.all("accepted"))

    def time_to_loss(self, target: float) -> float | None:
        """Return when the loss was first seen at ``target`` or below."""
        return next((time for time, loss in self.losses if loss <= target), None)


async def work(
    job: Job, model: list[Variable], counter: Variable, global_step: Variable, optimizer: Any
) -> tuple[int, float, list[Push]]:
    """Train; runs on each worker as one closure.

    Returns:
        The worker's index, the loop time at which it began, and its pushes.
    """
    worker, loop = get_worker_index(), asyncio.get_running_loop()
    snapshots, labels = digits.load("train")
    rng = np.random.default_rng((job.seed, worker))
    own = -np.eye(1, counter.shape[0], worker, dtype=np.float32)[0]  # minus: it counts upwards
    pushes: list[Push] = []
    began, index = loop.time(), 0
    while index < job.steps and loop.time() < began + job.duration_s:
        chosen = rng.integers(len(labels), size=job.batch)
        values = await pull(model)
        gradients = digits.gradients(values, snapshots[chosen], labels[chosen])
        seconds = job.pace.seconds(worker, index)
        await _compute(seconds, job, global_step, index)
        result = await optimizer.apply_gradients(
            [*zip(gradients, model, strict=True), (own, counter)], global_step=global_step
        )
        pushes.append(
            Push(
                loop.time(), seconds, result.outcome.value, result.step,
                result.staleness, result.count, result.partial,
            )
        )  # fmt: skip
        index = result.step if job.synchronous else index + 1
    return worker, began, pushes


async def _compute(seconds: float, job: Job, global_step: Variable, step: int) -> None:
    """Sleep as long as the gradient takes, or until nobody wants it any more.

    A worker whose gradient takes longer than usual looks ten times a second whether the others
    have closed the step, as it would drop a computation in the middle.
    """
    patience = job.pace.patience_s
    if not job.synchronous or seconds <= patience:
        await asyncio.sleep(seconds)
        return
    left = seconds - patience
    await asyncio.sleep(patience)
    while left > 0 and int(await global_step.read()) <= step:
        await asyncio.sleep(min(patience / 10, left))
        left -= patience / 10


async def train(
    cluster: LocalCluster,
    mode: Mode,
    make_job: Callable[[Mode], Job],
    *,
    seed: int,
    watch_s: float,
    limit_s: float,
) -> Run:
    """Train in ``mode`` under a coordinator of its own, with fresh variables.

    Args:
        cluster: A running cluster with as many workers as the mode has.
        mode: How.
        make_job: What each worker does in that mode.
        seed: Of the initial model.
        watch_s: Seconds between two looks at the loss.
        limit_s: Seconds after which the run has failed.

    Raises:
        DeadlineExceeded: After ``limit_s``. What runs is cancelled.
    """
    strategy = ParameterServerStrategy(cluster.resolver)
    async with ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            values = digits.initial_model(seed)
            model = [Variable(value, name=f"layer_{n}") for n, value in enumerate(values)]
            counter = Variable(np.zeros(mode.num_workers, np.float32), name="counter")
            global_step = get_or_create_global_step()
        job, optimizer = make_job(mode), mode.optimizer(CLUSTER_RATE)
        looks: list[tuple[float, float]] = []
        async with _watching(model, looks, watch_s):
            args = (job, model, counter, global_step, optimizer)
            scheduled = [coordinator.schedule(work, args) for _ in range(mode.num_workers)]
            await coordinator.join(limit_s)
            logs = sorted(await coordinator.fetch(scheduled))
        began = min(log[1] for log in logs)
        run = Run(
            mode,
            job,
            [[push._replace(ended=push.ended - began) for push in log[2]] for log in logs],
            [(time - began, loss) for time, loss in looks if time >= began],
            mode.rate(CLUSTER_RATE),
        )
        run.global_step = int(await global_step.read())
        run.counter = await counter.read()
        return run


@contextlib.asynccontextmanager
async def _watching(
    model: list[Variable], looks: list[tuple[float, float]], every_s: float
) -> AsyncIterator[None]:
    """Note the loss of the test snapshots again and again."""
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            values = await pull(model)
            looks.append((loop.time(), digits.loss_on_test(values)))
            await asyncio.sleep(every_s)

    task = loop.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()  # it never returns: this raises
