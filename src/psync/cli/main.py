"""The command line: ``psync run``, ``scale``, ``join``, ``top``, ``task`` and others.

Every option also reads an environment variable, ``PSYNC_<COMMAND>_<OPTION>``. Wrong usage is one
line on stderr and exit code 2. Imports are late: the launcher has its tasks running before it could
have imported what they need, and ``--help`` needs none of it.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from psync.cli.certs import certs, tls_environ, tls_options
from psync.cli.checkpoint import checkpoint
from psync.cli.dashboard import dashboard as dashboard_command
from psync.cli.health import health
from psync.cli.join import join
from psync.cli.launch.commands import launch
from psync.cli.options import log_level_option, module_option, plugin_option
from psync.cli.run_on import engine_options, run_on
from psync.cli.scale import scale
from psync.cli.top import top
from psync.cli.trace import trace
from psync.errors import ConfigurationError, PsyncError, TrainingEnded
from psync.launch.task_output import configure_logging, fill_standard_streams

USAGE_ERROR = 2  # exit code, as everywhere
FAILED = 1
OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}


@click.group(
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


@psync.command(options_metavar="[OPTIONS]")
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
@module_option
@click.option("--ps", type=click.IntRange(min=1), default=1, help="Number of ps tasks.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of workers.  [default: 1; with --hosts, as many as they have room for]",
)
@click.option(
    "--hosts",
    metavar="HOST:N,...",
    help="Run ps tasks and workers on these hosts, over ssh: up to N workers on each, ps tasks on "
    "all in turn. The chief runs here. The program lies under the same path there.",
)
@click.option("--ssh", default="ssh", help="With --hosts: the command, and options, as rsync -e.")
@click.option(
    "--remote-python",
    metavar="PYTHON",
    help="With --hosts: the interpreter there, which has psync.  [default: the path of this one]",
)
@click.option(
    "--env",
    "variables",
    metavar="NAME",
    multiple=True,
    help="With --hosts: a variable that tasks there get from here, besides PSYNC_… and PYTHONPATH.",
)
@click.option("--evaluator", is_flag=True, help="Run the script as an evaluator, too.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    help="How often a worker or ps that died is started again within a minute. One more death of a "
    "worker ends the run, a ps is left for the chief to miss. 0: neither is started again.",
)
@click.option(
    "--chief-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="How often, in all, the chief is started again if a signal killed it or its exit code is "
    "neither 0 nor 2. It goes on from its newest checkpoint if the script restores that.",
)
@click.option("--quiet", is_flag=True, help="Show the chief's output only.")
@engine_options
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(min=0),
    help="GPUs that each worker sees and no other one does, of those in CUDA_VISIBLE_DEVICES or of "
    "this machine; ps tasks see none. Without it all tasks see what psync run does.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve metrics for Prometheus on this port of 127.0.0.1, while a coordinator runs. 0: a "
    "free one; the chief's log has the URL. Each ps and worker serves its own on a free port; see "
    "its log.",
)
@click.option(
    "--dashboard", is_flag=True, help="Show the run in a web page; its URL is printed (127.0.0.1)."
)
@click.option(
    "--dashboard-address",
    metavar="HOST:PORT",
    help="The same, there. Port 0: a free one.",
)
@click.option(
    "--log",
    "run_log",
    envvar="PSYNC_RUN_LOG",  # the same that the chief reads
    type=click.Path(dir_okay=False),
    metavar="RUN.jsonl",
    help="Write the run down, for psync dashboard RUN.jsonl.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="RUN.html",
    help="Write a page that shows the whole run and opens offline.",
)
@plugin_option
@tls_options
@log_level_option
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
    """Run SCRIPT on a cluster of its own: on this machine, on some HOSTS, on Ray or on Dask.

    The script runs once as the chief and once on each worker. It ends in psync.run(main), which
    tells each process what it is. ps tasks do not load it. The exit code is the chief's.

    \b
    Two ps tasks, four workers, arguments for the script after --:
        psync run train.py --ps 2 --workers 4 -- --epochs 10

    \b
    The same on two machines that ssh reaches without a question:
        psync run train.py --ps 2 --hosts a:2,b:2 -- --epochs 10

    \b
    A module of a package, as python -m runs it:
        psync run -m research.train --ps 2 --workers 4

    Ctrl-C stops all tasks in order, a second one kills them.
    """
    shown = {}
    if metrics_port is not None:
        from psync.status.http import check_metrics

        check_metrics()
        shown["PSYNC_METRICS"] = f"127.0.0.1:{metrics_port}"
        shown["PSYNC_TASK_METRICS"] = "127.0.0.1:0"
    if dashboard_address or dashboard:
        from psync.status.dashboard.server import DEFAULT_ADDRESS, check_can_serve

        shown["PSYNC_DASHBOARD"] = dashboard_address or DEFAULT_ADDRESS
        check_can_serve(shown["PSYNC_DASHBOARD"])
    with contextlib.ExitStack() as stack:
        if report is not None:
            run_log = stack.enter_context(_reported(report, run_log))
        if run_log:
            shown["PSYNC_RUN_LOG"] = run_log
        environ = {**os.environ, "PSYNC_LOG_LEVEL": log_level, **shown, **tls_environ(**tls)}
        if engine is not None or engine_address is not None:
            run_on(
                engine, script, args, module=module, address=engine_address,
                num_ps=ps, num_workers=workers or 1, max_restarts=max_restarts,
                gpus_per_worker=gpus_per_worker, plugins=plugins, environ=environ,
                refused=evaluator or chief_restarts or quiet or bool(hosts or report),
            )  # fmt: skip
        from psync.cli.run import launch
        from psync.launch.hosts import HostsPlan, parse_hosts

        plan = None
        if hosts is not None:
            plan = HostsPlan(
                parse_hosts(hosts), ssh, remote_python or sys.executable, variables, gpus_per_worker
            )
        return launch(
            script, args, module=module, num_ps=ps,
            num_workers=workers or (1 if plan is None else len(plan.places)),
            hosts=plan, evaluator=evaluator, max_restarts=max_restarts,
            chief_restarts=chief_restarts, quiet=quiet, plugins=plugins,
            gpus_per_worker=gpus_per_worker, environ=environ,
        )  # fmt: skip


@contextlib.contextmanager
def _reported(report: Path, run_log: str | None) -> Iterator[str]:
    """Return a context that writes a report at its end; it yields the path of the run log.

    Raises:
        ConfigurationError: The report cannot be written there.
    """
    from psync.status.dashboard.report_page import check_path, write_report

    check_path(report)
    with tempfile.TemporaryDirectory(prefix="psync-report-") as folder:
        log = run_log or os.path.join(folder, "run.jsonl")
        yield log
        try:
            if not os.path.exists(log):
                raise ConfigurationError("no coordinator has run")
            written = write_report(log, report)
        except PsyncError as exc:  # never worth the exit code of a run
            click.echo(f"psync: there is no report: {exc}", err=True)
        else:
            why = "" if written == report else f", for {report} cannot be written"
            click.echo(f"psync: the report of the run is in {written}{why}", err=True)


@psync.group()
def bench() -> None:
    """Measure psync on this machine."""


@bench.command("sync-async")
@click.option("--quick", is_flag=True, help="Fewer and shorter runs: less than a minute in all.")
@click.option(
    "--parts",
    multiple=True,
    type=click.Choice(["processes", "virtual"]),
    help="What to run, once for each part; by default everything.",
)
@click.option(
    "--workers",
    multiple=True,
    type=click.IntRange(min=2),
    default=(2, 4),
    help="Number of worker processes, once for each cluster.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out"),
    help="Folder of the JSON file and the plots.",
)
def sync_async(
    quick: bool,
    parts: tuple[str, ...],
    workers: tuple[int, ...],
    out: Path,
) -> int:
    """Compare synchronous with asynchronous training.

    Asynchronous, of bounded staleness, synchronous, and with backup workers: gradients per
    second, staleness, drops, and the time until a network reads digits. In worker processes,
    with and without a slow one; and with 100 workers in virtual time.

    \b
    A quick look, and everything:
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
    help="A Python that has TensorFlow, torch or Ray, which then run beside psync; "
    "make bench-peers makes one.",
)
@click.option(
    "--rows", metavar="TEXT", default="", help="Only rows with this in their name, as: synchronous."
)
@click.option(
    "--only",
    type=click.Choice(["psync"]),
    help="Leave out peers and floors.",
)
@click.option(
    "--against",
    metavar="CHECKOUT",
    type=click.Path(path_type=Path),
    help="Another checkout of psync, which is measured in the same turns.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep the rows that peers.json in the folder has, and measure the others.",
)
@click.option(
    "--scripts",
    type=click.Path(path_type=Path),
    default=Path("benchmarks/peers"),
    help="The programs of peers and floors; they come with psync's sources.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out"),
    help="Folder of peers.json and peers.md.",
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
    """Measure psync beside other systems and beside what the machine can do.

    Closures, pulls, pushes, rows of tables, synchronous and asynchronous training: each on 2 ps and
    2 workers, in processes of their own, in turns. Prints a table in Markdown: medians, lowest and
    highest in brackets, and how many times as fast psync is.

    \b
    psync and bare sockets; and every peer that ~/peers has:
        psync bench peers --quick
        psync bench peers --peers ~/peers/bin/python

    Each row is written when it has been measured. After Ctrl-C, go on with --resume.

    \b
    This checkout beside another one:
        psync bench peers --only psync --against ../psync-before
    """
    from psync.bench import peers as benchmark

    return benchmark.run(
        python, scripts, out, quick=quick, rows=rows, only_psync=only is not None,
        against=against, resume=resume,
    )  # fmt: skip


