"""Which array of a snapshot is which slice of which tensor, and what the rest is called."""

from __future__ import annotations

import numpy as np

from psync.checkpoints.layout import Layout, Wanted, changed_rate, step_of
from psync.checkpoints.manifest import Place, Slice
from psync.numerics.moment_rules import Adam
from psync.schedules import Constant
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.shards import Key
from psync.store.snapshot import freeze
from psync.store.snapshot_state import SnapshotState
from psync.store.store import ShardStore


def shard(name: str, number: int, index: int, offset: int, rows: int, ps: int) -> ShardSpec:
    return ShardSpec(name, number, index, offset, (rows, 2), "float32", ps)


SPECS = [
    [shard("w", 0, 0, 0, 3, 0), shard("b/value", 1, 0, 0, 2, 0), shard("zero", 2, 0, 0, 4, 0)],
    [shard("w", 0, 1, 3, 2, 1)],
]


def snapshots(pushes: int = 1) -> list[SnapshotState]:
    """Two ps tasks with three variables; both shards of w have been pushed so often."""
    made = []
    for ps, specs in enumerate(SPECS):
        store = ShardStore(f"/job:ps/task:{ps}")
        store.define_optimizer(7, Adam(0.1).to_config())
        for spec in specs:
            value = None if spec.variable == "zero" else np.ones(spec.shape, np.float32)
            store.create(spec, value)
        for step in range(pushes + ps):
            spec = specs[0]
            grad = np.ones(spec.shape, np.float32)
            for _ in store.apply(7, spec.key, grad, store.begin_push(7, step)):
                pass
        made.append(freeze(store, Ledger(), lambda answer: None).state)
    return made


def wanted(
    tensor: str, offset: int, rows: int, key: Key, optimizer: int = -1, slot: str = ""
) -> Wanted:
    return Wanted(tensor, (rows,), "float32", offset, key=key, optimizer=optimizer, slot=slot)


W = [wanted("model/w", 0, 3, (0, 0)), wanted("model/w", 3, 2, (0, 1))]
M = [wanted("adam/m/w", 0, 3, (0, 0), 7, "m"), wanted("adam/m/w", 3, 2, (0, 1), 7, "m")]


def test_what_is_wanted_has_its_name_and_the_rest_is_called_by_its_variable() -> None:
    never_pushed = wanted("adam/m/b", 0, 2, (1, 0), 7, "m")
    layout = Layout(snapshots(), [*W, *M, never_pushed])
    names = [[name for _, name in arrays] for arrays in layout.arrays]
    assert names == [
        ["model/w@0", "adam/m/w@0", "~/w/7-v@0", "~/b/value/value@0"],
        ["model/w@3", "adam/m/w@3", "~/w/7-v@3"],
    ]
    assert layout.find(M[1]) == (1, 1)
    assert layout.find(never_pushed) is None


def test_a_constant_array_is_written_only_if_it_is_wanted_and_no_part_of_the_snapshot() -> None:
    layout = Layout(snapshots(), [wanted("zero", 0, 4, (2, 0))])
    *others, last = layout.arrays[0]
    assert last[1] == "zero@0"
    written = [(8 * i, 8, i) for i in range(len(others) + 1)]
    assert layout.slices(0, "f", written) == [("zero", Slice(0, 4, "f", 32, 8, 4))]
    assert [place.item for place in layout.places(0, written)] == [item for item, _ in others]


def test_where_arrays_lie_is_told_of_tensors_and_of_the_snapshot() -> None:
    layout = Layout(snapshots(), W)
    written = [(80, 16, 1), (96, 16, 2), (112, 16, 3)]
    assert layout.slices(1, "ps-1", written) == [("model/w", Slice(3, 2, "ps-1", 80, 16, 1))]
    assert layout.places(1, written) == [
        Place(0, 80, 16, 1),
        Place(1, 96, 16, 2),
        Place(2, 112, 16, 3),
    ]


def test_an_array_may_be_part_of_two_tensors() -> None:
    part = wanted("part", 0, 2, (0, 1))  # a shard that is saved as a variable of its own, too
    layout = Layout(snapshots(), [*W, part])
    assert layout.arrays[1][0] == (0, "model/w@3")
    assert layout.slices(1, "f", [(8, 16, 5), (24, 16, 6), (40, 16, 7)]) == [
        ("model/w", Slice(3, 2, "f", 8, 16, 5)),
        ("part", Slice(0, 2, "f", 8, 16, 5)),
    ]


def test_the_pushes_that_all_ps_tasks_have_counted_are_added_up() -> None:
    assert step_of(snapshots(pushes=4), 7) == 9
    assert step_of(snapshots(), 8) == 0


def test_a_learning_rate_is_told_if_it_is_not_the_first_one() -> None:
    made = snapshots()
    assert changed_rate(made, 7) is None
    assert changed_rate(made, 8) is None
    store = ShardStore("/job:ps/task:0")
    store.define_optimizer(7, Adam(0.1).to_config())
    store.set_learning_rate(7, Constant(0.25).to_config())
    later = freeze(store, Ledger(), lambda answer: None).state
    assert changed_rate([later, *made], 7) == Constant(0.25).to_config()
