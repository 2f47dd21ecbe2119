"""Files of certificates: who can read them, and what is there when something goes wrong."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from psync.errors import ConfigurationError
from psync.net import certificates
from psync.net.certificates import FILES, load_tls, mint, own_hosts, temporary, write
from psync.net.signing import Authority

CONTENTS = dict(zip(FILES, (b"the authority", b"the certificate", b"the key"), strict=True))


def test_only_the_owner_reads_the_key(tmp_path: Path) -> None:
    variables = write(CONTENTS, tmp_path / "new" / "certs")
    ca, cert, key = map(Path, variables.values())
    assert [path.name for path in (ca, cert, key)] == ["ca.pem", "cert.pem", "key.pem"]
    assert [path.read_bytes() for path in (ca, cert, key)] == list(CONTENTS.values())
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("there", ["ca.pem", "cert.pem", "key.pem"])
def test_nothing_is_overwritten_and_nothing_is_left(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("dear to somebody")
    with pytest.raises(ConfigurationError) as caught:
        write(CONTENTS, tmp_path)
    assert caught.value.message == f"{tmp_path / there}: cannot be written: file exists"
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "dear to somebody"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written: not a directory"):
        write(CONTENTS, tmp_path / "file" / "certs")


def test_certificates_are_valid_from_a_little_before_now_for_so_many_days() -> None:
    now = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
    made = mint(["ps0"], 7, now)
    for pem in (made["ca.pem"], made["cert.pem"]):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc == now - datetime.timedelta(hours=1)
        assert certificate.not_valid_after_utc == now + datetime.timedelta(days=7)


def test_the_key_of_the_authority_is_nowhere() -> None:
    made = mint(["ps0"], 1)
    assert made["key.pem"].count(b"BEGIN PRIVATE KEY") == 1
    assert b"PRIVATE" not in made["ca.pem"] + made["cert.pem"]


def test_this_machine_is_known_by_its_name_and_its_loopback_addresses() -> None:
    assert own_hosts()[:3] == ["localhost", "127.0.0.1", "::1"]
    assert socket.gethostname() in own_hosts()


def test_temporary_certificates_work_and_go() -> None:
    with temporary(days=1) as variables:
        key = Path(variables["PSYNC_TLS_KEY_FILE"])
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
        assert load_tls(variables) is not None
    assert not key.parent.exists()


def test_without_the_package_that_makes_them_its_name_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "psync.net.signing")
    with pytest.raises(ConfigurationError) as caught:
        mint(["ps0"], 1)
    assert "package cryptography, which is not installed" in caught.value.message
    assert caught.value.hint == "pip install 'psync[tls]'; TLS itself does not need it"


def test_a_host_without_a_name_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates.socket, "gethostname", lambda: "localhost")
    assert own_hosts() == ["localhost", "127.0.0.1", "::1"]


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
