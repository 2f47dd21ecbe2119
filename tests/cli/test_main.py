"""The command line: help, usage errors, and what each command hands on."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography import x509

import psync
from psync.cli.main import main
from psync.cli.run import Launcher
from psync.errors import ConfigurationError
from psync.net.certificates import TLS_VARIABLES, load_tls
from tasks_by_hand import SECRET, by_hand
from tls_files import authority, variables_of


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What psync answers wrong usage with, along with exit code 2: a line, perhaps a hint."""
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch("psync: error: .*\n(hint: .*\n)?", captured.err)
    return captured.err.rstrip("\n")


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"psync {importlib.metadata.version('psync')}\n"


def test_a_variable_named_like_the_version_option_does_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_VERSION", "1")
    assert main(["run", "--help"]) == 0
    assert "SCRIPT" in capsys.readouterr().out


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for args, example in [
        (["--help"], "psync run train.py --ps 2 --workers 2"),
        (["run", "--help"], "psync run train.py --ps 2 --workers 4 -- --epochs 10"),
        (["task", "-h"], "PSYNC_SECRET_FILE=~/cluster.secret psync task"),
    ]:
        assert main(args) == 0
        assert example in capsys.readouterr().out


def test_without_a_command_help_is_shown_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Commands:" in captured.err


def test_wrong_usage_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in [
        (["run"], "Missing argument 'SCRIPT'."),
        (["run", "nowhere.py"], "script 'nowhere.py' does not exist"),
        (["run", "x.py", "--ps", "0"], "Invalid value for '--ps': 0 is not in the range x>=1."),
        (
            ["run", "x.py", "--workers", "-1"],
            "Invalid value for '--workers': -1 is not in the range x>=1.",
        ),
        (
            ["run", "x.py", "--max-restarts", "-1"],
            "Invalid value for '--max-restarts': -1 is not in the range x>=0.",
        ),
        (
            ["run", "x.py", "--ps", "two"],
            "Invalid value for '--ps': 'two' is not a valid integer range.",
        ),
    ]:
        assert refused(capsys, *args) == f"psync: error: {message}"


def test_an_option_meant_for_the_script_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "run", "train.py", "--epochs", "3")
    assert "--epochs" in line
    assert line.endswith(" Options of the script go after --.")


def test_an_unknown_option_of_another_command_has_no_such_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not refused(capsys, "task", "--epochs").endswith("after --.")


def test_options_come_from_the_environment_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_RUN_PS", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PSYNC_RUN_WORKERS", "0")
        named = "psync: error: Invalid value for PSYNC_RUN_WORKERS: 0 is not in the range x>=1."
        assert refused(capsys, "run", "x.py", "--ps", "1") == named
    monkeypatch.setenv("PSYNC_CHIEF_TIMEOUT", "1")
    assert "Invalid value for '--ps'" in refused(capsys, "run", "x.py", "--ps", "0")


