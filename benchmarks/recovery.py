"""How long training stands still when a ps is killed, and while a checkpoint is saved.

    python benchmarks/recovery.py [--quick] [--json FILE] [--out DIR]    # three minutes, or one

A cluster of real processes on this machine, joined by TCP on loopback: 2 ps, 2 workers, which push
to a counter that lies on both ps tasks, one closure after the other.

    kill -9 of a ps     of a model of 64 MiB over both: from the signal until the end of the first
                        push that was begun after it, median of several kills, for each
                        ``ps_recovery``. The processes are started again by the local cluster
    save of 1 GiB       (256 MiB with --quick): by how much the longest push during the save was
                        longer than the longest one before it; whether a push ended in each 100 ms;
                        and its speed beside ``dd conv=fsync`` of as many bytes into the same
                        directory, before and after it

The counter must be what so many closures make of it, less those that a rollback has undone, or the
program ends with an error.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop
from throughput import check, machine

import psync

MIB = 1 << 20


async def push(counter):
    """Add one to each element, on both ps tasks; return when that began, and ended."""
    began = time.monotonic()
    await counter.assign_add(np.ones(2, np.int64))
    return began, time.monotonic()


class Training:
    """Closures that push, a few of them always under way."""

    def __init__(self, coordinator, counter, ahead=4):
        self.spans = []  # of the pushes that have ended
        self._coordinator = coordinator
        self._counter = counter
        self._ahead = ahead
        self._stopped = False

    async def __aenter__(self):
        self._feeding = asyncio.ensure_future(self._feed())
        return self

    async def __aexit__(self, *exc_info):
        self._stopped = True
        await self._feeding

    async def until(self, holds):
        """Wait until something holds of the pushes that have ended; return it."""
        while not (found := holds(self.spans)):
            if self._feeding.done():
                self._feeding.result()
            await asyncio.sleep(0.005)
        return found

    async def _feed(self):
        waiting = []
        while waiting or not self._stopped:
            while len(waiting) < self._ahead and not self._stopped:
                waiting.append(self._coordinator.schedule(push, args=(self._counter,)))
            self.spans.append(await waiting.pop(0))


def declare(strategy, mib):
    """Declare a counter over both ps tasks, and a model of so many MiB."""
    with strategy.scope():
        counter = psync.Variable(np.zeros(2, np.int64), name="counter")
        model = [
            psync.Variable(
                lambda shape, offset: np.full(shape, 0.5, np.float32),
                shape=(16 * MIB // 4,),
                dtype=np.float32,
                name=f"w{number}",
            )
            for number in range(mib // 16)
        ]
    return counter, model


class Run:
    """A cluster with a counter, a model, and where its checkpoints go."""

    def __init__(self, recovery, mib, directory):
        self._recovery = recovery
        self._mib = mib
        self._directory = directory
        self._events = []

    async def __aenter__(self):
        self.cluster = psync.LocalCluster(2, 2, max_restarts=100)
        await self.cluster.start()
        options = {} if self._recovery == "checkpoint" else {"ps_recovery": self._recovery}
        strategy = psync.ParameterServerStrategy(
            self.cluster.resolver, psync.FixedShardsPartitioner(2), **options
        )
        self.coordinator = psync.ClusterCoordinator(strategy)
        await self.coordinator.start()
        self.counter, model = declare(strategy, self._mib)
        self.manager = psync.CheckpointManager(
            psync.Checkpoint(counter=self.counter, model=model), self._directory, max_to_keep=1
        )
        self._following = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(self, *exc_info):
        await self.coordinator.close()
        await self._following
        await self.cluster.stop()

    async def _follow(self):
        async for event in self.coordinator.events():
            self._events.append(event)

    def training(self):
        return Training(self.coordinator, self.counter)

    async def check(self, closures):
        """Check the counter; return how many closures were undone."""
        undone = sum(len(getattr(event, "closures", ())) for event in self._events)
        found = (await self.counter.read()).tolist()
        check(
            found == [closures - undone] * 2,
            f"{self._recovery}: the counter is {found}, expected {closures} - {undone}",
        )
        return undone


async def measure_kills(recovery, kills, directory):
    """Return what it took from each kill to the next push."""
    seconds, closures = [], 0
    async with Run(recovery, 64, directory) as run:
        await run.manager.save()
        for number in range(kills):
            async with run.training() as training:
                await training.until(lambda spans: len(spans) > 20)
                await run.coordinator.backed_up()
                process = run.cluster.tasks[f"ps-{number % 2}"]
                killed = time.monotonic()
                os.kill(process.pid, signal.SIGKILL)
                ended = await training.until(
                    lambda spans, killed=killed: next((e for b, e in spans if b > killed), None)
                )
                seconds.append(ended - killed)
            closures += len(training.spans)
        undone = await run.check(closures)
    return {
        "name": f"kill -9 of a ps, {recovery}",
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "closures": closures,
        "undone": undone,
    }


def dd(path, nbytes):
    """Return bytes per second of dd."""
    began = time.monotonic()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={nbytes // MIB}", "conv=fsync"],
        check=True,
        capture_output=True,
    )
    seconds = time.monotonic() - began
    path.unlink()
    return nbytes / seconds


async def measure_save(mib, directory):
    """Return how a save and pushes go beside each other."""
    async with Run("checkpoint", mib, directory) as run:
        await run.counter.read()
        speeds = [dd(directory / "dd", mib * MIB)]
        async with run.training() as training:
            await training.until(lambda spans: len(spans) > 500)
            began = time.monotonic()
            await run.manager.save()
            ended = time.monotonic()
            await training.until(lambda spans: spans[-1][0] > ended)
        speeds.append(dd(directory / "dd", mib * MIB))
        await run.check(len(training.spans))
    spans = training.spans
    before = max(end - start for start, end in spans if end < began)
    during = max(end - start for start, end in spans if end > began and start < ended)
    ends = sorted(end for _, end in spans if began <= end <= ended)
    gaps = [after - at for at, after in zip([began, *ends], [*ends, ended], strict=True)]
    speed, floor = mib * MIB / (ended - began), statistics.mean(speeds)
    return {
        "name": f"save of {mib} MiB",
        "seconds": ended - began,
        "bytes_per_s": speed,
        "dd_bytes_per_s": speeds,
        "of_dd": speed / floor,
        "longest_push_before_s": before,
        "longest_push_during_s": during,
        "held_s": during - before,
        "longest_gap_s": max(gaps),
        "pushes": len(ends),
    }


def show(result):
    if "median_s" in result:
        print(
            f"{result['name']}: {result['median_s']:.2f} s to the next push "
            f"({min(result['seconds']):.2f}-{max(result['seconds']):.2f}), "
            f"{result['closures']} closures, {result['undone']} undone"
        )
        return
    before, during, held, gap = (
        1e3 * result[key]
        for key in ("longest_push_before_s", "longest_push_during_s", "held_s", "longest_gap_s")
    )
    print(
        f"{result['name']}: {result['seconds']:.2f} s, {result['bytes_per_s'] / 1e6:.0f} MB/s, "
        f"{result['of_dd']:.2f} of dd conv=fsync\n"
        f"  longest push {before:.1f} ms before and {during:.1f} ms during it ({held:+.1f}); "
        f"{result['pushes']} pushes meanwhile, longest time without one {gap:.0f} ms"
    )


async def measure(options):
    base = Path(options.out or tempfile.mkdtemp(prefix="psync-recovery-"))
    results = []
    try:
        for recovery in options.recovery:
            kills = 3 if options.quick else 9
            results.append(await measure_kills(recovery, kills, base / recovery))
            show(results[-1])
        if not options.no_save:
            (base / "save").mkdir(parents=True)
            results.append(await measure_save(256 if options.quick else 1024, base / "save"))
            show(results[-1])
    finally:
        if not options.out:
            shutil.rmtree(base, ignore_errors=True)
    return results


def main():
    parser = argparse.ArgumentParser(description="what a lost ps and a checkpoint cost")
    parser.add_argument("--quick", action="store_true", help="fewer kills, a smaller checkpoint")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--out", metavar="DIR", help="where checkpoints go; default: a temporary one"
    )
    parser.add_argument("--recovery", nargs="+", default=["checkpoint", "backup"])
    parser.add_argument("--no-save", action="store_true", help="measure kills only")
    options = parser.parse_args()
    results = uvloop.run(measure(options))
    if options.json:
        Path(options.json).write_text(
            json.dumps({"machine": machine(), "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
