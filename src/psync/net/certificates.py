"""Certificates for a cluster: an authority that signs one of them, and is then forgotten.

All tasks of a cluster share one certificate and its key, as they share the secret. The key of the
authority is never written: so nobody, the owner included, can sign another certificate that these
tasks would trust. For further hosts make new files for all.

Private keys and certificates: the only file that needs the package cryptography.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psync.errors import ConfigurationError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
CA_NAME, CERT_NAME, KEY_NAME = "ca.pem", "cert.pem", "key.pem"
SKEW = datetime.timedelta(hours=1)
"""Clocks of hosts may differ by that much."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """What is made, as PEM.

    Attributes:
        ca: Certificate of the authority: what tasks trust.
        cert: Certificate that tasks show.
        key: Its private key.
    """

    ca: bytes
    cert: bytes
    key: bytes


def own_hosts() -> list[str]:
    """Return how this machine is addressed by itself, and its name."""
    name = socket.gethostname()
    return [*LOCAL_HOSTS, *([name] if name and name not in LOCAL_HOSTS else [])]


def mint(hosts: Sequence[str], days: float, now: datetime.datetime | None = None) -> Certificates:
    """Make an authority and a certificate for these hosts.

    Args:
        hosts: Names and IP addresses, as they stand in the cluster's description.
        days: How long the certificates are valid, from ``now`` on.
        now: Default: now.

    Raises:
        ConfigurationError: If the package ``cryptography`` is not installed, or a host is none.
    """
    try:
        from psync.net.certificates import Authority
    except ImportError as exc:
        raise ConfigurationError(
            "certificates are made with the package cryptography, which is not installed",
            hint="pip install 'psync[tls]'; TLS itself does not need it",
        ) from exc
    now = now or datetime.datetime.now(datetime.UTC)
    authority = Authority(now - SKEW, now + datetime.timedelta(days=days))
    return Certificates(authority.certificate, *authority.issue(hosts))


def write(certificates: Certificates, directory: Path) -> tuple[Path, Path, Path]:
    """Write the files ``ca.pem``, ``cert.pem`` and ``key.pem`` (mode 600) into a directory.

    Returns:
        Their paths, in this order.

    Raises:
        ConfigurationError: If one of them is there already, or cannot be written: then none is
            left.
    """
    contents = (
        (CA_NAME, certificates.ca, 0o644),
        (CERT_NAME, certificates.cert, 0o644),
        (KEY_NAME, certificates.key, 0o600),
    )
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content, mode in contents:
            path = directory / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(path)
            with open(descriptor, "wb") as file:
                file.write(content)
    except OSError as exc:
        for path in written:
            path.unlink(missing_ok=True)
        hint = None
        if isinstance(exc, FileExistsError):
            hint = "choose another directory, or remove it: a new key fits no old certificate"
        raise ConfigurationError(
            f"{exc.filename or directory}: cannot be written: {(exc.strerror or str(exc)).lower()}",
            hint=hint,
        ) from exc
    ca, cert, key = written
    return ca, cert, key


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
        yield variables(*write(made, Path(directory)))


def variables(ca: Path, cert: Path, key: Path) -> dict[str, str]:
    """Return the environment variables with which tasks use these files."""
    return {
        "PSYNC_TLS_CA_FILE": str(ca),
        "PSYNC_TLS_CERT_FILE": str(cert),
        "PSYNC_TLS_KEY_FILE": str(key),
    }


AUTHORITY, TASK = "psync cluster authority", "psync task"
_PEM = serialization.Encoding.PEM
NEVER_IN_A_NAME = frozenset(" :/,*@[]")


class Authority:
    """A key with which certificates are signed, and which is never written anywhere.

    Args:
        first: From when its own certificate and those that it signs are valid.
        last: Until when.

    Attributes:
        certificate: Its own, as PEM: what tasks trust.
    """

    def __init__(self, first: datetime.datetime, last: datetime.datetime) -> None:
        self._first, self._last = first, last
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = (
            self._begin(AUTHORITY, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = own.public_bytes(_PEM)

    def issue(self, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Return a certificate for these names and IP addresses, and its new key, as PEM.

        Raises:
            ConfigurationError: If a host is none.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys(hosts)])
        both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._begin(TASK, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
            .add_extension(names, critical=False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        form, secrecy = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return certificate.public_bytes(_PEM), key.private_bytes(_PEM, form, secrecy)

    def _begin(self, subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        public = key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(_named(subject))
            .issuer_name(_named(AUTHORITY))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._first)
            .not_valid_after(self._last)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates,
        crl_sign=signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        name = host.encode("ascii" if host.isascii() else "idna").decode()
    except ValueError as exc:
        raise ConfigurationError(f"host {host!r}: {exc}") from exc
    if not name or name.startswith(".") or NEVER_IN_A_NAME.intersection(name):
        raise ConfigurationError(f"host {host!r}: expected a name or an IP address, without a port")
    return x509.DNSName(name)
