"""The shards of one ps: whatever is done to them, they have the bits that plain numpy gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import own_rules
from inside import pool_of
from psync.errors import (
    BusyError,
    ConfigurationError,
    PartitionError,
    PsyncError,
    RuleError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.memory import BLOCK_BYTES, BLOCK_ELEMENTS, Scratch
from psync.numerics.rows import SCATTER_OPS, combine
from psync.numerics.rules import ACCUMULATOR, SGD, Adam, Lamb, RuleOptions, Sums, UpdateRule
from psync.numerics.sums import sum_of_squares
from psync.schedules import Constant
from psync.specs import DTYPE_NAMES, ShardSpec, dtype_of, marked_after
from psync.store.ledger import Ledger
from psync.store.reattach import FormerStore, Orders, Progress
from psync.store.rows import RowMean, RowValues
from psync.store.snapshot import Loaded, freeze
from psync.store.snapshot_state import NOTHING, SnapshotState
from psync.store.store import Adjacent, Means, Plan, ShardStore, Work, ones
from psync.store.work import ShardWork, Workspace
from rule_table import RULES

TASK = "/job:ps/task:1"
KEY = (0, 0)
LARGE = (2 * BLOCK_ELEMENTS + 10) // 7, 7  # three blocks, whose borders cut rows


def spec_of(
    shape: tuple[int, ...] = (64, 10),
    dtype: str = "float32",
    number: int = 0,
    index: int = 0,
    name: str = "w",
) -> ShardSpec:
    return ShardSpec(name, number, index, 0, shape, dtype, ps=1)


def store_of(
    shape: tuple[int, ...] = (64, 10),
    dtype: str = "float32",
    *rules: UpdateRule,
    value: Any = None,
    fill: float = 0,
) -> ShardStore:
    """A store with one shard, and these rules as optimizers 0, 1, …"""
    store = ShardStore(TASK)
    store.create(spec_of(shape, dtype), value, fill=fill)
    for number, rule in enumerate(rules):
        store.define_optimizer(number, rule.to_config())
    return store


@pytest.fixture
def store() -> ShardStore:
    return store_of((64, 10), "float32", SGD(0.5), Adam(), fill=1)


def value(store: ShardStore, key: tuple[int, int] = KEY) -> np.ndarray:
    spec = store.spec(key)
    flat = np.frombuffer(b"".join(store.read(key)), dtype_of(spec.dtype))
    return flat.reshape(spec.shape)


def slot(store: ShardStore, name: str, optimizer: int = 0, dtype: str = "float32") -> np.ndarray:
    views = store.read_slot(KEY, optimizer, name)
    return np.frombuffer(b"".join(views), dtype).reshape(store.spec(KEY).shape)


def run(work: Work) -> int:
    """Do the work; returns in how many pieces."""
    return sum(1 for _ in work)


def push(
    store: ShardStore, grad: Any, key: tuple[int, int] = KEY, optimizer: int = 0
) -> RuleError | None:
    step = store.begin_push(optimizer)
    run(store.apply_checked(optimizer, key, store.check_apply(optimizer, key, grad), step))
    return store.take_failure(optimizer, step)


def push_rows(
    store: ShardStore, rows: np.ndarray, grads: np.ndarray, optimizer: int = 0
) -> RuleError | None:
    store.check_apply_rows(optimizer, KEY)
    step, checked = store.begin_push(optimizer), store.check_rows(KEY, rows, grads)
    run(store.apply_rows(optimizer, KEY, rows, checked, step))
    return store.take_failure(optimizer, step)


def scatter(store: ShardStore, op: str, rows: np.ndarray, values: np.ndarray) -> Work:
    store.check_scatter(KEY, op)
    return store.scatter(KEY, op, rows, store.check_rows(KEY, rows, values))


def gathered(store: ShardStore, rows: np.ndarray) -> np.ndarray:
    out = np.empty(len(rows) * store.row_bytes(KEY), np.uint8)
    run(store.read_rows(KEY, rows, out))
    spec = store.spec(KEY)
    return out.view(dtype_of(spec.dtype)).reshape(len(rows), *spec.shape[1:])


def drawn(seed: int, shape: tuple[int, ...] = LARGE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- the values ------------------------------------------------------------------------------

SHAPES = {
    (0, 0): (4, 3), (1, 0): (5,), (2, 0): (4, 3), (2, 1): (0, 3), (3, 0): LARGE, (4, 0): (7,),
    (5, 0): (1,),
}  # fmt: skip
USED = SGD(0.5, momentum=0.5), Adam(0.01), SGD(0.25)


class Model:
    """The same in whole arrays of numpy, which nobody shares."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[Any, ...], np.ndarray] = {}
        for key, shape in SHAPES.items():
            self.arrays[key] = np.zeros(shape, np.float32)
            for number, rule in enumerate(USED):
                for name in rule.slot_names():
                    initial = rule.initial_slot(name)
                    self.arrays[*key, number, name] = np.full(shape, initial, np.float32)

    def update(
        self, optimizer: int, key: Any, grad: np.ndarray, step: int, rows: Any = ...
    ) -> None:
        rule = USED[optimizer]
        arrays = [self.arrays[key], *(self.arrays[*key, optimizer, n] for n in rule.slot_names())]
        param, *slots = [array[rows].reshape(-1) for array in arrays]
        rule.apply([(param, grad.reshape(-1), slots, param, slots)], step, Scratch())
        for array, changed in zip(arrays, [param, *slots], strict=True):
            array[rows] = changed.reshape(grad.shape)


def adjacent(arrays: list[np.ndarray]) -> Adjacent:
    """The same side by side in one."""
    ends = [0, *itertools.accumulate(map(len, arrays))]
    parts = [slice(*ends[at : at + 2]) for at in range(len(arrays))]
    made = Adjacent(np.concatenate([np.empty(0, np.float32), *arrays]), parts)
    assert len(made) == len(arrays)
    return made


