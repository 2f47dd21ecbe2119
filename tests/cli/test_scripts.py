"""The user's script as a command."""

from __future__ import annotations

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


def test_a_directory_without_a_main_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        script_command(str(tmp_path))
    assert str(caught.value) == f"script {str(tmp_path)!r} is a directory without a __main__.py"
