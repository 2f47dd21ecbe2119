"""Reports on checkpoints, and exports that other programs read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from data_files import add_data
from psync.checkpoints.files import Writer
from psync.cli.checkpoint_reports import INDEX, differences, export, inspection, summary
from psync.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from psync.specs import dtype_name

TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)


def save(
    directory: Path, number: int, states: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A checkpoint of a table in two slices, a scalar, and a bfloat16 vector."""
    tensors: dict[str, Any] = {
        "model/table": TABLE, "model/bias": np.float64(3), "opt/m/table": TABLE,
        "model/half": np.ones(3, ml_dtypes.bfloat16), **changes,
    }  # fmt: skip
    tensors = {name: np.asarray(value) for name, value in tensors.items() if value is not None}
    shapes = {name: (value.shape, dtype_name(value.dtype)) for name, value in tensors.items()}
    states = {"opt/step": 7, "long": "x" * 200} if states is None else states
    writer = Writer(directory, f"ckpt-{number:08d}", number, shapes, states)
    pieces = []
    for name, value in tensors.items():
        if value.ndim == 2:
            pieces += [(name, 0, value[:4]), (name, 4, value[4:])]
        else:
            pieces.append((name, 0, value))
    add_data(writer, "data", *pieces)
    return writer.commit()


def test_a_summary_is_a_line(tmp_path: Path) -> None:
    line = summary(save(tmp_path, 12))
    assert line.startswith("ckpt-00000012  4 tensors  2 states  ")
    assert "B  20" in line


def test_an_inspection_lists_everything(tmp_path: Path) -> None:
    lines = inspection(save(tmp_path, 1))
    assert "model/table  float32[10, 2]  80 B  2 slices" in lines
    assert "model/bias  float64[]  8 B" in lines
    assert "opt/step  7" in lines
    assert any(line.startswith("long  ") and line.endswith("...") for line in lines)


@pytest.mark.promise("checkpoints.damage-detected")
def test_an_inspection_checks_every_byte(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for file in path.iterdir():
        whole = file.read_bytes()
        for at in range(0, len(whole), 7):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CheckpointCorrupt, match=file.name):
                inspection(path)
        file.write_bytes(whole)


def test_differences_are_named_with_their_size(tmp_path: Path) -> None:
    changed = TABLE.copy()
    changed[3, 1] += 0.5
    changed[7, 0] = np.nan
    first = save(tmp_path, 1, gone=np.zeros(2), other=np.zeros(2), kind=np.zeros(2, np.int8))
    second = save(
        tmp_path, 2, new=np.zeros(2), other=np.zeros(3), kind=np.zeros(2, np.int16),
        **{"model/table": changed},
    )  # fmt: skip
    assert differences(first, first) == []
    found = {d.name: d for d in differences(first, second)}
    assert {name: d.what for name, d in found.items()} == {
        "gone": "only in the first", "new": "only in the second", "other": "shape",
        "kind": "dtype", "model/table": "values",
    }  # fmt: skip
    assert found["model/table"].changed == 2


def test_nan_is_no_difference_to_nan(tmp_path: Path) -> None:
    value = np.array([np.nan, -0.0])
    first = save(tmp_path, 1, v=value)
    second = save(tmp_path, 2, v=-value)
    assert differences(first, second) == []


@pytest.mark.parametrize(
    ("value", "other", "line"),
    [
        (np.int64([2**53, 1]), np.int64([2**53 + 1, 1]), "1 elements, by 1 at most"),
        (np.int64([-(2**63)]), np.int64([2**63 - 1]), "1 elements, by 1.845e+19 at most"),
        (np.uint8([255, 0]), np.uint8([0, 255]), "2 elements, by 255 at most"),
        (np.array([True, False]), np.array([True, True]), "1 elements, by 1 at most"),
        (np.array([np.nan, 1.0]), np.array([0.0, 1.0]), "1 elements, by nan at most"),
        (np.array([np.nan, 1.0]), np.array([0.0, 3.0]), "2 elements, by 2 at most"),
        (np.array([np.inf, 1.0]), np.array([0.0, 1.0]), "1 elements, by inf at most"),
    ],
)
def test_every_element_that_differs_is_counted(
    tmp_path: Path, value: np.ndarray, other: np.ndarray, line: str
) -> None:
    (found,) = differences(save(tmp_path, 1, v=value), save(tmp_path, 2, v=other))
    assert str(found) == f"v  values: {line}"