def read(store: ShardStore, place: tuple[Any, ...]) -> list[memoryview]:
    """A value by its key; a slot by key, optimizer and name."""
    return store.read(place) if len(place) == 2 else store.read_slot(place[:2], *place[2:])


def through_bytes(store: ShardStore) -> ShardStore:
    frozen = freeze(store, NOTHING)
    state = SnapshotState.from_bytes(frozen.state.to_bytes(), "here")
    loaded = Loaded(state, ShardStore(TASK), Ledger())
    for place in list(loaded.wanted):
        whole = b"".join(frozen.views(place))
        list(loaded.write(place, 0, memoryview(whole)))
    return loaded.store


def adopted(store: ShardStore) -> ShardStore:
    """What a new program takes over, under the same numbers."""
    ids = tuple((store.spec(key).variable, key[0]) for key in store.keys())
    former, made = FormerStore(TASK), ShardStore(TASK)
    former.take(store, Ledger(), 1, Progress.UPDATED)
    optimizers = tuple(((1, number), number) for number in range(len(USED)))
    former.adopt(Orders(ids, (), optimizers), made)
    for number, rule in enumerate(USED):  # as the program's first push does it
        made.define_optimizer(number, rule.to_config())
    return made


@pytest.mark.promise("reads.never-torn", "reads.stable")
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                "push together together beside mean rows scatter assign average load read drop "
                "freeze adopt".split()
            ),
            st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=7),
            st.integers(0, 2),
            st.integers(-3, 3),
        ),
        max_size=25,
    )
)
@example(  # slots of shards that are updated together at last, and one of which is busy before
    [
        ("together", [(0, 0), (1, 0)], 1, 1),
        ("together", [(2, 0), (4, 0)], 1, 2),
        ("beside", [(0, 0), (1, 0), (2, 0)], 1, 3),
        ("beside", [(0, 0), (4, 0), (5, 0)], 1, 1),
        ("together", [(1, 0), (2, 0)], 1, 2),
        ("together", [(0, 0), (1, 0), (2, 0), (4, 0), (5, 0)], 1, 1),
    ]
)
def test_whatever_is_done_a_store_has_what_numpy_has_and_what_was_read_stays(
    operations: list[tuple[str, list[tuple[int, int]], int, int]],
) -> None:
    store, model = ShardStore(TASK), Model()
    held: list[tuple[list[memoryview], bytes]] = []
    plans: dict[tuple[Any, ...], Plan] = {}

    def apply_together(keys: Any, flat: Any, optimizer: int, step: int, kind: int) -> None:
        """As arrays, as one of which they are all, or as one of which they are some."""
        given = [flat, adjacent(flat), adjacent([np.ones(3, np.float32), *flat])[1:]][kind % 3]
        plan = plans.setdefault(tuple(keys), Plan(keys))
        store.apply_at_once(optimizer, plan, given, step)

    for key, shape in SHAPES.items():
        store.create(spec_of(shape, "float32", *key, name=str(key)))
    for number, rule in enumerate(USED):
        store.define_optimizer(number, rule.to_config())
    for what, keys, optimizer, number in operations:
        key, shape = keys[0], SHAPES[keys[0]]
        data = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) % 8 * number
        names = USED[optimizer].slot_names()[:1]
        if what in ("push", "together", "beside", "mean"):
            if what == "beside":
                keys = [key, *(each for each in keys if each != key)]
            step = store.begin_push(optimizer)
            grads = [np.full(SHAPES[each], number + n, np.float32) for n, each in enumerate(keys)]
            flat = [
                store.check_apply(optimizer, each, grad)
                for each, grad in zip(keys, grads, strict=True)
            ]
            if what == "push":
                for each, grad in zip(keys, adjacent(flat), strict=True):
                    run(store.apply_checked(optimizer, each, grad, step))
            elif what == "together":
                apply_together(keys, flat, optimizer, step, number)
            elif what == "beside":  # an update of the first one is under way
                work = store.apply_checked(optimizer, key, flat[0], step)
                with pytest.raises(BusyError):
                    apply_together(keys, flat, optimizer, step, number)
                apply_together(keys[1:], flat[1:], optimizer, step, number)
                run(work)
            else:  # (1 · 0 + 3 · g) / 4
                pushes = [[grad * 0 for grad in flat], adjacent(flat) if number % 2 else flat]
                store.apply_at_once(optimizer, Plan(keys), Means(pushes, (1, 3)), step)
                grads = [grad * np.float32(0.75) for grad in grads]
            for each, grad in zip(keys, grads, strict=True):
                model.update(optimizer, each, grad, step)
        elif what in ("rows", "scatter") and len(shape) == 2 and shape[0]:
            rows = np.array([1, shape[0] - 1])
            values = store.check_rows(key, rows, data[rows])
            if what == "rows":
                step = store.begin_push(optimizer)
                run(store.apply_rows(optimizer, key, rows, values, step))
                model.update(optimizer, key, data[rows], step, rows)
            else:
                run(store.scatter(key, "sub", rows, values))
                model.arrays[key][rows] -= data[rows]
        elif what == "assign":
            run(store.assign(key, ("assign", "add", "sub", "max")[number % 4], data))
            present = model.arrays[key]
            changed = (data, present + data, present - data, np.maximum(present, data))
            model.arrays[key] = changed[number % 4].copy()
        elif what == "average":
            run(store.average((0, 0), (2, 0), 0.5))
            model.arrays[0, 0] -= np.float32(0.5) * (model.arrays[0, 0] - model.arrays[2, 0])
        elif what == "load":
            for name in names:
                run(store.load_slot(key, optimizer, name, abs(data)))
                model.arrays[*key, optimizer, name] = abs(data)
        elif what == "read":
            places = (key, *((*key, optimizer, name) for name in names))
            held += [(read(store, place), model.arrays[place].tobytes()) for place in places]
            views = store.read_together(plans.setdefault(tuple(keys), Plan(keys)))
            held.append((views, b"".join(model.arrays[each].tobytes() for each in keys)))
        elif what == "drop":
            held = held[1:]
        elif what in ("freeze", "adopt"):
            store = through_bytes(store) if what == "freeze" else adopted(store)
            plans.clear()
        for place, array in model.arrays.items():
            assert b"".join(read(store, place)) == array.tobytes()
        for views, then in held:
            assert b"".join(views) == then


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_the_same_bits_however_its_shards_are_pushed(
    name: str, dtype: str
) -> None:
    stores = [ShardStore(TASK) for _ in range(2)]
    sizes = dict(enumerate((7, 1, 64, 0, 33)))  # neither is a multiple of what a CPU does at once
    for store in stores:
        for number, size in sizes.items():
            value = np.linspace(-2, 2, size).astype(dtype_of(dtype))
            store.create(spec_of((size,), dtype, number), value)
        store.define_optimizer(0, RULES[name].to_config())
    keys = stores[0].keys()
    for step in range(6):
        grads = [drawn(step, (size,)).astype(dtype_of(dtype)) for size in sizes.values()]
        stores[0].apply_at_once(
            0, Plan(keys), Means([adjacent(grads)], [1.0]) if step % 2 else grads, step
        )
        for key, grad in zip(keys, grads, strict=True):
            run(stores[1].apply_checked(0, key, stores[1].check_apply(0, key, grad), step))
        contents = [
            [read(store, place) for key in keys for place in
             (key, *((*key, 0, slot) for slot in RULES[name].slot_names()))]
            for store in stores
        ]  # fmt: skip
        assert contents[0] == contents[1]
    assert {store.version(key) for store in stores for key in keys} == {6}


