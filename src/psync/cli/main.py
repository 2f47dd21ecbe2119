"""The command line: ``psync run``, ``scale``, ``join``, ``top``, ``task`` and others.

Every option also reads an environment variable, ``PSYNC_<COMMAND>_<OPTION>``. Wrong usage is one
line on stderr and exit code 2. Imports are late: the launcher has its tasks running before it could
have imported what they need, and ``--help`` needs none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import inspect
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from psync.bench.commands import bench
from psync.errors import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    ConnectFailed,
    DeadlineExceeded,
    ProtocolError,
    PsyncError,
    TrainingEnded,
    VersionMismatch,
)
from psync.integrations.manifests import launch
from psync.launch.plugins import load_plugins, plugins_environ
from psync.launch.process import (
    check_settings,
    configure_logging,
    fill_standard_streams,
    run_loop,
    watch_launcher,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from psync.net.trace import Trace
    from psync.status.dashboard.run_log import FinishedRun
    from psync.status.serving import StatusReader

FAILED = 1  # exit code

FIRST_WINDOW_S = 1.0
"""Rates of one look are means over so long."""

RUN_LOG = b'{"psync_run_log"'
"""How the log of a run begins."""

SETUP_ERRORS = (
    ConfigurationError, AuthenticationError, ConnectFailed, DeadlineExceeded, ProtocolError,
)  # fmt: skip
"""Errors of ``speaking`` commands that are told in a line."""


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Decorate a command that speaks to a task: what is wrong there is told in a line."""
    try:
        yield
    except SETUP_ERRORS as exc:
        raise ConfigurationError(exc.message, hint=exc.hint) from exc


# Types of options and arguments.
A_CHECKPOINT = click.Path(exists=True, file_okay=False, path_type=Path)
A_FILE = click.Path(dir_okay=False)
FROM_0 = click.IntRange(min=0)
FROM_1 = click.IntRange(min=1)
ABOVE_0 = click.FloatRange(min=0, min_open=True)


class Command(click.Command):
    """A command whose docstring describes its options, too: below ``Args:``, by their names."""

    def __init__(self, *, help: str | None = None, **settings: Any) -> None:
        text, _, described = inspect.cleandoc(help or "").partition("\n\nArgs:\n")
        super().__init__(help=text, **settings)
        texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE))
        for option in self.params:
            if isinstance(option, click.Option) and option.help is None:
                option.help = re.sub(r"\n +", " ", texts.get(option.name, "")) or None


