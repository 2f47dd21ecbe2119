"""The command ``python -m psync.testing.chaos``: trains under kills and reports violations."""

from __future__ import annotations

import asyncio
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from psync.testing.chaos import one_run
from psync.testing.chaos.killer import KillPlan
from psync.testing.chaos.one_run import LOSSES, Result, RunPlan, deaths_of, summary
from psync.testing.chaos.program import Settings
from psync.testing.chaos.scenes import SCENES

WORKER_POINTS = {
    "async": ("worker.closure.start", "worker.closure.end", "worker.push.between_ps",
              "worker.push.begun", "worker.push.answered"),
    "sync": ("worker.closure.start", "worker.closure.end", "worker.push.sent",
             "worker.push.begun", "worker.push.answered"),
}  # fmt: skip
PS_POINTS = {
    "async": ("ps.push.received", "ps.push.applied", "ps.assign.applied"),
    "sync": ("ps.step.applied", "ps0.step.decided", "ps0.step.applied", "ps.assign.applied"),
}
DRAWN, NONE = "drawn", "none"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seed", type=int, default=1, help="Seed of all random choices.")
@click.option("--minutes", type=float, default=1.0, help="Minutes of faults in total.")
@click.option("--mode", type=click.Choice(["async", "sync", "both"]), default="async")
@click.option(
    "--recovery", type=click.Choice(["checkpoint", "backup", "none"]), default="checkpoint",
    help="backup: each ps has a backup; none: no checkpoints, and only workers are killed.",
)  # fmt: skip
@click.option(
    "--attach", is_flag=True, help="A restarted chief continues with the variables on the ps tasks."
)
@click.option("--ps", "num_ps", type=click.IntRange(1), default=2, help="Number of ps tasks.")
@click.option("--workers", "num_workers", type=click.IntRange(1), default=3)
@click.option("--pause", type=float, default=1.0, help="Mean seconds between two kills.")
@click.option(
    "--jobs",
    default="",
    help="Relative frequency of kills by job, such as worker=1,ps=0.5; default: all jobs.",
)
@click.option("--signals", default="", help="Relative frequency of signals, such as SIGKILL=1.")
@click.option("--losses/--no-losses", default=True, help="Whether messages are dropped.")
@click.option(
    "--cuts", default=0.0, help="Mean seconds between two faults of each proxy; 0: no proxies."
)
@click.option(
    "--failpoints",
    default=DRAWN,
    help="Failpoints as in PSYNC_FAILPOINTS, none, or drawn (from the seed).",
)
@click.option(
    "--scene", type=click.Choice(["", *SCENES]), default="",
    help="One scripted fault instead of random ones; see docs/explanation/testing.md.",
)  # fmt: skip
@click.option(
    "--without", default="", help="Safeguards to switch off, as in PSYNC_TESTING_WITHOUT."
)
@click.option(
    "--at-least",
    default="",
    help="Fail if there are fewer deaths than these: worker=50,ps=20,chief=5.",
)
@click.option("--log-level", default="warning", help="Log level of the tasks.")
@click.option(
    "--out",
    default="",
    help="Directory for logs and checkpoints; default: a temporary one, removed if the run passes.",
)
def main(
    seed: int, minutes: float, mode: str, recovery: str, attach: bool, num_ps: int,
    num_workers: int, pause: float, jobs: str, signals: str, losses: bool, cuts: float,
    failpoints: str, scene: str, without: str, at_least: str, log_level: str, out: str,
) -> None:  # fmt: skip
    """Train on real processes while they are killed, stopped and cut off; then check the result.

    Exit code 1: an update was lost, or applied more than once, or a check failed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    again = shlex.join([sys.executable, "-m", "psync.testing.chaos", *sys.argv[1:]])
    left = out or tempfile.mkdtemp(prefix="psync-chaos-")
    modes = ["async", "sync"] if mode == "both" else [mode]
    if scene and (attach or recovery != "checkpoint" or modes != ["async"]):
        raise click.UsageError(
            "--scene sets the mode and the recovery; leave out --attach, --mode and --recovery"
        )
    if recovery == "backup" and attach:
        raise click.UsageError("--recovery backup cannot be combined with --attach")
    kills = KillPlan()
    shares = _shares(jobs) or dict(kills.jobs)
    if recovery == "none":
        shares = {"worker": shares.get("worker", 1.0)}
    by_signal = {job: _shares(signals) or dict(kills.signals[job]) for job in shares}
    results: list[Result] = []
    for each in modes:
        directory = Path(left, each)
        directory.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            str(directory), each, seed, num_ps, num_workers, recovery=recovery,
            checkpoint_every=0 if recovery == "none" else 3, attach=attach,
        )  # fmt: skip
        points = failpoints
        if failpoints == DRAWN:
            # The killer lets a chief live that recovers a ps, where it knows of that.
            points = drawn_failpoints(seed, each, "none" if attach else recovery)
        plan = RunPlan(
            seed, minutes * 60 / len(modes), settings, KillPlan(shares, by_signal, pause),
            LOSSES if losses else None,
            "" if points == NONE else points, without, cuts, log_level,
        )  # fmt: skip
        result = asyncio.run(one_run.run(one_run.staged(plan, scene) if scene else plan))
        print(summary(result, again), flush=True)
        results.append(result)
    missing = _missing(results, _shares(at_least))
    for text in missing:
        print(f"FAULT: {text}")
    if missing or any(result.faults for result in results):
        sys.exit(1)
    if not out:
        shutil.rmtree(left)


def drawn_failpoints(seed: int, mode: str, recovery: str) -> str:
    """Return one failpoint of workers and, where ps tasks are recovered, one of theirs."""
    rng = random.Random(f"{seed}/{mode}/failpoints")
    points = [f"{rng.choice(WORKER_POINTS[mode])}=kill@{rng.randrange(100, 400)}"]
    if recovery != "none":
        points.append(f"{rng.choice(PS_POINTS[mode])}=kill@{rng.randrange(300, 1500)}")
    return ", ".join(points)


def _missing(results: list[Result], at_least: dict[str, float]) -> list[str]:
    deaths: Counter[str] = Counter()
    for result in results:
        deaths += deaths_of(result)
    text = ", ".join(f"{count} of {job}" for job, count in sorted(deaths.items()))
    print(f"\ndeaths in all: {text or 'none'}")
    return [
        f"{deaths[job]} deaths of {job}, expected at least {count:g}"
        for job, count in at_least.items()
        if deaths[job] < count
    ]


def _shares(text: str) -> dict[str, float]:
    return {
        name: float(share or 1)
        for name, _, share in (item.partition("=") for item in text.split(",") if item)
    }


if __name__ == "__main__":
    main()