@pytest.mark.promise("answers.asynchronous", "updates.received-is-applied")
def test_a_plan_that_was_settled_while_rows_were_laid_out_is_settled_anew() -> None:
    store, plan = store_of((4, 2), "float32", SGD(1.0), fill=1), Plan([KEY])
    work = scatter(store, "assign", np.array([0]), np.full((1, 2), 5, np.float32))
    next(work)
    with pytest.raises(BusyError):
        store.read_together(plan)
    run(work)
    store.apply_at_once(0, plan, [np.ones(8, np.float32)], 0)
    assert b"".join(store.read_together(plan)) == value(store).tobytes()
    assert value(store).tolist() == [[4, 4], [0, 0], [0, 0], [0, 0]]
    layout = store.layout
    gathered(store, np.array([1]))
    assert store.layout == layout


def test_an_arena_is_copied_only_while_somebody_else_reads() -> None:
    store = store_of((4,), "float32", ACCUMULATING, Lamb(0.5), SGD(0.5), fill=1)
    store.create(spec_of((4,), number=1), fill=1)
    ones = np.ones(4, np.float32)

    def everything() -> int:
        run(store.assign(KEY, "add", ones))
        run(store.average((1, 0), KEY, 0.5))
        for optimizer in range(3):
            push(store, ones, optimizer=optimizer)
        return store.statistics()["copies"]  # type: ignore[no-any-return]

    assert everything() == 0
    held, before = store.read((1, 0)), value(store, (1, 0)).tobytes()
    assert everything() == 1
    assert b"".join(held) == before


def test_slots_lie_as_values_do_but_for_those_of_two_programs() -> None:
    store = store_of((4,), "float32", Adam(0.5), Adam(0.5))
    store.create(spec_of((4,), number=1))
    other, grads = store.shards()[1, 0], [np.ones(4, np.float32)] * 2
    store.apply_at_once(1, Plan([(1, 0)]), grads[:1], 0)
    other.slots = {(0, name): slot for (_, name), slot in other.slots.items()}
    store.apply_at_once(0, Plan([KEY]), grads[:1], 0)
    held = store.read_slot((1, 0), 0, "m")
    before = b"".join(held)
    store.apply_at_once(0, Plan([KEY, (1, 0)]), grads, 1)
    assert value(store).tobytes() == value(store, (1, 0)).tobytes()
    assert b"".join(held) == before != b"".join(store.read_slot((1, 0), 0, "m"))


@pytest.mark.promise("updates.at-most-once")
@pytest.mark.parametrize("repeats", [False, True])
def test_where_one_shard_is_busy_none_is_updated(repeats: bool) -> None:
    rule = (
        SGD(1.0)
        if repeats
        else SGD(1.0).with_options(RuleOptions(weight_decay=0.5, excluded_names=("w",)))
    )
    store = store_of((2,), "float32", rule, fill=1)
    store.create(spec_of((2, 1), number=1))
    keys = [KEY, *[KEY] * repeats, (1, 0)]
    work = store.read_rows((1, 0), np.array([0]), np.empty(4, np.uint8))
    with pytest.raises(BusyError):
        store.apply_at_once(0, Plan(keys), [np.ones(2, np.float32)] * len(keys), 0)
    run(work)
    assert value(store).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (0, 4), (2, 2)])
def test_a_shard_begins_as_an_array_a_buffer_a_number_or_a_copy(
    shape: tuple[int, ...], dtype: str
) -> None:
    store = ShardStore(TASK)
    values = np.resize(np.array([1, 0], dtype_of(dtype)), shape)
    assert store.create(spec_of(shape, dtype), values)
    assert store.create(spec_of(shape, dtype, 1), memoryview(values.tobytes()))
    assert store.create(spec_of(shape, dtype, 2), fill=1)
    run(store.copy(spec_of(shape, dtype, 3), KEY))
    assert not store.create(spec_of(shape, dtype), fill=1), "again: nothing changes"
    run(store.assign((2, 0), "assign", values))
    for key in store.keys():
        assert np.array_equal(value(store, key), values)


def test_a_copy_is_of_the_moment_in_which_it_began() -> None:
    store = store_of(LARGE, fill=1)
    copying = store.copy(spec_of(LARGE, number=1), KEY)
    with pytest.raises(BusyError):
        store.read((1, 0))
    next(copying)
    run(store.assign(KEY, "add", np.ones(LARGE, np.float32)))
    run(copying)
    run(store.copy(spec_of(LARGE, number=1), KEY))  # again: nothing changes
    assert (value(store, (1, 0)) == 1).all()
    assert (value(store) == 2).all()


