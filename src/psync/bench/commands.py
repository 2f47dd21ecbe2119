"""``psync bench``: the command line of the benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.group()
def bench() -> None:
    """Measure psync on this machine."""


@bench.command("sync-async")
@click.option("--quick", is_flag=True, help="Fewer and shorter runs: less than a minute in total.")
@click.option(
    "--parts",
    multiple=True,
    type=click.Choice(["processes", "virtual"]),
    help="Part to run; repeatable.  [default: all parts]",
)
@click.option(
    "--workers",
    multiple=True,
    type=click.IntRange(min=2),
    default=(2, 4),
    help="Number of worker processes; repeatable, one cluster for each.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out"),
    help="Folder for the JSON file and the plots.",
)
def sync_async(
    quick: bool,
    parts: tuple[str, ...],
    workers: tuple[int, ...],
    out: Path,
) -> int:
    """Compare synchronous with asynchronous training.

    Runs four modes: asynchronous, bounded staleness, synchronous, and synchronous with backup
    workers. Measures gradients per second, staleness, dropped gradients, and the time until a
    network reads digits: with worker processes, with and without a slow worker, and with 100
    workers in virtual time.

    \b
    A quick look, then everything:
        psync bench sync-async --quick
        psync bench sync-async --out results
    """
    from psync.bench import sync_async as benchmark

    os.environ.setdefault("PSYNC_LOG_LEVEL", "warning")  # of the clusters' tasks
    return benchmark.run(
        benchmark.Options(
            parts=parts or benchmark.PARTS,
            workers=workers,
            quick=quick,
            out=out,
        )
    )


@bench.command("peers")
@click.option("--quick", is_flag=True, help="Fewer and shorter repetitions.")
@click.option(
    "--peers",
    "python",
    metavar="PYTHON",
    help="Python interpreter with TensorFlow, torch or Ray installed, to measure these too; make "
    "bench-peers creates one.",
)
@click.option(
    "--rows",
    metavar="TEXT",
    default="",
    help="Only rows whose name contains this text, such as synchronous.",
)
@click.option(
    "--only",
    type=click.Choice(["psync"]),
    help="Measure only psync.",
)
@click.option(
    "--against",
    metavar="CHECKOUT",
    type=click.Path(path_type=Path),
    help="Another checkout of psync, measured alternately with this one.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep the rows already in the folder's peers.json, and measure the rest.",
)
@click.option(
    "--scripts",
    type=click.Path(path_type=Path),
    default=Path("benchmarks/peers"),
    help="Folder of the programs that psync is compared with; part of psync's sources.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out"),
    help="Folder for peers.json and peers.md.",
)
def peers(
    quick: bool,
    python: str | None,
    rows: str,
    only: str | None,
    against: Path | None,
    resume: bool,
    scripts: Path,
    out: Path,
) -> int:
    """Compare psync with other systems and with the limits of the machine.

    Measures closures, pulls, pushes, table rows, and synchronous and asynchronous training, each
    with 2 ps tasks and 2 workers. Each system runs in separate processes, and repetitions alternate
    between systems. Prints a Markdown table: the median, the lowest and highest value in brackets,
    and how many times as fast psync is.

    \b
    psync and bare sockets, then every peer that ~/peers has:
        psync bench peers --quick
        psync bench peers --peers ~/peers/bin/python

    Each row is written as soon as it is measured. After Ctrl-C, continue with --resume.

    \b
    This checkout against another one:
        psync bench peers --only psync --against ../psync-before
    """
    from psync.bench import peers as benchmark

    return benchmark.run(
        python, scripts, out, quick=quick, rows=rows, only_psync=only is not None,
        against=against, resume=resume,
    )  # fmt: skip
