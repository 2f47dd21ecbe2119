"""Few open files for this process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


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
