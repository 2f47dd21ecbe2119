"""Options that several commands have: level of the log, plugins. ``certs`` has those of TLS."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.core import ParameterSource

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

log_level_option = click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    # One name for all commands, for it is also how `run` hands the level to the tasks.
    envvar="PSYNC_LOG_LEVEL",
    default="info",
    help="Lowest level of psync's own log that is shown.",
)

module_option = click.option(
    "-m",
    "--module",
    is_flag=True,
    help="Treat SCRIPT as the name of a module, as python -m does: package.module.",
)

plugin_option = click.option(
    "--plugin",
    "plugins",
    metavar="MODULE",
    multiple=True,
    envvar="PSYNC_PLUGINS",  # as for the level: it is how `run` hands them to the tasks
    help="Module that registers your update rules or schedules. Repeatable.",
)


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
