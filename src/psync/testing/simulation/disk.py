"""A disk that fails, and that forgets what was not synced when a machine dies.

The files lie in a real directory, which all hosts share. Each operation asks the world first: its
process may die before it, or the disk may be full. A dead process does nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from psync.checkpoints.files import Disk
from psync.testing.simulation.processes import current_process

WRITTEN_BACK_S = 30.0
"""After which a kernel has written what nobody has synced."""

BUFFER_BYTES = 4096
"""Held back in a process until it is told to let go of it."""

FULL = ("create", "write", "sync", "make_directory")
"""What a full disk refuses; one that fails refuses any."""


class ProcessDied(BaseException):
    """Ends a thread of a process that is dead."""


@dataclass(eq=False)
class _Step:
    """Something that is not on the disk yet."""

    host: str
    at_s: float
    directory: Path  # which has to be synced
    undo: Callable[[Path], None]  # given that directory


@dataclass
class SimulatedDisk(Disk):
    """The disk of all hosts.

    Args:
        reach: Told of each operation before it is done: its name and its process.
        rng: Of what is lost.
    """

    reach: Callable[[str, str], object]
    rng: random.Random
    failing: dict[str, int] = field(default_factory=dict)  # errno, by host
    _steps: list[_Step] = field(default_factory=list)
    _unsynced: dict[int, tuple[str, float, Path]] = field(default_factory=dict)  # by inode

    # What a task does.

    def create(self, path: Path) -> BinaryIO:
        """Make a file."""
        self._ask("create", path)
        file = _File(self, path)
        inode = os.stat(path).st_ino
        self._unsynced[inode] = self._here()[0], self._here()[1], path
        self._did(path.parent, lambda where: (where / path.name).unlink(missing_ok=True))
        return cast(BinaryIO, file)

    def sync(self, file: BinaryIO) -> None:
        """Let what was written survive."""
        made = cast(_File, file)
        made.flush()
        self._ask("sync", made.path)
        self._unsynced.pop(os.stat(made.fileno()).st_ino, None)

    def sync_directory(self, path: Path) -> None:
        """Let names survive, whoever made them."""
        self._ask("sync_directory", path)
        self._steps = [step for step in self._steps if step.directory != path]

    def make_directory(self, path: Path) -> None:
        """Make a directory."""
        self._ask("make_directory", path)
        path.mkdir()
        self._did(path.parent, lambda where: shutil.rmtree(where / path.name))

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory another name."""
        self._ask("rename", old)
        self._move(old, new)
        self._did(new.parent, lambda where: self._move(where / new.name, where / old.name))

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        self._ask("unlink", path)
        if not path.exists():
            return
        data = path.read_bytes()
        path.unlink()

        def undo(where: Path) -> None:
            (where / path.name).write_bytes(data)

        self._did(path.parent, undo)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory, one file after the other."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(path)):
                self.unlink(path / name)
            self._ask("remove_directory", path)
            path.rmdir()
            self._did(path.parent, lambda where: (where / path.name).mkdir())

    # What happens to it.

    def lose(self, hosts: Collection[str]) -> None:
        """Some machines have died: what they have not synced is lost, from a drawn point on."""
        now = asyncio.get_running_loop().time()
        for inode, (host, at_s, path) in list(self._unsynced.items()):
            if host in hosts:
                del self._unsynced[inode]
                if now - at_s < WRITTEN_BACK_S:
                    self._damage(path, inode)
        mine = [step for step in self._steps if step.host in hosts]
        recent = [step for step in mine if now - step.at_s < WRITTEN_BACK_S]
        kept = self._keep(recent)
        for step in reversed(recent):
            if step not in kept:
                with contextlib.suppress(OSError):
                    step.undo(step.directory)
        self._steps = [step for step in self._steps if step not in mine]

    def _keep(self, steps: Sequence[_Step]) -> list[_Step]:
        """Draw what is on the disk all the same: a journal keeps their order, others do not."""
        if self.rng.random() < 0.5:
            return list(steps[: self.rng.randrange(len(steps) + 1)])
        kept: list[_Step] = []
        for directory in dict.fromkeys(step.directory for step in steps):
            within = [step for step in steps if step.directory == directory]
            kept += within[: self.rng.randrange(len(within) + 1)]
        return kept

    def _move(self, old: Path, new: Path) -> None:
        old.rename(new)
        for step in self._steps:
            if step.directory == old:
                step.directory = new

    def _damage(self, path: Path, inode: int) -> None:
        for there in (path, *path.parent.parent.glob(f"*/{path.name}")):
            with contextlib.suppress(OSError):
                size = os.stat(there).st_size
                if os.stat(there).st_ino == inode:
                    os.truncate(there, self.rng.randrange(size + 1))
                    if self.rng.random() < 0.5:
                        os.truncate(there, size)  # zeros
                    return

    def _here(self) -> tuple[str, float]:
        process = current_process.get()
        return "" if process is None else process.name, asyncio.get_running_loop().time()

    def _did(self, directory: Path, undo: Callable[[Path], None]) -> None:
        self._steps.append(_Step(*self._here(), directory, undo))

    def _ask(self, operation: str, path: Path) -> None:
        process = current_process.get()
        if process is None:
            return
        if not process.is_dead:
            self.reach(operation, process.name)
        if process.is_dead:
            raise ProcessDied(process.name)
        number = self.failing.get(process.name, 0)
        if number == errno.EIO or (number and operation in FULL):
            raise OSError(number, os.strerror(number), str(path))


class _File(io.RawIOBase):
    """A file that is being written; what it holds back dies with its process."""

    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self.path = path
        self._disk = disk
        self._file = open(path, "xb", buffering=0)
        self._held = bytearray()

    def write(self, data: Any) -> int:
        """Write bytes, perhaps later."""
        self._held += data
        if len(self._held) > BUFFER_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Write what is held back; of what does not fit, a part is there."""
        held, self._held = self._held, bytearray()
        if not held:
            return
        try:
            self._disk._ask("write", self.path)
        except OSError:
            self._file.write(held[: self._disk.rng.randrange(len(held))])
            raise
        self._file.write(held)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        if self.closed:
            return
        try:
            process = current_process.get()
            if process is None or not process.is_dead:
                self.flush()
        finally:
            self._file.close()
            super().close()
