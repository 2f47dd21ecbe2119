from __future__ import annotations

import numpy as np

import psync
from local_training import strategy_of


def test_it_is_printed_as_a_table() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        psync.Variable(np.zeros((399, 2), np.float32), name="table")
        psync.Variable(0, name="b", dtype="int8")
    report = strategy.placement()
    assert str(report).splitlines() == [
        "variable   shard  shape     dtype    bytes  ps",
        "table          0  (200, 2)  float32  1,600   0",
        "table          1  (199, 2)  float32  1,592   1",
        "b              0  ()        int8         1   0",
        "all of it                            1,601   0",
        "all of it                            1,592   1",
    ]
    assert report.rows[1].device == "/job:ps/replica:0/task:1/device:CPU:0"


def test_without_variables_nothing_lies_anywhere() -> None:
    report = strategy_of(1).placement()
    assert (report.rows, report.totals) == ((), (0,))
    assert str(report).split()[:3] == ["variable", "shard", "shape"]
