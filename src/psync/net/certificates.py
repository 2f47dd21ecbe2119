"""Certificates for a cluster, signed by an authority whose key is never stored.

All tasks of a cluster share one certificate and its key, as they share the secret. Without the
authority's key, not even the owner can sign another certificate that these tasks would trust. For
further hosts make new files for all.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from psync.errors import ConfigurationError
from psync.net.tls import CA_FILE, CERT_FILE, KEY_FILE

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
SKEW = datetime.timedelta(hours=1)
"""Clocks of hosts may differ by that much."""


FILES = {"ca.pem": CA_FILE, "cert.pem": CERT_FILE, "key.pem": KEY_FILE}
"""The variable that names each file: the certificate of the authority, which tasks trust; the
certificate that tasks show; its private key."""


def own_hosts() -> list[str]:
    """Return how this machine is addressed by itself, and its name."""
    name = socket.gethostname()
    return [*LOCAL_HOSTS, *([name] if name and name not in LOCAL_HOSTS else [])]


def mint(
    hosts: Sequence[str], days: float, now: datetime.datetime | None = None
) -> dict[str, bytes]:
    """Make an authority and a certificate for these hosts; return the ``FILES``, as PEM.

    Args:
        hosts: Names and IP addresses, as they stand in the cluster's description.
        days: How long the certificates are valid, from ``now`` on.
        now: Default: now.

    Raises:
        ConfigurationError: If the package ``cryptography`` is not installed, or a host is none.
    """
    try:
        from psync.net.signing import Authority
    except ImportError as exc:
        raise ConfigurationError(
            "certificates are made with the package cryptography, which is not installed",
            hint="pip install 'psync[tls]'; TLS itself does not need it",
        ) from exc
    now = now or datetime.datetime.now(datetime.UTC)
    authority = Authority(now - SKEW, now + datetime.timedelta(days=days))
    return dict(zip(FILES, (authority.certificate, *authority.issue(hosts)), strict=True))


def write(contents: Mapping[str, bytes], directory: Path) -> dict[str, str]:
    """Write the files ``ca.pem``, ``cert.pem`` and ``key.pem`` (mode 600) into a directory.

    Returns:
        The environment variables with which tasks use them.

    Raises:
        ConfigurationError: If one of them is there already, or cannot be written: then none is
            left.
    """
    written: dict[str, str] = {}
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, variable in FILES.items():
            path = str(directory / name)
            mode = 0o600 if variable == KEY_FILE else 0o644
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written[variable] = path
            with open(descriptor, "wb") as file:
                file.write(contents[name])
    except OSError as exc:
        for path in written.values():
            Path(path).unlink(missing_ok=True)
        hint = None
        if isinstance(exc, FileExistsError):
            hint = "choose another directory, or remove it: a new key fits no old certificate"
        raise ConfigurationError(
            f"{exc.filename or directory}: cannot be written: {(exc.strerror or str(exc)).lower()}",
            hint=hint,
        ) from exc
    return written


@contextlib.contextmanager
def temporary(days: float) -> Iterator[dict[str, str]]:
    """Return a context manager for the variables of certificates that last as long as it does.

    They are for this machine alone. Their directory is private, and is removed at the end.

    Args:
        days: How long they are valid, if the end is not before.

    Raises:
        ConfigurationError: As ``mint``.
    """
    made = mint(LOCAL_HOSTS, days)
    with tempfile.TemporaryDirectory(prefix="psync-tls-") as directory:  # mode 700
        yield write(made, Path(directory))