@psync.command()
@click.option(
    "--insecure",
    is_flag=True,
    envvar=["PSYNC_TASK_INSECURE", "PSYNC_SERVE_INSECURE"],  # the latter until 0.2
    help="Serve without a secret, to everybody who can reach the address.",
)
@click.option(
    "--chief-timeout",
    metavar="SECONDS",
    envvar=["PSYNC_TASK_CHIEF_TIMEOUT", "PSYNC_SERVE_CHIEF_TIMEOUT", "PSYNC_CHIEF_TIMEOUT"],
    help="How long to be without a chief, before the first one and after the last one has gone; "
    "none: for ever.  [default: 3600 before, 600 after; none under a launcher]",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    envvar="PSYNC_TASK_METRICS",
    help="Serve what this task counts for Prometheus, there. Port 0: a free one; the log has it.",
)
@plugin_option
@tls_options
@log_level_option
def task(
    insecure: bool,
    chief_timeout: str | None,
    metrics: str | None,
    plugins: tuple[str, ...],
    log_level: str,
    **tls: Any,
) -> int:
    """Serve as the ps or the worker that TF_CONFIG, or a scheduler, says this process is.

    It loads no script, only plugins: a worker gets its steps from the chief. Ends when the chief
    says so, on SIGTERM, or, with code 1, when no chief comes. The cluster's secret comes from
    PSYNC_SECRET or PSYNC_SECRET_FILE.

    \b
    The first ps of a cluster of two machines:
        export TF_CONFIG='{"cluster": {"chief": ["a:2222"], "ps": ["b:2222"],
            "worker": ["a:2223"]}, "task": {"type": "ps", "index": 0}}'
        PSYNC_SECRET_FILE=~/cluster.secret psync task
    """
    from psync.launch import tasks
    from psync.launch.plugins import plugins_environ

    os.environ.update({**tls_environ(**tls), **plugins_environ(plugins, {})})
    if metrics:
        os.environ["PSYNC_TASK_METRICS"] = metrics
    if plugins:  # what lies here, as for `python -m psync task`
        sys.path.insert(0, "")
    configure_logging(log_level)
    try:
        return tasks.serve_forever(insecure=insecure, chief_timeout=chief_timeout)
    except TrainingEnded as error:
        return _fail(str(error), FAILED)


