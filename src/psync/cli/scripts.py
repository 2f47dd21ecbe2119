"""The user's script, as commands of psync run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from psync.errors import ConfigurationError

SCRIPT_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")  # what the interpreter takes by name


def script_command(script: str, args: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """Return the command that runs a script the way ``python SCRIPT ARGS`` does.

    Args:
        script: A Python file, or a directory with a ``__main__.py``; or the name of a module.
        args: What the script finds in ``sys.argv``.
        module: Whether it is a module, which runs the way ``python -m MODULE ARGS`` does.

    Raises:
        ConfigurationError: There is no such file, directory or module.
    """
    if module:
        _check_module(script)
        return [sys.executable, "-m", script, *args]
    path = Path(script)
    if not path.exists():
        is_module = path.suffix not in SCRIPT_SUFFIXES and os.sep not in script
        raise ConfigurationError(
            f"script {script!r} does not exist",
            hint="a module runs with -m, as with python" if is_module else None,
        )
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise ConfigurationError(f"script {script!r} is a directory without a __main__.py")
    elif path.suffix not in SCRIPT_SUFFIXES:
        raise ConfigurationError(
            f"script {script!r} is not a Python file: expected a name ending in .py"
        )
    return [sys.executable, script, *args]


def directory_of(script: str, *, module: bool) -> str:
    """Return the directory that Python puts first on ``sys.path`` for a script or module."""
    if module:
        return os.getcwd()
    return os.path.abspath(script if os.path.isdir(script) else os.path.dirname(script))


def _check_module(name: str) -> None:
    """Look for a module as ``python -m`` does, but import nothing, not even its package.

    Raises:
        ConfigurationError: It is not there, or a package without a ``__main__.py``.
    """
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    found = ""
    for part in (*name.split("."), "__main__"):
        found = f"{found}.{part}".removeprefix(".")
        spec = PathFinder.find_spec(found, places)
        if spec is None and part == "__main__":
            raise ConfigurationError(
                f"{name!r} is a package without a __main__.py, so it cannot be run"
            )
        if spec is None:
            raise ConfigurationError(
                f"module {name!r} was not found: there is no {found!r} in this directory "
                f"({os.getcwd()}) or where Python looks for modules",
                hint="-m takes a name such as package.module, without .py; to run a file, leave "
                "out -m",
            )
        if spec.submodule_search_locations is None:
            if found == name or part == "__main__":
                return
            raise ConfigurationError(f"module {name!r} was not found: {found!r} is not a package")
        places = list(spec.submodule_search_locations)
