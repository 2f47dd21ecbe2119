"""``psync dashboard``: the web page of a run that has ended, from its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from psync.status.dashboard.shows import Show


@click.command()
@click.argument("log", type=click.Path(), metavar="RUN.jsonl")
@click.option(
    "--address",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    help="Where to serve the page. Port 0 takes a free port.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="RUN.html",
    help="Write an HTML page that opens offline, and serve nothing.",
)
def dashboard(log: str, address: str, report: Path | None) -> int:
    """Show a run log in a web page and print the page's URL. Ctrl-C ends it.

    psync run --log RUN.jsonl and ClusterCoordinator(run_log=…) write run logs. For a running
    program, use psync run --dashboard.
    """
    from psync.status.dashboard.run_log import FinishedRun
    from psync.status.dashboard.server import check_can_serve
    from psync.status.dashboard.shows import LogShow

    if report is not None:
        from psync.status.dashboard.report_page import check_path, write_report

        click.echo(write_report(log, check_path(report)))
        return 0
    check_can_serve(address)
    with contextlib.closing(FinishedRun(log)) as run:
        asyncio.run(_serve(LogShow(run), address))
    return 0


async def _serve(show: Show, address: str) -> None:
    from psync.status.dashboard.attached import hosts_of
    from psync.status.dashboard.server import serving

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ended.set)
    async with serving(show, address, hosts_of(os.environ)) as url:
        click.echo(url)
        await ended.wait()
