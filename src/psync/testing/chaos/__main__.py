"""``python -m psync.testing.chaos``: train while plugs are pulled, and say what was found.

Layer: L5. Imports: errors, testing.chaos.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import click

from psync.testing.chaos import one_run
from psync.testing.chaos.killer import KillPlan
from psync.testing.chaos.one_run import LOSSES, RunPlan
from psync.testing.chaos.program import Settings
from psync.testing.chaos.summary import summary


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seed", type=int, default=1, help="Of all that is drawn.")
@click.option("--minutes", type=float, default=1.0, help="For so long plugs are pulled.")
@click.option("--mode", type=click.Choice(["async", "sync"]), default="async")
@click.option(
    "--recovery", type=click.Choice(["checkpoint", "replica", "none"]), default="none",
    help="none: no ps and no chief is killed.",
)  # fmt: skip
@click.option("--ps", type=click.IntRange(1), default=2)
@click.option("--workers", type=click.IntRange(1), default=3)
@click.option("--pause", type=float, default=1.5, help="Mean seconds between two kills.")
@click.option("--jobs", default="", help="Shares of kills, as in worker=1,ps=0.5; default: all.")
@click.option("--signals", default="", help="The same for signals, as in SIGKILL=1.")
@click.option("--losses/--no-losses", default=True, help="Whether messages are lost.")
@click.option(
    "--cuts", default=0.0, help="Mean seconds between two faults of each proxy; 0: no proxies."
)
@click.option("--failpoints", default="", help="As in PSYNC_FAILPOINTS.")
@click.option("--without", default="", help="As in PSYNC_TESTING_WITHOUT.")
@click.option("--log-level", default="warning", help="Of the tasks.")
@click.option("--out", default="", help="Directory to leave everything in; default: a fresh one.")
def main(
    seed: int,
    minutes: float,
    mode: str,
    recovery: str,
    ps: int,
    workers: int,
    pause: float,
    jobs: str,
    signals: str,
    losses: bool,
    cuts: float,
    failpoints: str,
    without: str,
    log_level: str,
    out: str,
) -> None:
    """Train on real processes while these are killed, stopped and cut off; then look what is left.

    Exit code 1: something is there that must not be, or is missing.
    """
    directory = out or tempfile.mkdtemp(prefix="psync-chaos-")
    Path(directory).mkdir(parents=True, exist_ok=True)
    settings = Settings(
        directory, mode, seed, ps, workers, recovery=recovery,
        checkpoint_every=0 if recovery == "none" else 3,
    )  # fmt: skip
    kills = KillPlan(pause_s=pause)
    shares = _shares(jobs) or dict(kills.jobs)
    if recovery == "none":
        shares = {"worker": shares.get("worker", 1.0)}
    by_signal = {job: _shares(signals) or dict(kills.signals[job]) for job in shares}
    plan = RunPlan(
        seed, minutes * 60, settings, KillPlan(shares, by_signal, pause),
        LOSSES if losses else None, failpoints, without, cuts, log_level,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = asyncio.run(one_run.run(plan))
    again = shlex.join([sys.executable, "-m", "psync.testing.chaos", *sys.argv[1:]])
    print(summary(result, again))
    sys.exit(1 if result.faults else 0)


def _shares(text: str) -> dict[str, float]:
    return {
        name: float(share or 1)
        for name, _, share in (item.partition("=") for item in text.split(",") if item)
    }


if __name__ == "__main__":
    main()