def test_a_moving_average_is_of_the_moment_in_which_it_began() -> None:
    store = store_of(LARGE, fill=1)
    store.create(spec_of(LARGE, number=1))
    averaging = store.average((1, 0), KEY, 0.5)
    next(averaging)
    run(store.assign(KEY, "add", np.ones(LARGE, np.float32)))
    run(averaging)
    assert (value(store, (1, 0)) == 0.5).all()


@pytest.mark.parametrize("last", [1, 4])  # the one of 4 lies in memory of its own
def test_what_a_reader_has_of_small_shards_stays_when_an_average_moves(last: int) -> None:
    shape = (16 << 10,)
    store = store_of(shape, fill=1)
    for number in range(1, last + 1):
        store.create(spec_of(shape, number=number), np.full(shape, 2, np.float32))
    held = store.read((last, 0))
    run(store.average((last, 0), KEY, 0.5))
    assert (np.frombuffer(b"".join(held), np.float32) == 2).all()
    assert (value(store, (last, 0)) == 1.5).all()
    assert (value(store) == 1).all()


def test_integers_wrap_around_floats_overflow_and_bools_are_joined() -> None:
    for dtype, first, op, second, result in (
        ("uint8", 250, "add", 10, 4), ("uint8", 4, "sub", 5, 255),
        ("float16", 60000, "add", 60000, np.inf), ("bool", 0, "max", 1, True),
    ):  # fmt: skip
        store = store_of((1,), dtype, fill=first)
        run(store.assign(KEY, op, np.array([second], dtype)))  # type: ignore[arg-type]
        assert value(store).tolist() == [result]


def test_data_may_lie_at_any_address(store: ShardStore) -> None:
    values = np.arange(640, dtype=np.float32).reshape(64, 10)
    buffer = memoryview(b"x" + values.tobytes())[1:]
    run(store.assign(KEY, "assign", buffer))
    assert np.array_equal(value(store), values)
    push(store, buffer)
    assert np.array_equal(value(store), values * np.float32(0.5))


@settings(deadline=None)
@given(
    st.sampled_from(SCATTER_OPS),
    st.sampled_from(["int8", "uint8", "int64", "float16", "float32", "bool"]),
    st.sets(st.integers(0, 9)),
)
def test_rows_change_as_in_numpy_in_the_dtype_of_the_shard(
    op: str, dtype: str, chosen: set[int]
) -> None:
    rng = np.random.default_rng(3)
    model = rng.integers(0, 255, (10, 2)).astype(dtype)
    store, rows = store_of((10, 2), dtype, value=model), np.array(sorted(chosen), np.int64)
    values = rng.integers(0, 2 if dtype == "bool" else 255, (len(rows), 2)).astype(dtype)
    try:
        run(scatter(store, op, rows, values))
    except ValueMismatchError:  # this dtype has no such operation
        return
    current = model[rows]
    combine(op, current, values)
    model[rows] = current
    np.testing.assert_array_equal(value(store), model)
    np.testing.assert_array_equal(gathered(store, rows[::-1]), model[rows[::-1]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"reduction": "mean", "per_index": True}, [0, 2, 0, 2.5, 0, 4]),
        ({"reduction": "mean", "per_index": False}, [0, 0.5, 0, 2.5, 0, 3]),
        ({"reduction": "sum", "per_index": True}, [0, 2, 0, 10, 0, 12]),
        ({"reduction": "mean", "per_index": True, "scale": 0.5}, [0, 1, 0, 1.25, 0, 2]),
    ],
)
def test_rows_of_several_pushes_become_one(
    dtype: str, how: dict[str, Any], expected: list[float]
) -> None:
    store = store_of((6, 2), dtype, SGD(1.0))
    values = np.array([[2, 2], [4, 4]], dtype_of(dtype))
    gradients = [RowValues(np.array(rows), values) for rows in ([1, 3], [3, 5])]
    run(store.apply_row_mean(0, KEY, RowMean(gradients, [1.0, 3.0], **how), 0))
    assert (-value(store)[:, 0].astype(np.float64)).tolist() == expected
    assert (store.version(KEY), store.statistics()["rows"]) == (1, 3)


def test_many_rows_are_read_in_pieces() -> None:
    store, backwards = store_of(LARGE), np.arange(LARGE[0])[::-1].copy()
    run(store.assign(KEY, "assign", drawn(0)))
    for _ in range(2):  # the first time they are laid side by side
        assert gathered(store, backwards).tobytes() == drawn(0)[::-1].tobytes()


@pytest.mark.parametrize("num_rows", [0, 3, 200_000])
def test_the_squares_of_a_mean_are_those_of_its_rows(num_rows: int) -> None:
    store, values = store_of((1 << 20, 2)), drawn(4, (num_rows, 2))
    rows = np.sort(np.random.default_rng(4).choice(1 << 20, num_rows, replace=False))
    mean = RowMean([RowValues(rows, values), RowValues(rows, 3 * values)], [1, 1], "mean", True)
    sums: list[Sums] = []
    assert run(store.square_row_mean(KEY, mean, sums)) > num_rows * 8 >> 20
    assert sums == [(sum_of_squares((values + 3 * values) / np.float32(2)), 0.0)]
    assert store.version(KEY) == 0


# --- what is refused, before anything has changed ----------------------------------------------

WHERE = f'"w/part_0" on {TASK}: '
ROWS = np.zeros((2, 10), np.float32)
ACCUMULATING = SGD(0.5).with_options(RuleOptions(gradient_accumulation_steps=2))


def rows_refused(rows: list[int]) -> Callable[[ShardStore], object]:
    return lambda store: store.check_rows(KEY, np.array(rows), ROWS)


