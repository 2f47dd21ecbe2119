from __future__ import annotations

import numpy as np
import pytest

from asked import Asked, peer_of
from psync.errors import BusyError, UsageError, ValueMismatchError
from psync.numerics.rules import SGD, Lamb
from psync.ps.shard_sets import ShardSet
from psync.ps.update import Update
from psync.specs import ShardSpec
from psync.store.ledger import Ledger
from psync.store.store import ShardStore
from psync.wire.messages import Assign, AverageShards, Push
from psync.wire.tensors import to_bytes_view

CLIENT = ("/job:worker/task:0", 5)


@pytest.fixture
def store() -> ShardStore:
    made = ShardStore("/job:ps/task:0")
    for number, shape in enumerate([(2,), (0, 3), (3,)]):
        spec = ShardSpec(f"v{number}", number, 0, 0, shape, "float32", 0)
        made.create(spec, np.ones(shape, np.float32))
    made.define_optimizer(1, SGD(0.5).to_config())
    return made


def update(
    store: ShardStore,
    message: Push | Assign | AverageShards,
    value: float = 1,
    ledger: Ledger | None = None,
) -> Update:
    known = ShardSet(((0, 0), (1, 0), (2, 0))).look_up(store)
    body = to_bytes_view(np.full(known.nbytes // 4, value, np.float32))
    return Update(
        Asked(peer_of(CLIENT), message), known, (body,), store, ledger or Ledger(), known.keys
    )


def a_push(**changes: object) -> Push:
    fields = {
        "sequence": 1, "acked_below": 1, "closure": 7, "ordinal": 0, "set_id": 1, "members": None,
        "optimizer": 1, "config": None, "elsewhere": 0,
    }  # fmt: skip
    return Push(**(fields | changes))  # type: ignore[arg-type]


def an_assign(op: str = "add") -> Assign:
    return Assign(1, 1, -1, 0, 1, None, op)


def values(store: ShardStore) -> list[list[float]]:
    return [np.frombuffer(b"".join(store.read(key)), np.float32).tolist() for key in store.keys()]


@pytest.mark.promise("updates.misfit-refused")
def test_nothing_has_begun_where_a_part_does_not_fit(store: ShardStore) -> None:
    store.create(ShardSpec("n", 3, 0, 0, (2,), "int32", 0))
    known = ShardSet(((0, 0), (3, 0))).look_up(store)
    made = Update(
        Asked(peer_of(CLIENT), a_push()),
        known,
        (memoryview(bytes(16)),),
        store,
        Ledger(),
        known.keys,
    )
    with pytest.raises(ValueMismatchError, match="only floating-point variables can be optimized"):
        made.begin(0)
    assert store.begin_push(1, 0) == 0  # no step was drawn
    with pytest.raises(UsageError, match="unknown operation 'mul'"):
        update(store, an_assign("mul")).begin(0)
    with pytest.raises(UsageError, match="optimizer 2 is not defined"):
        update(store, a_push(optimizer=2)).begin(0)
    assert values(store)[0] == [1, 1]


@pytest.mark.parametrize(
    "changes", [{"ratios": [1.0, 1.0, 1.0]}, {"optimizer": 2, "ratios": [1.0]}]
)
def test_ratios_that_fit_nothing_are_refused_before_anything_changes(
    store: ShardStore, changes: dict[str, object]
) -> None:
    store.define_optimizer(2, Lamb(0.5).to_config())
    with pytest.raises(UsageError, match="trust ratios for 3 shards and optimizer"):
        update(store, a_push(**changes)).begin(0)
    assert store.push_count(2).marked == 0


def test_piece_by_piece_small_shards_side_by_side_are_one_piece(store: ShardStore) -> None:
    for number in (3, 4):
        store.create(ShardSpec(f"v{number}", number, 0, 0, (4,), "float32", 0), fill=1)
    known = ShardSet(tuple(store.keys())).look_up(store)
    body = to_bytes_view(np.ones(known.nbytes // 4, np.float32))
    push = Update(Asked(peer_of(CLIENT), a_push()), known, (body,), store, Ledger(), known.keys)
    push.judge()
    push.begin(0)
    assert list(push.costs) == [8, 0, 44]
    work = store.assign((4, 0), "add", np.ones(4, np.float32))
    with pytest.raises(BusyError, match="v4"):
        push.work(2)
    for _ in work:
        pass
    assert values(store)[2] == [1] * 3, "none of them has changed"
    for position in range(3):
        for _ in push.work(position):
            pass
    assert values(store) == [[0.5] * 2, [], [0.5] * 3, [0.5] * 4, [1.5] * 4]
    assert [store.version(key) for key in store.keys()] == [1, 1, 1, 1, 2]
    assert len(store.read_together(known.keys)) == 2


def test_only_one_number_is_raised_and_nothing_else_has_begun(store: ShardStore) -> None:
    push = update(store, a_push(raised=(2, 0)))
    push.judge()
    with pytest.raises(
        ValueMismatchError, match=r"expected one number, to be raised by one, got shape"
    ):
        push.begin(0)
    assert store.push_count(1).marked == 0
    assert values(store) == [[1, 1], [], [1, 1, 1]]
