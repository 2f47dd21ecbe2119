"""``psync top``: what a running program does, live in the terminal, or once as a table or JSON."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

import click

from psync.cli.options import choosing_run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from psync.status.reading import StatusReader, UrlReader

    Reader = StatusReader | UrlReader

FIRST_WINDOW_S = 1.0
"""Rates of one look are means over so long."""


@click.command()
@choosing_run
@click.option("--once", is_flag=True, help="Print one table and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON; needs --once.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=1.0,
    metavar="SECONDS",
    help="Seconds between updates.",
)
def top(run: str | None, once: bool, as_json: bool, interval: float) -> int:
    """Show what a running program is doing: its workers, ps tasks, steps and events.

    RUN is the id, process id or name of one of your programs on this machine, the path of its run
    file, or the status URL that a program with --metrics-port logs. If several programs are
    running and you name none, they are listed. Ctrl-C ends psync top; the program continues.

    \b
    The current status, for a script:
        psync top --once --json
    """
    from psync.errors import ConfigurationError, DeadlineExceeded, ProtocolError

    if as_json and not once:
        raise click.UsageError("--json prints one status: it needs --once")
    try:
        return asyncio.run(_show(run, once or not sys.stdout.isatty(), as_json, interval))
    except (ProtocolError, DeadlineExceeded) as exc:
        raise ConfigurationError(exc.message, hint=exc.hint) from exc


def reading_of(run: str | None) -> AbstractAsyncContextManager[Reader]:
    """Return a context in which a run can be asked; see ``chosen_run``. It may be a URL, too."""
    from psync.status.reading import UrlReader, reading_status
    from psync.status.run_files import chosen_run

    if run is not None and run.startswith(("http://", "https://")):
        return nullcontext(UrlReader(run))
    return reading_status(chosen_run(run))


async def _show(path: str | None, once: bool, as_json: bool, interval: float) -> int:
    async with reading_of(path) as reader:
        await reader.read()  # rates are counted from here on, if nobody has asked for a while
        if not once:
            from rich.console import Console

            return await _follow_until_told(reader, Console(), interval)
        await asyncio.sleep(FIRST_WINDOW_S)
        status = await reader.read()
    if as_json:
        click.echo(status.to_json())
        return 0
    from rich.console import Console

    from psync.cli.status_tables import tables_of

    Console().print(tables_of(status))
    return 0


async def _follow_until_told(reader: Reader, console: Console, interval: float) -> int:
    """Follow a run until it ends, or SIGTERM comes; return the exit code.

    Either way the terminal is left as it was. Ctrl-C cancels this.
    """
    following = asyncio.ensure_future(_follow(reader, console, interval))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, following.cancel)
    try:
        await asyncio.wait([following])
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        following.cancel()
        await asyncio.wait([following])
    if following.cancelled():
        return 128 + signal.SIGTERM
    following.result()
    return 0


async def _follow(reader: Reader, console: Console, interval: float) -> None:
    """Show the status again and again, until the run ends."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from psync.cli.status_tables import tables_of
    from psync.errors import ConfigurationError, DeadlineExceeded

    silent = Text()
    tables: RenderableType = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                status = await reader.read()
            except ConfigurationError as exc:
                ended = Text(exc.message)
                break
            except DeadlineExceeded as exc:
                silent = Text(exc.message, "red")
            else:
                silent = Text()
                tables = tables_of(status, height=console.height - 1)
            live.update(Group(silent, tables) if silent else tables, refresh=True)
            await asyncio.sleep(interval)
    console.print(tables)
    console.print(ended)