REFUSED: list[tuple[Callable[[ShardStore], object], type[PsyncError], str]] = [
    (lambda s: s.create(spec_of((64, 11), name="v")), PartitionError,
     f'"v/part_0" on {TASK}: already exists as "w/part_0" of shape (64, 10) float32 at row 0 on '
     'ps 1, got "v/part_0" of shape (64, 11) float32 at row 0 on ps 1'),
    (lambda s: s.copy(spec_of(number=1, name="c"), (0, 3)), UnknownVariableError,
     f'"c/part_0" on {TASK}: cannot begin as a copy of shard 3 of variable 0, which is not here'),
    (lambda s: s.copy(spec_of((10, 64), number=1), KEY), PartitionError,
     f'{WHERE}expected shape (64, 10) float32, as "w/part_0" has, got shape (10, 64) float32'),
    (lambda s: s.copy(spec_of((3,)), KEY), PartitionError, "already exists"),
    (lambda s: s.read((9, 0)), UnknownVariableError, f"{TASK} holds no shard 0 of variable 9"),
    (lambda s: s.check_apply(0, (0, 3), b""), UnknownVariableError, 'shard 3 of variable 0 ("w")'),
    (lambda s: s.begin_push(4), UsageError, f"optimizer 4 is not defined on {TASK}"),
    (lambda s: s.check_apply(4, KEY, bytes(2560)), UsageError, "optimizer 4 is not defined"),
    (lambda s: s.read_slot(KEY, 4, "m"), UsageError, "optimizer 4 is not defined"),
    (lambda s: s.check_apply_rows(4, KEY), UsageError, "optimizer 4 is not defined"),
    (lambda s: s.read_slot(KEY, 0, "m"), UsageError,
     f"optimizer 0 (sgd) on {TASK} has no slot 'm'\nhint: its slots are none"),
    (lambda s: s.read_slot(KEY, 1, "momentum"), UsageError,
     "no slot 'momentum'\nhint: its slots are m, v"),
    (lambda s: s.load_slot(KEY, 1, "m", bytes(8)), ValueMismatchError,
     "expected 2560 bytes for slot 'm', got 8"),
    (lambda s: s.assign(KEY, "mul", bytes(2560)), UsageError,  # type: ignore[arg-type]
     f"{WHERE}unknown operation 'mul'"),
    (lambda s: s.check_scatter(KEY, "xor"), UsageError, f"{WHERE}unknown operation"),
    (lambda s: s.check_apply(0, KEY, bytes(1280)), ValueMismatchError,
     f"{WHERE}expected shape (64, 10) float32 (2560 bytes), got 1280 bytes"),
    (lambda s: s.assign(KEY, "add", np.ones((64, 5), np.float32)), ValueMismatchError,
     "(2560 bytes), got shape (64, 5) float32"),
    (lambda s: s.create(spec_of(number=1), np.ones((64, 10), ">f4")), ValueMismatchError,
     "(2560 bytes), got shape (64, 10) >f4"),
    (rows_refused([3, 3]), ValueMismatchError,
     f"{WHERE}expected each row once and in ascending order, got row 3 after row 3"),
    (rows_refused([-1, 2]), ValueMismatchError,
     f"{WHERE}row -1 of the shard does not exist, it has 64"),
    (rows_refused([2, 64]), ValueMismatchError, "row 64 of the shard does not exist, it has 64"),
    (rows_refused([1]), ValueMismatchError, f"{WHERE}expected 1 rows of 40 bytes, got 80 bytes"),
    (lambda s: s.check_row_numbers(KEY, np.array([3, -1, 2])), ValueMismatchError, "row -1 of"),
    (lambda s: s.define_optimizer(0, SGD(0.25).to_config()), ConfigurationError,
     f"optimizer 0 on {TASK} is already defined as "),
    (lambda s: s.define_optimizer(9, None), ConfigurationError,
     f"{TASK}: expected the config of an optimizer"),
    (lambda s: s.measure(0, KEY, np.zeros(640, np.float32), 0, []), UsageError,
     f"optimizer 0 (sgd) on {TASK} has nothing to measure"),
    (lambda s: (s.define_optimizer(2, Lamb(0.1).to_config()), s.check_apply_rows(2, KEY)),
     ValueMismatchError, "norm over the whole"),
    (lambda s: (s.define_optimizer(2, ACCUMULATING.to_config()), s.check_apply_rows(2, KEY)),
     ValueMismatchError, "accumulates"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_what_does_not_fit_is_refused_and_changes_nothing(
    store: ShardStore, call: Callable[[ShardStore], object], error: type[PsyncError], text: str
) -> None:
    with pytest.raises(error) as caught:
        call(store)
    assert text in str(caught.value)
    assert store.keys() == [KEY]
    assert (store.busy(KEY), store.version(KEY)) == (False, 0)
    assert (value(store) == 1).all()


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_only_floating_shards_are_optimized_or_averaged(dtype: str) -> None:
    store = store_of((2,), dtype, Adam())
    for call in (
        lambda: store.check_apply(0, KEY, bytes(store.spec(KEY).nbytes)),
        lambda: store.read_slot(KEY, 0, "m"),
        lambda: store.check_apply_rows(0, KEY),
    ):
        text = f"{WHERE}only floating-point variables can be optimized, got {dtype}\nhint: declare"
        with pytest.raises(ValueMismatchError, match=text):
            call()
    with pytest.raises(ValueMismatchError, match="only floating-point variables have moving"):
        store.check_average(KEY, KEY)


def test_bools_are_0_or_1_and_not_added() -> None:
    store = store_of((2, 1), "bool")
    with pytest.raises(ValueMismatchError, match="bool values cannot be added: not 'add'"):
        store.assign(KEY, "add", b"\0\1")
    with pytest.raises(ValueMismatchError, match=r"\(2 bytes\), got bytes other than 0 and 1"):
        store.assign(KEY, "assign", b"\0\2")
    with pytest.raises(ValueMismatchError, match="bool values, got bytes other than 0 and 1"):
        store.check_rows(KEY, np.array([1]), b"\2")


def test_a_scalar_has_no_rows_and_an_average_is_shaped_as_its_variable() -> None:
    store = store_of(())
    store.create(spec_of((1,), number=1))
    with pytest.raises(ValueMismatchError, match="a scalar has no rows"):
        store.check_row_numbers(KEY, np.array([0]))
    with pytest.raises(PartitionError, match=r"expected shape \(\) float32, as "):
        store.check_average((1, 0), KEY)


# --- work: block by block, always to its end ---------------------------------------------------


def some_work(store: ShardStore, what: str) -> Work:
    """Work of several pieces that adds one to each element."""
    whole = np.ones(store.spec(KEY).shape, np.float32)
    if what == "assign":
        return store.assign(KEY, "add", whole)
    if what == "push":
        return store.apply_checked(0, KEY, store.check_apply(0, KEY, -whole), 0)
    return scatter(store, "add", np.arange(len(whole)), whole)


@pytest.mark.parametrize("pieces_before", [0, 1, 2])
@pytest.mark.parametrize("end", ["run", "closed", "dropped"])
@pytest.mark.parametrize("what", ["assign", "push", "rows"])
def test_a_shard_is_busy_until_its_work_is_done_which_is_done_whoever_abandons_it(
    what: str, end: str, pieces_before: int
) -> None:
    store = store_of(LARGE, "float32", SGD(1.0))
    store.create(spec_of((2,), number=1))
    work = some_work(store, what)
    for _ in range(pieces_before):
        next(work)
    for call in (
        lambda: store.read(KEY),
        lambda: store.read_range(KEY, 0, 1),
        lambda: store.read_rows(KEY, np.array([0]), np.empty(28, np.uint8)),
        lambda: store.copy(spec_of(LARGE, number=2), KEY),
        lambda: store.check_idle([(1, 0), KEY]),
        lambda: store.apply_at_once(0, Plan([KEY]), [np.ones(LARGE, np.float32).reshape(-1)], 0),
        *(lambda each=each: some_work(store, each) for each in ("assign", "push", "rows")),
    ):
        with pytest.raises(BusyError, match=f"{WHERE}an update is in progress"):
            call()
    push(store, np.full(2, -1, np.float32), (1, 0))
    if end == "run":
        run(work)
    elif end == "closed":
        work.close()
    del work
    assert (store.busy(KEY), store.version(KEY)) == (False, 1)
    assert (value(store) == 1).all()
    assert (value(store, (1, 0)) == 1).all()


def test_a_slot_is_what_it_is_set_to() -> None:
    store = store_of((4,), "float32", Adam(0.5))
    run(store.load_slot(KEY, 0, "v", np.full(4, 9, np.float32)))
    assert slot(store, "v").tolist() == [9] * 4


@pytest.mark.parametrize("rule", [SGD(0.5, momentum=0.5), Lamb(0.5)], ids=["SGD", "Lamb"])
def test_blocks_of_a_push_that_are_computed_elsewhere_have_the_same_bits(rule: UpdateRule) -> None:
    shape = (9 * BLOCK_ELEMENTS,)
    stores = [store_of(shape, "float32", rule, value=drawn(1, shape)) for _ in range(2)]
    works = [store.apply_checked(0, KEY, drawn(2, shape), 0) for store in stores]
    work, handed_out = works[0], 0
    assert isinstance(work, ShardWork)
    for _ in works[0]:
        while out := work.hand_out(2):
            for block in out:
                block.compute(Workspace())
            work.take_back(out)
            handed_out += 1
    assert handed_out >= 2
    run(works[1])
    assert value(stores[0]).tobytes() == value(stores[1]).tobytes()


@pytest.mark.parametrize("together", [False, True])
def test_a_shard_whose_update_has_failed_half_way_is_never_read(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    def no_memory(nbytes: int) -> np.ndarray:
        raise MemoryError

    store = store_of((4,) if together else LARGE, "float32", SGD(1.0))
    snapshot = store.read(KEY)
    store.check_idle([KEY])
    work = iter(()) if together else some_work(store, "assign")
    next(work, None)
    monkeypatch.setattr(pool_of(store), "take", no_memory)
    grad = np.ones(4, np.float32)
    with pytest.raises(MemoryError):
        _ = store.apply_at_once(0, Plan([KEY]), [grad], 0) if together else next(work)
    with pytest.raises(BusyError):
        store.read(KEY)
    with pytest.raises(BusyError):
        store.check_idle([KEY])
    assert store.version(KEY) == 0
    assert not any(b"".join(snapshot))


# --- what it costs ---------------------------------------------------------------------------


def test_only_blocks_that_somebody_holds_are_copied_each_once() -> None:
    store = store_of((2 * BLOCK_ELEMENTS,), "float32", Adam(), fill=1)
    grad = np.ones(2 * BLOCK_ELEMENTS, np.float32)
    for _ in range(3):
        push(store, grad)
    assert store.statistics()["copies"] == 0
    held = store.read(KEY)
    same = [np.frombuffer(views[0], np.uint8) for views in (held, store.read(KEY))]
    assert np.shares_memory(*same)
    for _ in range(100):
        run(store.assign(KEY, "add", grad))
    assert store.statistics()["copies"] == 2
    misses = store.statistics()["pool"]["misses"]
    for _ in range(10):
        held = store.read(KEY)
        push(store, grad)
    statistics = store.statistics()
    assert statistics["copies"] == 2 + 20  # the slots stay in place
    assert statistics["pool"]["misses"] <= misses + 2
    assert (statistics["applies"], statistics["assigns"]) == (13, 100)
    assert (statistics["shards"], statistics["bytes"]) == (1, grad.nbytes)
    assert statistics["slot_bytes"] == 2 * grad.nbytes


@pytest.mark.parametrize("rows", [1 << 14, 1 << 22], ids=["small", "large"])
def test_rows_and_bytes_do_not_depend_on_the_size_of_the_table(rows: int) -> None:
    store = store_of((rows, 64), "float32", SGD(0.5, momentum=0.5), fill=0.25)  # 4096 rows a block
    chosen = np.array([0, 5, 4095, 4096, 16_383])
    push_rows(store, chosen, np.ones((5, 64), np.float32))
    gathered(store, chosen[::-1])
    counters = store.statistics()
    assert (counters["rows"], counters["row_bytes"]) == (10, 2560)
    assert (counters["row_updates"], counters["copies"]) == (1, 0)
    store.read_range(KEY, 4095, 4097)
    assert store.statistics()["rows"] == 12


def test_a_declared_table_of_a_terabyte_serves_and_takes_rows() -> None:
    rows = 1 << 32  # of 256 bytes
    store = store_of((rows, 64), "float32", Adam(0.1), fill=0.5)
    far = np.array([3, rows - 1])
    assert store.rows_cost(KEY, far) < 1024
    push_rows(store, far, np.ones((2, 64), np.float32))
    assert push_rows(store, far[:0], np.ones((0, 64), np.float32)) is None
    got = gathered(store, np.array([rows - 1, 0, 3]))
    assert got[1].tolist() == [0.5] * 64
    assert (got[[0, 2]] != 0.5).all()
    push_rows(store, far, np.zeros((2, 64), np.float32))
    assert (gathered(store, far) < got[[2, 0]]).all(), "its moments go on"
    run(store.read_rows(KEY, far[:0], np.empty(0, np.uint8)))
    assert store.read_range(KEY, 3, 3) == []
    assert store.statistics()["rows"] == 2 + 3 + 2 + 2


def test_rows_cost_what_they_are_and_what_must_be_moved_or_copied_first() -> None:
    store, rows = store_of((1 << 16, 64)), np.array([0, (1 << 16) - 1])
    assert store.rows_cost(KEY, rows) == 2 * (256 + 64)
    assert store.rows_cost(KEY, rows[:0]) == store.rows_cost(KEY, range(0)) == 0
    run(store.assign(KEY, "assign", np.ones((1 << 16, 64), np.float32)))
    assert store.rows_cost(KEY, rows) == 2 * (256 + 64) + 16 * BLOCK_BYTES
    assert (gathered(store, rows) == 1).all()  # blocks lie side by side from now on
    cheap = store.rows_cost(KEY, rows)
    assert cheap < BLOCK_BYTES
    held = store.read(KEY)
    assert store.rows_cost(KEY, rows[::-1]) >= cheap + 2 * BLOCK_BYTES
    for _ in range(2):
        run(scatter(store, "add", rows, np.ones((2, 64), np.float32)))
    assert store.statistics()["copies"] == 2
    assert (np.frombuffer(b"".join(held), np.float32) == 1).all()
    assert (value(store)[rows] == 3).all()


# --- optimizers ------------------------------------------------------------------------------


def test_slots_appear_when_they_are_used_and_those_of_half_precision_are_single() -> None:
    size = BLOCK_ELEMENTS + 5
    store = store_of((size,), "bfloat16", SGD(1.0, momentum=0.5), SGD(1.0, momentum=0.5))
    assert store.statistics()["slot_bytes"] == 0
    assert not slot(store, "momentum", 1).any()
    grad = np.arange(size).astype(ml_dtypes.bfloat16)
    push(store, grad)
    assert np.array_equal(slot(store, "momentum"), -grad.astype(np.float32))
    assert not slot(store, "momentum", 1).any()
    assert np.array_equal(value(store), -grad)
    assert store.row_bytes(KEY) == 2


def test_pushes_are_counted_here_and_by_those_who_tell_of_them(store: ShardStore) -> None:
    store.define_optimizer(0, SGD(0.5).to_config())  # again
    store.define_optimizer(0, {**SGD(0.5).to_config(), "excluded_names": ()})  # the same
    assert [store.begin_push(0, carried) for carried in (0, 0, 7, 3)] == [0, 1, 9, 10]
    base = marked_after(0, 5)
    store.set_count(1, base)
    assert store.hear_count(1, 0, base, [(1, 3)], 1) == 3
    assert (store.push_count(1).known, store.iterations) == (8, 11)
    assert [store.begin_step(1, step) for step in (8, 14)] == [8, 14]
    assert store.iterations == 15


def test_a_learning_rate_is_set_and_the_definition_stays(store: ShardStore) -> None:
    store.set_learning_rate(0, Constant(0.25).to_config())
    store.define_optimizer(0, SGD(0.5).to_config())  # what other users know
    push(store, np.ones((64, 10), np.float32))
    assert (value(store) == 0.75).all()
    assert store.rule(0).learning_rate == Constant(0.25)


def test_gradients_are_accumulated_for_each_shard_by_itself_and_anew_after_a_load() -> None:
    store = store_of((4,), "float32", ACCUMULATING, fill=1)
    store.create(spec_of((4,), number=1), fill=1)

    def one(size: float, number: int = 0) -> list[float]:
        mean = store.mean_of([np.full(4, size * n, np.float32) for n in (1, 3)], [1.0, 1.0])
        run(store.apply_checked(0, (number, 0), mean, 0))
        return value(store, (number, 0))[:1].tolist()  # type: ignore[no-any-return]

    assert (one(1), one(5, 1), one(3)) == ([1], [1], [1 - 0.5 * 4])
    assert not slot(store, ACCUMULATOR).any()
    one(8)
    run(store.load_slot(KEY, 0, ACCUMULATOR, np.full(4, 9, np.float32)))
    assert (one(1), one(3)) == ([-1], [-1 - 0.5 * 4])  # nobody knows how many are in that sum


def test_excluded_variables_do_not_decay() -> None:
    options = RuleOptions(weight_decay=0.5, excluded_words=("bias",))
    store = store_of((4,), "float32", SGD(0.5).with_options(options), fill=1)
    store.create(spec_of((4,), number=1, name="bias"), fill=1)
    store.apply_at_once(0, Plan([KEY, (1, 0)]), [np.zeros(4, np.float32)] * 2, 0)
    assert value(store).tolist() == [0.75] * 4
    assert value(store, (1, 0)).tolist() == [1] * 4


@pytest.mark.parametrize("steps", [None, 2])
def test_to_measure_changes_nothing_and_tells_what_is_applied(steps: int | None) -> None:
    rule = Lamb(0.5).with_options(RuleOptions(gradient_accumulation_steps=steps))
    store = store_of(LARGE, "float32", rule, fill=1)
    assert store.rule(0).takes_norms
    grad, count = np.ones(LARGE, np.float32), float(np.prod(LARGE))
    given = store.check_apply(0, KEY, grad)
    if steps:
        run(store.apply_checked(0, KEY, given, 0))
    sums: list[Sums] = []
    mean = store.mean_of([given * n for n in (1, 3)], [1.0, 1.0], scale=0.5)
    for gradient in (given, mean):
        run(store.measure(0, KEY, gradient, 0, sums))
    run(store.square_mean(KEY, mean, sums))
    assert sums[:2] == [(count, pytest.approx(count))] * 2  # Adam's first update is a sign
    assert sums[2:] == [(pytest.approx(count), 0.0)]
    assert (value(store) == 1).all()
    run(store.apply_checked(0, KEY, given, 0, Lamb.trust_ratio([(16.0, 4.0)])))
    np.testing.assert_allclose(value(store), 1 - 0.5 * 2, atol=1e-5)


def test_ones_are_made_once_and_nobody_changes_them() -> None:
    assert ones((2,), "int64") is ones((2,), "int64")
    assert not ones((2,), "float32").flags.writeable


# --- rules of users ----------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


def state(store: ShardStore) -> list[bytes]:
    """Values and slots, as bytes."""
    names = store.rule(0).slot_names()
    return [b"".join(read(store, place)) for place in (KEY, *((*KEY, 0, n) for n in names))]


@pytest.mark.promise("rules.error-changes-nothing")
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("count", [None, 5, LARGE[0]], ids=["dense", "rows", "all rows"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_shard_is_as_it_was_when_a_rule_of_a_user_raises(
    registry: None, at: int, count: int | None, steps: int | None
) -> None:
    if count and steps:
        pytest.skip("rows are not accumulated")
    rule = own_rules.Momentum(0.1).with_options(RuleOptions(gradient_accumulation_steps=steps))
    store, other = (store_of(LARGE, "float32", rule, value=drawn(1)) for _ in range(2))

    def pushed(store: ShardStore, grad: np.ndarray) -> RuleError | None:
        if count is None:
            return push(store, grad)
        return push_rows(store, np.arange(count), grad[:count])

    too_large = drawn(9)
    too_large[:count][at] = 4 * own_rules.TOO_LARGE
    held = store.read(KEY)
    for each in (store, other):
        assert pushed(each, drawn(2)) is None
    before, version = state(store), store.version(KEY)
    error = pushed(store, too_large)
    assert error is not None
    assert error.message == (
        f'update rule "tests.momentum" for "w/part_0" raised ValueError on {TASK}: '
        "a gradient above 100"
    )
    assert (error.task, error.type_name) == (TASK, "ValueError")
    assert "own_rules.py" in error.traceback_text
    assert state(store) == before
    assert (store.busy(KEY), store.version(KEY)) == (False, version)
    other.begin_push(0)
    for each in (store, other):
        assert pushed(each, drawn(3)) is None
        assert push(each, drawn(4)) is None  # of the whole shard, rows or not
    assert state(store) == state(other) != before
    assert b"".join(held) == drawn(1).tobytes()


def test_other_shards_of_the_push_are_updated(registry: None) -> None:
    store = store_of((4,), "float32", own_rules.Momentum(0.1))
    for number in (1, 2):
        store.create(spec_of((4,), number=number, name=f"v{number}"))
    keys = store.keys()
    gradients = [np.full(4, size, np.float32) for size in (1, 2 * own_rules.TOO_LARGE, 1)]
    store.apply_at_once(0, Plan(keys), gradients, 0)
    error = store.take_failure(0, 0)
    assert error is not None
    assert '"v1/part_0"' in error.message
    assert store.take_failure(0, 0) is None  # once
    store.apply_at_once(0, Plan(keys), Means([gradients, gradients], [1.0, 1.0]), 1)
    assert store.take_failure(0, 1) is not None
    assert [store.version(key) for key in keys] == [2, 0, 2]
    assert store.num_updates == 4


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        ((0.5, 0), 'schedule "Halving" raised ArithmeticError on'),
        ((-1.0, 9), r"learning rate from 0, got -1\.0 at step 0"),
    ],
)
def test_a_schedule_that_raises_refuses_the_push_and_the_step_stays(
    registry: None, rate: tuple[float, int], text: str
) -> None:
    store = store_of(LARGE, "float32", SGD(own_rules.Halving(*rate)))
    for _ in range(2):
        with pytest.raises(RuleError, match=text) as caught:
            push(store, drawn(5))
    assert caught.value.task == TASK
    assert store.push_count(0).marked == 0
    assert not value(store).any()
    store.set_learning_rate(0, own_rules.Halving(0.5).to_config())
    assert push(store, drawn(5)) is None


def test_a_rule_that_is_not_registered_is_refused_by_name(registry: None) -> None:
    config: Any = own_rules.Momentum(0.1).to_config() | {"rule": "tests.unknown"}
    with pytest.raises(ConfigurationError, match=rf"{TASK}: unknown optimizer 'tests\.unk"):
        ShardStore(TASK).define_optimizer(1, config)


def test_an_error_without_a_text_is_told_all_the_same(
    registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def raises(*_: object) -> None:
        raise Mute

    store = store_of((4,), "float32", own_rules.Momentum(0.1))
    monkeypatch.setattr(own_rules.Momentum, "update", raises)
    error = push(store, np.ones(4, np.float32))
    assert error is not None
    assert "raised Mute on /job:ps/task:1: its text cannot be had" in error.message
