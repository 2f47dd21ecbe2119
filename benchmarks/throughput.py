"""How fast psync moves closures and tensors, beside raw sockets in the same run.

    python benchmarks/throughput.py [--quick] [--json FILE]    # two minutes, or half a minute

One cluster of real processes on this machine, 2 ps and 2 workers, joined by TCP on loopback if
``PSYNC_SHARED_MEMORY=0``, and as tasks of one host are if not;
``floor.py`` has 2 and 2 processes as well. The two take turns, repetition by repetition, so that
whatever else the machine does hits both. Variables are float32, and cut in two, one half on each
ps, but for the 100 small ones, which lie on the two in turn. Both workers work at once.

What is counted
    empty closures   one ``schedule`` each, of a coroutine that returns a number; from the first
                     ``schedule`` until all values are fetched
    pull             ``psync.pull``: bytes of the variable, times steps, times workers
    push             ``apply_gradients`` with SGD on the ps; likewise. The floor only sends
    pull + push      one after the other, as in training; the bytes of both directions
    100 variables    of 64×64 in one pull and one push; the floor moves as many bytes in one piece

Time runs from the start of the first worker to the end of the last, inside the workers.
1 GiB/s is 2**30 bytes per second. After each repetition the variables must be what so many
updates make of them, to the last bit, or the program ends with an error. The table shows medians
(the ratio is the median of the ratios of neighbours); the file has every repetition.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np
import uvloop
from floor import Floor

import psync

NUM_PS = NUM_WORKERS = 2
MIB, GIB = 1 << 20, 1 << 30
PACKAGES = ("psync", "numpy", "uvloop", "msgspec")


@dataclass(frozen=True)
class Case:
    """Some variables, and what a step does with them."""

    name: str
    unit: str
    variables: str  # key of the variables, see ``declare``
    pull: bool
    push: bool

    def rate(self, nbytes: int, steps: int, seconds: float) -> float:
        """Return the figure: bytes in GiB/s, or steps per second, of all workers together."""
        done = steps * NUM_WORKERS / seconds
        return done if self.unit == "steps/s" else done * nbytes * (self.pull + self.push) / GIB


CASES = [
    *(
        Case(f"{what} {mib} MiB", "GiB/s", f"{mib} MiB", "pull" in what, "push" in what)
        for what in ("pull", "push", "pull + push")
        for mib in (1, 16, 64)
    ),
    Case("100 variables, pull + push", "steps/s", "100 variables", True, True),
]


def declare():
    """Declare the variables of all cases, all zero."""
    groups = {f"{mib} MiB": [(mib * MIB // 4,)] for mib in (1, 16, 64)}
    groups["100 variables"] = [(64, 64)] * 100
    return {
        key: [psync.Variable(np.zeros(shape, np.float32), name=key) for shape in shapes]
        for key, shapes in groups.items()
    }


class Bench:
    """The cluster's half of the measurements."""

    def __init__(self, coordinator, strategy):
        self._coordinator = coordinator
        with strategy.scope():
            self.variables = declare()
        self._optimizer = psync.optimizers.SGD(1.0)
        self._pushes = dict.fromkeys(self.variables, 0)

    async def closures(self, count):
        """Return closures per second."""

        async def nothing():
            return 1

        began = time.perf_counter()
        values = [self._coordinator.schedule(nothing) for _ in range(count)]
        await self._coordinator.join()
        total = sum(await self._coordinator.fetch(values))
        seconds = time.perf_counter() - began
        check(total == count, f"{count} closures returned {total}")
        return count / seconds

    async def steps(self, case, steps):
        """Return the seconds that ``steps`` steps on every worker take."""
        variables, optimizer = self.variables[case.variables], self._optimizer

        async def work(steps, pull, push):
            gradients = [np.ones(variable.shape, np.float32) for variable in variables]
            began = time.perf_counter()
            for _ in range(steps):
                if pull:
                    await psync.pull(variables)
                if push:
                    await optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return psync.get_worker_index(), began, time.perf_counter()

        scheduled = [
            self._coordinator.schedule(work, args=(steps, case.pull, case.push))
            for _ in range(NUM_WORKERS)
        ]
        await self._coordinator.join()
        workers, starts, ends = zip(*await self._coordinator.fetch(scheduled), strict=True)
        check(len(set(workers)) == NUM_WORKERS, f"{case.name}: one worker did all the work")
        if case.push:
            self._pushes[case.variables] += steps * NUM_WORKERS
        await self._check_values(case)
        return max(ends) - min(starts)

    async def _check_values(self, case):
        """Compare all variables with what the updates so far must have made of them."""
        expected = -float(self._pushes[case.variables])  # whole numbers: exact in float32
        for value in await psync.pull(self.variables[case.variables]):
            check((value == expected).all(), f"{case.name}: expected {expected} everywhere")


