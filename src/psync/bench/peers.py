"""Comparison with TensorFlow 1: every step reads all variables and pushes dense gradients.

The two take turns, repetition by repetition, so that whatever else the machine does hits both.
TensorFlow runs in a Python that has it, as a script that prints its figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psync.api.cluster_coordinator import ClusterCoordinator
from psync.api.global_step import get_or_create_global_step
from psync.api.pulls import pull
from psync.api.strategy import ParameterServerStrategy
from psync.api.sync_replicas import SyncReplicasOptimizer
from psync.api.variables import Variable
from psync.bench.checks import WrongResultError
from psync.bench.figures import Figures
from psync.client.context import get_worker_index
from psync.errors import ConfigurationError
from psync.launch.local import LocalCluster
from psync.optimizers import SGD

NUM_PS, NUM_VARIABLES = 2, 2
RATE = 1e-3
WARM_UP_STEPS = 5
LIMIT_S = 120.0  # of one measurement, by either


@dataclass(frozen=True)
class Case:
    """A size, and a way to train."""

    synchronous: bool
    name_of_size: str
    mib: float  # of all variables together
    steps: int  # of each worker, after those for warming up
    pull_ahead: bool = True  # whether the token brings the next values, as is the default
    ps_recovery: str = "checkpoint"  # "replica": each ps has a copy in the process of the other

    @property
    def name(self) -> str:
        """What the table calls it."""
        without = "" if self.pull_ahead else ", each value pulled"
        copied = f', ps_recovery="{self.ps_recovery}"' if self.has_copies else ""
        return f"{'sync' if self.synchronous else 'async'}, {self.name_of_size}{without}{copied}"

    @property
    def has_copies(self) -> bool:
        """Whether each ps has a copy; TensorFlow has none."""
        return self.ps_recovery == "replica"

    @property
    def unit(self) -> str:
        """What is counted: updates if gradients are averaged, else gradients."""
        return "steps/s" if self.synchronous else "gradients/s"

    @property
    def shape(self) -> tuple[int, int]:
        """Of each variable, float32."""
        return (int(self.mib * (1 << 20) / 4 / 10 / NUM_VARIABLES), 10)


CASES = [
    Case(synchronous, *size, ps_recovery=ps_recovery)
    for synchronous in (True, False)
    for size in (("40 KB", 0.04, 300), ("16 MB", 16.0, 25))
    for ps_recovery in ("checkpoint", "replica")
]
CASES.insert(1, Case(True, "40 KB", 0.04, 300, pull_ahead=False))


async def measure(
    num_workers: int,
    repetitions: int,
    tensorflow: Sequence[str] | None,
    note: Callable[[str], None],
) -> list[Figures]:
    """Measure all cases.

    Args:
        num_workers: Workers; there are 2 ps tasks.
        repetitions: Of each case.
        tensorflow: The command that measures TensorFlow, or None: psync alone. It gets the
            mode, the size in MiB, the steps and the number of workers as arguments, and prints
            ``{"seconds": …, "updates": …}``.
        note: Called with what runs next.
    """
    rates: dict[tuple[Case, str], list[float]] = {}
    async with LocalCluster(NUM_PS, num_workers) as cluster:
        await run_psync(cluster, num_workers, CASES[0])  # for warming up
        for repetition in range(repetitions):
            for case in CASES:
                note(f"{case.name}, repetition {repetition + 1} of {repetitions}")
                rate = await run_psync(cluster, num_workers, case)
                rates.setdefault((case, "psync"), []).append(rate)
                if tensorflow is not None and not case.has_copies:
                    rate = await run_tensorflow(tensorflow, num_workers, case)
                    rates.setdefault((case, "tensorflow"), []).append(rate)
    return [result_of(case, num_workers, rates) for case in CASES]


def result_of(case: Case, num_workers: int, rates: dict[tuple[Case, str], list[float]]) -> Figures:
    made: Figures = {"name": case.name, "unit": case.unit, "workers": num_workers}
    for system in ("psync", "tensorflow"):
        runs = rates.get((case, system))
        if runs:
            made[system] = {
                "min": min(runs), "median": statistics.median(runs), "max": max(runs),
                "runs": runs,
            }  # fmt: skip
    if "tensorflow" in made:
        pairs = zip(made["psync"]["runs"], made["tensorflow"]["runs"], strict=True)
        made["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return made


async def step_loop(
    case: Case, variables: list[Variable], counter: Variable, global_step: Variable, optimizer: Any
) -> tuple[int, float, float]:
    """Train on one worker; returns its index and the loop times between which it was timed."""
    loop = asyncio.get_running_loop()
    gradients = [np.empty(case.shape, np.float32) for _ in variables]
    one = np.float32(-1)  # minus: the counter counts upwards
    began = loop.time()
    for index in range(WARM_UP_STEPS + case.steps):
        if index == WARM_UP_STEPS:
            began = loop.time()
        for value, gradient in zip(await pull(variables), gradients, strict=True):
            np.subtract(value, 1, out=gradient)  # of the sum of (w - 1)²
            gradient *= 2
        pairs = [*zip(gradients, variables, strict=True), (one, counter)]
        await optimizer.apply_gradients(pairs, global_step=global_step)
    return get_worker_index(), began, loop.time()


async def run_psync(cluster: LocalCluster, num_workers: int, case: Case) -> float:
    """Return steps per second, of all workers' gradients if they are not averaged."""
    strategy = ParameterServerStrategy(cluster.resolver, ps_recovery=case.ps_recovery)
    async with ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            variables = [
                Variable(np.zeros(case.shape, np.float32), name=f"w{n}")
                for n in range(NUM_VARIABLES)
            ]
            counter = Variable(np.float32(0), name="counter")
            global_step = get_or_create_global_step()
        optimizer: Any = SGD(RATE)
        if case.synchronous:
            optimizer = SyncReplicasOptimizer(
                SGD(RATE), replicas_to_aggregate=num_workers, pull_ahead=case.pull_ahead
            )
        args = (case, variables, counter, global_step, optimizer)
        scheduled = [coordinator.schedule(step_loop, args) for _ in range(num_workers)]
        await coordinator.join(LIMIT_S)
        workers, starts, ends = zip(*await coordinator.fetch(scheduled), strict=True)
        if len(set(workers)) != num_workers:
            raise WrongResultError(f"wrong result: {case.name}: one worker did all the work")
        updates = (WARM_UP_STEPS + case.steps) * (1 if case.synchronous else num_workers)
        values = await pull((*variables, counter, global_step))
        check_values(case, updates, *values)
    timed = case.steps * (1 if case.synchronous else num_workers)
    return float(timed / (max(ends) - min(starts)))


