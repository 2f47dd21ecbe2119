"""``psync trace``: what all tasks of a running program do for some seconds, as a file."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from psync.cli.options import choosing_run

if TYPE_CHECKING:
    from psync.net.tracing.stretch import Trace

RUN_LOG = b'{"psync_run_log"'
"""How the log of a run begins."""


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.json")
@choosing_run
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=5.0,
    metavar="SECONDS",
    help="How long to record. Ctrl-C ends it earlier.",
)
def trace(out: Path, run: str | None, seconds: float) -> int:
    """Record what a running program does, and write it to OUT.json for Perfetto.

    Open the file at https://ui.perfetto.dev or chrome://tracing: each task appears as a
    process, with the workers' steps and how their time is spent, the requests on both sides, and
    counters. RUN is the id, process id or name of one of your programs on this machine, the path
    of its run file, or the status URL that a program with --metrics-port logs. If several programs
    are running and you name none, they are listed.

    \b
    Ten seconds of the program in the other terminal:
        psync trace out.json --seconds 10
    """
    from psync.errors import ConfigurationError, DeadlineExceeded, ProtocolError

    if run is not None and _is_run_log(run):
        raise ConfigurationError(
            f"{run} is the log of a run that has ended; only running programs can be traced",
            hint=f"psync dashboard {run} shows it",
        )
    try:
        traced = asyncio.run(_trace(out, run, seconds))
    except (ProtocolError, DeadlineExceeded) as exc:
        raise ConfigurationError(exc.message, hint=exc.hint) from exc
    for line in _lines(out, traced):
        click.echo(line)
    return 0


async def _trace(out: Path, path: str | None, seconds: float) -> Trace:
    from psync.cli.top import reading_of
    from psync.net.tracing.stretch import tracing

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with reading_of(path) as reader:
        status = await reader.read()
        async with tracing(reader.read_spans, status.program, out) as traced:
            loop.add_signal_handler(signal.SIGINT, ended.set)
            click.echo(f"recording {status.program} for {seconds:g} s ...", err=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await traced.wait(ended)
            loop.remove_signal_handler(signal.SIGINT)
    return traced


def _is_run_log(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(RUN_LOG)) == RUN_LOG
    except OSError:
        return False


def _lines(out: Path, traced: Trace) -> list[str]:
    summary = traced.summary
    assert summary is not None, "the file is written"
    lines = [
        f"{out}: {summary.events} events of {summary.seconds:.1f} s, {len(summary.tasks)} tasks; "
        f"open it at https://ui.perfetto.dev",
    ]
    if traced.cut_short:
        lines.append(f"it ends early: {traced.cut_short}")
    lines += [
        f"{task}: {count} events were dropped, since more came than could be asked for"
        for task, count in summary.lost.items()
    ]
    if math.isfinite(summary.within_s) and summary.within_s > 1e-3:
        lines.append(f"clocks of tasks are aligned within {summary.within_s * 1e3:.1f} ms only")
    return lines