def check(right, message):
    if not right:
        sys.exit(f"wrong result: {message}")


async def measure(quick):
    """Run everything; return a list of results."""
    repetitions, budget = (3, GIB // 4) if quick else (7, GIB)  # bytes that a worker moves
    results = []
    async with psync.LocalCluster(NUM_PS, NUM_WORKERS) as cluster:
        strategy = psync.ParameterServerStrategy(
            cluster.resolver, psync.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=NUM_PS)
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            bench = Bench(coordinator, strategy)
            with Floor(NUM_PS, NUM_WORKERS) as floor:
                count = 5_000 if quick else 20_000
                await bench.closures(count)
                runs = [await bench.closures(count) for _ in range(repetitions)]
                results.append(result("empty closures", "1/s", runs, None))
                for case in CASES:
                    runs, floors = await run_case(case, bench, floor, repetitions, budget)
                    results.append(result(case.name, case.unit, runs, floors))
    return results


async def run_case(case, bench, floor, repetitions, budget):
    """Let floor and psync take turns; return the rates of both."""
    nbytes = sum(variable.spec.nbytes for variable in bench.variables[case.variables])
    steps = max(4, min(budget // nbytes, 400) // (case.pull + case.push))
    directions = {"pull": case.pull, "push": case.push}
    runs, floors = [], []
    for repetition in range(repetitions + 1):
        bare = await asyncio.to_thread(floor.measure, nbytes, steps, **directions)
        seconds = await bench.steps(case, steps)
        if repetition:  # the first one is for warming up
            floors.append(case.rate(nbytes, steps, bare))
            runs.append(case.rate(nbytes, steps, seconds))
    return runs, floors


def result(name, unit, runs, floors):
    """Return one line of the table as data, and print it."""
    median = statistics.median(runs)
    line = f"{name:28}{figure(median):>9} {unit:8}{figure(min(runs)):>9} to {figure(max(runs)):8}"
    made = {"name": name, "unit": unit, "psync": summary(runs)}
    if floors:
        ratio = statistics.median(run / floor for run, floor in zip(runs, floors, strict=True))
        line += f"{figure(statistics.median(floors)):>9}{ratio:8.0%}"
        made |= {"floor": summary(floors), "ratio": ratio}
    print(line, flush=True)
    return made


def summary(runs):
    return {
        "min": min(runs), "median": statistics.median(runs), "max": max(runs), "runs": runs,
    }  # fmt: skip


def figure(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def machine():
    """Say where the figures come from."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "load_before": os.getloadavg()[0],
    }


def main():
    parser = argparse.ArgumentParser(description="psync's throughput, beside raw sockets")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    os.environ.setdefault("PSYNC_LOG_LEVEL", "warning")  # of the cluster's tasks
    about = machine()
    print(
        f"{about['cores']} cores, Python {about['python']}, "
        + ", ".join(f"{name} {version}" for name, version in about["packages"].items())
        + f"; load before: {about['load_before']:.1f}\n"
    )
    print(f"{'':28}{'psync':>9} {'':8}{'from':>9} to {'':8}{'floor':>9}{'ratio':>8}")
    results = uvloop.run(measure(options.quick))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": about, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
