"""Certificates: for whom, for how long, and for what they are good."""

from __future__ import annotations

import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from psync.errors import ConfigurationError
from psync.net.signing import Authority

FIRST = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
LAST = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
HOSTS = ["ps0.example.org", "10.0.0.7", "2001:db8::7", "ps0.example.org"]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(FIRST, LAST)


def test_a_certificate_names_its_hosts_and_its_time(authority: Authority) -> None:
    pem, _ = authority.issue(HOSTS)
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["ps0.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.7"),
        ipaddress.ip_address("2001:db8::7"),
    ]
    assert certificate.not_valid_before_utc == FIRST
    assert certificate.not_valid_after_utc == LAST


def test_the_authority_has_signed_it_and_itself(authority: Authority) -> None:
    own = x509.load_pem_x509_certificate(authority.certificate)
    certificate = x509.load_pem_x509_certificate(authority.issue(HOSTS)[0])
    own.verify_directly_issued_by(own)
    certificate.verify_directly_issued_by(own)
    other = x509.load_pem_x509_certificate(Authority(FIRST, LAST).certificate)
    with pytest.raises(InvalidSignature):
        certificate.verify_directly_issued_by(other)


def test_a_task_may_be_on_both_sides_and_may_sign_nothing(authority: Authority) -> None:
    found = x509.load_pem_x509_certificate(authority.issue(HOSTS)[0]).extensions
    usages = set(found.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert usages == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not found.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_the_key_is_the_certificates_and_each_is_new(authority: Authority) -> None:
    (first, first_key), (second, _) = authority.issue(HOSTS), authority.issue(HOSTS)
    certificate = x509.load_pem_x509_certificate(first)
    assert load_pem_private_key(first_key, None).public_key() == certificate.public_key()
    assert x509.load_pem_x509_certificate(second).public_key() != certificate.public_key()


def test_a_name_of_another_alphabet_is_written_as_names_are(authority: Authority) -> None:
    certificate = x509.load_pem_x509_certificate(authority.issue(["bücher.example"])[0])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["xn--bcher-kva.example"]


@pytest.mark.parametrize(
    "host", ["ps0:2222", "", "*", "*.example.org", "a b", "http://x", ".x", "ü" * 80]
)
def test_what_is_no_host_is_named(host: str, authority: Authority) -> None:
    with pytest.raises(ConfigurationError) as caught:
        authority.issue(["ok", host])
    assert caught.value.message.startswith(f"host {host!r}: ")
