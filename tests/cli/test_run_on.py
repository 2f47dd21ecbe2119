"""psync run --on: what is refused before anything starts. See tests/integrations for the rest."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from psync.cli import run_on
from psync.cli.main import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('never')")
    return str(path)


@pytest.mark.parametrize(
    "option", [["--evaluator"], ["--quiet"], ["--chief-restarts", "2"], ["--report", "x.html"]]
)
def test_what_needs_a_launcher_is_refused(
    script: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "ray", *option, script]) == 2
    assert "--on does not support --evaluator" in capsys.readouterr().err


def test_an_address_needs_an_engine(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--address", "head:6379", script]) == 2
    assert "--address needs --on ray or --on dask" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_an_engine_that_is_not_installed_is_named(
    script: str,
    engine: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(run_on, "find_spec", lambda name: None if name == package else found(name))
    assert main(["run", "--on", engine, script]) == 2
    said = capsys.readouterr().err
    assert f"--on {engine} needs the package {package}, which is not installed here" in said
    assert f"pip install 'psync[{engine}]'" in said


def test_a_script_that_is_missing_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--on", "ray", "nowhere.py"]) == 2
    assert "script 'nowhere.py' does not exist" in capsys.readouterr().err
