"""Where the processes of this machine listen, as the kernel says."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

LISTEN = "0A"


def descendants(pid: int) -> set[int]:
    """The process and all that it has started, directly or not."""
    found, todo = {pid}, [pid]
    while todo:
        for path in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = {int(child) for child in path.read_text().split()} - found
                found |= children
                todo += children
    return found


def listening(pids: set[int]) -> set[str]:
    """The IP addresses on which these processes hold sockets that listen, also inherited ones."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    inodes.update(re.findall(r"^socket:\[(\d+)\]$", target))
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                words = bytes.fromhex(fields[1].split(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.add(socket.inet_ntop(family, packed))
    return addresses
