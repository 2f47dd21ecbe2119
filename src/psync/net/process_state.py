"""Per-process registries and counters, and fresh ones for a simulation in the same process.

All of this process's are made here, and nowhere else, so that a simulation can run in a process
as if nothing had run there before, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from io import FileIO
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

MISPLACED = 78
"""Exit code of a worker of ``psync run`` that runs the program instead of serving: the launcher
says so, once for all of them."""

_all: list[PerProcess[Any]] = []


class PerProcess(Generic[_T]):
    """A value that each process has one of; call this for the one of here.

    Args:
        make: Returns the value with which a process begins.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self.make = make
        self.value = make()
        _all.append(self)

    def __call__(self) -> _T:
        return self.value


@contextlib.contextmanager
def fresh_process() -> Iterator[None]:
    """Let everything be as in a process that has just begun; afterwards it is as it was."""
    before = {id(each): each.value for each in _all}
    for each in _all:
        each.value = each.make()
    try:
        yield
    finally:
        for each in _all:  # a module may have been imported meanwhile
            each.value = before[id(each)] if id(each) in before else each.make()


def inherited_file(variable: str) -> int | None:
    """Return the descriptor that a launcher has passed on under this name; it has one owner."""
    known = os.environ.pop(variable, None)
    if known is None:
        return None
    fd, _, inode = known.partition(":")
    with contextlib.suppress(OSError):
        # A process that the program has started has the variable, and another file there, or none.
        if os.fstat(int(fd)).st_ino == int(inode):
            return int(fd)
    return None


def named_file(file: FileIO) -> str:
    """Return how a process that inherits a file recognizes it."""
    return f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}"


@contextlib.contextmanager
def new_pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Return a context manager for both ends of a pipe, either of which may be closed before."""
    read_fd, write_fd = os.pipe()
    with FileIO(read_fd) as read_end, FileIO(write_fd, "w") as write_end:
        yield read_end, write_end