@pytest.mark.parametrize(
    ("variable", "expected", "texts"),
    [
        ("PSYNC_LIMIT_CONNECTIONS", "an integer from 1 (digits only)", ["0", "-1", "1e6", "", "١"]),
        ("PSYNC_LIMIT_HEADER_BYTES", "an integer from 4096 (digits only)", ["1", "9" * 5000]),
        (
            "PSYNC_CHIEF_TIMEOUT",
            "seconds above 0, or none",
            ["0", "-3", "nan", "inf", "soon", "1 h"],
        ),
        ("PSYNC_WATCHDOG_TIMEOUT", "seconds", ["soon", "nan", "inf", "1,5"]),
        ("PSYNC_LOOP", "uvloop or asyncio", ["trio"]),
        ("PSYNC_STATUS", "0 or 1", ["yes"]),
        ("PSYNC_TASK_METRICS", '"HOST:PORT"', ["9400"]),
    ],
)
def test_a_variable_of_tasks_that_makes_no_sense_is_one_error_before_any_starts(
    variable: str,
    expected: str,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    for text in texts:
        monkeypatch.setenv(variable, text)
        line = refused(capsys, "run", str(tmp_path / "train.py"))
        assert line.startswith(f"psync: error: {variable}")
        assert f": expected {expected}, got {text!r}" in line
        with pytest.raises(ConfigurationError, match=variable):
            asyncio.run(psync.LocalCluster(1, 1).start())


def python(*args: str) -> str:
    """What the interpreter prints."""
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.processes
def test_the_package_can_be_run_as_a_module() -> None:
    version = importlib.metadata.version("psync")
    assert python("-m", "psync", "--version") == f"psync {version}\n"


@pytest.mark.processes
def test_an_interrupt_while_the_command_loads_ends_it_silently() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["psync"].partition(":")
    code = (
        "import signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'click': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    script = f"from {module} import {name} as main; sys.exit(main())"
    for entry in (script, "import runpy; runpy.run_module('psync', run_name='__main__')"):
        run = subprocess.run([sys.executable, "-c", code + entry], capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (130, "")


@pytest.mark.processes
def test_the_launcher_imports_nothing_that_is_slow_to_load() -> None:
    code = (
        "import sys; from psync.cli.main import main; from psync.cli.run import Launcher\n"
        "Launcher.launch = lambda launcher: 0\n"
        "assert main(['run', sys.argv[1]]) == 0\n"
        "print([name for name in ('numpy', 'uvloop', 'msgpack') if name in sys.modules])"
    )
    assert python("-c", code, __file__) == "[]\n"


@pytest.mark.processes
def test_a_reader_that_has_gone_does_not_change_the_exit_code() -> None:
    code = (
        "import sys; from psync.cli.main import main; print('unread'); sys.exit(main(['nonsense']))"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as gone:
        result = subprocess.run(
            [sys.executable, "-c", code],
            stdout=gone,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # the text is still to be flushed
            check=False,
        )
    assert (result.returncode, result.stderr) == (
        2,
        b"psync: error: No such command 'nonsense'.\n",
    )


@pytest.mark.parametrize(
    "command", [["task"], ["join", "127.0.0.1:1"], ["run", "train.py"]], ids=lambda each: each[0]
)
def test_a_level_that_is_none_is_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *command, "--log-level", "loud")
    assert "'loud' is not one of 'debug', 'info', 'warning', 'error', 'critical'" in said


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the command writes into it
    for name in [name for name in os.environ if name.startswith("PSYNC_")]:
        del os.environ[name]


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
    Path("x.py").touch()
    relative = {name: os.path.relpath(path) for name, path in environ.items()}
    given: list[dict[str, str]] = []

    def launch(launcher: Launcher) -> int:
        environ = launcher.environ
        given.append({name: environ[name] for name in TLS_VARIABLES if name in environ})
        return 0

    monkeypatch.setattr(Launcher, "launch", launch)
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

    def run_loop(serving: object, *, terminated_code: int) -> int:
        found.update({name: os.environ[name] for name in TLS_VARIABLES if name in os.environ})
        return terminated_code

    monkeypatch.setattr("psync.cli.main.run_loop", run_loop)
    monkeypatch.setenv("TF_CONFIG", config("ps"))
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


def config(job: str, **cluster: list[str]) -> str:
    described = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:3"]}
    return json.dumps({"cluster": {**described, **cluster}, "task": {"type": job, "index": 0}})


def test_a_task_that_serves_answers_to_who_has_the_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with by_hand() as cluster:
        cluster.serve_all()
        monkeypatch.setenv("PSYNC_SECRET", SECRET)
        for job in ("ps", "worker"):
            monkeypatch.setenv("TF_CONFIG", config(job, **cluster.cluster))
            assert main(["health"]) == 0
            assert capsys.readouterr().out == f"/job:{job}/task:0 answers\n"
        monkeypatch.setenv("PSYNC_SECRET", "another one, of the same kind")
        assert main(["health"]) == 2
        assert "does not have the same secret" in capsys.readouterr().err


def test_a_task_that_is_not_there_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PSYNC_SECRET", SECRET)
    monkeypatch.setenv("TF_CONFIG", config("ps"))
    assert main(["health", "--timeout", "2"]) == 1
    assert "psync: /job:ps/task:0 at 127.0.0.1:2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TF_CONFIG": config("chief")}, "/job:chief/task:0 does not listen"),
        ({"TF_CONFIG": config("ps"), "PSYNC_SECRET": ""}, "PSYNC_SECRET: expected at least"),
        ({}, "this process belongs to no cluster"),
    ],
)
def test_wrong_set_up_is_told(
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["health"]) == 2
    assert told in capsys.readouterr().err


def test_what_cannot_be_used_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join"]) == 2
    assert "Missing argument 'HOST:PORT'" in capsys.readouterr().err
