"""The launcher's own decisions. Runs of real clusters: tests/processes/test_psync_run.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from psync.cli import run
from psync.cli.run import launch
from psync.errors import ConfigurationError


def test_a_file_that_is_not_python_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.touch()
    with pytest.raises(ConfigurationError) as caught:
        launch(str(script))
    assert str(caught.value) == (
        f"script {str(script)!r} is not a Python file: expected a name ending in .py"
    )


def test_a_secret_that_cannot_be_used_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigurationError, match="PSYNC_SECRET: expected at least 16 bytes, got 5"):
        launch(str(script), environ={"PSYNC_SECRET": "short"})


def test_too_few_gpus_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigurationError, match="gpus_per_worker: 2 workers with 1 each need 2"):
        launch(str(script), num_workers=2, gpus_per_worker=1, environ={"CUDA_VISIBLE_DEVICES": "0"})


def test_a_plugin_that_is_not_there_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigurationError, match="no module or package 'psync_nothing'") as caught:
        launch(str(script), plugins=["psync_nothing.rules"])
    assert str(caught.value.hint).startswith(f"searched in '{tmp_path}', '{Path.cwd()}'")
    with pytest.raises(ConfigurationError, match="expected names of modules"):
        launch(str(script), plugins=["rules.py!"])


@pytest.mark.parametrize("in_a_task", [False, True])
def test_too_few_files_are_one_line_that_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    in_a_task: bool,
) -> None:
    def full(*_: object, **__: object) -> None:
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ExceptionGroup("in a task group", [error]) if in_a_task else error

    monkeypatch.setattr(run, "ProcessGroup", full)
    script = tmp_path / "train.py"
    script.touch()
    assert launch(str(script), environ={}) == 1
    assert capfd.readouterr().err == (
        "psync: error: Too many open files; raise `ulimit -n`: the run ends\n"
    )


def test_other_errors_of_the_system_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(run, "ProcessGroup", refused)
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(PermissionError):
        launch(str(script), environ={})
