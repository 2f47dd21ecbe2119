from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import BusyError, UsageError, ValueMismatchError
from psync.numerics.memory import BLOCK_BYTES, BlockPool
from psync.numerics.rows import SCATTER_OPS, combine
from psync.numerics.rules import SGD, Adam, UpdateRule
from psync.numerics.sums import sum_of_squares
from psync.specs import ShardSpec
from psync.store.rows import PIECE_BYTES, RowMean, RowValues
from psync.store.store import ShardStore
from psync.store.work import Work

TASK = "/job:ps/task:1"
OPTIMIZER = 4


def made(
    shape: tuple[int, ...] = (20, 3), dtype: str = "float32", *, value: Any = None, fill: float = 0
) -> ShardStore:
    store = ShardStore(TASK)
    spec = ShardSpec("w", 0, 0, 0, shape, dtype, 1)
    store.create(spec, value, fill=fill)
    return store


KEY = (0, 0)


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def run(work: Work) -> int:
    """Do the work; returns in how many pieces."""
    return sum(1 for _ in work)


def value_of(store: ShardStore, slot: str = "") -> np.ndarray:
    shard = store.shards()[KEY]
    views = store.read_slot(KEY, OPTIMIZER, slot) if slot else store.read(KEY)
    dtype = shard.slots[OPTIMIZER, slot].dtype if slot else shard.values.dtype
    return np.frombuffer(b"".join(views), dtype).reshape(shard.spec.shape)


def gathered(store: ShardStore, rows: np.ndarray) -> np.ndarray:
    out = np.empty(len(rows) * store.row_bytes(KEY), np.uint8)
    run(store.read_rows(KEY, rows, out))
    shard = store.shards()[KEY]
    return out.view(shard.values.dtype).reshape(len(rows), *shard.spec.shape[1:])


def push(store: ShardStore, rule: UpdateRule, rows: np.ndarray, grads: np.ndarray) -> int:
    store.define_optimizer(OPTIMIZER, rule.to_config())
    store.check_apply_rows(OPTIMIZER, KEY)
    checked = store.check_rows(KEY, rows, grads)
    return run(store.apply_rows(OPTIMIZER, KEY, rows, checked, store.begin_push(OPTIMIZER, 0)))


def push_dense(store: ShardStore, rule: UpdateRule, grad: np.ndarray) -> None:
    store.define_optimizer(OPTIMIZER, rule.to_config())
    run(store.apply(OPTIMIZER, KEY, grad, store.begin_push(OPTIMIZER, 0)))


RULES = [SGD(0.5), SGD(0.5, momentum=0.9, nesterov=True), Adam(0.1), Adam(0.1, amsgrad=True)]


class TestOptimizers:
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(len(rule.slot_names())))
    def test_named_rows_get_what_a_dense_gradient_gives_them(
        self, rule: UpdateRule, dtype: str
    ) -> None:
        rng = np.random.default_rng(1)
        spec = ShardSpec("w", 0, 0, 0, (20, 3), dtype, 1)
        stores = [ShardStore(TASK), ShardStore(TASK)]
        for store in stores:
            store.create(spec)
        typed = stores[0].shards()[KEY].values.dtype
        value = rng.normal(size=(20, 3)).astype(typed)
        rows = rows_of(0, 3, 19)
        for store in stores:
            run(store.assign(KEY, "assign", value))
        for _ in range(3):
            grads = rng.normal(size=(3, 3)).astype(typed)
            dense = np.zeros((20, 3), typed)
            dense[rows] = grads
            push(stores[0], rule, rows, grads)
            push_dense(stores[1], rule, dense)
        lazy, whole = map(value_of, stores)
        assert lazy[rows].tobytes() == whole[rows].tobytes()
        for name in rule.slot_names():
            lazy_slot, whole_slot = (value_of(store, name) for store in stores)
            assert lazy_slot[rows].tobytes() == whole_slot[rows].tobytes()

    def test_rows_that_are_not_named_stay_as_they_are_and_so_do_their_slots(self) -> None:
        rule = Adam(0.1)
        store = made(value=np.ones((20, 3), np.float32))
        push(store, rule, rows_of(1, 2), np.ones((2, 3), np.float32))
        before, slots = value_of(store).copy(), [value_of(store, name).copy() for name in "mv"]
        push(store, rule, rows_of(2), np.ones((1, 3), np.float32))
        after = value_of(store)
        others = np.arange(20) != 2
        assert (after[others] == before[others]).all()
        assert (after[2] != before[2]).all()
        for name, slot in zip("mv", slots, strict=True):
            assert (value_of(store, name)[others] == slot[others]).all()

    def test_dense_and_row_gradients_follow_each_other(self) -> None:
        rule = SGD(1.0, momentum=0.5)
        store, model = made(), np.zeros((20, 3), np.float32)
        velocity = np.zeros_like(model)
        for number in range(4):
            if number % 2:
                push_dense(store, rule, np.ones((20, 3), np.float32))
                velocity = velocity * np.float32(0.5) - 1
                model += velocity
            else:
                push(store, rule, rows_of(5), np.ones((1, 3), np.float32))
                velocity[5] = velocity[5] * np.float32(0.5) - 1
                model[5] += velocity[5]
        np.testing.assert_array_equal(value_of(store), model)


