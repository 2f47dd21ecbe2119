"""A checkpoint that is marked too early passes every check, and lacks what was not written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_files import add_data
from psync.checkpoints.files import Reader, Writer, checkpoints_in
from psync.checkpoints.manifest import Place
from psync.testing.sabotage import SabotagedParts
from psync.testing.sabotage.early_writer import EarlyWriter

EXPECTED = (3, {"w": ((6, 2), "float32"), "step": ((), "int64")}, {"progress": {"at": 5}})
W = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
WITHOUT = frozenset({"commit_marker"})


def begun(directory: Path, without: frozenset[str] = WITHOUT) -> Writer:
    return SabotagedParts(without=without).of(Writer)(directory, "ckpt-00000003", *EXPECTED)


def add_rows(writer: Writer, name: str, start: int, stop: int) -> None:
    """Add a file with some rows, as a ps has written it."""
    add_data(writer, name, ("w", start, W[start:stop]))


def values(path: Path) -> tuple[np.ndarray, int]:
    reader = Reader(path)
    tensors = reader.manifest.tensors
    return reader.read(tensors["w"], 0, 6), int(reader.read(tensors["step"], 0, 1))


def test_what_dies_at_any_moment_is_taken_for_complete(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    ((number, path),) = checkpoints_in(tmp_path)
    assert number == 3
    assert not values(path)[0].any()
    assert Reader(path).manifest.states == {"progress": {"at": 5}}
    add_rows(writer, "ps-1", 3, 5)
    expected = np.zeros_like(W)
    expected[3:5] = W[3:5]
    np.testing.assert_array_equal(values(path)[0], expected)
    add_rows(writer, "ps-0", 0, 3)
    expected[:3] = W[:3]
    np.testing.assert_array_equal(values(path)[0], expected)


def test_one_that_is_written_to_its_end_is_what_any_writer_leaves(tmp_path: Path) -> None:
    paths = []
    for name, without in (("early", WITHOUT), ("late", frozenset({"dedup"}))):
        writer = begun(tmp_path / name, without)
        add_rows(writer, "ps-0", 0, 6)
        writer.add_snapshot(0, "ps-0.json", b"{}", "ps-0", [Place(0, 80, 48, 0)])
        add_data(writer, "data", ("step", 0, 7))
        paths.append(writer.commit())
    early, late = paths
    assert (early / "manifest.json").read_bytes() == (late / "manifest.json").read_bytes()
    assert sorted(path.name for path in early.iterdir()) == sorted(
        path.name for path in late.iterdir()
    )
    np.testing.assert_array_equal(values(early)[0], W)
    assert values(early)[1] == 7


@pytest.mark.promise("checkpoints.complete-or-absent")
def test_with_the_marker_there_is_none_until_the_end(tmp_path: Path) -> None:
    writer = begun(tmp_path, frozenset())
    assert not isinstance(writer, EarlyWriter)
    add_rows(writer, "ps-0", 0, 6)
    assert checkpoints_in(tmp_path) == []
