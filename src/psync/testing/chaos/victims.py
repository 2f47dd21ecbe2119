"""The processes of a ``psync run``, by task, for the killer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of a task."""

    pid: int
    job: str
    index: int
    config: dict[str, Any] = field(default_factory=dict, compare=False)  # its TF_CONFIG

    @property
    def name(self) -> str:
        """As in ``worker-0``."""
        return f"{self.job}-{self.index}"

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal; False if the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)
            return True
        return False


def victims_of(launcher: int) -> dict[tuple[str, int], Victim]:
    """Return the living tasks of a launcher, by job and index.

    Args:
        launcher: Process id of ``psync run``.
    """
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            victim = _victim(directory, launcher)
            if victim is not None:
                found[victim.job, victim.index] = victim
    return found


def _victim(directory: Path, launcher: int) -> Victim | None:
    """Return the task that a process is; None if it is none of the launcher's, or dead."""
    try:
        state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
        if int(parent) != launcher or state in "ZX":
            return None
        environ = (directory / "environ").read_bytes().split(b"\0")
        text = next(line for line in environ if line.startswith(b"TF_CONFIG="))
        config = json.loads(text.partition(b"=")[2])
        task = config["task"]
        return Victim(int(directory.name), task["type"], int(task["index"]), config)
    except (OSError, StopIteration, ValueError, KeyError, TypeError):
        return None  # it ends, or has not begun: between fork and exec it is the launcher's copy
