"""TLS settings from the environment: trusted authority, own certificate, mutual or not.

One authority for the whole cluster: a holder of a certificate of it is a peer, under the names
that stand in the certificate. By default both sides show theirs (mutual TLS); with
``PSYNC_TLS_MUTUAL=0`` only the task that is connected to does. TLS never takes the secret's place.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from psync.errors import AuthenticationError, ConfigurationError
from psync.net.secret import read_private
from psync.wire.frames import SAME_TLS

CA_FILE, CERT_FILE, KEY_FILE = "PSYNC_TLS_CA_FILE", "PSYNC_TLS_CERT_FILE", "PSYNC_TLS_KEY_FILE"
MUTUAL = "PSYNC_TLS_MUTUAL"
TLS_VARIABLES = (CA_FILE, CERT_FILE, KEY_FILE, MUTUAL)

HOW_TO_MAKE_THEM = "make certificates: psync certs new"


_SAME_CA = f"all tasks must trust the authority that signed this certificate: {CA_FILE}"
_HINTS = {  # by OpenSSL's number of what is wrong with a certificate
    9: "check the clocks of both machines",  # not yet valid
    10: "create new ones for all tasks: psync certs new; or check the clocks",  # expired
    62: "it must name the host as the cluster's description does: psync certs new --hosts …",
    64: "it must name the address as the cluster's description does: psync certs new --hosts …",
}


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
    text = environ.get(MUTUAL, "")
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"{MUTUAL}: expected 0 or 1, got {text!r}")
    mutual = text != "0"
    if ca is None and cert is None and key is None:
        if text == "1":
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
    with _usable(CERT_FILE, cert), open(cert, encoding="ascii") as file:
        own = _first_certificate(file.read())
    try:
        for context in contexts:
            context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as exc:
        raise ConfigurationError(
            f"{CERT_FILE} ({cert}) and {KEY_FILE} ({key}) cannot be used: {words_of(exc)}",
            hint="expected a certificate and its private key, both as PEM",
        ) from exc
    return hashlib.sha256(own).digest()


def _first_certificate(pem: str) -> bytes:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = pem.find(begin)
    stop = pem.find(end, start)
    if start < 0 or stop < 0:
        raise ValueError("expected a certificate as PEM")
    return ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])


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


def refusal_of(error: ssl.SSLError, who: str) -> AuthenticationError:
    """Say who refuses whom, and why, when TLS has not come up.

    Args:
        error: What OpenSSL says.
        who: What to call the peer.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        why = words_of(error).rstrip(".")
        return AuthenticationError(
            f"the certificate of {who} is refused: {why[:1].lower()}{why[1:]}",
            hint=_HINTS.get(error.verify_code, _SAME_CA),
        )
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError(f"{who} presents no certificate", hint=SAME_TLS)
    alert = re.search(r"ALERT_(\w+)", error.reason or "")
    if alert is None:
        return AuthenticationError(f"TLS with {who} failed: {words_of(error)}")
    what = alert[1].replace("_", " ").lower()
    if what == "certificate required":
        return AuthenticationError(
            f"{who} requires a certificate, but this task has none", hint=SAME_TLS
        )
    return AuthenticationError(
        f"{who} refuses the certificate of this task: {what}", hint=f"its log says more; {_SAME_CA}"
    )


def words_of(error: ssl.SSLError) -> str:
    """Return what OpenSSL has to say, without its numbers and places."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()