class Group(click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type


@click.group(
    cls=Group,
    invoke_without_command=True,
    context_settings={
        "auto_envvar_prefix": "PSYNC",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(
    package_name="psync",
    message="psync %(version)s",
    allow_from_autoenv=False,  # PSYNC_VERSION is a likely name for something else
)
@click.pass_context
def psync(context: click.Context) -> int:
    """An asyncio parameter server: ps tasks hold the variables, workers compute gradients.

    \b
    Start a script with 2 ps tasks and 2 workers on this machine:
        psync run train.py --ps 2 --workers 2

    Each option also reads an environment variable: PSYNC_RUN_PS for run --ps.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        return USAGE_ERROR
    return 0


@psync.group()
def checkpoint() -> None:
    """Inspect, compare and export checkpoints.

    \b
    List the checkpoints, inspect the newest, export its model for other programs:
        psync checkpoint ls run/checkpoints
        psync checkpoint inspect run/checkpoints/ckpt-00000012
        psync checkpoint export run/checkpoints/ckpt-00000012 model --only model
    """


@checkpoint.command("ls")
@click.argument("directory", type=A_CHECKPOINT)
def list_command(directory: Path) -> int:
    """List the complete checkpoints in DIRECTORY, the oldest first."""
    from psync.checkpoints.files import checkpoints_in
    from psync.cli.checkpoint_reports import summary

    return _print(summary(path) for _, path in checkpoints_in(directory))


@checkpoint.command("inspect")
@click.argument("path", type=A_CHECKPOINT)
def inspect_command(path: Path) -> int:
    """List the contents of the checkpoint PATH, and verify every byte."""
    from psync.cli.checkpoint_reports import inspection

    load_plugins("psync checkpoint")  # it names rules
    return _print(inspection(path))


@checkpoint.command("diff")
@click.argument("first", type=A_CHECKPOINT)
@click.argument("second", type=A_CHECKPOINT)
def diff_command(first: Path, second: Path) -> int:
    """List the differences between two checkpoints; exit code 1 if there are any."""
    from psync.cli.checkpoint_reports import differences

    found = differences(first, second)
    _print(found)
    return FAILED if found else 0


@checkpoint.command("export")
@click.argument("path", type=A_CHECKPOINT)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--only", "prefixes", multiple=True, metavar="PREFIX")
@click.option("--max-file-mib", type=FROM_1, default=5 << 10)
def export_command(
    path: Path, directory: Path, prefixes: tuple[str, ...], max_file_mib: int
) -> int:
    """Write tensors of the checkpoint PATH to the new DIRECTORY as plain safetensors.

    Each variable is exported whole, however it was sharded. If several files are needed, they come
    with an index that Hugging Face tools read.

    Args:
        prefixes: Export tensors with this name, or with this prefix up to a /. Repeatable.
        max_file_mib: Start another file when one reaches this size.
    """
    from psync.cli.checkpoint_reports import export

    max_file_bytes = max_file_mib << 20
    return _print(export(path, directory, prefixes=prefixes, max_file_bytes=max_file_bytes))


def _print(lines: Iterable[object]) -> int:
    for line in lines:
        click.echo(line)
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


@psync.command()
@choosing_run
@click.option("--once", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--interval", type=click.FloatRange(min=0.2), default=1.0, metavar="SECONDS")
@speaking()
def top(run: str | None, once: bool, as_json: bool, interval: float) -> int:
    """Show what a running program is doing: its workers, ps tasks, steps and events.

    RUN is the id, process id or name of one of your programs on this machine, the path of its run
    file, or the status URL that a program with --metrics-port logs. If several programs are
    running and you name none, they are listed. Ctrl-C ends psync top; the program continues.

    \b
    The current status, for a script:
        psync top --once --json

    Args:
        once: Print one table and exit.
        as_json: Print the status as JSON; needs --once.
        interval: Seconds between updates.
    """
    if as_json and not once:
        raise click.UsageError("--json prints one status: it needs --once")
    # SIGTERM leaves the terminal as it was.
    return run_loop(lambda: _show(run, once or not sys.stdout.isatty(), as_json, interval))


def reader_of(run: str | None) -> StatusReader:
    """Return what asks a run; see ``chosen_run``. It may be a URL, too.

    Raises:
        ConfigurationError: There is no such run, or there are several.
    """
    from psync.status.run_files import chosen_run
    from psync.status.serving import reader_of_run, reader_of_url

    if run is not None and run.startswith(("http://", "https://")):
        return reader_of_url(run)
    return reader_of_run(chosen_run(run))


async def _show(path: str | None, once: bool, as_json: bool, interval: float) -> int:
    from rich.console import Console

    from psync.cli.status_tables import tables_of

    reader = reader_of(path)
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


async def _follow(reader: StatusReader, console: Console, interval: float) -> None:
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


@psync.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.json")
@choosing_run
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, metavar="SECONDS")
@speaking()
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

    Args:
        seconds: How long to record. Ctrl-C ends it earlier.
    """
    if run is not None and _is_run_log(run):
        raise ConfigurationError(
            f"{run} is the log of a run that has ended; only running programs can be traced",
            hint=f"psync dashboard {run} shows it",
        )
    return _print(_lines(out, asyncio.run(_trace(out, run, seconds))))


async def _trace(out: Path, path: str | None, seconds: float) -> Trace:
    from psync.net.shielding import at_most
    from psync.net.trace import tracing

    loop, reader = asyncio.get_running_loop(), reader_of(path)
    status = await reader.read()
    async with tracing(reader.read_spans, status.program, out) as traced:
        loop.add_signal_handler(signal.SIGINT, traced.ended.set)
        click.echo(f"recording {status.program} for {seconds:g} s ...", err=True)
        await at_most(seconds, traced.ended.wait())
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
        f"open it at https://ui.perfetto.dev"
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


@psync.command()
@click.argument("log", type=click.Path(), metavar="RUN.jsonl")
@click.option("--address", default="127.0.0.1:0", metavar="HOST:PORT")
@click.option("--report", type=click.Path(path_type=Path), metavar="RUN.html")
def dashboard(log: str, address: str, report: Path | None) -> int:
    """Show a run log in a web page and print the page's URL. Ctrl-C ends it.

    psync run --log RUN.jsonl and ClusterCoordinator(run_log=…) write run logs. For a running
    program, use psync run --dashboard.

    Args:
        address: Where to serve the page. Port 0 takes a free port.
        report: Write an HTML page that opens offline, and serve nothing.
    """
    from psync.status.dashboard.run_log import FinishedRun, check_path, write_report
    from psync.status.http import check_can_serve

    if report is not None:
        click.echo(write_report(log, check_path(report)))
        return 0
    check_can_serve("dashboard", address)
    with contextlib.closing(FinishedRun(log)) as run:
        asyncio.run(_serve(run, address))
    return 0


async def _serve(run: FinishedRun, address: str) -> None:
    from psync.status.http import serving_dashboard

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ended.set)
    async with serving_dashboard(run, address) as url:
        click.echo(url)
        await ended.wait()


F = TypeVar("F", bound=Callable[..., object])

USAGE_ERROR = 2  # exit code, as everywhere
OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}

PROBE = "/job:probe/task:0"
"""The name under which ``health`` speaks to the task; no cluster has such a job."""


CHIEF_TIMEOUT = "PSYNC_CHIEF_TIMEOUT"


# Options that several commands have.

TLS_FILES = {
    "ca": "Certificate of the authority that signed all tasks' certificates (PEM). Every "
    "connection then uses TLS, and every task presents a certificate.",
    "cert": "Certificate that this task presents.",
    "key": "Private key of that certificate; must be readable only by its owner.",
}

# Some have one name in the environment for all commands: it is how `run` hands them to the tasks.
TASK_OPTIONS = (
    click.option(
        "--plugin",
        "plugins",
        metavar="MODULE",
        multiple=True,
        envvar="PSYNC_PLUGINS",
        help="Module that registers your update rules or schedules. Repeatable.",
    ),
    *(
        click.option(
            f"--tls-{name}-file",
            type=A_FILE,
            envvar=f"PSYNC_TLS_{name.upper()}_FILE",
            help=text,
        )
        for name, text in TLS_FILES.items()
    ),
    click.option(
        "--tls-mutual/--no-tls-mutual",
        default=None,
        envvar="PSYNC_TLS_MUTUAL",
        help="Whether connecting tasks must present a certificate too.  [default: they must]",
    ),
    click.option(
        "--log-level",
        type=click.Choice(("debug", "info", "warning", "error", "critical"), case_sensitive=False),
        envvar="PSYNC_LOG_LEVEL",
        default="info",
        help="Lowest level of psync's own log that is shown.",
    ),
)


def task_options(command: F) -> F:
    """Add the options of every command that starts tasks; the files of TLS come as ``tls_…``."""
    for option in reversed(TASK_OPTIONS):
        command = option(command)
    return command


def tls_environ(tls_mutual: bool | None, **files: str | None) -> dict[str, str]:
    """Return the variables that say what the options say, once it is clear that they can be used.

    Raises:
        ConfigurationError: See ``certificates.load_tls``.
    """
    environ = {f"PSYNC_{name.upper()}": os.path.abspath(at) for name, at in files.items() if at}
    if tls_mutual is not None:
        environ["PSYNC_TLS_MUTUAL"] = "1" if tls_mutual else "0"
    if environ:
        from psync.net.certificates import load_tls

        load_tls(environ)  # here it is one error, and not one on each task
    return environ


# Commands.


@psync.command(options_metavar="[OPTIONS]")
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
@click.option("-m", "--module", is_flag=True)
@click.option("--ps", type=FROM_1, default=1)
@click.option("--workers", type=FROM_1)
@click.option("--hosts", metavar="HOST:N,...")
@click.option("--ssh", default="ssh")
@click.option("--remote-python", metavar="PYTHON")
@click.option("--env", "variables", metavar="NAME", multiple=True)
@click.option("--evaluator", is_flag=True)
@click.option("--max-restarts", type=FROM_0, default=3)
@click.option("--chief-restarts", type=FROM_0, default=0)
@click.option("--quiet", is_flag=True)
@click.option("--on", "engine", type=click.Choice(("ray", "dask")))
@click.option("--address", "engine_address", metavar="HOST:PORT")
@click.option("--gpus-per-worker", type=FROM_0)
@click.option("--metrics-port", type=click.IntRange(0, 65535))
@click.option("--dashboard", is_flag=True)
@click.option("--dashboard-address", metavar="HOST:PORT")
# The variable is the one that the chief reads.
@click.option("--log", "run_log", envvar="PSYNC_RUN_LOG", type=A_FILE, metavar="RUN.jsonl")
@click.option("--report", type=click.Path(path_type=Path), metavar="RUN.html")
@task_options
def run(
    script: str,
    args: tuple[str, ...],
    module: bool,
    ps: int,
    workers: int | None,
    hosts: str | None,
    ssh: str,
    remote_python: str | None,
    variables: tuple[str, ...],
    evaluator: bool,
    max_restarts: int,
    chief_restarts: int,
    quiet: bool,
    engine: str | None,
    engine_address: str | None,
    gpus_per_worker: int | None,
    metrics_port: int | None,
    dashboard: bool,
    dashboard_address: str | None,
    run_log: str | None,
    report: Path | None,
    plugins: tuple[str, ...],
    log_level: str,
    **tls: Any,
) -> int:
    """Run SCRIPT on a new cluster: on this machine, on HOSTS over ssh, on Ray or on Dask.

    The script runs once as the chief and once on each worker; ps tasks do not load it. It ends in
    psync.run(main), which gives each process its role. The exit code is the chief's.

    \b
    Two ps tasks, four workers, arguments for the script after --:
        psync run train.py --ps 2 --workers 4 -- --epochs 10

    \b
    The same on two machines that ssh reaches without a prompt:
        psync run train.py --ps 2 --hosts a:2,b:2 -- --epochs 10

    \b
    A module of a package, as python -m runs it:
        psync run -m research.train --ps 2 --workers 4

    Ctrl-C stops all tasks in order; a second Ctrl-C kills them.

    Args:
        module: Treat SCRIPT as the name of a module, as python -m does: package.module.
        ps: Number of ps tasks.
        workers: Number of workers.  [default: 1; with --hosts, the sum of their numbers]
        hosts: Run ps tasks and workers on these hosts, over ssh: up to N workers on each, and the
            ps tasks spread evenly. The chief runs here. The program must have the same path on
            each host.
        ssh: With --hosts: the ssh command and its options, as for rsync -e.
        remote_python: With --hosts: the Python interpreter on the hosts; psync must be installed
            there.  [default: the path of this one]
        variables: With --hosts: an environment variable to pass to the tasks on the hosts, besides
            PSYNC_… and PYTHONPATH. Repeatable.
        evaluator: Also run the script as an evaluator.
        max_restarts: How many times a minute a worker or ps that dies is restarted. If a worker
            dies more often, the run ends; a ps stays dead, and the chief reports it lost. 0: no
            restarts.
        chief_restarts: How many times in total the chief is restarted when a signal kills it or its
            exit code is neither 0 nor 2. It continues from its newest checkpoint if the script
            restores it.
        quiet: Show only the chief's output.
        engine: Run ps tasks and workers on this engine. The script runs only here, as the chief.
        engine_address: Address of Ray or of Dask's scheduler.  [default: RAY_ADDRESS or
            DASK_SCHEDULER_ADDRESS; otherwise a new one on this machine]
        gpus_per_worker: Number of GPUs for each worker's exclusive use, taken from
            CUDA_VISIBLE_DEVICES or from all GPUs of the machine; ps tasks see none. By default all
            tasks see the GPUs that psync run sees.
        metrics_port: Serve Prometheus metrics on this port of 127.0.0.1 while a coordinator runs; 0
            takes a free port. The chief logs the URL. Each ps and worker serves its own metrics on
            a free port and logs its URL.
        dashboard: Show the run in a web page; its URL is printed (127.0.0.1).
        dashboard_address: Like --dashboard, but at this address. Port 0 takes a free port.
        run_log: Write a run log, for psync dashboard RUN.jsonl.
        report: Write an HTML page that shows the whole run and opens offline.
    """
    from psync.status.http import DEFAULT_ADDRESS, check_can_serve

    shown = {}
    if metrics_port is not None:
        shown["PSYNC_METRICS"] = f"127.0.0.1:{metrics_port}"
        check_can_serve("metrics", shown["PSYNC_METRICS"])
        shown["PSYNC_TASK_METRICS"] = "127.0.0.1:0"
    if dashboard_address or dashboard:
        shown["PSYNC_DASHBOARD"] = dashboard_address or DEFAULT_ADDRESS
        check_can_serve("dashboard", shown["PSYNC_DASHBOARD"])
    with contextlib.ExitStack() as stack:
        if report is not None:
            run_log = stack.enter_context(_reported(report, run_log))
        if run_log:
            shown["PSYNC_RUN_LOG"] = run_log
        environ = {**os.environ, "PSYNC_LOG_LEVEL": log_level, **shown, **tls_environ(**tls)}
        check_settings(environ)
        if engine is None and engine_address is not None:
            raise click.UsageError("--address needs --on ray or --on dask.")
        if engine is not None and (
            evaluator or chief_restarts or quiet or hosts is not None or report is not None
        ):
            raise click.UsageError(
                "--on does not support --evaluator, --chief-restarts, --quiet, --hosts or --report."
            )
        from psync.cli.run import Launcher, plugged, script_command

        command = script_command(script, args, module=module)
        environ = plugged(environ, plugins, script, module=module)
        if engine is not None:
            from psync.integrations.engines import run_on

            run_on(
                engine, command, environ, num_ps=ps, num_workers=workers or 1,
                address=engine_address, gpus_per_worker=gpus_per_worker, max_restarts=max_restarts,
            )  # fmt: skip
        plan = None
        if hosts is not None:
            from psync.integrations.ssh import HostsPlan, parse_hosts

            plan = HostsPlan(
                parse_hosts(hosts), ssh, remote_python or sys.executable, variables, gpus_per_worker
            )
        return Launcher(
            command, num_ps=ps, num_workers=workers or (1 if plan is None else len(plan.places)),
            hosts=plan, evaluator=evaluator, max_restarts=max_restarts,
            chief_restarts=chief_restarts, quiet=quiet, gpus_per_worker=gpus_per_worker,
            environ=environ,
        ).launch()  # fmt: skip


@contextlib.contextmanager
def _reported(report: Path, run_log: str | None) -> Iterator[str]:
    """Return a context that writes a report at its end; it yields the path of the run log.

    Raises:
        ConfigurationError: The report cannot be written there.
    """
    from psync.status.dashboard.run_log import check_path, write_report

    check_path(report)
    with tempfile.TemporaryDirectory(prefix="psync-report-") as folder:
        log = run_log or os.path.join(folder, "run.jsonl")
        yield log
        try:
            if not os.path.exists(log):
                raise ConfigurationError("no coordinator has run")
            written = write_report(log, report)
        except PsyncError as exc:  # never worth the exit code of a run
            click.echo(f"psync: no report was written: {exc}", err=True)
        else:
            why = "" if written == report else f", for {report} cannot be written"
            click.echo(f"psync: the report of the run is in {written}{why}", err=True)


@psync.command()
@click.argument("workers", type=FROM_1)
@choosing_run
def scale(workers: int, run: str | None) -> int:
    """Change the number of workers of a program that psync run started to WORKERS.

    New workers are started and join the coordinator. If there are too many, the workers with the
    highest indices finish their closure and leave. RUN is the id, process id or name of one of your
    psync runs on this machine, or the path of its file. If several are running and you name none,
    they are listed.

    \b
    Eight workers for the program in the other terminal:
        psync scale 8
    """
    from psync.cli.run import ask_to_scale

    click.echo(ask_to_scale(run, workers))
    return 0


@psync.command(options_metavar="[OPTIONS]")
@click.argument("chief", metavar="HOST:PORT")
@click.argument("script", required=False, metavar="[SCRIPT]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
@click.option("-m", "--module", is_flag=True)
@click.option("--listen", metavar="HOST[:PORT]", default="")
@click.option(
    "--chief-timeout", metavar="SECONDS", envvar=["PSYNC_JOIN_CHIEF_TIMEOUT", CHIEF_TIMEOUT]
)
@task_options
@speaking()
def join(
    chief: str,
    script: str | None,
    args: tuple[str, ...],
    module: bool,
    listen: str,
    chief_timeout: str | None,
    log_level: str,
    **settings: Any,
) -> int:
    """Join the running cluster whose chief listens at HOST:PORT, as another worker.

    The cluster needs no preparation: the chief gives the worker an index, and the coordinator adds
    it. On SIGTERM the worker finishes its closure, leaves and exits with code 0. It also exits with
    code 0 when the program ends. The cluster's secret comes from PSYNC_SECRET or
    PSYNC_SECRET_FILE. If the program's steps use classes of its script, name the SCRIPT here too;
    it ends in psync.run(main), as on every task.

    \b
    One more worker for the program whose chief is at a:2222:
        PSYNC_SECRET_FILE=~/cluster.secret psync join a:2222

    Args:
        module: Treat SCRIPT as the name of a module, as python -m does: package.module.
        listen: Address where this worker listens.  [default: a free port on the interface towards
            the chief]
        chief_timeout: How long to wait for a chief: before the first one connects, and after the
            last one is gone. none: forever.  [default: 3600 before, 600 after]
    """
    _set_up(log_level=log_level, **settings)
    if script is not None:
        from psync.cli.run import script_command

        command = script_command(script, args, module=module)
        os.environ.update(PSYNC_JOIN=chief, PSYNC_JOIN_LISTEN=listen, PSYNC_LOG_LEVEL=log_level)
        if chief_timeout:
            os.environ["PSYNC_CHIEF_TIMEOUT"] = chief_timeout
        os.execv(sys.executable, command)
    from psync.launch import tasks

    load_plugins(tasks.JOINING)
    joining = partial(tasks.join, chief, listen, chief_timeout=chief_timeout)
    return run_loop(joining, terminated_code=0)


@psync.command()
@click.option(
    "--insecure",
    is_flag=True,
    envvar=["PSYNC_TASK_INSECURE", "PSYNC_SERVE_INSECURE"],  # the latter until 0.2
)
@click.option(
    "--chief-timeout",
    metavar="SECONDS",
    envvar=["PSYNC_TASK_CHIEF_TIMEOUT", "PSYNC_SERVE_CHIEF_TIMEOUT", CHIEF_TIMEOUT],
)
@click.option("--metrics", metavar="HOST:PORT", envvar="PSYNC_TASK_METRICS")
@task_options
def task(
    insecure: bool,
    chief_timeout: str | None,
    metrics: str | None,
    **settings: Any,
) -> int:
    """Serve as the ps or worker that TF_CONFIG or a scheduler assigns to this process.

    It loads plugins but no script: workers get their steps from the chief. It ends when the chief
    ends it, on SIGTERM, or with code 1 when no chief connects in time. The cluster's secret comes
    from PSYNC_SECRET or PSYNC_SECRET_FILE.

    \b
    The first ps of a cluster of two machines:
        export TF_CONFIG='{"cluster": {"chief": ["a:2222"], "ps": ["b:2222"],
            "worker": ["a:2223"]}, "task": {"type": "ps", "index": 0}}'
        PSYNC_SECRET_FILE=~/cluster.secret psync task

    Args:
        insecure: Serve without a secret: anyone who can reach the address can connect.
        chief_timeout: How long to wait for a chief: before the first one connects, and after the
            last one is gone. none: forever.  [default: 3600 before, 600 after; none under a
            launcher]
        metrics: Serve this task's Prometheus metrics at this address. Port 0 takes a free port,
            which the log shows.
    """
    from psync.launch import tasks

    _set_up(**settings)
    if metrics:
        os.environ["PSYNC_TASK_METRICS"] = metrics
    own = tasks.own_task(None)
    watch_launcher()
    load_plugins(own.name)
    serving = partial(
        tasks.serve_as, own, insecure=insecure, shared=False, chief_timeout=chief_timeout
    )
    return run_loop(serving, terminated_code=own.terminated_code)


def _set_up(plugins: Sequence[str], log_level: str, **tls: Any) -> None:
    """Set this process up as a task; its plugins may lie here, as for `python -m psync task`."""
    os.environ.update({**tls_environ(**tls), **plugins_environ(plugins, {})})
    if plugins:
        sys.path.insert(0, "")
    configure_logging(log_level)


@psync.command()
@click.option("--timeout", type=ABOVE_0, default=5.0, metavar="SECONDS")
@speaking()
def health(timeout: float) -> int:
    """Check whether the ps or worker of this environment answers.

    The task is found as psync task finds it (TF_CONFIG, SLURM, Kubernetes) and contacted with the
    cluster's secret and TLS. An answer shows that the task's event loop runs. A step that computes
    on the loop delays the answer, so for workers use this as a readiness probe, not as a liveness
    probe.

    \b
    Exit codes:
        0  the task answers
        1  it does not: it is not listening yet, is busy, or hangs
        2  wrong configuration, as for psync task; or the task is a chief or evaluator, which
           does not listen

    Args:
        timeout: How long to wait for the answer.
    """
    from psync.cluster import ENQUIRER
    from psync.launch.tasks import own_task
    from psync.net.endpoint import Endpoint
    from psync.net.environment import platform_of

    own = own_task(None)
    if own.job not in ("ps", "worker"):
        raise ConfigurationError(
            f"{own.name} does not listen: only ps and worker tasks answer",
            hint="psync top --once shows what a chief does",
        )
    platform = platform_of(own.resolver, own.address, warn=lambda text: None)

    async def knock() -> None:
        endpoint = Endpoint(platform, PROBE, ENQUIRER, {})  # which is fenced nowhere
        try:
            async with asyncio.timeout(timeout):
                await endpoint.connect(own.address, own.name)
        finally:
            await endpoint.close()

    try:
        asyncio.run(knock())
    except (ConfigurationError, AuthenticationError, VersionMismatch):
        raise
    except (PsyncError, TimeoutError) as error:
        why = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error
        click.echo(f"psync: {own.name} at {own.address}: {why}", err=True)
        return FAILED
    click.echo(f"{own.name} answers")
    return 0


@psync.group()
def certs() -> None:
    """Create certificates for TLS between tasks.

    \b
    Once, for all hosts of a cluster; then copy the files to each host:
        psync certs new --out certs --hosts ps0.example.org,10.0.0.7
    """


@certs.command("new")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("certs"))
@click.option("--hosts", multiple=True, metavar="HOST[,HOST…]")
@click.option("--days", type=click.IntRange(min=1, max=36_500), default=365)
def new(out: Path, hosts: tuple[str, ...], days: int) -> int:
    """Create a certificate authority, and one certificate and key for all tasks.

    The authority's private key is discarded, so no further certificates can be made that these
    tasks would trust. To add hosts, create all files again. Needs: pip install 'psync[tls]'.

    Args:
        out: Folder for the files; it must not exist yet.
        hosts: Names and IP addresses of all hosts where tasks listen, as in the cluster
            description. This machine's name, localhost, 127.0.0.1 and ::1 are always included.
        days: How long the certificates are valid.
    """
    from psync.net.certificates import mint, own_hosts, write

    named = [host.strip().strip("[]") for text in hosts for host in text.split(",")]
    every = list(dict.fromkeys([*own_hosts(), *filter(None, named)]))
    variables = write(mint(every, days), out.absolute())
    click.echo(f"valid for {days} days, for {', '.join(every)}; on each host, for each task:")
    for name, path in variables.items():
        click.echo(f"export {name}={path}")
    return 0


serve = copy.copy(task)  # its name until 0.2
serve.hidden = True
psync.add_command(serve, "serve")
psync.add_command(launch)
psync.add_command(bench)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        args: What follows the program's name; by default ``sys.argv[1:]``.
    """
    fill_standard_streams()
    try:
        code: int = psync.main(args, prog_name="psync", standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, click.BadParameter):
            error.param_hint = _variable_of(error) or error.param_hint
        of_run = isinstance(error, click.NoSuchOption) and error.ctx and error.ctx.command is run
        hint = " Options of the script go after --." if of_run else ""  # click cannot know that
        code = _fail(error.format_message() + hint)
    except ConfigurationError as error:
        code = _fail(str(error))
    except TrainingEnded as error:
        code = _fail(str(error), FAILED)
    except CheckpointError as error:
        code = _fail(" ".join(str(error).split()), FAILED)
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        code = _fail(f"the output cannot be written: {error.strerror}", FAILED)
    except (KeyboardInterrupt, click.Abort):
        code = 130  # 128 + SIGINT, before anything ran that had to be stopped
    _let_go_of_broken_pipes()
    return code


def _variable_of(error: click.BadParameter) -> str | None:
    """Return the variable that holds the wrong value; None: it is from the command line."""
    context, option = error.ctx, error.param
    if context is None or option is None or option.name is None:
        return None
    if context.get_parameter_source(option.name) is not ParameterSource.ENVIRONMENT:
        return None
    names = option.envvar or f"{context.auto_envvar_prefix}_{option.name.upper()}"
    return next(filter(os.environ.get, [names] if isinstance(names, str) else names), None)


def _fail(message: str, code: int = USAGE_ERROR) -> int:
    with contextlib.suppress(OSError):
        click.echo(f"psync: error: {message}", err=True)
    return code


def _let_go_of_broken_pipes() -> None:
    """Keep Python from flushing again, failing again, and changing the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # it was closed before we were started
            continue
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
