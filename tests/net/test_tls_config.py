"""What a task says of certificates that it cannot use."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from psync.errors import ConfigurationError
from psync.net.tls_config import load_tls, refusal_of
from tls_files import authority, variables_of

CA, CERT, KEY, MUTUAL = (
    "PSYNC_TLS_CA_FILE",
    "PSYNC_TLS_CERT_FILE",
    "PSYNC_TLS_KEY_FILE",
    "PSYNC_TLS_MUTUAL",
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return variables_of(tmp_path / "certs", authority())


def refused(environ: dict[str, str]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load_tls(environ)
    return caught.value


def test_no_variable_means_no_tls() -> None:
    assert load_tls({}) is None
    assert load_tls({CA: "", CERT: "", KEY: "", MUTUAL: ""}) is None
    assert load_tls({MUTUAL: "0"}) is None


def test_tls_1_3_with_names_and_certificates_of_both_sides(environ: dict[str, str]) -> None:
    tls = load_tls(environ)
    assert tls is not None
    assert tls.server is not None
    for context in (tls.client, tls.server):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1  # and none of the system's
    assert tls.client.check_hostname
    own = ssl.PEM_cert_to_DER_cert(Path(environ[CERT]).read_text())
    assert tls.binding == hashlib.sha256(own).digest()


def test_without_mutual_tls_a_task_that_connects_needs_no_certificate(
    environ: dict[str, str],
) -> None:
    tls = load_tls({CA: environ[CA], MUTUAL: "0"})
    assert tls is not None
    assert tls.client.verify_mode == ssl.CERT_REQUIRED
    assert (tls.server, tls.binding) == (None, b"")
    tls = load_tls({**environ, MUTUAL: "0"})
    assert tls is not None
    assert tls.server is not None
    assert tls.server.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([CERT, KEY], f"{CERT} is set, but {CA} is not"),
        ([KEY], f"{KEY} is set, but {CA} is not"),
        ([CA, CERT], f"{CERT} is set, but {KEY} is not"),
        ([CA, KEY], f"{KEY} is set, but {CERT} is not"),
        ([CA], f"{CA} is set, but {CERT} is not: both sides of a connection present a certificate"),
    ],
)
def test_what_is_missing_is_named(names: list[str], told: str, environ: dict[str, str]) -> None:
    assert refused({name: environ[name] for name in names}).message == told


def test_mutual_tls_is_said_with_0_and_1(environ: dict[str, str]) -> None:
    assert refused({**environ, MUTUAL: "no"}).message == f"{MUTUAL}: expected 0 or 1, got 'no'"
    assert refused({MUTUAL: "1"}).message == f"{MUTUAL} is 1, but {CA} is not set"


@pytest.mark.parametrize("name", [CA, CERT, KEY])
def test_a_file_that_is_not_there_is_named(name: str, environ: dict[str, str]) -> None:
    missing = environ[name] + ".gone"
    error = refused({**environ, name: missing})
    assert error.message == f"{name} ({missing}): cannot be used: No such file or directory"


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602])
def test_a_key_that_others_can_read_or_change_is_refused(
    mode: int, environ: dict[str, str]
) -> None:
    os.chmod(environ[KEY], mode)
    error = refused(environ)
    assert error.message == (
        f"{KEY} ({environ[KEY]}): users other than its owner can read or change it "
        f"(mode {mode:04o})"
    )
    assert error.hint == f"chmod 600 {environ[KEY]}"


@pytest.mark.parametrize("name", [CA, CERT])
@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_without_a_certificate_is_named(
    name: str, text: str, environ: dict[str, str]
) -> None:
    Path(environ[name]).write_text(text)
    assert refused(environ).message.startswith(f"{name} ({environ[name]}): cannot be used: ")


def test_the_key_of_another_certificate_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    other = variables_of(tmp_path / "other", authority())
    error = refused({**environ, KEY: other[KEY]})
    assert error.message.endswith("cannot be used: key values mismatch")


def test_nobody_is_asked_for_a_password(environ: dict[str, str]) -> None:
    path = Path(environ[KEY])
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert refused(environ).message == (
        f"{KEY}: the key has a password, which psync cannot ask for"
    )


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", "b:1 refuses the certificate of this task: unknown ca"),
        (
            "TLSV13_ALERT_CERTIFICATE_REQUIRED",
            "b:1 requires a certificate, but this task has none",
        ),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "b:1 presents no certificate"),
        ("NO_SHARED_CIPHER", "TLS with b:1 failed: no shared cipher"),
    ],
)
def test_what_openssl_says_is_told_in_words(reason: str, told: str) -> None:
    error = ssl.SSLError(1, "[SSL] library words")
    error.reason = reason
    assert refusal_of(error, "b:1").message == told


def test_openssl_may_have_no_words() -> None:
    error = ssl.SSLError("odd")
    error.reason = None  # type: ignore[assignment]
    assert refusal_of(error, "b:1").message == "TLS with b:1 failed: ('odd',)"
