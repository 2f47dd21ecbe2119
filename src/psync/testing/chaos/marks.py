"""Marks of workers in the middle of a push, in a file that all tasks map.

A file that all tasks map: for each worker the id of its process and a number that is odd while a
push is under way. Whoever kills looks at it before and after: what was odd, is the same, and
belongs to a living process was in flight at the moment of the kill. A worker that is killed itself
leaves its number as it was.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

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