serve = copy.copy(task)  # its name until 0.2
serve.hidden = True
psync.add_command(serve, "serve")
psync.add_command(top)
psync.add_command(trace)
psync.add_command(scale)
psync.add_command(join)
psync.add_command(health)
psync.add_command(launch)
psync.add_command(dashboard_command)
psync.add_command(checkpoint)
psync.add_command(certs)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        args: What follows the program's name; by default ``sys.argv[1:]``.
    """
    fill_standard_streams()
    try:
        code: int = psync.main(args, prog_name="psync", standalone_mode=False)
    except click.ClickException as error:
        code = _fail(error.format_message() + _hint(error))
    except ConfigurationError as error:
        code = _fail(str(error))
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        code = _fail(f"the output cannot be written: {error.strerror}", FAILED)
    except (KeyboardInterrupt, click.Abort):
        code = 130  # 128 + SIGINT, before anything ran that had to be stopped
    _let_go_of_broken_pipes()
    return code


def _fail(message: str, code: int = USAGE_ERROR) -> int:
    with contextlib.suppress(OSError):
        click.echo(f"psync: error: {message}", err=True)
    return code


def _hint(error: click.ClickException) -> str:
    """Say what is the likely mistake where click cannot know."""
    if isinstance(error, click.NoSuchOption) and error.ctx and error.ctx.command is run:
        return " Options of the script go after --."
    return ""


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