def check_values(case: Case, updates: int, *values: np.ndarray) -> None:
    """Compare all variables with their closed form.

    The counter gains the learning rate with each update, the global step one. Each synchronous
    update leaves 1 - 2·rate of the model's distance to 1; asynchronous gradients belong to
    older values, and so leave less.

    Args:
        case: What was run.
        updates: How many there must have been.
        values: Of the model's variables, the counter and the global step.

    Raises:
        WrongResultError: They differ.
    """
    *model, counter, global_step = values
    fresh = 1 - (1 - 2 * RATE) ** updates
    highest = fresh if case.synchronous else 2 * RATE * updates  # all of the first values
    for what, lowest, value, highest, slack in (
        ("global step", updates, global_step, updates, 0.0),
        ("counter / learning rate", updates, counter / RATE, updates, 0.25),
        *(("model", fresh, value, highest, 1e-4) for value in model),
    ):
        if not (lowest - slack <= value.min() and value.max() <= highest + slack):
            raise WrongResultError(
                f"wrong result: {case.name}: {what}: expected {lowest:.7g} to {highest:.7g}, got "
                f"{value.min():.7g} to {value.max():.7g}"
            )


async def run_tensorflow(command: Sequence[str], num_workers: int, case: Case) -> float:
    """Return TensorFlow's figure for the same case.

    Raises:
        ConfigurationError: The command failed.
    """
    arguments = ("sync" if case.synchronous else "async", case.mib, case.steps, num_workers)
    process = await asyncio.create_subprocess_exec(
        *command, *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
        measured = json.loads(output)
        return float(measured["updates"] / measured["seconds"])
    except (TimeoutError, ValueError, KeyError) as exc:
        raise ConfigurationError(
            f"{' '.join(command)} gave no figure for {case.name}",
            hint="run it by itself: it says what it needs",
        ) from exc
    finally:
        if process.returncode is None:
            process.terminate()  # it ends its own tasks
            await process.wait()
