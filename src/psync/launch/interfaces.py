"""This machine's interfaces and interpreter, as tasks on other machines have to know them."""

from __future__ import annotations

import socket
import sys

from psync.cluster import split_address
from psync.errors import ConfigurationError

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Functions of the program travel as bytecode, which another version does not read."""


def interface_towards(address: str) -> str:
    """Return this machine's own address on the way to another one; no packet is sent.

    Args:
        address: ``host:port``.

    Raises:
        ConfigurationError: It is none, or its name cannot be resolved, or there is no way.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            own: str = probe.getsockname()[0]
    except OSError as exc:
        raise ConfigurationError(f"{address} is unreachable: {exc.strerror or exc}") from exc
    return own


def joined_with(host: str, port: int) -> str:
    """Return an address as text, with brackets round one of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
