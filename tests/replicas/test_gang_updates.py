"""What is brought to the others, and what is done with all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from local_training import at_once
from psync import IndexedSlices, VariableAggregation
from psync.errors import ReplicaValueError, UnsupportedError, ValueMismatchError
from psync.replicas import gang_updates

ROWS = IndexedSlices(np.ones((1, 2), np.float32), [0])


class Target:
    """Notes what is written to it."""

    def __init__(self, name: str, aggregation: str = "SUM") -> None:
        self.name, self.aggregation = name, VariableAggregation[aggregation]
        self.written: list[tuple[str, Any]] = []

    def __getattr__(self, method: str) -> Any:
        async def write(value: Any) -> None:
            self.written.append((method, value))

        return write


class Optimizer:
    """Notes what is pushed through it."""

    def get_name(self) -> str:
        return "SGD"

    async def apply_gradients(self, pairs: Any, global_step: Any) -> Any:
        return [(gradient.tolist(), variable.name) for gradient, variable in pairs], global_step


class Others:
    """All replicas of a gang, which all bring the same."""

    replica_id, num_replicas = 0, 3

    async def collective(self, what: str, function: Any, value: Any) -> Any:
        self.what = what
        return await function(None, [value] * self.num_replicas)


@pytest.mark.parametrize(
    ("aggregation", "rows", "values"),
    [
        ("SUM", [1, 2] * 3, [1.0, 2.0] * 3),
        ("MEAN", [1, 2], [1.0, 2.0]),
        ("ONLY_FIRST_REPLICA", [1, 2], [1.0, 2.0]),
    ],
)
def test_rows_of_all_replicas_are_added_once(aggregation, rows, values):
    target, others = Target("v", aggregation), Others()
    brought = np.array([1, 2]), np.array([[1.0], [2.0]])
    at_once(gang_updates.scatter(others, target, "scatter_add", *brought))
    ((method, (written_rows, written)),) = target.written
    assert method == "scatter_add"
    assert written_rows.tolist() == rows
    assert written[:, 0].tolist() == values
    assert others.what == 'scatter_add to "v"'


def test_other_scatters_need_a_first_replica():
    rows, values = np.array([1]), np.array([[1.0]])
    for aggregation, error in (
        ("NONE", ReplicaValueError), ("SUM", UnsupportedError), ("MEAN", UnsupportedError),
    ):  # fmt: skip
        target = Target("v", aggregation)
        with pytest.raises(error, match='scatter_max to "v" in one of 3 replicas'):
            at_once(gang_updates.scatter(Others(), target, "scatter_max", rows, values))
    target = Target("v", "ONLY_FIRST_REPLICA")
    at_once(gang_updates.scatter(Others(), target, "scatter_max", rows, values))
    assert target.written == [("scatter_max", (rows, values))]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        (
            ([(1.0, "v")], [(1.0, "v"), (1.0, "w")]),
            'replica 0 has gradients for "v", replica 1 for "v", "w"',
        ),
        (
            ([(np.ones((3, 2)), "v")], [(ROWS, "v")]),
            'gradients for "v": reduce: IndexedSlices on some',
        ),
    ],
    ids=["other variables", "rows and whole"],
)
def test_replicas_whose_gradients_do_not_fit_each_other_are_named(pairs, error):
    targets = {name: Target(name) for name in "vw"}
    calls = [
        (Optimizer(), [(gradient, targets[name]) for gradient, name in each], None)
        for each in pairs
    ]
    with pytest.raises(ValueMismatchError, match=error):
        at_once(gang_updates._push(None, calls))
