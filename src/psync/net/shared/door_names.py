"""The names of doors, and the sockets that bear them; see ``doors``.

A launcher makes them as well, beside the addresses of its tasks, and loads nothing for that.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from psync.net.platform import flag

BACKLOG = 1024  # all tasks of a cluster connect at once, and to tasks that are not up yet
_ANYWHERE = ("0.0.0.0", "::")  # compared with, not bound to


def may_share(environ: Mapping[str, str]) -> bool:
    """Whether tasks may share memory: unless ``PSYNC_SHARED_MEMORY`` is 0.

    Raises:
        ConfigurationError: It is neither 0 nor 1.
    """
    return flag(environ, "PSYNC_SHARED_MEMORY") is not False


def name_of_door(host: str, port: int | None) -> str:
    """Return the name of the door beside an address: a numeric one, or of a Unix socket's file.

    Raises:
        OSError: There is no such file.
    """
    if port is None:  # containers with one network can have several files of this path
        status = os.stat(host)
        host, port = f"unix/{status.st_dev}", status.st_ino
    return f"\0psync/{os.geteuid()}/{host}:{port}"


def door_beside(listening: socket.socket) -> socket.socket | None:
    """Return a socket that listens beside another one; None: somebody else does, or nobody can."""
    name = listening.getsockname()
    host, port = name[:2] if isinstance(name, tuple) else (name, None)
    sock: socket.socket | None = None
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(name_of_door("*" if host in _ANYWHERE else host, port))
        sock.listen(BACKLOG)
    except OSError:
        if sock is not None:
            sock.close()
        return None
    return sock


def shut(door: socket.socket) -> None:
    """Let nobody in any more, also where another process has the same socket."""
    with contextlib.suppress(OSError):
        door.shutdown(socket.SHUT_RDWR)
    door.close()
