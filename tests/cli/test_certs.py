"""psync certs, and the options that name its files."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from psync.cli import run
from psync.cli.main import main
from psync.launch import tasks
from psync.net.tls_config import TLS_VARIABLES, load_tls
from tls_files import authority, variables_of


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the command writes into it
    for name in [name for name in os.environ if name.startswith("PSYNC_")]:
        del os.environ[name]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def options_of(environ: dict[str, str]) -> list[str]:
    return [
        part
        for name, value in environ.items()
        for part in ("--" + name.removeprefix("PSYNC_").lower().replace("_", "-"), value)
    ]


# --- psync certs new -------------------------------------------------------------------------


def test_files_are_made_and_the_variables_for_them_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--hosts", "ps0.example.org, 10.0.0.7", "--hosts", "[2001:db8::7]", "--days", "30"]
    assert main(["certs", "new", *args]) == 0
    first, *exports = capsys.readouterr().out.splitlines()
    names = f"localhost, 127.0.0.1, ::1, {socket.gethostname()}, ps0.example.org, 10.0.0.7, "
    assert first == f"valid for 30 days, for {names}2001:db8::7; on each host, for each task:"
    environ = dict(line.removeprefix("export ").split("=") for line in exports)
    assert {name: Path(path).name for name, path in environ.items()} == {
        "PSYNC_TLS_CA_FILE": "ca.pem",
        "PSYNC_TLS_CERT_FILE": "cert.pem",
        "PSYNC_TLS_KEY_FILE": "key.pem",
    }
    assert all(Path(path).parent == tmp_path / "certs" for path in environ.values())
    assert stat.S_IMODE((tmp_path / "certs" / "key.pem").stat().st_mode) == 0o600
    assert load_tls(environ) is not None
    certificate = x509.load_pem_x509_certificate((tmp_path / "certs" / "cert.pem").read_bytes())
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 30


def test_files_that_are_there_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "certs")
    assert main(["certs", "new", "--out", out]) == 0
    before = (tmp_path / "certs" / "key.pem").read_bytes()
    capsys.readouterr()
    told = refused(capsys, "certs", "new", "--out", out)
    assert told.startswith(f"psync: error: {out}/ca.pem: cannot be written: file exists\nhint: ")
    assert (tmp_path / "certs" / "key.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--hosts", "ps0:2222"], "host 'ps0:2222': expected a name or an IP address"),
        (["--days", "0"], "0 is not in the range"),
        (["--days", "100000"], "100000 is not in the range"),
    ],
)
def test_wrong_usage_is_told_and_nothing_is_made(
    args: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, "certs", "new", "--out", str(tmp_path / "certs"), *args)
    assert not (tmp_path / "certs").exists()


def test_without_cryptography_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "psync.net.signing", raising=False)
    told = refused(capsys, "certs", "new", "--out", str(tmp_path / "certs"))
    assert "hint: pip install 'psync[tls]'" in told
    assert not (tmp_path / "certs").exists()


# --- options ---------------------------------------------------------------------------------


def test_options_and_variables_reach_the_tasks_with_paths_that_hold_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = variables_of(tmp_path / "certs", authority())
    monkeypatch.chdir(tmp_path)
    relative = {name: os.path.relpath(path) for name, path in environ.items()}
    given: list[dict[str, str]] = []

    def launch(*args: Any, environ: dict[str, str], **options: Any) -> int:
        given.append({name: environ[name] for name in TLS_VARIABLES if name in environ})
        return 0

    monkeypatch.setattr(run, "launch", launch)
    assert main(["run", "x.py", *options_of(relative), "--no-tls-mutual"]) == 0
    os.environ.update(relative)
    assert main(["run", "x.py"]) == 0
    os.environ["PSYNC_TLS_MUTUAL"] = "0"
    assert main(["run", "x.py", "--tls-mutual"]) == 0
    assert given == [
        {**environ, "PSYNC_TLS_MUTUAL": "0"},
        environ,
        {**environ, "PSYNC_TLS_MUTUAL": "1"},
    ]


@pytest.mark.usefixtures("own_log")
def test_serve_takes_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = variables_of(tmp_path / "certs", authority())
    found: dict[str, str] = {}

    def serve_forever(**options: Any) -> int:
        found.update({name: os.environ[name] for name in TLS_VARIABLES if name in os.environ})
        return 0

    monkeypatch.setattr(tasks, "serve_forever", serve_forever)
    assert main(["task", *options_of(environ)]) == 0
    assert found == environ


@pytest.mark.parametrize("command", [["run", "x.py"], ["task"]])
def test_files_that_cannot_be_used_are_one_error_before_anything_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = variables_of(tmp_path / "certs", authority())
    os.chmod(environ["PSYNC_TLS_KEY_FILE"], 0o644)
    told = refused(capsys, *command, *options_of(environ))
    assert "users other than its owner can read or change it (mode 0644)" in told
    del environ["PSYNC_TLS_CA_FILE"]
    assert "PSYNC_TLS_CA_FILE is not" in refused(capsys, *command, *options_of(environ))
