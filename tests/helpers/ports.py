"""Ports for tasks that a test starts by hand, and to which nobody else comes first."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

PORTS = range(10_000, 32_000)
"""Below those that Linux gives to whoever asks for any port, or connects."""


@contextlib.contextmanager
def claimed_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Yield ports on which nothing listens, and which no other test on this machine gets meanwhile.

    A port is claimed by a socket of its name, of another kind: it goes with this process.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as claims:
        draw = random.SystemRandom()  # another one in each process
        while len(ports) < count:
            port = draw.choice(PORTS)
            claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):  # another test has it, or somebody listens there
                claim.bind(f"\0psync-tests/{port}")
                socket.create_server((host, port)).close()
                ports.append(port)
        yield ports
