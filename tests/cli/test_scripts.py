"""The user's script as a command."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from psync.cli.scripts import script_command
from psync.errors import ConfigurationError


def test_a_script_runs_in_this_interpreter_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = script_command(str(script), ["--lr", "0.1"])
    assert command == [sys.executable, str(script), "--lr", "0.1"]


def test_a_directory_with_a_main_file_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert script_command(str(tmp_path)) == [sys.executable, str(tmp_path)]


def test_a_missing_script_is_an_error(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    with pytest.raises(ConfigurationError) as caught:
        script_command(script)
    assert str(caught.value) == f"script {script!r} does not exist"
    with pytest.raises(ConfigurationError, match="does not exist\nhint: a module runs with -m"):
        script_command("research.train")


def test_a_directory_without_a_main_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        script_command(str(tmp_path))
    assert str(caught.value) == f"script {str(tmp_path)!r} is a directory without a __main__.py"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the current directory, which says so if it is imported."""
    for name in ("research/__init__.py", "research/deep/__init__.py", "research/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError('imported')")
    (tmp_path / "research/deep/__main__.py").touch()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["research.train", "research.deep", "plain.train", "json.tool"])
@pytest.mark.usefixtures("package")
def test_a_module_runs_as_python_does_it_and_is_not_imported_before(name: str) -> None:
    command = script_command(name, ["--lr", "0.1"], module=True)
    assert command == [sys.executable, "-m", name, "--lr", "0.1"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("research.tran", "there is no 'research.tran' in this directory"),
        ("reserch.train", "there is no 'reserch' in this directory"),
        ("research/train.py", "there is no 'research/train' in this directory"),
        ("", "there is no '' in this directory"),
        ("research..train", "there is no 'research.' in this directory"),
        ("research.train.py", "'research.train' is not a package"),
        ("research", "'research' is a package without a __main__.py"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_module_that_is_not_there_is_an_error(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        script_command(name, module=True)
