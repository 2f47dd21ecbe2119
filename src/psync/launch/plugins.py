"""Plugins: modules that each task loads when its process starts, and that register rules there.

What they register (``psync.rules``, ``psync.schedules.register``) is then known by its name; no
code travels. Named by ``--plugin``, ``LocalCluster(plugins=…)`` and ``PSYNC_PLUGINS``, or as entry
points of installed packages::

    [project.entry-points."psync.plugins"]
    mypackage = "mypackage.rules"
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder

from psync.errors import ConfigurationError, PsyncError, check_fits

GROUP = "psync.plugins"
"""Of entry points."""

VARIABLE = "PSYNC_PLUGINS"
"""Names of modules, with spaces between them: how a launcher hands them to its tasks."""


def plugins_environ(plugins: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for tasks that are to load plugins, beside those named already.

    Raises:
        ConfigurationError: One is no name of a module.
    """
    is_list = not isinstance(plugins, str)
    check_fits(is_list, "plugins: expected a list of modules", plugins, f"plugins=[{plugins!r}]")
    names = list(plugins)
    for name in names:
        fits = isinstance(name, str) and all(map(str.isidentifier, name.split(".")))
        check_fits(fits, "plugins: expected names of modules, such as mypackage.rules", name)
    if not names:
        return {}
    return {VARIABLE: " ".join(dict.fromkeys([*environ.get(VARIABLE, "").split(), *names]))}


def check_found(plugins: Iterable[str], places: Sequence[str]) -> None:
    """Check that plugins are where tasks will look; nothing is loaded.

    Raises:
        ConfigurationError: One is not.
    """
    for name in plugins:
        top = name.partition(".")[0]
        if PathFinder.find_spec(top, list(places)) is None:
            raise ConfigurationError(
                f"plugin {name!r} cannot be imported: there is no module or package {top!r}",
                hint=f"searched in {', '.join(map(repr, places))}",
            )


def load_plugins(task: str, environ: Mapping[str, str] = os.environ) -> None:
    """Load all plugins: those that the environment names, then entry points. Again is nothing.

    Args:
        task: Name of the task that this process is, for messages.
        environ: Default: the environment of this process.

    Raises:
        ConfigurationError: One cannot be imported; names it, the task and where Python looks.
    """
    from importlib import metadata  # 10 ms, which the launcher does not need

    for name in environ.get(VARIABLE, "").split():
        _load(f"plugin {name!r}", task, partial(importlib.import_module, name))
    for entry in metadata.entry_points(group=GROUP):
        package = "" if entry.dist is None else f" of {entry.dist.name}"
        _load(f"plugin {entry.name!r}{package} ({entry.value})", task, entry.load)


def _load(what: str, task: str, load: Callable[[], object]) -> None:
    try:
        load()
    except (Exception, SystemExit) as exc:
        text = exc.message if isinstance(exc, PsyncError) else f"{type(exc).__name__}: {exc}"
        frame = users_frame(exc)
        place = "" if frame is None else f" (at {frame.filename}:{frame.lineno})"
        raise ConfigurationError(
            f"{what} cannot be imported on {task}: {text}{place}",
            hint=f"{sys.executable} looks for modules in {', '.join(map(repr, sys.path))}",
        ) from exc


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return where code of the user's was when an error came; None: no such code ran."""
    psync, *packages = map(os.path.dirname, (__file__, importlib.__file__, asyncio.__file__))
    ours = (os.path.dirname(psync), *packages, contextlib.__file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isabs(frame.filename) and not frame.filename.startswith(ours):
            return frame
    return None
