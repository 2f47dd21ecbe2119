"""Options that several commands have: level of the log, plugins. ``certs`` has those of TLS."""

from __future__ import annotations

from collections.abc import Callable

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

plugin_option = click.option(
    "--plugin",
    "plugins",
    metavar="MODULE",
    multiple=True,
    envvar="PSYNC_PLUGINS",  # as for the level: it is how `run` hands them to the tasks
    help="A module with update rules or schedules of your own; several times for several.",
)


def choosing_run(command: Callable[..., int]) -> Callable[..., int]:
    """Let a command, which takes ``run``, be told a run by --run or by its last argument."""

    def keep(context: click.Context, _: click.Parameter, named: str | None) -> None:
        if named is not None and context.params.get("run") is not None:
            raise click.UsageError("the run is given twice: once is enough")
        context.params["run"] = named or context.params.get("run")

    option = click.option(
        "--run", "named", callback=keep, expose_value=False, metavar="RUN",
        help="Which program, if several run: id, process or name. Without it they are listed.",
    )  # fmt: skip
    return click.argument("run", required=False, metavar="[RUN]", is_eager=True)(option(command))
