from __future__ import annotations

from psync.api.strategy import report_of
from psync.specs import ShardSpec, VariableSpec

SHARDS = tuple(
    ShardSpec("table", 0, index, offset, (rows, 2), "float32", ps)
    for index, offset, rows, ps in ((0, 0, 200, 1), (1, 200, 199, 0))
)
TABLE = VariableSpec("table", 0, (399, 2), "float32", True, SHARDS, "train.py:1")
B = VariableSpec("b", 1, (), "int8", True, (ShardSpec("b", 1, 0, 0, (), "int8", 1),), "train.py:2")


def test_it_is_printed_as_a_table() -> None:
    assert str(report_of([TABLE, B], 2)).splitlines() == [
        "variable   shard  shape     dtype    bytes  ps",
        "table          0  (200, 2)  float32  1,600   1",
        "table          1  (199, 2)  float32  1,592   0",
        "b              0  ()        int8         1   1",
        "all of it                            1,592   0",
        "all of it                            1,601   1",
    ]


def test_without_variables_nothing_lies_anywhere() -> None:
    report = report_of([], 1)
    assert (report.rows, report.totals) == ((), (0,))
    assert str(report).splitlines()[0].split() == [
        "variable", "shard", "shape", "dtype", "bytes", "ps",
    ]  # fmt: skip
