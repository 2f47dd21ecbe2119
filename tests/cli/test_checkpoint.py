"""psync checkpoint: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psync.checkpoints.files import Writer
from psync.checkpoints.manifest import Planned
from psync.cli.main import main


def save(directory: Path, number: int, value: float) -> str:
    shapes = {"model/w": ((4,), "float32")}
    writer = Writer(directory, f"ckpt-{number:08d}", number, shapes, {"epoch": number})
    file = writer.data_file("data", [Planned("model/w", (4,), "float32", 0)])
    file.write(np.full(4, value, np.float32))
    return str(writer.commit())


def test_complete_checkpoints_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 1.0)
    (tmp_path / "ckpt-00000003.tmp").mkdir()
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ckpt-00000001", "ckpt-00000002"]


def test_what_is_in_one_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", save(tmp_path, 1, 1.0)]) == 0
    assert capsys.readouterr().out == "model/w  float32[4]  16 B\nepoch  1\n"


def test_differences_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = save(tmp_path, 1, 1.0), save(tmp_path, 2, 1.5)
    assert main(["checkpoint", "diff", first, first]) == 0
    assert capsys.readouterr().out == ""
    assert main(["checkpoint", "diff", first, second]) == 1
    assert capsys.readouterr().out == "model/w  values: 4 elements, by 0.5 at most\nepoch  state\n"


def test_an_export_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    path = save(tmp_path, 1, 1.0)
    assert main(["checkpoint", "export", path, str(out), "--only", "model"]) == 0
    assert capsys.readouterr().out == f"{out / 'model.safetensors'}\n"


def test_what_is_no_checkpoint_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no checkpoint here" in captured.err


def test_a_path_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["checkpoint", "--help"]) == 0
    assert "psync checkpoint export" in capsys.readouterr().out
