"""The user's script, as commands of psync run it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from psync.errors import ConfigurationError

SCRIPT_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")  # what the interpreter takes by name


def script_command(script: str, args: Sequence[str] = ()) -> list[str]:
    """The command that runs a script the way ``python SCRIPT ARGS`` does.

    Raises:
        ConfigurationError: If it is not a Python file, nor a directory with a ``__main__.py``.
    """
    path = Path(script)
    if not path.exists():
        raise ConfigurationError(f"script {script!r} does not exist")
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise ConfigurationError(f"script {script!r} is a directory without a __main__.py")
    elif path.suffix not in SCRIPT_SUFFIXES:
        raise ConfigurationError(
            f"script {script!r} is not a Python file: expected a name ending in .py"
        )
    return [sys.executable, script, *args]
