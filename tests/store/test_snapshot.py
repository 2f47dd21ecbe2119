from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from psync.errors import BusyError, CheckpointCorrupt, CheckpointError, UsageError
from psync.numerics import memory as blocks
from psync.numerics.memory import BLOCK_BYTES, bytes_of
from psync.numerics.rules import SGD, Adam, RuleOptions
from psync.schedules import Constant
from psync.specs import ShardSpec, dtype_of
from psync.store.ledger import Ledger
from psync.store.snapshot import Frozen, Loaded, freeze, settling
from psync.store.snapshot_state import SnapshotState, pack_answer
from psync.store.store import Plan, ShardStore
from psync.wire.messages import Pushed

PS = "/job:ps/task:0"
W0 = ("/job:worker/task:0", 21)
ADAM = Adam(0.1).to_config()
LARGE = (3, BLOCK_BYTES // 4)  # three blocks of float32


def spec(name: str, number: int, shape: tuple[int, ...], dtype: str = "float32") -> ShardSpec:
    return ShardSpec(name, number, 0, 0, shape, dtype, 0)


W = spec("w", 0, (3, 4))
V = spec("v", 1, LARGE)
T = spec("table", 2, (8_000_000, 64))


def frozen(store: ShardStore, ledger: Ledger | None = None, **kwargs: Any) -> Frozen:
    return freeze(store, dataclasses.replace((ledger or Ledger()).snapshot(pack_answer), **kwargs))


def loaded(state: SnapshotState) -> Loaded:
    return Loaded(state, ShardStore(PS), Ledger(20))


def fill(target: Loaded, source: Frozen) -> None:
    for place in list(target.wanted):
        list(target.write(place, 0, memoryview(b"".join(source.views(place)))))


def again(store: ShardStore, ledger: Ledger | None = None) -> Loaded:
    """Through bytes and back, as over a disk."""
    snapshot = frozen(store, ledger)
    made = loaded(SnapshotState.from_bytes(snapshot.state.to_bytes(), "here"))
    fill(made, snapshot)
    return made


def apply(store: ShardStore, key: tuple[int, int], value: float, optimizer: int = 1) -> None:
    shard = store.spec(key)
    grad = store.check_apply(optimizer, key, np.full(shard.shape, value, dtype_of(shard.dtype)))
    for _ in store.apply_checked(optimizer, key, grad, store.begin_push(optimizer, 0)):
        pass


def assign(store: ShardStore, key: tuple[int, int], value: Any, op: Any = "assign") -> None:
    shard = store.spec(key)
    for _ in store.assign(key, op, np.full(shard.shape, value, dtype_of(shard.dtype))):
        pass


def array_of(views: list[memoryview], dtype: str = "float32") -> np.ndarray:
    return np.concatenate([bytes_of(view) for view in views]).view(dtype_of(dtype))


def same(one: ShardStore, other: ShardStore) -> None:
    """All that can be read of two stores is the same, bit for bit."""
    first, second = frozen(one), frozen(other)
    assert first.state == second.state
    for place in range(len(first.state.items)):
        a, b = first.views(place), second.views(place)
        assert [bytes(view) for view in a] == [bytes(view) for view in b]


@pytest.fixture
def store() -> ShardStore:
    store = ShardStore(PS)
    store.define_optimizer(1, ADAM)
    store.create(W, np.arange(12, dtype=np.float32).reshape(3, 4))
    store.create(V, fill=2.0)
    return store


class TestWhatIsKept:
    def test_values_slots_steps_and_versions(self, store: ShardStore) -> None:
        for key in (W.key, V.key, V.key):
            apply(store, key, 0.5)
        store.set_learning_rate(1, Constant(0.25).to_config())
        copy = again(store).store
        same(store, copy)
        assert (copy.version(W.key), copy.version(V.key)) == (1, 2)
        assert copy.push_count(1).marked == 3
        assert copy.rule(1).learning_rate == Constant(0.25)
        copy.define_optimizer(1, ADAM)  # as the others know it
        for each in (store, copy):
            apply(each, V.key, -3.0)
        same(store, copy)

    def test_accumulated_gradients_and_how_many_they_are(self, store: ShardStore) -> None:
        rule = SGD(0.5, 0.9).with_options(RuleOptions(gradient_accumulation_steps=3))
        store.define_optimizer(2, rule.to_config())
        apply(store, W.key, 1.0, optimizer=2)
        copy = again(store).store
        for _ in range(2):  # the third one is applied
            for each in (store, copy):
                apply(each, W.key, 5.0, optimizer=2)
        same(store, copy)
        assert array_of(copy.read(W.key))[0] != 0

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [((), "int64"), ((0, 3), "float32"), ((5,), "bool"), ((2, 3), "bfloat16"),
         ((4,), "float16"), ((2,), "uint8"), ((2, 2), "float64")],
    )  # fmt: skip
    def test_shards_of_every_kind(self, shape: tuple[int, ...], dtype: str) -> None:
        store = ShardStore(PS)
        store.create(spec("x", 0, shape, dtype))
        assign(store, (0, 0), 1)
        if "float" in dtype:
            store.define_optimizer(1, ADAM)
            apply(store, (0, 0), 0.5)
        copy = again(store)
        same(store, copy.store)
        assert array_of(copy.store.read((0, 0)) or [memoryview(b"")], dtype).tolist() == (
            array_of(store.read((0, 0)) or [memoryview(b"")], dtype).tolist()
        )

    def test_rows_that_were_written_among_constant_ones(self) -> None:
        store = ShardStore(PS)
        store.define_optimizer(1, ADAM)
        table = spec("t", 0, (100_000, 8))
        store.create(table, fill=3.0)
        rows = np.array([5, 70_000])
        grads = store.check_rows(table.key, rows, memoryview(np.ones((2, 8), np.float32)).cast("B"))
        for _ in store.apply_rows(1, table.key, rows, grads, store.begin_push(1, 0)):
            pass
        copy = again(store).store
        same(store, copy)
        values = array_of(copy.read(table.key)).reshape(table.shape)
        assert (values[[5, 70_000]] != 3).all()
        assert np.count_nonzero((values != 3).any(axis=1)) == 2
        for each in (store, copy):  # and goes on with rows
            for _ in each.apply_rows(1, table.key, rows, grads, each.begin_push(1, 0)):
                pass
        same(store, copy)

    @pytest.mark.promise("checkpoints.any-cluster-size", "answers.after-failover")
    def test_slots_that_were_laid_beside_those_of_a_push_without_their_shard(self) -> None:
        store = ShardStore(PS)
        store.define_optimizer(1, ADAM)
        for number in range(3):
            store.create(spec(f"v{number}", number, (8,)))
        for numbers in ([0], [0, 1], [2], [1, 2]):
            keys, ones = [(number, 0) for number in numbers], np.ones(8, np.float32)
            store.apply_at_once(1, Plan(keys), [ones] * len(keys), store.begin_push(1, 0))
        copy = again(store).store
        same(store, copy)
        for each in (store, copy):
            apply(each, (0, 0), 1)
        same(store, copy)

    def test_the_ledger(self, store: ShardStore) -> None:
        ledger = Ledger(20)
        answer = Pushed("accepted", 3)
        ledger.record(ledger.judge(W0, 0, 0, 5, 0, 77, ("w",)), answer)
        made = again(store, ledger)
        assert made.ledger.judge(W0, 0, 0, 5, 0, 77).answer == answer
        assert [call[0] for call in made.state.calls] == [5]

    def test_iterations_count_updates(self, store: ShardStore) -> None:
        assert frozen(ShardStore(PS)).state.iterations == 0
        rule = SGD(0.5).with_options(RuleOptions(gradient_accumulation_steps=3))
        store.define_optimizer(2, rule.to_config())
        store.set_count(2, 10)
        store.set_count(1, 2)
        assert frozen(store).state.iterations == 3


