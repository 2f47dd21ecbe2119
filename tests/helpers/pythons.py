"""The interpreters on this machine that psync supports, one of each minor version.

    python tests/helpers/pythons.py
    3.11 /usr/bin/python3.11
    3.12 /home/me/.pyenv/versions/3.12.1/bin/python

They are looked for on PATH, where pyenv keeps its versions, and in PSYNC_PYTHONS, which lists
further folders (as PATH does). Each is asked what it is: a shim of pyenv may be none. The Makefile
runs the tests on each.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
ASK = "import sys, venv; print('%d.%d' % sys.version_info[:2])"


def candidates(minor: str) -> Iterator[Path]:
    """Yield what may be an interpreter of this version, the one to be preferred first."""
    listed = [Path(name) for name in os.environ.get("PSYNC_PYTHONS", "").split(":") if name]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(pyenv.glob(f"versions/{minor}.*/bin"), key=lambda path: len(path.parts[-2]))
    on_path = [Path(name) for name in os.get_exec_path()]
    for folder in (*listed, *on_path, *reversed(kept)):
        if (path := folder / f"python{minor}").is_file():
            yield path


def is_version(path: Path, minor: str) -> bool:
    """Whether a file runs, is this version, and can make environments."""
    try:
        asked = subprocess.run(
            [path, "-c", ASK], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == minor


@cache
def pythons() -> dict[str, Path]:
    """Return the path of an interpreter for each supported version that is there."""
    found = {}
    for minor in SUPPORTED:
        for path in candidates(minor):
            if is_version(path, minor):
                found[minor] = path
                break
    return found


if __name__ == "__main__":
    for minor, path in pythons().items():
        print(minor, path)
