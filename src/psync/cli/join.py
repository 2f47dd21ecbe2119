"""``psync join``: another worker for a cluster that runs, which knows the chief's address alone."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from psync.cli.certs import tls_environ, tls_options
from psync.cli.options import log_level_option, module_option, plugin_option
from psync.errors import ConfigurationError, TrainingEnded


@click.command(options_metavar="[OPTIONS]")
@click.argument("chief", metavar="HOST:PORT")
@click.argument("script", required=False, metavar="[SCRIPT]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
@module_option
@click.option(
    "--listen",
    metavar="HOST[:PORT]",
    default="",
    help="Address where this worker listens.  [default: a free port on the interface towards the "
    "chief]",
)
@click.option(
    "--chief-timeout",
    metavar="SECONDS",
    envvar=["PSYNC_JOIN_CHIEF_TIMEOUT", "PSYNC_CHIEF_TIMEOUT"],
    help="How long to wait for a chief: before the first one connects, and after the last one is "
    "gone. none: forever.  [default: 3600 before, 600 after]",
)
@plugin_option
@tls_options
@log_level_option
def join(
    chief: str,
    script: str | None,
    args: tuple[str, ...],
    module: bool,
    listen: str,
    chief_timeout: str | None,
    plugins: tuple[str, ...],
    log_level: str,
    **tls: Any,
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
    """
    from psync.launch.plugins import plugins_environ
    from psync.launch.task_output import configure_logging

    os.environ.update({**tls_environ(**tls), **plugins_environ(plugins, {})})
    configure_logging(log_level)
    if script is not None:
        from psync.cli.scripts import script_command

        command = script_command(script, args, module=module)
        os.environ.update(PSYNC_JOIN=chief, PSYNC_JOIN_LISTEN=listen, PSYNC_LOG_LEVEL=log_level)
        if chief_timeout:
            os.environ["PSYNC_CHIEF_TIMEOUT"] = chief_timeout
        os.execv(sys.executable, command)
    from psync.launch.tasks import SETUP_ERRORS, join_forever

    if plugins:  # what lies here, as for `psync task`
        sys.path.insert(0, "")
    try:
        return join_forever(chief, listen, chief_timeout=chief_timeout)
    except SETUP_ERRORS as error:
        raise ConfigurationError(error.message, hint=error.hint) from error
    except TrainingEnded as error:
        click.echo(f"psync: error: {error}", err=True)
        return 1
