"""What one closure, step, variable or byte costs as clusters grow: is the curve flat?

    python benchmarks/scaling.py --quick --out out      # some minutes
    python benchmarks/scaling.py --out docs/images      # an hour
    python benchmarks/scaling.py --curves here ps       # some of them

Prints a table, and writes ``scaling.json`` and ``scaling.svg``: on the y-axis is always the cost of
*one* of what the x-axis counts, so a cost that does not grow is a flat line.

``processes``        1 to 64 worker processes, 2 ps: an empty closure, a step of all together
``here``             1 to 1,000 workers in one process: CPU of a closure, a step, a first step
``wide``             2 to 8 ps, twice as many workers: CPU of a synchronous step, of ps 0, of others
``wide_here``        25 to 200 workers and 16 ps in one process: CPU of a synchronous step
``variables``        1 to 10,000 of 64 bytes: CPU and time of one, pulled and pushed; its creation
``shards``           1 to 64, of a variable of 4 MiB on 2 ps: the step
``ps``               1 to 64 tasks with 1 KiB each: the step, for each of them
``bytes``            1 KiB to 1 GiB in one variable: the step, for each KiB
``worker_memory``    100 to 1,000 workers in one process: memory of one, and of a connection
``variable_memory``  100 to 10,000 variables: likewise
``closure_memory``   1,000 to 1,000,000 queued closures: likewise
``cores``            a ps that may use one core, and two: a push of 64 MiB by one worker

Each point is measured several times, each time in a fresh process and cluster; the points of a
curve take turns. What does not fit into the memory of this machine is left out, and it is said.
``scaling_points.py`` has the measurements. A step pulls all variables and pushes to all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import scaling_points
import uvloop
from throughput import machine

from psync.bench import plots, report

MIB, GIB = 1 << 20, 1 << 30
PROCESS_BYTES = 80 * MIB  # a task that has done nothing yet
LIMIT_S = 600  # of one point


@dataclass(frozen=True)
class Curve:
    """One panel, or several, over one axis."""

    point: Callable  # measures one size
    over: str  # label of the x-axis
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    panels: dict[str, tuple[str, ...]]  # title and unit: beginnings of the figures it shows
    needs: Callable[[int], int] = lambda size: GIB  # bytes of memory


CURVES = {
    "processes": Curve(
        scaling_points.processes, "worker processes", (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8),
        {
            "empty closure, worker processes; µs": ("closure",),
            "step, worker processes; µs, all together": ("step",),
        },
        lambda size: (size + 3) * PROCESS_BYTES,
    ),
    "here": Curve(
        scaling_points.here, "workers in one process", (1, 2, 10, 30, 100, 300, 1000),
        (2, 30, 300, 1000),
        {
            "empty closure, one process; µs of CPU": ("closure",),
            "step, one process; µs of CPU": ("step",),
            "first step, one process; µs of CPU": ("first step",),
        },
        lambda size: PROCESS_BYTES + size * MIB,
    ),
    "wide": Curve(
        scaling_points.wide, "ps tasks, with twice as many workers", (2, 4, 8), (2, 4),
        {"synchronous step, wide; µs of CPU": ("all", "ps 0", "another")},
        lambda size: (3 * size + 1) * PROCESS_BYTES,
    ),
    "wide_here": Curve(
        scaling_points.wide_here, "workers in one process, 16 ps tasks", (25, 50, 100, 200),
        (25, 100),
        {"synchronous step, one process; µs of CPU, for each worker": ("a worker",)},
        lambda size: PROCESS_BYTES + size * MIB,
    ),
    "variables": Curve(
        scaling_points.variables, "variables of 64 bytes", (1, 10, 100, 1000, 10_000),
        (1, 100, 10_000),
        {
            "step, for each variable; µs": ("step",),
            "creation, for each variable; µs": ("creation",),
        },
    ),
    "shards": Curve(
        scaling_points.shards, "shards of 4 MiB in all", (1, 2, 4, 8, 16, 32, 64), (1, 4, 16, 64),
        {"step of 4 MiB; µs": ("step",)},
    ),
    "ps": Curve(
        scaling_points.ps, "ps tasks", (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8),
        {"step, for each ps; µs": ("step",)}, lambda size: (size + 2) * PROCESS_BYTES,
    ),
    "bytes": Curve(
        scaling_points.nbytes, "bytes of the variable", tuple(4**n << 10 for n in range(11)),
        tuple(16**n << 10 for n in range(5)),
        {"step, for each KiB; µs": ("step",)}, lambda size: GIB // 2 + 8 * size,
    ),
    "worker_memory": Curve(
        scaling_points.worker_memory, "workers in one process", (100, 300, 1000), (100, 1000),
        {"memory of a worker, of a connection; bytes": ("worker", "connection")},
        lambda size: PROCESS_BYTES + size * MIB,
    ),
    "variable_memory": Curve(
        scaling_points.variable_memory, "variables of 64 bytes", (100, 1000, 10_000),
        (100, 10_000), {"memory of a variable; bytes": ("created", "pulled")},
    ),
    "closure_memory": Curve(
        scaling_points.closure_memory, "closures in the queue", (10**3, 10**4, 10**5, 10**6),
        (10**3, 10**5), {"memory of a queued closure; bytes": ("with",)},
        lambda size: GIB // 2 + 4096 * size,
    ),
    "cores": Curve(
        scaling_points.cores, "cores of the ps", (1, 2), (1, 2),
        {"push of 64 MiB; µs": ("push",)},
    ),
}  # fmt: skip


class Measured:
    """All runs of one curve.

    Args:
        name: Of the curve.
        sizes: Its points.
    """

    def __init__(self, name, sizes):
        self._curve = CURVES[name]
        self._name = name
        self._sizes = list(sizes)
        self.left_out = []
        self._runs = {}  # figure → size → runs
        for size in sizes:
            if why := self._impossible(size):
                self._sizes.remove(size)
                self._leave_out(f"{size:,} {self._curve.over} left out: {why}")

    def _impossible(self, size):
        needed, free = self._curve.needs(size), free_memory()
        if needed > free:
            return f"they take some {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} are free"
        if self._name == "cores":
            if not hasattr(os, "sched_setaffinity"):
                return "tasks cannot be bound to cores on this system"
            if size > len(os.sched_getaffinity(0)):
                return f"this machine has {len(os.sched_getaffinity(0))}"
        return ""

    def _leave_out(self, line):
        self.left_out.append(line)
        print(line, flush=True)

    def measure(self, quick):
        """Measure each point once more."""
        for size in list(self._sizes):
            print(f"… {self._name}, {size:,} {self._curve.over}", file=sys.stderr, flush=True)
            figures = in_a_process(self._name, size, quick)
            if figures is None:
                self._sizes.remove(size)
                self._leave_out(f"{size:,} {self._curve.over} left out: not done in {LIMIT_S} s")
                continue
            for figure, value in figures.items():
                self._runs.setdefault(figure, {}).setdefault(size, []).append(value)

    def panels(self):
        """Return the panels of this curve, as data."""
        return [
            {
                "curve": self._name,
                "title": title,
                "over": self._curve.over,
                "left_out": self.left_out,
                "lines": {
                    figure: [{"at": size, **summary(runs)} for size, runs in points.items()]
                    for figure, points in self._runs.items()
                    if figure.startswith(beginnings)
                },
            }
            for title, beginnings in self._curve.panels.items()
        ]


def summary(runs):
    return {
        "median": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": runs,
    }  # fmt: skip


def in_a_process(name, size, quick):
    """Measure one point in a fresh process; return its figures, None if it took too long."""
    command = [sys.executable, __file__, "--point", name, "--sizes", str(size)]
    try:
        done = subprocess.run(
            command + ["--quick"] * quick, capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        sys.exit(f"{done.stderr}\n{name} of {size:,} has failed")
    return json.loads(done.stdout.splitlines()[-1])


def free_memory():
    """Return the bytes of memory that a new program may take, or as good as any number."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def table(panels):
    """Return lines: a figure's median at each size, and how far its runs lie apart at most."""
    lines = []
    for panel in panels:
        if not panel["lines"]:
            continue
        sizes = [point["at"] for point in next(iter(panel["lines"].values()))]
        rows = []
        for figure, points in panel["lines"].items():
            spread = max(point["max"] / point["min"] for point in points)
            medians = [report.number(point["median"]) for point in points]
            rows.append([f"  {figure}", *medians, f"{spread:.2f} ×"])
        header = [panel["title"], *(f"{size:,}" for size in sizes), "spread"]
        lines += [report.table(header, rows), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description="what one costs as there are more")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter points, twice each")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--sizes", nargs="+", type=int, help="points of all curves, in their stead")
    parser.add_argument("--repetitions", type=int, help="of each point (default: 5, quick: 2)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the files")
    parser.add_argument("--point", choices=CURVES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("PSYNC_LOG_LEVEL", "warning")  # of the cluster's tasks
    if options.point:
        [size] = options.sizes
        point = CURVES[options.point].point
        print(json.dumps(uvloop.run(point(size, options.quick))))
        return
    about = machine()
    print(
        f"{about['cores']} cores, Python {about['python']}, "
        + ", ".join(f"{name} {version}" for name, version in about["packages"].items())
        + f"; load before: {about['load_before']:.1f}\n"
    )
    panels = []
    for name in options.curves:
        curve = CURVES[name]
        sizes = options.sizes or (curve.quick if options.quick else curve.sizes)
        measured = Measured(name, sizes)
        for _ in range(options.repetitions or (2 if options.quick else 5)):
            measured.measure(options.quick)
        print(table(measured.panels()), flush=True)
        panels += measured.panels()
    options.out.mkdir(parents=True, exist_ok=True)
    written = {"machine": about, "quick": options.quick, "panels": panels}
    (options.out / "scaling.json").write_text(json.dumps(written, indent=1) + "\n")
    plots.plot_scaling(panels, options.out / "scaling.svg")
    print(f"figures: {options.out / 'scaling.json'}\nplot: {options.out / 'scaling.svg'}")


if __name__ == "__main__":
    main()