def test_what_is_constant_in_part_is_written_out_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 64)
    store, table = ShardStore(PS), spec("t", 0, (600, 32))  # 300 blocks
    store.create(table, fill=3.0)
    assert list(settling(store)) == []  # no rows were asked for
    rows = np.array([5, 411])
    for _ in store.scatter(table.key, "assign", rows, np.zeros((2, 32), np.float32)):
        pass
    work = store.scatter(table.key, "assign", rows, np.zeros((2, 32), np.float32))
    assert len(list(settling(store))) == 2  # pauses: a busy shard is let alone
    work.close()
    values = store.shards()[table.key].values
    assert values.num_made == 0
    assert len(list(settling(store))) == 4
    assert values.num_made == 2
    assert array_of(store.read(table.key)).sum() == 3 * 32 * 598


class TestFrozen:
    def test_updates_go_on_and_what_is_held_stays(self, store: ShardStore) -> None:
        apply(store, V.key, 1.0)
        snapshot = frozen(store)
        before = [
            [bytes(view) for view in snapshot.views(i)] for i in range(len(snapshot.state.items))
        ]
        apply(store, V.key, 7.0)
        assign(store, W.key, 9)
        after = [
            [bytes(view) for view in snapshot.views(i)] for i in range(len(snapshot.state.items))
        ]
        assert before == after
        assert array_of(store.read(W.key)).tolist() == [9.0] * 12

    def test_nothing_is_copied(self, store: ShardStore) -> None:
        assign(store, V.key, 1)
        (view,) = [view for view in frozen(store).views(0)]
        assert bytes_of(view).ctypes.data == bytes_of(store.read(W.key)[0]).ctypes.data

    def test_a_busy_shard_is_to_be_waited_for(self, store: ShardStore) -> None:
        work = store.assign(V.key, "add", np.ones(LARGE, np.float32))
        with pytest.raises(BusyError, match='"v/part_0": an update is in progress'):
            frozen(store)
        for _ in work:
            pass
        frozen(store)

    def test_a_table_that_was_never_touched_is_one_element(self) -> None:
        store = ShardStore(PS)
        store.create(T, fill=0.5)
        snapshot = frozen(store)
        (item,) = snapshot.state.items
        assert item.is_constant
        assert item.fill == np.float32(0.5).tobytes()
        views = snapshot.views(0)
        assert sum(view.nbytes for view in views) == item.nbytes == T.nbytes
        assert len({bytes_of(view).ctypes.data for view in views}) == 1
        assert (bytes_of(views[-1]).view(np.float32) == 0.5).all()
        copy = loaded(snapshot.state)
        assert list(copy.wanted) == []
        copy.check_whole("a copy of what is constant")
        assert copy.store.shards()[T.key].values.num_made == 0
        assert array_of(copy.store.read_range(T.key, 7_999_999, 8_000_000)).tolist() == [0.5] * 64

    def test_parts_of_items(self, store: ShardStore) -> None:
        assign(store, V.key, 1)
        snapshot = frozen(store)
        whole = b"".join(map(bytes, snapshot.views(1)))
        for start, stop in [(0, 0), (5, 5), (0, len(whole)), (BLOCK_BYTES - 3, BLOCK_BYTES + 5),
                            (3, 2 * BLOCK_BYTES + 1)]:  # fmt: skip
            assert b"".join(map(bytes, snapshot.part(1, start, stop))) == whole[start:stop]
        for start, stop in [(-1, 3), (4, 3), (0, len(whole) + 1)]:
            with pytest.raises(CheckpointError, match='the value of "v/part_0": no'):
                snapshot.part(1, start, stop)
        with pytest.raises(CheckpointError, match="item 9 of a snapshot is"):
            snapshot.part(9, 0, 0)

    def test_what_is_read_block_by_block_is_held_no_longer(self, store: ShardStore) -> None:
        assign(store, V.key, 1)
        snapshot = frozen(store)
        assert array_of(list(snapshot.letting_go(1))).tolist() == [1] * V.size
        copies = store.statistics()["copies"]
        assign(store, V.key, 2)
        assert store.statistics()["copies"] == copies

    def test_what_is_let_go_of_is_yielded_once(self, store: ShardStore) -> None:
        assign(store, V.key, 1)
        snapshot = frozen(store)
        expected = b"".join(snapshot.views(1))
        assert b"".join(snapshot.letting_go(1)) == expected
        with pytest.raises(CheckpointError, match="no longer held"):
            snapshot.views(1)

    def test_drop_stops_who_is_reading(self, store: ShardStore) -> None:
        assign(store, V.key, 1)
        snapshot = frozen(store)
        reading = snapshot.letting_go(1)
        next(reading)
        snapshot.drop()
        with pytest.raises(CheckpointError, match="its snapshot is no longer held"):
            next(reading)
        with pytest.raises(CheckpointError, match="no longer held"):
            snapshot.views(0)


