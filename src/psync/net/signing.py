"""Private keys and certificate signing; the only module that imports cryptography."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psync.errors import ConfigurationError

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
        self.certificate = self._signed(AUTHORITY, self._key)

    def issue(self, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Return a certificate for these names and IP addresses, and its new key, as PEM.

        Raises:
            ConfigurationError: If a host is none.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys(hosts)])
        both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = self._signed(TASK, key, x509.ExtendedKeyUsage(both_sides), names, signer)
        form, secrecy = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return certificate, key.private_bytes(_PEM, form, secrecy)

    def _signed(
        self, subject: str, key: ec.EllipticCurvePrivateKey, *more: x509.ExtensionType
    ) -> bytes:
        """Return the certificate of a key, as PEM, with ``more`` extensions."""
        public, signs = key.public_key(), subject == AUTHORITY
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(subject))
            .issuer_name(_named(AUTHORITY))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._first)
            .not_valid_after(self._last)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.BasicConstraints(signs, 0 if signs else None), critical=True)
            .add_extension(_usage(signs_certificates=signs), critical=True)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


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
