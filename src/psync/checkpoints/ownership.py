"""Who writes into a directory, or a file: one process at a time, which a file beside names.

The file is locked (``flock``) and says who has locked it. The lock ends with the process, however
that dies, so the next program takes over at once. Where a file system has no locks, what the file
says has to do: a process of this host that is gone has lost its place, one of another host may
live. Before each save the owner looks whether the file still names it. So where locks hold on one
host only, and a program of another host has taken over, the older program gets an error.

Reading needs no owner. Everything here blocks, for a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from psync.checkpoints.files import regular
from psync.errors import ConfigurationError
from psync.net.platform import PerProcess

MAX_BYTES = 4096
"""Of such a file, which has some 150."""

_owners = PerProcess(weakref.WeakValueDictionary[str, "Owner"])
_changing = threading.RLock()


class Owner:
    """What this process owns, until nothing refers to this any more. Made by ``own``."""

    def __init__(self, path: Path, fd: int, text: bytes) -> None:
        self.text = text
        self.fd = fd
        self.let_go = weakref.finalize(self, _let_go, path, fd, text, os.getpid())


def own(path: Path, what: str, hint: str) -> Owner:
    """Become the owner, or stay it: all of a process are one.

    Args:
        path: Of the file that names the owner.
        what: The owner does, for messages: "saves into run/checkpoints".
        hint: For whoever is not the owner.

    Raises:
        ConfigurationError: Another process is the owner; it is named.
        OSError: The file cannot be written.
    """
    key = os.path.realpath(path)
    with _changing:
        owner = _owners().get(key)
        if owner is not None and (named := _read(path)) is not None:  # None: the file was removed
            if named == owner.text:
                return owner
            raise _taken(named, what, hint)
        while True:
            try:
                fd = regular(os.fspath(path), os.O_RDWR | os.O_CREAT, 0o666)
            except PermissionError:  # another user's
                fd = regular(os.fspath(path), os.O_RDONLY)
            try:
                named = os.pread(fd, MAX_BYTES, 0)
                locked = _lock(fd)
                if locked is False:
                    raise _taken(named, what, hint)
                if locked is None and _may_live(named):
                    hint = f"{hint}; if that process has ended, remove {path}"
                    raise _taken(named, what, hint)
                with contextlib.suppress(FileNotFoundError):
                    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_RDWR:
                        path.unlink()  # another user's, who has gone
                    elif os.stat(path).st_ino == os.fstat(fd).st_ino:  # else its owner removed it
                        text = json.dumps(asdict(_this_process())).encode()
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, text, 0)
                        owner = _owners()[key] = Owner(path, fd, text)
                        return owner
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _lock(fd: int) -> bool | None:
    """Return whether a file could be locked; None: its file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _let_go(path: Path, fd: int, text: bytes, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the lock nor the descriptor
        with contextlib.suppress(OSError):
            if _read(path) == text:
                path.unlink()
        os.close(fd)


def _read(path: Path) -> bytes | None:
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read(MAX_BYTES)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class _Process:
    """What such a file says."""

    host: str
    pid: int
    since: Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
    program: str
    started: str = ""  # in ticks; "" where the system does not say

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.program[:100]} (process {self.pid} on {self.host[:100]}, since {since})"


def _this_process() -> _Process:
    program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
    pid = os.getpid()
    return _Process(socket.gethostname(), pid, time.time(), program, _start_of(pid))


def _process_in(named: bytes) -> _Process | None:
    """Return what a file says; None, if it was damaged, or is being written."""
    try:
        return msgspec.convert(json.loads(named), _Process)
    except (ValueError, RecursionError):
        return None


def _start_of(pid: int) -> str:
    """Return when a process was started, as ``started``."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _may_live(named: bytes) -> bool:
    """Whether a process that has no lock may be there all the same."""
    found = _process_in(named)
    if found is None or found.host != socket.gethostname():
        return found is not None
    try:
        os.kill(found.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return _start_of(found.pid) == found.started


def _taken(named: bytes, what: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"{_process_in(named) or 'another process'} {what}", hint=hint)


def let_go_of_all() -> None:
    """Own nothing any more: this process has simulated others, which have ended."""
    for owner in list(_owners().values()):
        owner.let_go()


def _forked() -> None:
    """Leave the locks to the parent alone: a child that outlives it must not keep them."""
    global _changing
    _changing = threading.RLock()
    for owner in list(_owners().values()):
        os.close(owner.fd)
    _owners().clear()


os.register_at_fork(after_in_child=_forked)