class TestLoaded:
    def test_bytes_may_come_in_parts_and_again(self, store: ShardStore) -> None:
        assign(store, V.key, 3)
        snapshot = frozen(store)
        whole = b"".join(map(bytes, snapshot.views(1)))
        made = loaded(snapshot.state)
        assert list(made.wanted) == [0, 1]
        cuts = [0, 5, BLOCK_BYTES, 2 * BLOCK_BYTES + 7, len(whole)]
        for start, stop in itertools.pairwise(cuts):
            assert list(made.wanted) == [0, 1]
            for _ in made.write(1, start, memoryview(whole)[start:stop]):
                pass
        for _ in made.write(1, 4, memoryview(whole)[4:9]):
            pass
        assert list(made.wanted) == [0]
        assert b"".join(map(bytes, made.store.read(V.key))) == whole

    def test_a_gap_is_refused(self, store: ShardStore) -> None:
        made = loaded(frozen(store).state)
        for _ in made.write(0, 0, memoryview(bytes(23))):
            pass
        with pytest.raises(UsageError, match="bytes from 25 on follow 23"):
            next(made.write(0, 25, memoryview(bytes(19))))
        assert list(made.wanted) == [0]
        with pytest.raises(UsageError, match=r"the copy is incomplete: .* is missing"):
            made.check_whole("the copy")

    def test_what_is_not_wanted_is_refused(self, store: ShardStore) -> None:
        made = loaded(frozen(store).state)
        for place in (1, 7):  # constant; none
            with pytest.raises(UsageError, match=f"item {place} of a snapshot has no bytes"):
                next(made.write(place, 0, memoryview(b"abcd")))
        for start in (-1, 45):
            with pytest.raises(UsageError, match="no bytes"):
                next(made.write(0, start, memoryview(b"abcd")))

    def test_whoever_fills_it_stops_when_it_is_given_up(self, store: ShardStore) -> None:
        assign(store, V.key, 3)
        made = loaded(frozen(store).state)
        filling = made.write(1, 0, memoryview(bytes(made.state.items[1].nbytes)))
        next(filling)
        made.give_up()
        with pytest.raises(CheckpointError, match="another snapshot"):
            next(filling)

    def test_bytes_that_are_no_bool_are_corrupt(self) -> None:
        store = ShardStore(PS)
        store.create(spec("flags", 0, (4,), "bool"), np.array([True, False, True, True]))
        made = loaded(frozen(store).state)
        with pytest.raises(CheckpointCorrupt, match="bytes other than 0 and 1"):
            list(made.write(0, 0, memoryview(b"\0\1\1\2")))
