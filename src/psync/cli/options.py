"""Options that several commands have: level of the log, plugins. ``certs`` has those of TLS."""

from __future__ import annotations

import click

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
    help="SCRIPT is the name of a module, as for python -m: package.module.",
)

plugin_option = click.option(
    "--plugin",
    "plugins",
    metavar="MODULE",
    multiple=True,
    envvar="PSYNC_PLUGINS",  # as for the level: it is how `run` hands them to the tasks
    help="A module with update rules or schedules of your own; several times for several.",
)