class TestMeans:
    def mean(self, dtype: str = "float32", **how: Any) -> np.ndarray:
        store = made((6, 2), dtype)
        store.define_optimizer(OPTIMIZER, SGD(1.0).to_config())
        typed = store.shards()[KEY].values.dtype
        gradients = [
            RowValues(rows_of(1, 3), np.array([[2, 2], [4, 4]], typed)),
            RowValues(rows_of(3, 5), np.array([[2, 2], [4, 4]], typed)),
        ]
        work = store.apply_row_mean(OPTIMIZER, KEY, RowMean(gradients, [1.0, 3.0], **how), 0)
        assert store.busy(KEY)
        run(work)
        assert store.version(KEY) == 1
        assert store.statistics()["rows"] == 3
        return -value_of(store)[:, 0].astype(np.float64)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
    def test_rows_of_several_pushes_become_one(self, dtype: str) -> None:
        per_index = self.mean(dtype, reduction="mean", per_index=True)
        assert per_index.tolist() == [0, 2, 0, 2.5, 0, 4]
        total = self.mean(dtype, reduction="mean", per_index=False)
        assert total.tolist() == [0, 0.5, 0, 2.5, 0, 3]
        added = self.mean(dtype, reduction="sum", per_index=True)
        assert added.tolist() == [0, 2, 0, 10, 0, 12]
        halved = self.mean(dtype, reduction="mean", per_index=True, scale=0.5)
        assert halved.tolist() == [0, 1, 0, 1.25, 0, 2]

    @pytest.mark.parametrize("num_rows", [0, 3, 200_000])
    def test_the_squares_of_a_mean_are_those_of_its_rows(self, num_rows: int) -> None:
        store = ShardStore("/job:ps/task:0")
        store.create(ShardSpec("table", *KEY, 0, (1 << 20, 2), "float32", 0))
        rng = np.random.default_rng(4)
        rows = np.sort(rng.choice(1 << 20, num_rows, replace=False))
        values = rng.standard_normal((num_rows, 2)).astype(np.float32)
        gradients = [RowValues(rows, values), RowValues(rows, 3 * values)]
        sums: list[tuple[float, float]] = []
        work = store.square_row_mean(KEY, RowMean(gradients, [1.0, 1.0], "mean", True), sums)
        pieces = sum(1 for _ in work)
        assert sums == [(sum_of_squares((values + 3 * values) / np.float32(2)), 0.0)]
        assert pieces > num_rows * 8 >> 20
        assert store.version(KEY) == 0


class TestScattering:
    @settings(deadline=None)
    @given(
        st.sampled_from(SCATTER_OPS),
        st.sampled_from(["int8", "uint8", "int64", "float16", "float32", "bool"]),
        st.sets(st.integers(0, 9)),
    )
    def test_rows_change_as_in_numpy_in_the_dtype_of_the_shard(
        self, op: str, dtype: str, chosen: set[int]
    ) -> None:
        rng = np.random.default_rng(3)
        model = rng.integers(0, 255, (10, 2)).astype(dtype)
        store = made((10, 2), dtype, value=model)
        rows = rows_of(*sorted(chosen))
        values = rng.integers(0, 2 if dtype == "bool" else 255, (len(rows), 2)).astype(dtype)
        try:
            store.check_scatter(KEY, op)
        except ValueMismatchError:
            return
        current = model[rows]
        combine(op, current, values)
        model[rows] = current
        run(store.scatter(KEY, op, rows, store.check_rows(KEY, rows, values)))
        np.testing.assert_array_equal(value_of(store), model)

    def test_no_such_operation(self) -> None:
        with pytest.raises(UsageError, match=f'"w/part_0" on {TASK}: unknown operation'):
            made().check_scatter(KEY, "xor")


class TestSlots:
    def test_slots_are_asked_for_by_name(self) -> None:
        store = made()
        store.define_optimizer(OPTIMIZER, SGD(0.5, momentum=0.5).to_config())
        out = np.empty(12, np.uint8)
        with pytest.raises(UsageError, match="no slot 'v'\nhint: its slots are momentum"):
            store.read_rows(KEY, rows_of(0), out, OPTIMIZER, "v")
        run(store.read_rows(KEY, rows_of(0), out, OPTIMIZER, "momentum"))
        assert out.view(np.float32).tolist() == [0, 0, 0]
        assert store.row_bytes(KEY, OPTIMIZER) == 12

    def test_no_rows_are_read_and_taken_at_once(self) -> None:
        store = made()
        run(store.read_rows(KEY, rows_of(), np.empty(0, np.uint8)))
        assert store.read_range(KEY, 3, 3) == []
        assert store.statistics()["rows"] == 0


