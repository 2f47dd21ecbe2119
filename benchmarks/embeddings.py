"""How fast rows of large tables are looked up and trained, and whether the table's size matters.

    python benchmarks/embeddings.py [--quick] [--json FILE]    # two minutes, or one

A cluster of real processes on this machine, joined by TCP on loopback: one worker, and 2 ps (4
for the last table). A step looks up, or pushes gradients for, 4,096 rows of 64 float32 at a time,
random ones in random order, one call after the other: ``psync.embedding_lookup``, and
``apply_gradients`` of ``IndexedSlices`` with SGD.

    1 M, all written       256 MB with a value of its own in every element
    1 M rows, 16 M rows    256 MB and 4 GB, declared with a constant: only rows that were pushed
                           take memory. Both are asked for the same rows, spread over the whole
    8 M rows on 4 ps       likewise, 2 GB

Rows are pushed once before anything is measured, so that lookups read memory and not a constant.
Bytes are what went over the connections of the ps tasks, both directions; rows and blocks are what
they say they touched; CPU is that of all processes of the cluster. After each table its rows must
be what so many pushes make of them, to the last bit, or the program ends with an error. The table
shows medians; the last line compares 16 M rows with 1 M.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from throughput import check, machine

import psync

ROWS_PER_CALL, COLUMNS = 4096, 64
SETS = 16  # of row numbers, used in turn
ROWS_PER_SHARD = 2 << 20  # at most: 512 MB
START = np.float32(0.5)  # the constant
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Table:
    """A variable to be measured."""

    name: str
    rows: int
    written: bool = False  # in every element, from the beginning

    def declare(self):
        shape = (self.rows, COLUMNS)
        value = np.broadcast_to(START, shape)
        if self.written:
            value = lambda shape, offset: np.full(shape, START)  # noqa: E731
        return psync.Variable(value, shape=shape, dtype=np.float32, name=self.name)

    def ids(self):
        """Return the sets of row numbers, which are spread alike over tables of all sizes."""
        rng = np.random.default_rng(0)
        unit = rng.permutation(1 << 20)[: SETS * ROWS_PER_CALL] * (self.rows >> 20)
        return unit.reshape(SETS, ROWS_PER_CALL)


class Bench:
    """One table in a running cluster."""

    def __init__(self, coordinator, strategy, table):
        self._coordinator = coordinator
        self._table = table
        with strategy.scope():
            self._variable = table.declare()
        self._optimizer = psync.optimizers.SGD(1.0)
        self._pushes = 0  # of each set

    async def run(self, *, push, calls):
        """Return calls per second, and what one call costs."""
        variable, optimizer, sets = self._variable, self._optimizer, self._table.ids()

        async def work(push, calls):
            gradient = np.ones((ROWS_PER_CALL, COLUMNS), np.float32)
            began, used = time.perf_counter(), time.process_time()
            for call in range(calls):
                ids = sets[call % SETS]
                if push:
                    slices = psync.IndexedSlices(gradient, ids)
                    await optimizer.apply_gradients([(slices, variable)])
                else:
                    await psync.embedding_lookup(variable, ids)
            return time.perf_counter() - began, time.process_time() - used

        before, cpu = await self._counters(), cpu_seconds()
        seconds, worker_cpu = await self._coordinator.schedule(work, args=(push, calls))
        after, cpu = await self._counters(), cpu_seconds() - cpu
        if push:
            self._pushes += calls // SETS
        each = {name: (after[name] - before[name]) / calls for name in after}
        return {
            "calls_per_s": calls / seconds, "cpu_ms": cpu / calls * 1e3,
            "worker_cpu_ms": worker_cpu / calls * 1e3, **each,
        }  # fmt: skip

    async def check(self):
        """Compare some rows with what the pushes so far must have made of them."""
        touched = self._table.ids()[0]
        expected = START - np.float32(self._pushes)  # exact in float32
        rows = await psync.embedding_lookup(self._variable, touched)
        check((rows == expected).all(), f"{self._table.name}: expected {expected} everywhere")
        others = np.setdiff1d(np.arange(1000), self._table.ids())
        rows = await psync.embedding_lookup(self._variable, others)
        check((rows == START).all(), f"{self._table.name}: untouched rows have changed")

    async def _counters(self):
        tasks = await self._coordinator.ps_statistics()
        return {
            "bytes": sum(
                task["network"]["bytes_received"] + task["network"]["bytes_sent"] for task in tasks
            ),
            "rows": sum(task["store"]["rows"] for task in tasks),
            "blocks": sum(task["store"]["row_blocks"] for task in tasks),
        }


def cpu_seconds():
    """Return the CPU time that this process and its descendants have used."""
    parents, used = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(entry.parent.name)
        parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(used[pid] for pid in ours)


async def measure(quick):
    """Run everything; return a list of results."""
    repetitions, calls = (3, 5 * SETS) if quick else (7, 20 * SETS)
    million = 1 << 20
    results = []
    for num_ps, tables in (
        (2, [Table("1 M, all written", million, written=True), Table("1 M rows", million),
             Table("16 M rows", 16 * million)]),
        (4, [Table("8 M rows on 4 ps", 8 * million)]),
    ):  # fmt: skip
        async with psync.LocalCluster(num_ps, 1) as cluster:
            strategy = psync.ParameterServerStrategy(
                cluster.resolver,
                lambda shape, dtype: [max(num_ps, shape[0] // ROWS_PER_SHARD), 1],  # noqa: B023
            )
            async with psync.ClusterCoordinator(strategy) as coordinator:
                benches = [Bench(coordinator, strategy, table) for table in tables]
                results += await take_turns(tables, benches, repetitions, calls)
    return results


async def take_turns(tables, benches, repetitions, calls):
    """Measure tables in turn, repetition by repetition, so that a slow moment hits all of them."""
    runs = {}
    for repetition in range(repetitions + 1):
        for table, bench in zip(tables, benches, strict=True):
            for push in (True, False):
                run = await bench.run(push=push, calls=calls)
                if repetition:  # the first one is for warming up
                    runs.setdefault((table.name, push), []).append(run)
            await bench.check()
    return [result(name, push, of_one) for (name, push), of_one in runs.items()]


def result(name, push, runs):
    """Return one line of the table as data, and print it."""
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    rates = [run["calls_per_s"] for run in runs]
    what = "push" if push else "lookup"
    print(
        f"{name:18}{what:8}{median['calls_per_s']:8,.0f}{min(rates):8,.0f}{max(rates):8,.0f}"
        f"{median['calls_per_s'] * ROWS_PER_CALL / 1e6:8.2f}{median['bytes'] / 1e3:10,.0f}"
        f"{median['rows']:8,.0f}{median['blocks']:8,.0f}{median['cpu_ms']:8.2f}"
        f"{median['worker_cpu_ms']:8.2f}",
        flush=True,
    )
    return {"table": name, "what": what, "median": median, "runs": runs}


def main():
    parser = argparse.ArgumentParser(description="psync's speed with rows of large tables")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    os.environ.setdefault("PSYNC_LOG_LEVEL", "warning")  # of the cluster's tasks
    about = machine()
    print(f"{about['cores']} cores, load before: {about['load_before']:.1f}\n")
    print(
        f"{'table':18}{'':8}{'calls/s':>8}{'from':>8}{'to':>8}{'M ids/s':>8}{'kB/call':>10}"
        f"{'rows':>8}{'blocks':>8}{'CPU ms':>8}{'worker':>8}"
    )
    results = uvloop.run(measure(options.quick))
    rates = {(r["table"], r["what"]): r["median"]["calls_per_s"] for r in results}
    ratios = [rates["1 M rows", what] / rates["16 M rows", what] for what in ("lookup", "push")]
    print(
        f"\n16 M rows take {ratios[0]:.2f} times as long to look up as 1 M, {ratios[1]:.2f} to push"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": about, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
