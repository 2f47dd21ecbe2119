"""``psync run --on ray`` and ``--on dask``: the script as the chief, its tasks on an engine.

There is no launcher that stays: this process becomes the script's. ``psync.run`` finds the engine
in ``PSYNC_ON``, opens a cluster on it, and runs the program inside.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

import click

from psync.cli.scripts import directory_of, script_command
from psync.errors import ConfigurationError
from psync.launch.plugins import check_found, plugins_environ

ENGINES = {"ray": "ray", "dask": "distributed"}
"""The package that each of them needs."""


_C = TypeVar("_C", bound=Callable[..., Any])


def engine_options(command: _C) -> _C:
    """Give a command ``--on`` and ``--address``."""
    command = click.option(
        "--address",
        "engine_address",
        metavar="HOST:PORT",
        help="Address of Ray or of Dask's scheduler.  [default: RAY_ADDRESS or "
        "DASK_SCHEDULER_ADDRESS; otherwise a new one on this machine]",
    )(command)
    return click.option(
        "--on",
        "engine",
        type=click.Choice(tuple(ENGINES)),
        help="Run ps tasks and workers on this engine. The script runs only here, as the chief.",
    )(command)


def run_on(
    engine: str | None,
    script: str,
    args: Sequence[str],
    *,
    module: bool = False,
    address: str | None,
    num_ps: int,
    num_workers: int,
    max_restarts: int,
    gpus_per_worker: int | None,
    plugins: Sequence[str],
    environ: Mapping[str, str],
    refused: bool | int,
) -> NoReturn:
    """Run a script as the chief of a cluster on an engine, in place of this process.

    Args:
        engine: One of ``ENGINES``; None: it was not said.
        script: A Python file, or a directory with a ``__main__.py``; or the name of a module.
        args: What the script finds in ``sys.argv``.
        module: Whether it is a module.
        address: Where the engine is; None: as its own variables say.
        num_ps: Number of ps tasks.
        num_workers: Number of workers.
        max_restarts: How often a minute each of them may be started again.
        gpus_per_worker: GPUs that each worker gets; only on Ray.
        plugins: Modules that all tasks load.
        environ: What the script inherits.
        refused: Whether an option was given that only a launcher has.

    Raises:
        UsageError: Of click: the options do not go together.
        ConfigurationError: The script is missing or not one, the engine's package is not installed,
            or a plugin is not found here.
    """
    if engine is None:
        raise click.UsageError("--address needs --on ray or --on dask.")
    if refused:
        raise click.UsageError(
            "--on does not support --evaluator, --chief-restarts, --quiet, --hosts or --report."
        )
    command = script_command(script, args, module=module)
    if find_spec(ENGINES[engine]) is None:
        raise ConfigurationError(
            f"--on {engine} needs the package {ENGINES[engine]}, which is not installed here",
            hint=f"pip install 'psync[{engine}]'",
        )
    variables = {**environ, **plugins_environ(plugins, environ)}
    if plugins:
        places = [directory_of(script, module=module), os.getcwd()]
        check_found(plugins, [*places, *sys.path])
        python_path = [*places, *filter(None, [environ.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(python_path)
    variables["PSYNC_ON"] = json.dumps(
        {
            "engine": engine,
            "num_ps": num_ps,
            "num_workers": num_workers,
            "address": address,
            "gpus_per_worker": gpus_per_worker,
            "max_restarts": max_restarts,
        }
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, variables)
