"""Dask collections as data of workers."""

from __future__ import annotations

import pytest

from engine_programs import HERE, run

pytest.importorskip("distributed")

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = str(HERE / "dask_programs.py")


def test_arrays_and_dataframes_come_partition_by_partition() -> None:
    said, _ = run([PROGRAMS, "collections"])
    numbers = sum(range(1000))
    for name, total, kind, shapes in (
        ("tuple", 4 * numbers, "tuple", [[50, 3], [50]]),
        ("dict", 4 * numbers, "dict", [[50, 3], [50]]),
        ("array", numbers, "ndarray", [[50]]),
        ("dataframe", numbers + 1000, "dict", [[50], [50]]),
    ):
        rows, sums, batches = zip(*said[name], strict=True)
        assert rows == (500, 500)
        assert sum(sums) == total
        assert batches == ([kind, shapes],) * 2
    assert said["tuple_error"].startswith("data: expected the same chunks along axis 0")
    assert said["int_error"] == "data: expected Dask arrays or a dataframe, got int"
    assert said["dict_error"] == "data: expected Dask arrays or a dataframe, got ndarray"
