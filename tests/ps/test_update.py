from __future__ import annotations

import numpy as np
import pytest

from psync.errors import BusyError, UsageError, ValueMismatchError
from psync.numerics.rules import SGD, Lamb
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.ps.shard_sets import ShardSet
from psync.ps.update import Update
from psync.specs import ShardSpec
from psync.store.commit_log import LogNames
from psync.store.ledger import Duplicate, Fresh, Ledger
from psync.store.store import ShardStore
from psync.wire.messages import Assign, AssignLocked, AverageShards, Push
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
    return Update(CLIENT, message, known, (body,), store, ledger or Ledger(), known.keys)


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


def test_a_push_is_judged_checked_and_applied(store: ShardStore) -> None:
    made = update(store, a_push(elsewhere=4), value=2)
    verdict = made.judge()
    assert isinstance(verdict, Fresh)
    assert verdict.ticket.call == (7, 0)
    made.begin(0)
    assert made.step == 4
    for position in range(3):
        for _ in made.work(position):
            pass
    assert values(store) == [[0, 0], [], [0, 0, 0]]
    made.ledger.record(verdict.ticket, "accepted")
    assert made.judge() == Duplicate("accepted")


def test_an_assign_outside_of_closures(store: ShardStore) -> None:
    made = update(store, an_assign(), value=2)
    verdict = made.judge()
    assert isinstance(verdict, Fresh)
    assert verdict.ticket.call is None
    made.begin(0)
    for position in range(3):
        for _ in made.work(position):
            pass
    assert values(store) == [[3, 3], [], [3, 3, 3]]


@pytest.mark.promise("updates.misfit-refused")
def test_nothing_has_begun_where_a_part_does_not_fit(store: ShardStore) -> None:
    store.create(ShardSpec("n", 3, 0, 0, (2,), "int32", 0))
    known = ShardSet(((0, 0), (3, 0))).look_up(store)
    made = Update(CLIENT, a_push(), known, (memoryview(bytes(16)),), store, Ledger(), known.keys)
    with pytest.raises(ValueMismatchError, match="only floating-point variables can be optimized"):
        made.begin(0)
    assert store.begin_push(1, 0) == 0  # no step was drawn
    with pytest.raises(UsageError, match="unknown operation 'mul'"):
        update(store, an_assign("mul")).begin(0)
    with pytest.raises(UsageError, match="optimizer 2 is not defined"):
        update(store, a_push(optimizer=2)).begin(0)
    assert values(store)[0] == [1, 1]


def test_a_push_may_bring_the_ratios_of_whole_variables(store: ShardStore) -> None:
    store.define_optimizer(2, Lamb(0.5).to_config())
    made = update(store, a_push(optimizer=2, ratios=[1.0, 1.0, 0.5]))
    made.begin(0)
    made.at_once()
    # the first update of Adam is the sign of the gradient
    first, _, last = values(store)
    np.testing.assert_allclose(first, [0.5, 0.5], atol=1e-5)
    np.testing.assert_allclose(last, [0.75] * 3, atol=1e-5)


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


def test_the_log_names_sets_by_numbers_of_its_own_and_no_locks(store: ShardStore) -> None:
    names, keys = LogNames(), [(0, 0), (1, 0), (2, 0)]
    locked = AssignLocked(1, 0, -1, 0, 33, None, "add", None, None, 5)
    assert update(store, locked).entry(names) == Assign(1, 0, -1, 0, 0, keys, "add")
    again = update(store, a_push(set_id=7)).entry(names)
    assert again == a_push(set_id=0)
    average = AverageShards(1, 0, -1, 0, [(0, 2, 0)], 0.5)
    assert update(store, average).entry(names) is average


def test_a_push_may_raise_a_number_in_the_same_update(store: ShardStore) -> None:
    store.create(ShardSpec("step", 3, 0, 0, (), "int64", 0), np.int64(4))
    push = update(store, a_push(raised=(3, 0)))
    push.judge()
    push.begin(0)
    assert len(push.costs) == 4
    push.at_once()
    assert int(np.frombuffer(b"".join(store.read((3, 0))), np.int64)[0]) == 5
    assert values(store)[0] == [0.5, 0.5]


def test_piece_by_piece_small_shards_side_by_side_are_one_piece(store: ShardStore) -> None:
    for number in (3, 4):
        store.create(ShardSpec(f"v{number}", number, 0, 0, (4,), "float32", 0), fill=1)
    known = ShardSet(tuple(store.keys())).look_up(store)
    body = to_bytes_view(np.ones(known.nbytes // 4, np.float32))
    push = Update(CLIENT, a_push(), known, (body,), store, Ledger(), known.keys)
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


def test_shards_that_are_updated_together_cost_less_than_one_after_the_other() -> None:
    store = ShardStore("/job:ps/task:0")
    for number in range(100):
        store.create(ShardSpec(f"v{number}", number, 0, 0, (4,), "float32", 0))
    store.define_optimizer(1, SGD(0.5).to_config())
    store.define_optimizer(2, Lamb(0.5).to_config())
    known = ShardSet(tuple(store.keys())).look_up(store)
    body = to_bytes_view(np.ones(known.nbytes // 4, np.float32))
    work = LongWork("/job:ps/task:0", lambda: None)
    for optimizer, fits in ((1, True), (2, False)):
        message = a_push(optimizer=optimizer)
        push = Update(CLIENT, message, known, (body,), store, Ledger(), known.keys)
        push.begin(0)
        assert work.fits_now(store, known.keys, push.nbytes + INLINE_BYTES // 2) is fits


def test_piece_by_piece_the_number_is_raised_last(store: ShardStore) -> None:
    store.create(ShardSpec("step", 3, 0, 0, (), "int64", 0), np.int64(4))
    push = update(store, a_push(raised=(3, 0)))
    push.judge()
    push.begin(0)
    for position in range(len(push.costs)):
        for _ in push.work(position):
            pass
    assert int(np.frombuffer(b"".join(store.read((3, 0))), np.int64)[0]) == 5
    assert values(store)[0] == [0.5, 0.5]


def test_only_one_number_is_raised_and_nothing_else_has_begun(store: ShardStore) -> None:
    push = update(store, a_push(raised=(2, 0)))
    push.judge()
    with pytest.raises(
        ValueMismatchError, match=r"expected one number, to be raised by one, got shape"
    ):
        push.begin(0)
    assert store.push_count(1).marked == 0
    assert values(store) == [[1, 1], [], [1, 1, 1]]
