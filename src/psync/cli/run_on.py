"""``psync run --on ray`` and ``--on dask``: the script as the chief, its tasks on an engine.

There is no launcher that stays: this process becomes the script's. ``psync.run`` finds the engine
in ``PSYNC_ON``, opens a cluster on it, and runs the program inside.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NoReturn

from psync.cli.run import script_command
from psync.errors import ConfigurationError
from psync.launch.plugins import check_found, plugins_environ

ENGINES = {"ray": "ray", "dask": "distributed"}
"""The package that each of them needs."""


def run_on(
    engine: str,
    script: str,
    args: Sequence[str],
    *,
    address: str | None,
    num_ps: int,
    num_workers: int,
    max_restarts: int,
    gpus_per_worker: int | None,
    plugins: Sequence[str],
    environ: Mapping[str, str],
) -> NoReturn:
    """Run a script as the chief of a cluster on an engine, in place of this process.

    Args:
        engine: One of ``ENGINES``.
        script: A Python file, or a directory with a ``__main__.py``.
        args: What the script finds in ``sys.argv``.
        address: Where the engine is; None: as its own variables say.
        num_ps: Number of ps tasks.
        num_workers: Number of workers.
        max_restarts: How often a minute each of them may be started again.
        gpus_per_worker: GPUs that each worker gets; only on Ray.
        plugins: Modules that all tasks load.
        environ: What the script inherits.

    Raises:
        ConfigurationError: The script is missing or not one, the engine's package is not installed,
            or a plugin is not found here.
    """
    command = script_command(script, args)
    if find_spec(ENGINES[engine]) is None:
        raise ConfigurationError(
            f"--on {engine} needs the package {ENGINES[engine]}, which is not installed here",
            hint=f"pip install 'psync[{engine}]'",
        )
    variables = {**environ, **plugins_environ(plugins, environ)}
    if plugins:
        directory = script if os.path.isdir(script) else os.path.dirname(script)
        places = [os.path.abspath(directory), os.getcwd()]
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
