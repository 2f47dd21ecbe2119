"""The journal of a chaos run's program: completed actions, synced line by line.

Every line is JSON and is on the disk before the program goes on, so a line that is there is true,
and what is missing at the end was not done, or not yet said. The last line may be cut off: the
program was killed while it wrote it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = "journal.jsonl"


class Journal:
    """The journal of one life of the program, after those of earlier ones.

    Args:
        directory: Of the run.
    """

    def __init__(self, directory: Path | str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(Path(directory, NAME), flags, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # what is cut off stays a line of its own

    def say(self, kind: str, **what: Any) -> None:
        """Write a line, and wait until it is on the disk."""
        os.write(self._fd, json.dumps({"kind": kind, **what}).encode() + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        """Say nothing more."""
        os.close(self._fd)


def read_journal(directory: Path | str) -> list[dict[str, Any]]:
    """Return the lines so far; one that is cut off is none."""
    try:
        text = Path(directory, NAME).read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in text.split(b"\n"):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            found.append(said)
    return found
