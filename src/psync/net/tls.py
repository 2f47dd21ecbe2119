"""TLS of a task: its certificates and whom it trusts, from the environment.

One authority for the whole cluster: a holder of a certificate of it is a peer, under the names
that stand in the certificate. By default both sides show theirs (mutual TLS); with
``PSYNC_TLS_MUTUAL=0`` only the task that is connected to does. TLS never takes the secret's place.
"""

from __future__ import annotations

import contextlib
import hashlib
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from psync.errors import ConfigurationError
from psync.net.platform import flag
from psync.net.secret import read_private

CA_FILE, CERT_FILE, KEY_FILE = "PSYNC_TLS_CA_FILE", "PSYNC_TLS_CERT_FILE", "PSYNC_TLS_KEY_FILE"
MUTUAL = "PSYNC_TLS_MUTUAL"
TLS_VARIABLES = (CA_FILE, CERT_FILE, KEY_FILE, MUTUAL)

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
    with _usable(KEY_FILE, key):
        read_private(key, f"{KEY_FILE} ({key})")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    with _usable(CERT_FILE, cert), open(cert, encoding="ascii") as file:
        pem = file.read()
        start = pem.find(begin)
        stop = pem.find(end, start)
        if start < 0 or stop < 0:
            raise ValueError("expected a certificate as PEM")
        own = ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])
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
    except ConfigurationError:
        raise
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
