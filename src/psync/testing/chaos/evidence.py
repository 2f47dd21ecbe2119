"""What a chaos run shows of itself: its program's journal, marks of pushes, and its processes.

Every line of the journal is JSON and is on the disk before the program goes on, so a line that is
there is true, and what is missing at the end was not done, or not yet said. The last line may be
cut off: the program was killed while it wrote it.

The marks are a file that all tasks map: for each worker the id of its process and a number that is
odd while a push is under way. Whoever kills looks at it before and after: what was odd, is the
same, and belongs to a living process was in flight at the moment of the kill. A worker that is
killed itself leaves its number as it was.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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


_SLOT = struct.Struct("<qq")  # process id, number
MAX_WORKERS = 256


class PushMarks:
    """The marks of one run.

    Args:
        path: Of the file; it is made if it is not there.
    """

    def __init__(self, path: Path | str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _SLOT.size * MAX_WORKERS)
            self._map = mmap.mmap(fd, _SLOT.size * MAX_WORKERS)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def pushing(self, worker: int) -> Iterator[None]:
        """Mark that this process, which is the worker, has begun a push; until the end of it."""
        pid, number = self._read(worker)
        if pid != os.getpid():
            number += number % 2  # an earlier life may have died in a push
        _SLOT.pack_into(self._map, _SLOT.size * worker, os.getpid(), number + 1)
        try:
            yield
        finally:
            _SLOT.pack_into(self._map, _SLOT.size * worker, os.getpid(), number + 2)

    def snapshot(self, num_workers: int) -> Mapping[int, tuple[int, int]]:
        """Return (process id, number) of each worker that has ever pushed."""
        found = {worker: self._read(worker) for worker in range(num_workers)}
        return {worker: slot for worker, slot in found.items() if slot[0]}

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()

    def _read(self, worker: int) -> tuple[int, int]:
        pid, number = _SLOT.unpack_from(self._map, _SLOT.size * worker)
        return pid, number


_marks: dict[str, PushMarks] = {}  # of this process, by path


def marks_at(path: str) -> PushMarks:
    """Return the marks of this process in a file; opened once."""
    if path not in _marks:
        _marks[path] = PushMarks(path)
    return _marks[path]


def in_flight(
    before: Mapping[int, tuple[int, int]],
    after: Mapping[int, tuple[int, int]],
    alive: Mapping[int, int],
) -> set[int]:
    """Return the workers whose push was under way between two snapshots.

    Args:
        before: Taken just before something happened.
        after: Taken just after it.
        alive: Process id of each worker that lived when it happened.
    """
    return {
        worker
        for worker, slot in before.items()
        if slot[1] % 2 and after.get(worker) == slot and alive.get(worker) == slot[0]
    }


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
