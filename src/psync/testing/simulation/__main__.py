"""Command line of the simulator: many seeds, one seed again, one plan made smaller.

python -m psync.testing.simulation --seeds 300 --seed 1     # what CI does
python -m psync.testing.simulation --replay 17              # one seed, and all that happened
python -m psync.testing.simulation --replay 17 --shrink out/17.json
python -m psync.testing.simulation --plan out/17.json       # what shrinking has left
python -m psync.testing.simulation --mutants                # what finds what is wrong?
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from psync.testing.sabotage.switches import NAMES
from psync.testing.simulation.drawing import SHAPES, drawn
from psync.testing.simulation.mutants import MUTANTS
from psync.testing.simulation.plan import Plan
from psync.testing.simulation.run import Report
from psync.testing.simulation.shrink import shrunk, table
from psync.testing.simulation.sweep import (
    Job,
    Kept,
    Sweep,
    commit,
    difference,
    hunt,
    run_all,
    seeds,
    serve,
    told,
)
from psync.testing.simulation.watch import MARKS, MUST_BE_REACHED_BY

NOISE = ("bytes", "message", "place")
"""Entries of a trace that are shown only if they are asked for."""

CHUNK = 500
"""Seeds that run between two entries of ``--keep``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if something was found."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.serve:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
        answers, sys.stdout = sys.stdout, sys.stderr
        serve(sys.stdin, answers, fresh=options.fresh)
        return 0
    if options.mutants:
        return asyncio.run(_mutants(options))
    if options.replay is None and options.plan is None:
        if options.shrink is not None or options.twice:
            parser.error("--shrink and --twice are about one run: --replay SEED, or --plan FILE")
        return asyncio.run(_sweep(options))
    try:
        return _replay(options)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        if options.plan is None:
            raise
        parser.error(f"{options.plan} is no plan that --shrink has written: {exc!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m psync.testing.simulation",
        description="Simulate whole clusters that things happen to, and look for broken promises.",
    )
    parser.add_argument("--seeds", type=_positive, default=300, help="how many (%(default)s)")
    parser.add_argument("--seed", type=_seed, default=1, help="the first (%(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="any", help="what is drawn")
    parser.add_argument("--commit-share", type=_share, default=0.0, metavar="SHARE",
                        help="so many seeds are drawn from the commit's hash")  # fmt: skip
    parser.add_argument("--twins", type=_share, default=0.05, metavar="SHARE",
                        help="so many run twice and are compared (%(default)s)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER",
                        help="go on where a sweep of the same source was interrupted")  # fmt: skip
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--without", action="append", choices=sorted(NAMES), default=[],
                        help="switch a safeguard off")  # fmt: skip
    parser.add_argument("--mutant", choices=sorted(MUTANTS), default="", help="break a rule")
    parser.add_argument("--canary", action="store_true", help="one seed in 100 fails on purpose")
    parser.add_argument(
        "--replay", type=_seed, metavar="SEED", help="run one, and print everything"
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="replay what --shrink wrote")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="make a plan smaller")
    parser.add_argument("--twice", action="store_true", help="run --replay twice, and compare")
    parser.add_argument("-v", "--verbose", action="store_true", help="messages and places, too")
    parser.add_argument("--mutants", action="store_true", help="look for each mutant")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fresh", action="store_true", help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def _seed(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected a seed of 0 or more, got {text}")
    return number


