"""Open files of this process: how many, and few of them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Let this process have so many more open files."""
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(free + 1)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
