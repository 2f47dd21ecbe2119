"""Commands that report: ``psync checkpoint``, ``top``, ``trace`` and ``dashboard``.

None of them needs a cluster of its own: they read files, or ask a program that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from psync.errors import CheckpointError, ConfigurationError, DeadlineExceeded, ProtocolError
from psync.launch.process import run_loop

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from psync.net.tracing import Trace
    from psync.status.dashboard.shows import Show
    from psync.status.serving import StatusReader, UrlReader

    Reader = StatusReader | UrlReader

FAILED = 1  # exit code

FIRST_WINDOW_S = 1.0
"""Rates of one look are means over so long."""

RUN_LOG = b'{"psync_run_log"'
"""How the log of a run begins."""

checkpoint_path = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def checkpoint() -> None:
    """Inspect, compare and export checkpoints.

    \b
    List the checkpoints, inspect the newest, export its model for other programs:
        psync checkpoint ls run/checkpoints
        psync checkpoint inspect run/checkpoints/ckpt-00000012
        psync checkpoint export run/checkpoints/ckpt-00000012 model --only model
    """


@checkpoint.command("ls")
@click.argument("directory", type=checkpoint_path)
def list_command(directory: Path) -> int:
    """List the complete checkpoints in DIRECTORY, the oldest first."""
    from psync.checkpoints.files import checkpoints_in
    from psync.cli.checkpoint_reports import summary

    return _report(lambda: [summary(path) for _, path in checkpoints_in(directory, "ckpt")])


@checkpoint.command("inspect")
@click.argument("path", type=checkpoint_path)
def inspect_command(path: Path) -> int:
    """List the contents of the checkpoint PATH, and verify every byte."""
    from psync.cli.checkpoint_reports import inspection
    from psync.launch.plugins import load_plugins

    load_plugins("psync checkpoint")  # it names rules
    return _report(lambda: inspection(path))


@checkpoint.command("diff")
@click.argument("first", type=checkpoint_path)
@click.argument("second", type=checkpoint_path)
def diff_command(first: Path, second: Path) -> int:
    """List the differences between two checkpoints; exit code 1 if there are any."""
    from psync.cli.checkpoint_reports import differences

    lines: list[str] = []

    def describe() -> list[str]:
        lines.extend(map(str, differences(first, second)))
        return lines

    return _report(describe) or (FAILED if lines else 0)


@checkpoint.command("export")
@click.argument("path", type=checkpoint_path)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--only",
    "prefixes",
    multiple=True,
    metavar="PREFIX",
    help="Export tensors with this name, or with this prefix up to a /. Repeatable.",
)
@click.option(
    "--max-file-mib",
    type=click.IntRange(min=1),
    default=5 << 10,
    help="Start another file when one reaches this size.",
)
def export_command(
    path: Path, directory: Path, prefixes: tuple[str, ...], max_file_mib: int
) -> int:
    """Write tensors of the checkpoint PATH to the new DIRECTORY as plain safetensors.

    Each variable is exported whole, however it was sharded. If several files are needed, they come
    with an index that Hugging Face tools read.
    """
    from psync.cli.checkpoint_reports import export

    return _report(
        lambda: [
            str(file)
            for file in export(
                path, directory, prefixes=prefixes, max_file_bytes=max_file_mib << 20
            )
        ]
    )


def _report(lines_of: Callable[[], list[str]]) -> int:
    """Print lines, or an error about a checkpoint in one line; return the exit code."""
    try:
        for line in lines_of():
            click.echo(line)
    except CheckpointError as error:
        click.echo(f"psync: error: {' '.join(str(error).split())}", err=True)
        return FAILED
    return 0


def choosing_run(command: Callable[..., int]) -> Callable[..., int]:
    """Let a command be told its ``run`` by --run, or by a last argument."""

    def choose(context: click.Context, _: click.Parameter, given: str | None) -> None:
        if given is not None:
            if context.get_parameter_source("run") is ParameterSource.COMMANDLINE:
                raise click.UsageError("the run is given twice: as an argument and as --run")
            context.params["run"] = given

    option = click.option(
        "--run", metavar="RUN", is_eager=True,
        help="Which program, if several are running: its id, process id or name.",
    )  # fmt: skip
    argument = click.argument(
        "given", required=False, metavar="[RUN]", expose_value=False, callback=choose
    )
    return argument(option(command))


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
    if as_json and not once:
        raise click.UsageError("--json prints one status: it needs --once")
    # SIGTERM leaves the terminal as it was.
    return run_loop(lambda: _show(run, once or not sys.stdout.isatty(), as_json, interval))


@contextlib.asynccontextmanager
async def reading_of(run: str | None) -> AsyncIterator[Reader]:
    """Return a context in which a run can be asked; see ``chosen_run``. It may be a URL, too.

    Raises:
        ConfigurationError: It cannot be asked, or does not answer.
    """
    from psync.status.run_files import chosen_run
    from psync.status.serving import UrlReader, reading_status

    try:
        if run is not None and run.startswith(("http://", "https://")):
            yield UrlReader(run)
        else:
            async with reading_status(chosen_run(run)) as reader:
                yield reader
    except (ProtocolError, DeadlineExceeded) as exc:
        raise ConfigurationError(exc.message, hint=exc.hint) from exc


async def _show(path: str | None, once: bool, as_json: bool, interval: float) -> int:
    from rich.console import Console

    from psync.cli.status_tables import tables_of

    async with reading_of(path) as reader:
        await reader.read()  # rates are counted from here on, if nobody has asked for a while
        if not once:
            await _follow(reader, Console(), interval)
            return 0
        await asyncio.sleep(FIRST_WINDOW_S)
        status = await reader.read()
    if as_json:
        click.echo(status.to_json())
    else:
        Console().print(tables_of(status))
    return 0


async def _follow(reader: Reader, console: Console, interval: float) -> None:
    """Show the status again and again, until the run ends."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from psync.cli.status_tables import tables_of

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
    if run is not None and _is_run_log(run):
        raise ConfigurationError(
            f"{run} is the log of a run that has ended; only running programs can be traced",
            hint=f"psync dashboard {run} shows it",
        )
    for line in _lines(out, asyncio.run(_trace(out, run, seconds))):
        click.echo(line)
    return 0


async def _trace(out: Path, path: str | None, seconds: float) -> Trace:
    from psync.net.tracing import tracing

    loop = asyncio.get_running_loop()
    async with reading_of(path) as reader:
        status = await reader.read()
        async with tracing(reader.read_spans, status.program, out) as traced:
            loop.add_signal_handler(signal.SIGINT, traced.ended.set)
            click.echo(f"recording {status.program} for {seconds:g} s ...", err=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await traced.ended.wait()
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
    from psync.status.dashboard.recorder import hosts_of
    from psync.status.dashboard.server import serving

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ended.set)
    async with serving(show, address, hosts_of(os.environ)) as url:
        click.echo(url)
        await ended.wait()