def test_states_are_compared(tmp_path: Path) -> None:
    same: dict[str, Any] = {"same": [1, math.nan], "map": {"a": 1, "b": 2}}
    first = save(tmp_path, 1, states={**same, "opt/step": 7, "gone": None})
    second = save(
        tmp_path, 2, states={"same": [1, math.nan], "map": {"b": 2, "a": 1}, "opt/step": 8}
    )
    assert list(map(str, differences(first, second))) == [
        "gone  only in the first", "opt/step  state",
    ]  # fmt: skip


class TestExport:
    def test_each_variable_is_whole_and_other_programs_read_it(self, tmp_path: Path) -> None:
        (written,) = export(save(tmp_path, 1), tmp_path / "out", prefixes=["model"])
        assert written == tmp_path / "out" / "model.safetensors"
        with safetensors.safe_open(written, "numpy") as file:
            assert sorted(file.keys()) == ["bias", "half", "table"]
            np.testing.assert_array_equal(file.get_tensor("table"), TABLE)
            assert file.get_tensor("bias") == 3
            assert file.get_slice("half").get_dtype() == "BF16"

    def test_without_prefixes_everything_comes_under_its_name(self, tmp_path: Path) -> None:
        (written,) = export(save(tmp_path, 1, **{"model/half": None}), tmp_path / "out")
        assert sorted(safetensors.numpy.load_file(written)) == [
            "model.bias", "model.table", "opt.m.table",
        ]  # fmt: skip

    def test_large_ones_come_in_files_with_an_index(self, tmp_path: Path) -> None:
        written = export(save(tmp_path, 1), tmp_path / "out", max_file_bytes=90)
        assert [path.name for path in written] == [
            "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX,
        ]  # fmt: skip
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"] == {"total_size": 174}
        for name, file in index["weight_map"].items():
            with safetensors.safe_open(tmp_path / "out" / file, "numpy") as opened:
                assert name in opened.keys()

    def test_one_tensor_may_be_asked_for(self, tmp_path: Path) -> None:
        (written,) = export(save(tmp_path, 1), tmp_path / "out", prefixes=["model/table"])
        assert list(safetensors.numpy.load_file(written)) == ["table"]

    def test_two_of_one_name_are_an_error_and_leave_nothing(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        with pytest.raises(CheckpointError, match="two tensors would be called 'table'"):
            export(path, tmp_path / "out", prefixes=["model", "opt/m"])
        assert not (tmp_path / "out").exists()

    def test_damage_is_found_and_leaves_nothing(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        data = bytearray((path / "data").read_bytes())
        data[-1] ^= 1
        (path / "data").write_bytes(data)
        with pytest.raises(CheckpointCorrupt):
            export(path, tmp_path / "out")
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt-00000001"]

    def test_what_there_is_not_cannot_be_exported(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        with pytest.raises(CheckpointNotFound, match="no tensor begins with mode"):
            export(path, tmp_path / "out", prefixes=["mode"])

    def test_a_directory_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        (tmp_path / "file").touch()
        with pytest.raises(
            CheckpointError, match=f"export to {tmp_path}/file/out: Not a directory"
        ):
            export(path, tmp_path / "file" / "out")

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match="exists already"):
            export(path, tmp_path / "out")

    @pytest.mark.parametrize("directory", [".", "/", "out/..", "out/."])
    def test_what_has_no_name_of_its_own_exists_already(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
    ) -> None:
        path = save(tmp_path, 1)
        (tmp_path / "out").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match="exists already"):
            export(path, Path(directory))

    def test_it_touches_nothing_beside_its_directory(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        (tmp_path / "out.tmp").mkdir()
        (tmp_path / "out.tmp" / "mine").touch()
        export(path, tmp_path / "out")
        assert (tmp_path / "out.tmp" / "mine").exists()
        found = sorted(entry.name for entry in tmp_path.iterdir())
        assert found == ["ckpt-00000001", "out", "out.tmp"]
        assert (tmp_path / "out").stat().st_mode == (tmp_path / "out.tmp").stat().st_mode