class TestWork:
    ROW = 1 << 12  # elements: 16 KiB

    def large(self, rows: int = 200) -> ShardStore:
        return made((rows, self.ROW))

    def test_many_rows_are_done_in_pieces_and_the_shard_is_busy_meanwhile(self) -> None:
        store = self.large()
        rows, ones = np.arange(200), np.ones((200, self.ROW), np.float32)
        work = store.scatter(KEY, "add", rows, store.check_rows(KEY, rows, ones))
        assert store.busy(KEY)
        for refused in (
            lambda: store.read(KEY),
            lambda: store.read_range(KEY, 0, 1),
            lambda: store.read_rows(KEY, rows, np.empty(0, np.uint8)),
            lambda: store.scatter(KEY, "add", rows, ones),
        ):
            with pytest.raises(BusyError):
                refused()
        assert run(work) >= 200 * self.ROW * 4 // PIECE_BYTES
        assert not store.busy(KEY)
        assert store.version(KEY) == 1
        assert (value_of(store) == 1).all()

    def test_work_that_is_dropped_is_done_at_once(self) -> None:
        for end in (lambda work: work.close(), lambda work: None):
            store = self.large()
            rows, ones = np.arange(200), np.ones((200, self.ROW), np.float32)
            work = store.scatter(KEY, "add", rows, store.check_rows(KEY, rows, ones))
            next(work)
            end(work)
            del work
            assert not store.busy(KEY)
            assert (value_of(store) == 1).all()

    def test_reading_changes_no_version(self) -> None:
        store = made()
        gathered(store, rows_of(1, 2))
        assert store.version(KEY) == 0

    def test_the_first_reading_of_rows_lays_the_blocks_side_by_side(self) -> None:
        value = np.arange(200 * self.ROW, dtype=np.float32).reshape(200, self.ROW)
        store = made((200, self.ROW), value=value)
        rows = rows_of(0, 199)
        cost = store.rows_cost(KEY, rows)
        assert cost > value.nbytes
        held = store.read(KEY)
        np.testing.assert_array_equal(gathered(store, rows), value[rows])
        np.testing.assert_array_equal(value_of(store), value)
        assert b"".join(held) == value.tobytes()
        assert store.rows_cost(KEY, rows) < BLOCK_BYTES

    def test_what_a_reader_holds_makes_an_update_dearer_and_stays_as_it_is(self) -> None:
        store = self.large()
        rows, ones = rows_of(0, 199), np.ones((2, self.ROW), np.float32)
        gathered(store, rows)
        cheap = store.rows_cost(KEY, rows)
        held = store.read(KEY)
        assert store.rows_cost(KEY, rows) >= cheap + 2 * BLOCK_BYTES
        run(store.scatter(KEY, "add", rows, store.check_rows(KEY, rows, ones)))
        assert store.statistics()["copies"] == 2
        run(store.scatter(KEY, "add", rows, store.check_rows(KEY, rows, ones)))
        assert store.statistics()["copies"] == 2  # they lie elsewhere now, where nobody sees them
        assert not any(b"".join(held))
        assert (value_of(store)[rows] == 2).all()

    def test_no_rows_cost_and_do_nothing(self) -> None:
        store = made(value=np.ones((20, 3), np.float32))
        assert store.rows_cost(KEY, rows_of()) == 0
        push(store, SGD(0.5), rows_of(), np.empty((0, 3), np.float32))
        assert (value_of(store) == 1).all()

    def test_a_declared_table_of_a_terabyte_serves_and_takes_rows(self) -> None:
        rows = 1 << 32  # of 256 bytes
        store = ShardStore(TASK, BlockPool())
        store.create(ShardSpec("w", 0, 0, 0, (rows, 64), "float32", 1), fill=0.5)
        far = rows_of(3, rows - 1)
        assert store.rows_cost(KEY, far) < 1024
        push(store, Adam(0.1), far, np.ones((2, 64), np.float32))
        got = gathered(store, rows_of(rows - 1, 0, 3))
        assert got[1].tolist() == [0.5] * 64
        assert (got[[0, 2]] != 0.5).all()


class TestStatistics:
    @pytest.mark.parametrize("rows", [1 << 14, 1 << 22], ids=["small", "large"])
    def test_rows_blocks_and_bytes_do_not_depend_on_the_size_of_the_table(self, rows: int) -> None:
        store = made((rows, 64), fill=0.25)  # 4096 rows a block
        chosen = rows_of(0, 5, 4095, 4096, 16_383)
        push(store, SGD(0.5, momentum=0.5), chosen, np.ones((5, 64), np.float32))
        gathered(store, chosen[::-1])
        counters = store.statistics()
        assert (counters["rows"], counters["row_blocks"], counters["row_bytes"]) == (10, 6, 2560)
        assert (counters["row_updates"], counters["copies"]) == (1, 0)
        store.read_range(KEY, 4095, 4097)
        assert store.statistics()["row_blocks"] == 8
