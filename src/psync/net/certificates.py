"""Certificates of a cluster: what a task's environment names, and new ones.

One authority for the whole cluster: a holder of a certificate of it is a peer, under the names
that stand in the certificate. By default both sides show theirs (mutual TLS); with
``PSYNC_TLS_MUTUAL=0`` only the task that is connected to does. TLS never takes the secret's place.

New ones are signed by an authority whose key is never stored. All tasks share one certificate and
its key, as they share the secret. Without the authority's key, not even the owner can sign another
certificate that these tasks would trust. For further hosts make new files for all.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from psync.errors import ConfigurationError
from psync.net.platform import flag
from psync.net.secret import read_private

CA_FILE, CERT_FILE, KEY_FILE = "PSYNC_TLS_CA_FILE", "PSYNC_TLS_CERT_FILE", "PSYNC_TLS_KEY_FILE"
MUTUAL = "PSYNC_TLS_MUTUAL"
TLS_VARIABLES = (CA_FILE, CERT_FILE, KEY_FILE, MUTUAL)

_FIRST_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)

HOW_TO_MAKE_THEM = "make certificates: psync certs new"


@dataclass(frozen=True, slots=True)
class Tls:
    """What TLS needs on one task.

    Attributes:
        client: For the connections that it makes.
        server: For those that it accepts; None: it has no certificate, and accepts none.
        binding: SHA-256 of its certificate, which the handshake proves to be the one that the
            peer has seen; b"" without one.
    """

    client: ssl.SSLContext
    server: ssl.SSLContext | None
    binding: bytes


def load_tls(environ: Mapping[str, str]) -> Tls | None:
    """Return the TLS that the environment describes; None if it names no file.

    Raises:
        ConfigurationError: If a file is missing or not what it should be, others than its owner can
            read or change the key, or some variables are set without those that they need.
    """
    ca, cert, key = (environ.get(name) or None for name in (CA_FILE, CERT_FILE, KEY_FILE))
    wanted = flag(environ, MUTUAL)
    mutual = wanted is not False
    if ca is None and cert is None and key is None:
        if wanted:
            raise ConfigurationError(
                f"{MUTUAL} is 1, but {CA_FILE} is not set", hint=HOW_TO_MAKE_THEM
            )
        return None
    if ca is None:
        raise ConfigurationError(
            f"{CERT_FILE if cert else KEY_FILE} is set, but {CA_FILE} is not",
            hint=f"name the authority that signed all tasks' certificates; {HOW_TO_MAKE_THEM}",
        )
    if (cert is None) is not (key is None):
        given, missing = (CERT_FILE, KEY_FILE) if key is None else (KEY_FILE, CERT_FILE)
        raise ConfigurationError(f"{given} is set, but {missing} is not")
    if cert is None and mutual:
        raise ConfigurationError(
            f"{CA_FILE} is set, but {CERT_FILE} is not: both sides of a connection present a "
            "certificate",
            hint=f"{HOW_TO_MAKE_THEM}; or give certificates only to listening tasks: {MUTUAL}=0",
        )
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and certificates
    _set_up(client, ca)
    if cert is None or key is None:
        return Tls(client, None, b"")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _set_up(server, ca)
    server.num_tickets = 0  # a session that is resumed shows no certificate
    if mutual:
        server.verify_mode = ssl.CERT_REQUIRED
    binding = _certify([server, client] if mutual else [server], cert, key)
    return Tls(client, server, binding)


def _set_up(context: ssl.SSLContext, ca: str) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with _usable(CA_FILE, ca):
        context.load_verify_locations(cafile=ca)


def _certify(contexts: list[ssl.SSLContext], cert: str, key: str) -> bytes:
    """Let a task show its certificate; return the certificate's hash."""
    read_private(key, f"{KEY_FILE} ({key})", HOW_TO_MAKE_THEM)
    with _usable(CERT_FILE, cert):
        first = _FIRST_CERTIFICATE.search(Path(cert).read_text("ascii"))
        if first is None:
            raise ValueError("expected a certificate as PEM")
        own = ssl.PEM_cert_to_DER_cert(first[0])
    try:
        for context in contexts:
            context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as exc:
        raise ConfigurationError(
            f"{CERT_FILE} ({cert}) and {KEY_FILE} ({key}) cannot be used: {words_of(exc)}",
            hint="expected a certificate and its private key, both as PEM",
        ) from exc
    return hashlib.sha256(own).digest()


def _no_password() -> NoReturn:
    raise ConfigurationError(
        f"{KEY_FILE}: the key has a password, which psync cannot ask for",
        hint="remove the password, and protect the key by the file's mode (600)",
    )


@contextlib.contextmanager
def _usable(variable: str, path: str) -> Iterator[None]:
    """Return a context in which a file that cannot be used is an error that names it."""
    try:
        yield
    except (OSError, ValueError) as exc:
        if isinstance(exc, ssl.SSLError):
            why = f"expected certificates as PEM ({words_of(exc)})"
        else:
            why = getattr(exc, "strerror", None) or str(exc)
        raise ConfigurationError(
            f"{variable} ({path}): cannot be used: {why}", hint=HOW_TO_MAKE_THEM
        ) from exc


def words_of(error: ssl.SSLError) -> str:
    """Return what OpenSSL has to say, without its numbers and places."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()


# New ones.

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
