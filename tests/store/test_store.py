from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inside import pool_of
from psync.errors import (
    BusyError,
    ConfigurationError,
    PartitionError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.memory import BLOCK_BYTES, BLOCK_ELEMENTS, BlockPool
from psync.numerics.rules import SGD, Adam
from psync.specs import DTYPE_NAMES, ShardSpec, dtype_of
from psync.store.store import ShardStore, Work, ones

TASK = "/job:ps/task:1"


def spec_of(
    shape: tuple[int, ...] = (64, 10),
    dtype: str = "float32",
    *,
    variable_id: int = 0,
    index: int = 0,
    name: str = "w",
) -> ShardSpec:
    return ShardSpec(name, variable_id, index, 0, shape, dtype, ps=1)


def value(store: ShardStore, key: tuple[int, int] = (0, 0)) -> np.ndarray:
    spec = store.spec(key)
    flat = np.frombuffer(b"".join(store.read(key)), dtype_of(spec.dtype))
    return flat.reshape(spec.shape)


def slot(store: ShardStore, name: str) -> np.ndarray:
    return np.frombuffer(b"".join(store.read_slot((0, 0), 0, name)), np.float32)


def run(work: Work) -> None:
    for _ in work:
        pass


@pytest.fixture
def store() -> ShardStore:
    """A store with a shard "w" of ones and SGD(0.5) as optimizer 0."""
    made = ShardStore(TASK)
    made.create(spec_of(), np.ones((64, 10), np.float32))
    made.define_optimizer(0, SGD(0.5).to_config())
    return made


class TestCreate:
    def test_from_array_buffer_and_fill(self) -> None:
        store = ShardStore(TASK)
        values = np.arange(640, dtype=np.float32).reshape(64, 10)
        assert store.create(spec_of(), values)
        assert store.create(spec_of(index=1), memoryview(values.tobytes()))
        assert store.create(spec_of(index=2), fill=0.25)
        assert store.create(spec_of(index=3))
        assert np.array_equal(value(store), values)
        assert np.array_equal(value(store, (0, 1)), values)
        assert (value(store, (0, 2)) == 0.25).all()
        assert not value(store, (0, 3)).any()
        assert store.keys() == [(0, 0), (0, 1), (0, 2), (0, 3)]

    def test_again_changes_nothing(self, store: ShardStore) -> None:
        assert not store.create(spec_of(), fill=7)
        assert (value(store) == 1).all()

    def test_another_spec_under_the_key_is_an_error(self, store: ShardStore) -> None:
        with pytest.raises(PartitionError) as caught:
            store.create(spec_of((64, 11), name="v"))
        assert str(caught.value) == (
            '"v/part_0" on /job:ps/task:1: already exists as "w/part_0" of shape (64, 10) float32 '
            'at row 0 on ps 1, got "v/part_0" of shape (64, 11) float32 at row 0 on ps 1'
        )

    @pytest.mark.parametrize(
        ("data", "got"),
        [
            (bytes(1280), "1280 bytes"),
            (b"", "0 bytes"),
            (np.ones((64, 5), np.float32), r"shape \(64, 5\) float32"),
            (np.ones((64, 10), np.int32), r"shape \(64, 10\) int32"),
            (np.ones((64, 10), ">f4"), r"shape \(64, 10\) >f4"),
        ],
    )
    def test_value_that_does_not_fit(self, data: object, got: str) -> None:
        store = ShardStore(TASK)
        with pytest.raises(
            ValueMismatchError,
            match=r'^"w/part_0" on /job:ps/task:1: expected shape \(64, 10\) float32 '
            rf"\(2560 bytes\), got {got}$",
        ):
            store.create(spec_of(), data)
        assert store.keys() == []

    def test_scalars_and_empty_shards(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of(()), np.float32(3).reshape(()))
        store.create(spec_of((0, 4), index=1), b"")
        store.define_optimizer(0, Adam().to_config())
        run(store.assign((0, 0), "add", np.float32(1).reshape(())))
        run(store.assign((0, 1), "assign", b""))
        run(store.apply(0, (0, 1), b"", 0))
        assert value(store) == 4
        assert store.read((0, 1)) == []
        assert store.statistics()["applies"] == 1

    @pytest.mark.parametrize("name", DTYPE_NAMES)
    def test_every_dtype(self, name: str) -> None:
        store = ShardStore(TASK)
        values = np.array([[0, 1], [1, 1]], dtype_of(name))
        store.create(spec_of((2, 2), name), values)
        run(store.assign((0, 0), "assign", (values.T.copy())))
        assert np.array_equal(value(store), values.T)


class TestCopy:
    @pytest.mark.parametrize("shape", [(), (0, 3), (64, 10), (3, BLOCK_ELEMENTS)])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
    def test_a_copy_has_the_value_of_its_original_and_a_life_of_its_own(
        self, shape: tuple[int, ...], dtype: str
    ) -> None:
        store = ShardStore(TASK)
        original = np.random.default_rng(0).integers(0, 2, shape).astype(dtype_of(dtype))
        store.create(spec_of(shape, dtype), original)
        run(store.copy(spec_of(shape, dtype, variable_id=1, name="c"), (0, 0)))
        run(store.assign((0, 0), "assign", np.zeros(shape, dtype_of(dtype))))
        assert np.array_equal(value(store, (1, 0)), original)
        assert not value(store).any()

    def test_again_changes_nothing(self, store: ShardStore) -> None:
        copied = spec_of(variable_id=1)
        run(store.copy(copied, (0, 0)))
        run(store.assign((0, 0), "add", np.ones((64, 10), np.float32)))
        run(store.copy(copied, (0, 0)))
        assert (value(store, (1, 0)) == 1).all()
        assert store.version((1, 0)) == 1

    def test_what_happens_to_the_original_meanwhile_changes_nothing(self) -> None:
        store = ShardStore(TASK)
        shape = (3, BLOCK_ELEMENTS)
        store.create(spec_of(shape), np.ones(shape, np.float32))
        copying = store.copy(spec_of(shape, variable_id=1), (0, 0))
        with pytest.raises(BusyError):
            store.read((1, 0))
        next(copying)
        run(store.assign((0, 0), "add", np.ones(shape, np.float32)))
        run(copying)
        assert (value(store, (1, 0)) == 1).all()
        assert (value(store) == 2).all()

    def test_it_lets_go_of_the_original(self, store: ShardStore) -> None:
        run(store.copy(spec_of(variable_id=1), (0, 0)))
        run(store.assign((0, 0), "add", np.ones((64, 10), np.float32)))
        assert store.statistics()["copies"] == 0

    def test_an_original_that_is_being_updated_is_not_copied(self, store: ShardStore) -> None:
        updating = store.assign((0, 0), "add", np.ones((64, 10), np.float32))
        with pytest.raises(BusyError):
            store.copy(spec_of(variable_id=1), (0, 0))
        assert store.keys() == [(0, 0)]
        run(updating)

    def test_without_its_original_there_is_none(self, store: ShardStore) -> None:
        with pytest.raises(UnknownVariableError) as caught:
            store.copy(spec_of(variable_id=1, name="c"), (0, 3))
        assert caught.value.message == (
            f'"c/part_0" on {TASK}: cannot begin as a copy of shard 3 of variable 0, which is not '
            "here"
        )

    @pytest.mark.parametrize(
        ("shape", "dtype"), [((10, 64), "float32"), ((64, 10), "int32"), ((64,), "float32")]
    )
    def test_a_copy_looks_like_its_original(
        self, store: ShardStore, shape: tuple[int, ...], dtype: str
    ) -> None:
        with pytest.raises(PartitionError, match=r'expected shape \(64, 10\) float32, as "w/part'):
            store.copy(spec_of(shape, dtype, variable_id=1), (0, 0))
        assert store.keys() == [(0, 0)]

    def test_another_shard_under_the_key_is_an_error(self, store: ShardStore) -> None:
        store.create(spec_of((3,), variable_id=1))
        with pytest.raises(PartitionError, match="already exists"):
            store.copy(spec_of(variable_id=1), (0, 0))


class TestUnknown:
    def test_shard(self, store: ShardStore) -> None:
        with pytest.raises(
            UnknownVariableError, match=r"^/job:ps/task:1 holds no shard 0 of variable 9$"
        ):
            store.read((9, 0))
        with pytest.raises(UnknownVariableError, match=r'holds no shard 3 of variable 0 \("w"\)$'):
            store.apply(0, (0, 3), b"", 0)

    def test_optimizer(self, store: ShardStore) -> None:
        for call in (
            lambda: store.begin_push(4, 0),
            lambda: store.apply(4, (0, 0), bytes(2560), 0),
            lambda: store.read_slot((0, 0), 4, "m"),
        ):
            with pytest.raises(UsageError, match=r"^optimizer 4 is not defined on /job:ps/task:1$"):
                call()

    def test_slot(self, store: ShardStore) -> None:
        with pytest.raises(
            UsageError, match=r"\(sgd\) on /job:ps/task:1 has no slot 'm'\nhint.* none"
        ):
            store.read_slot((0, 0), 0, "m")
        store.define_optimizer(1, Adam().to_config())
        with pytest.raises(UsageError, match="hint: its slots are m, v"):
            store.read_slot((0, 0), 1, "momentum")

    def test_operation(self, store: ShardStore) -> None:
        with pytest.raises(
            UsageError, match="\"w/part_0\" on /job:ps/task:1: unknown operation 'mul'"
        ):
            store.assign((0, 0), "mul", bytes(2560))  # type: ignore[arg-type]


class TestAssign:
    def test_assign_add_sub(self, store: ShardStore) -> None:
        data = np.full((64, 10), 3, np.float32)
        run(store.assign((0, 0), "add", data))
        assert (value(store) == 4).all()
        run(store.assign((0, 0), "sub", memoryview(data).cast("B")))
        assert (value(store) == 1).all()
        run(store.assign((0, 0), "assign", data.tobytes()))
        assert (value(store) == 3).all()
        assert store.version((0, 0)) == 3
        assert store.statistics()["assigns"] == 3

    def test_assign_max(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((3,), "int64"), np.array([5, -1, 7]))
        run(store.assign((0, 0), "max", np.array([6, -2, 7])))
        assert value(store).tolist() == [6, -1, 7]

    def test_integers_wrap_around(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((2,), "uint8"), np.array([250, 5], np.uint8))
        run(store.assign((0, 0), "add", np.array([10, 1], np.uint8)))
        assert value(store).tolist() == [4, 6]
        run(store.assign((0, 0), "sub", np.array([5, 1], np.uint8)))
        assert value(store).tolist() == [255, 5]

    def test_float_overflow_is_infinity_and_no_warning(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((1,), "float16"), np.array([60000], np.float16))
        run(store.assign((0, 0), "add", np.array([60000], np.float16)))
        assert value(store).tolist() == [np.inf]

    def test_bools_are_not_added(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((2,), "bool"))
        run(store.assign((0, 0), "assign", b"\x00\x01"))
        assert value(store).tolist() == [False, True]
        run(store.assign((0, 0), "max", b"\x01\x00"))
        assert value(store).tolist() == [True, True]
        with pytest.raises(ValueMismatchError, match="bool values cannot be added: not 'add'"):
            store.assign((0, 0), "add", b"\x00\x01")
        with pytest.raises(
            ValueMismatchError, match=r"bool \(2 bytes\), got bytes other than 0 and 1"
        ):
            store.assign((0, 0), "assign", b"\x00\x02")

    def test_data_may_lie_at_any_address(self, store: ShardStore) -> None:
        values = np.arange(640, dtype=np.float32).reshape(64, 10)
        buffer = b"x" + values.tobytes()
        run(store.assign((0, 0), "assign", memoryview(buffer)[1:]))
        assert np.array_equal(value(store), values)
        run(store.apply(0, (0, 0), memoryview(buffer)[1:], 0))
        assert np.array_equal(value(store), values * np.float32(0.5))


class TestApply:
    def test_sgd(self, store: ShardStore) -> None:
        run(store.apply(0, (0, 0), np.full((64, 10), 2, np.float32), store.begin_push(0, 0)))
        assert not value(store).any()
        assert store.version((0, 0)) == 1

    def test_slots_appear_with_their_initial_value_and_follow(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((3,)))
        store.define_optimizer(0, SGD(1.0, momentum=0.5).to_config())
        assert store.statistics()["slot_bytes"] == 0
        assert slot(store, "momentum").tolist() == [0, 0, 0]
        for _ in range(2):
            run(store.apply(0, (0, 0), np.ones(3, np.float32), 0))
        assert slot(store, "momentum").tolist() == [-1.5, -1.5, -1.5]
        assert value(store).tolist() == [-2.5, -2.5, -2.5]
        assert store.statistics()["slot_bytes"] == 12

    def test_each_optimizer_has_its_own_slots(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((3,)))
        for number in (0, 1):
            store.define_optimizer(number, SGD(1.0, momentum=0.5).to_config())
        run(store.apply(1, (0, 0), np.ones(3, np.float32), 0))
        assert slot(store, "momentum").tolist() == [0, 0, 0]

    def test_slots_of_half_precision_are_single_over_several_blocks(self) -> None:
        store = ShardStore(TASK)
        size = BLOCK_ELEMENTS + 5
        store.create(spec_of((size,), "bfloat16"))
        store.define_optimizer(0, SGD(1.0, momentum=0.5).to_config())
        grad = np.arange(size).astype(ml_dtypes.bfloat16)
        run(store.apply(0, (0, 0), grad, 0))
        assert np.array_equal(slot(store, "momentum"), -grad.astype(np.float32))
        assert np.array_equal(value(store), -grad)

    @pytest.mark.parametrize("dtype", ["int32", "bool"])
    def test_only_floating_shards(self, dtype: str) -> None:
        store = ShardStore(TASK)
        spec = spec_of((2,), dtype)
        store.create(spec)
        store.define_optimizer(0, Adam().to_config())
        for call in (
            lambda: store.apply(0, (0, 0), bytes(spec.nbytes), 0),
            lambda: store.read_slot((0, 0), 0, "m"),
        ):
            with pytest.raises(
                ValueMismatchError,
                match='"w/part_0" on /job:ps/task:1: only floating-point variables can be '
                f"optimized, got {dtype}\nhint: declare",
            ):
                call()

    def test_wrong_size_is_refused_before_anything_changes(self, store: ShardStore) -> None:
        with pytest.raises(ValueMismatchError) as caught:
            store.apply(0, (0, 0), bytes(1280), 0)
        assert str(caught.value) == (
            '"w/part_0" on /job:ps/task:1: '
            "expected shape (64, 10) float32 (2560 bytes), got 1280 bytes"
        )
        assert not store.busy((0, 0))
        assert (value(store) == 1).all()

    def test_check_apply_tells_the_same_and_changes_nothing(self, store: ShardStore) -> None:
        with pytest.raises(ValueMismatchError, match="got 1280 bytes"):
            store.check_apply(0, (0, 0), bytes(1280))
        store.check_apply(0, (0, 0), bytes(2560))
        assert not store.busy((0, 0))
        assert store.version((0, 0)) == 0


class TestApplyAtOnce:
    SHAPES = ((3,), (0, 2), (BLOCK_BYTES // 4 + 5,), (4, 4))

    def two(self, config: dict[str, object]) -> tuple[ShardStore, ShardStore]:
        """Two stores with the same shards."""
        stores = []
        for _ in range(2):
            made = ShardStore("/job:ps/task:0")
            for number, shape in enumerate(self.SHAPES):
                array = np.random.default_rng(number).normal(size=shape).astype(np.float32)
                made.create(spec_of(shape, variable_id=number), array)
            made.define_optimizer(1, config)
            stores.append(made)
        return stores[0], stores[1]

    @pytest.mark.parametrize(
        "config",
        [
            SGD(0.1).to_config(),
            SGD(0.1, 0.9, True).to_config(),
            Adam(0.1, amsgrad=True).to_config(),
        ],
    )
    @pytest.mark.parametrize("read", [False, True], ids=["in place", "held"])
    def test_is_the_same_as_shard_by_shard(self, config: dict[str, object], read: bool) -> None:
        at_once, one_by_one = self.two(config)
        keys = at_once.keys()
        snapshots = [at_once.read(key) for key in keys] if read else []
        before = [b"".join(snapshot) for snapshot in snapshots]
        for step in range(3):
            gradients = [
                np.random.default_rng(step).normal(size=shape).astype(np.float32)
                for shape in self.SHAPES
            ]
            flat = [
                at_once.check_apply(1, key, grad) for key, grad in zip(keys, gradients, strict=True)
            ]
            at_once.apply_at_once(1, keys, flat, step)
            for key, grad in zip(keys, gradients, strict=True):
                run(one_by_one.apply(1, key, grad, step))
        for key in keys:
            assert b"".join(at_once.read(key)) == b"".join(one_by_one.read(key))
            assert at_once.version(key) == one_by_one.version(key) == 3
            assert not at_once.busy(key)
        assert at_once.statistics()["applies"] == one_by_one.statistics()["applies"]
        assert [b"".join(snapshot) for snapshot in snapshots] == before

    def test_a_busy_shard_is_an_error(self) -> None:
        store, _ = self.two(SGD(0.1).to_config())
        work = store.assign((2, 0), "add", np.ones(self.SHAPES[2], np.float32))
        with pytest.raises(BusyError):
            store.apply_at_once(1, [(2, 0)], [np.ones(self.SHAPES[2], np.float32)], 0)
        run(work)


class TestOptimizers:
    def test_same_config_again_keeps_the_step(self, store: ShardStore) -> None:
        store.begin_push(0, 0)
        store.define_optimizer(0, SGD(0.5).to_config())
        assert store.begin_push(0, 0) == 1

    def test_another_config_is_an_error(self, store: ShardStore) -> None:
        with pytest.raises(
            ConfigurationError, match="optimizer 0 on /job:ps/task:1 is already defined as"
        ):
            store.define_optimizer(0, SGD(0.25).to_config())
        with pytest.raises(ConfigurationError, match="expected the config of an optimizer"):
            store.define_optimizer(1, None)

    def test_a_step_counts_pushes_seen_here_and_those_carried(self, store: ShardStore) -> None:
        assert [store.begin_push(0, carried) for carried in (0, 0, 7, 3)] == [0, 1, 9, 10]


class TestWork:
    SPEC = spec_of((3 * BLOCK_ELEMENTS,))

    @pytest.fixture
    def large(self) -> ShardStore:
        store = ShardStore(TASK)
        store.create(self.SPEC)
        store.define_optimizer(0, SGD(1.0, momentum=0.5).to_config())
        return store

    def test_one_block_per_next(self, large: ShardStore) -> None:
        assert len(list(large.assign((0, 0), "add", bytes(self.SPEC.nbytes)))) == 2  # and its end
        assert len(list(large.apply(0, (0, 0), bytes(self.SPEC.nbytes), 0))) == 2

    def test_shard_is_busy_from_the_call_to_the_end(self, large: ShardStore) -> None:
        work = large.apply(0, (0, 0), bytes(self.SPEC.nbytes), 0)
        for step in (None, work, work):
            if step is not None:
                next(step)
            assert large.busy((0, 0))
            for call in (
                lambda: large.read((0, 0)),
                lambda: large.read_slot((0, 0), 0, "momentum"),
                lambda: large.assign((0, 0), "assign", bytes(self.SPEC.nbytes)),
                lambda: large.apply(0, (0, 0), bytes(self.SPEC.nbytes), 0),
            ):
                with pytest.raises(BusyError, match=r'"w/part_0" on /job:ps/task:1: an update is'):
                    call()
        run(work)
        assert not large.busy((0, 0))
        large.read((0, 0))

    def test_other_shards_are_not_busy(self, large: ShardStore) -> None:
        large.create(spec_of((2,), index=1))
        work = large.apply(0, (0, 0), bytes(self.SPEC.nbytes), 0)
        run(large.apply(0, (0, 1), np.ones(2, np.float32), 0))
        run(work)
        assert value(large, (0, 1)).tolist() == [-1, -1]

    @pytest.mark.parametrize("blocks_before", [0, 1, 2])
    @pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
    def test_abandoned_work_is_finished(
        self, large: ShardStore, blocks_before: int, close: bool
    ) -> None:
        work = large.assign((0, 0), "add", np.ones(self.SPEC.shape, np.float32))
        for _ in range(blocks_before):
            next(work)
        if close:
            work.close()
        del work
        assert not large.busy((0, 0))
        assert (value(large) == 1).all()
        assert large.version((0, 0)) == 1

    def test_failure_inside_a_block_leaves_the_torn_shard_unreadable(
        self, large: ShardStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = large.read((0, 0))
        work = large.assign((0, 0), "add", np.ones(self.SPEC.shape, np.float32))
        next(work)

        def no_memory(nbytes: int) -> np.ndarray:
            raise MemoryError

        monkeypatch.setattr(pool_of(large), "take", no_memory)
        with pytest.raises(MemoryError):
            next(work)
        with pytest.raises(BusyError):
            large.read((0, 0))
        assert large.version((0, 0)) == 0
        assert not np.frombuffer(snapshot[0], np.float32).any()


@pytest.mark.promise("reads.never-torn", "reads.stable")
class TestSnapshots:
    def test_reads_do_not_copy(self, store: ShardStore) -> None:
        first, second = store.read((0, 0)), store.read((0, 0))
        a, b = np.frombuffer(first[0], np.uint8), np.frombuffer(second[0], np.uint8)
        assert np.shares_memory(a, b)

    def test_updates_without_readers_copy_nothing(self, store: ShardStore) -> None:
        for _ in range(10):
            run(store.apply(0, (0, 0), bytes(2560), 0))
        assert store.statistics()["copies"] == 0

    def test_a_held_snapshot_costs_each_block_one_copy_however_many_updates(self) -> None:
        pool = BlockPool()
        store = ShardStore(TASK, pool)
        spec = spec_of((2 * BLOCK_ELEMENTS,), "int8")
        store.create(spec)
        snapshot = store.read((0, 0))
        ones = bytes([1]) * spec.nbytes
        for _ in range(1000):
            run(store.assign((0, 0), "add", ones))
        statistics = store.statistics()
        assert statistics["copies"] == 2
        assert statistics["pool"]["misses"] == 2
        assert not any(np.frombuffer(view, np.uint8).any() for view in snapshot)
        assert (value(store) == np.int8(1000 % 256 - 256)).all()

    def test_reading_before_every_update_recycles_two_sets_of_blocks(self) -> None:
        store = ShardStore(TASK)
        spec = spec_of((2 * BLOCK_BYTES // 4,))
        store.create(spec, fill=1)
        store.define_optimizer(0, SGD(0.5).to_config())
        for _ in range(20):
            _snapshot = store.read((0, 0))
            run(store.apply(0, (0, 0), bytes(spec.nbytes), 0))
        statistics = store.statistics()
        assert statistics["copies"] == 38  # what was read first was no block of its own
        assert statistics["pool"]["misses"] <= 4
        assert statistics["pool"]["bytes"] <= 2 * spec.nbytes

    def test_slots_that_nobody_reads_stay_in_place(self) -> None:
        store = ShardStore(TASK)
        store.create(spec_of((8,)))
        store.define_optimizer(0, Adam().to_config())
        for _ in range(5):
            _snapshot = store.read((0, 0))
            run(store.apply(0, (0, 0), np.ones(8, np.float32), 0))
        assert store.statistics()["copies"] == 5

    @settings(max_examples=60, deadline=None)
    @given(
        size=st.sampled_from([3, 2000, BLOCK_ELEMENTS + 7]),
        steps=st.lists(
            st.tuples(
                st.sampled_from(["read", "slot", "drop", "assign", "add", "sub", "apply"]),
                st.integers(-3, 3),
            ),
            max_size=25,
        ),
    )
    def test_every_snapshot_stays_what_it_was(
        self, size: int, steps: list[tuple[str, int]]
    ) -> None:
        """Any interleaving of reads that are kept and updates, against plain numpy."""
        store = ShardStore(TASK)
        store.create(spec_of((size,)))
        store.define_optimizer(0, SGD(0.5, momentum=0.5).to_config())
        model = np.zeros(size, np.float32)
        velocity = np.zeros(size, np.float32)
        kept: list[tuple[list[memoryview], np.ndarray]] = []
        for op, number in steps:
            data = np.arange(size, dtype=np.float32) * np.float32(number)
            if op == "read":
                kept.append((store.read((0, 0)), model.copy()))
            elif op == "slot":
                kept.append((store.read_slot((0, 0), 0, "momentum"), velocity.copy()))
            elif op == "drop" and kept:
                kept.pop(number % len(kept))
            elif op == "apply":
                run(store.apply(0, (0, 0), data, 0))
                velocity = np.float32(0.5) * velocity - np.float32(0.5) * data
                model = model + velocity
            elif op in ("assign", "add", "sub"):
                run(store.assign((0, 0), op, data))
                model = data if op == "assign" else model + data * (1 if op == "add" else -1)
            for snapshot, expected in kept:
                assert np.frombuffer(b"".join(snapshot), np.float32).tobytes() == expected.tobytes()
            assert value(store).tobytes() == model.tobytes()


class TestStatistics:
    def test_counts(self, store: ShardStore) -> None:
        store.create(spec_of((2, 2), "float64", index=1))
        run(store.assign((0, 1), "add", np.ones((2, 2))))
        run(store.apply(0, (0, 0), bytes(2560), 0))
        statistics = store.statistics()
        assert (statistics["shards"], statistics["bytes"]) == (2, 2592)
        assert (statistics["applies"], statistics["assigns"], statistics["copies"]) == (1, 1, 0)
        assert [store.version(key) for key in store.keys()] == [1, 1]


def test_ones_are_made_once_and_nobody_changes_them() -> None:
    assert ones((), "int64") is ones((), "int64")
    assert not ones((2,), "float32").flags.writeable
    assert ones((2,), "float32").tolist() == [1, 1]
