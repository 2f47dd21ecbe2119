"""Notes of test hooks, which outlive a task that is killed.

``PSYNC_TESTING_NOTES=DIRECTORY`` lets each task append lines to a file of its own there, such as
``lost Update reply`` or ``failpoint ps.push.applied``. A line is one write to a file that is
appended to: the kernel has it, whatever becomes of the process. Without the variable nothing
is opened and nothing is written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from psync.errors import ConfigurationError

VARIABLE = "PSYNC_TESTING_NOTES"


class Notes:
    """What the test hooks of one task have done, over all its lives.

    Args:
        directory: Where the file of each task is; "": nothing is written.
        task: Names the file, as in ``worker-0``.
    """

    def __init__(self, directory: str = "", task: str = "task") -> None:
        self.task = task
        self._path = Path(directory, f"{task}.notes") if directory else None
        self._fd = -1  # -1: not opened yet

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Notes:
        """Return those of the task that ``TF_CONFIG`` names."""
        return cls(environ.get(VARIABLE, ""), _task_of(environ))

    def add(self, *words: str) -> None:
        """Write a line.

        Raises:
            ConfigurationError: The directory is not there.
        """
        if self._path is None:
            return
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            try:
                self._fd = os.open(self._path, flags, 0o600)
            except OSError as exc:
                raise ConfigurationError(
                    f"{VARIABLE}: {self._path} cannot be written: {exc}"
                ) from exc
        os.write(self._fd, f"{' '.join(words)}\n".encode())

    def earlier(self) -> Counter[str]:
        """Return how often each line was written so far, by this process and those before it."""
        return _lines_of(self._path) if self._path is not None else Counter()

    def close(self) -> None:
        """Let go of the file; the next line opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def notes_in(directory: Path) -> dict[str, Counter[str]]:
    """Return how often each line was written, by task."""
    return {path.stem: _lines_of(path) for path in sorted(directory.glob("*.notes"))}


def _lines_of(path: Path) -> Counter[str]:
    try:
        return Counter(path.read_text().splitlines())
    except FileNotFoundError:
        return Counter()


def _task_of(environ: Mapping[str, str]) -> str:
    """Return the name of this process's task; a broken ``TF_CONFIG`` is found elsewhere."""
    try:
        task = json.loads(environ.get("TF_CONFIG", ""))["task"]
        return f"{task['type']}-{task['index']}"
    except (ValueError, KeyError, TypeError):
        return "task"