def _share(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return number


def _job(options: argparse.Namespace, seed: int, plan: str = "", *, trace: bool = False) -> Job:
    without = tuple(options.without)
    return Job(seed, options.shape, plan, without, options.mutant, options.canary, trace)


async def _sweep(options: argparse.Namespace) -> int:
    """Run many seeds, and print what they have shown."""
    broken = options.without or options.mutant or options.canary
    kept = Kept(None if broken else options.keep, options.shape)
    drawn_seeds = seeds(options.seed, options.seeds, options.commit_share)
    sweep, jobs = kept.take([_job(options, seed) for seed in drawn_seeds])
    if sweep.seeds:
        print(f"{sweep.seeds} of {options.seeds} seeds have run before: {kept}", flush=True)
    twins_of_all = round(1 / options.twins) if options.twins else 0
    for at in range(0, len(jobs), CHUNK):
        chunk = jobs[at : at + CHUNK]
        try:
            results = await _run_some(
                chunk, chunk[::twins_of_all] if twins_of_all else [], options.jobs
            )
        except asyncio.CancelledError:  # Ctrl-C
            _print_summary(sweep)
            return 130
        kept.add(chunk, results)
        sweep.merge(results)
        print(f"... {sweep.seeds} seeds, {len(sweep.violations)} violations", flush=True)
    _print_summary(sweep)
    missed = [name for name in MARKS if not sweep.marks[name]]
    blind = bool(missed) and sweep.seeds >= MUST_BE_REACHED_BY and options.shape == "any"
    if blind:
        print(f"the simulator has gone blind: never reached in {sweep.seeds} seeds: {missed}")
    return 1 if sweep.violations or sweep.differing or blind else 0


async def _run_some(jobs: Sequence[Job], twins: Sequence[Job], num_children: int) -> Sweep:
    """Run jobs, some of them twice, and print the violations and differences at once."""
    began = time.monotonic()
    sweep = Sweep()
    first_runs = {}
    async for job, report in run_all(jobs, num_children):
        sweep.add(job, report)
        first_runs[job] = report
        if report.oracle:
            _print_violation(job, report.oracle, report.violation, report.at_s, report.entry)
    # Again, each in a fresh process with another PYTHONHASHSEED.
    async for job, report in run_all(twins, num_children, hash_seed=1001, fresh=True):
        if report.trace_hash == first_runs[job].trace_hash:
            sweep.twins += 1
        else:
            sweep.differing.append(job.seed)
            if len(sweep.differing) <= 3:
                print(f"\n{await _told_difference(job, first_runs[job])}")
    sweep.seconds = time.monotonic() - began
    return sweep


async def _told_difference(job: Job, first_run: Report) -> str:
    """Say where two runs part: in fresh processes, or after what ran before one of them."""
    if found := await difference(job):
        return found
    if found := await difference(job, first_run.before):
        return f"after seeds {', '.join(map(str, first_run.before))} in one process, {found}"
    return (
        f"seed {job.seed} ran twice and had two histories, {first_run.trace_hash} among them, but "
        "neither in fresh processes nor after the same seeds again: something of the machine (its "
        "clock, its memory, its load) has been let in"
    )


def _print_violation(job: Job, oracle: str, violation: str, at_s: float, entry: int) -> None:
    at = commit()[:10]
    print(f"{'at ' + at + ': ' if at else ''}{job.command()}  # {oracle}, at {at_s:.4f} s, "
          f"entry {entry}")  # fmt: skip
    for line in violation.splitlines()[:5]:
        print(f"    {line[:1000]}")
    sys.stdout.flush()


def _print_summary(sweep: Sweep) -> None:
    print(f"\nfaults that happened, by kind:\n{_columns(sweep.injected)}")
    print("\nmarks: how often reached, in how many seeds:")
    for name in MARKS:
        print(f"  {sweep.marks[name]:7d} {sweep.reached[name]:6d}  {name}")
    print(f"\n{sum(bool(sweep.marks[name]) for name in MARKS)} of {len(MARKS)} marks reached; "
          f"{sweep.twins} seeds ran twice and were the same")  # fmt: skip
    print(f"{sweep.seeds} seeds, {sweep.virtual_s:.0f} virtual seconds, {sweep.seconds:.0f} s, "
          f"{sweep.seeds / max(sweep.seconds, 0.001):.1f} seeds a second, "
          f"{len(sweep.violations)} violations")  # fmt: skip
    if sweep.differing:
        print(f"  seeds with two histories: {', '.join(map(str, sweep.differing))}")
    for job, report in sweep.violations:
        print(f"  {job.command()}  # {report.oracle}, at {report.at_s:.4f} s, entry {report.entry}")


def _columns(counts: dict[str, int]) -> str:
    return "\n".join(f"  {counts[name]:7d}  {name}" for name in sorted(counts))


def _replay(options: argparse.Namespace) -> int:
    """Run one plan here, and print all that happened; make it smaller if that is wanted."""
    if options.plan is not None:
        plan = Plan.from_json(options.plan.read_text())
    else:
        plan = drawn(options.replay, options.shape)
    job = _job(options, plan.seed, plan.to_json(), trace=True)
    if options.twice:
        found = asyncio.run(difference(job))
        print(found or "the same twice")
        return 1 if found else 0
    if options.shrink is not None:
        smaller, report = shrunk(
            plan, lambda each: _job(options, each.seed, each.to_json(), trace=True).run(), print
        )
        if not report.oracle:
            print("nothing to shrink: this run breaks no promise")
            return 0
        options.shrink.parent.mkdir(parents=True, exist_ok=True)
        options.shrink.write_text(smaller.to_json())
        print(table(smaller, report))
        again = dataclasses.replace(job, plan="", seed=0).command()
        print(f"\n{again.replace('--replay 0', f'--plan {options.shrink}')}")
        return 1
    print(table(plan, None))
    report = job.run()
    for entry in report.trace:
        if options.verbose or entry[2] not in NOISE:
            print(told(entry))
    print(f"\nseed {plan.seed}: {report.virtual_s:.4f} virtual seconds, {report.turns} turns, "
          f"trace {report.trace_hash}")  # fmt: skip
    print(f"marks: {', '.join(sorted(report.marks))}")
    if report.oracle:
        print(f"violation at {report.at_s:.4f} s, entry {report.entry}:\n{report.violation}")
    return 1 if report.oracle else 0


async def _mutants(options: argparse.Namespace) -> int:
    """Look for each mutant, and print the table; one that is not found is a failure."""
    began = time.monotonic()
    names = [options.mutant] if options.mutant else list(MUTANTS)
    print("| mutant | the rule that it breaks | found by | seeds |\n|---|---|---|---|")
    missed = []
    for name in names:
        found = await hunt(name, options.seed, options.seeds, options.jobs)
        print(f"| `{name}` | {MUTANTS[name].breaks} | {found.oracle or '-'} | {found.tried} |",
              flush=True)  # fmt: skip
        if found.job is None:
            missed.append(name)
        elif options.verbose:
            print(f"  {found.job.command()}")
    print(f"\n{len(names) - len(missed)} of {len(names)} found, {time.monotonic() - began:.0f} s")
    if missed:
        print(f"not found within {options.seeds} seeds: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
