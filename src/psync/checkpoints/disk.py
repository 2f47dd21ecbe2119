"""The disk operations of checkpoint writers, in one place that a simulation replaces.

Reading needs no seam: what a simulated disk has done to a directory is really there.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The operating system's. Each method raises the OSErrors of what it calls."""

    def create(self, path: Path) -> BinaryIO:
        """Make a file that is not there yet, and return it to be written."""
        return open(path, "xb")

    def sync(self, file: BinaryIO) -> None:
        """Let what was written to a file survive the machine."""
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Let the names in a directory survive the machine."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Make a directory that is not there yet; those above it are made if they are not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory another name."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with all that is in it, as far as that can be done."""
        shutil.rmtree(path, ignore_errors=True)


def regular(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a file, for ``open(…, opener=regular)``: a pipe or a device in its place is no wait.

    Raises:
        OSError: There is none, or something else than a file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "expected a regular file, got something else", path)
    return fd


current_disk: ContextVar[Disk] = ContextVar("psync_disk", default=Disk())  # noqa: B039
