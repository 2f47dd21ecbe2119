"""Variables: what declaring one decides, and what its handle does then."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import psync
from local_training import (
    at_once,
    declare,
    declared,
    in_step,
    inside_a_step,
    strategy_of,
    training,
    training_of,
)
from loops import for_each
from psync.errors import ClosedError, PartitionError, UsageError, ValueMismatchError

two_rows_each = psync.FixedShardsPartitioner(2)


def on(*indices: int) -> list[str]:
    return [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in indices]


# --- declaring: where and how -----------------------------------------------------------------


def test_a_declaration_says_name_shape_dtype_and_device() -> None:
    v = declared(v=np.zeros((3, 4), np.float16))
    assert (v.name, v.shape, v.dtype, v.device) == ("v", (3, 4), np.float16, *on(0))
    assert repr(v) == "<Variable 'v' shape=(3, 4) dtype=float16>"


def test_devices_go_round_the_ps_tasks_and_each_shard_takes_a_turn() -> None:
    first, sharded = declared(3, lambda shape, dtype: [2], first=0.0, sharded=np.zeros(4))
    assert [first.device] == on(0)
    assert list(sharded.device) == on(1, 2)


def test_devices_go_round_and_on_where_an_earlier_scope_has_stopped() -> None:
    strategy = strategy_of(3)
    variables = [declare(strategy, v=0.0) for _ in range(4)]
    assert [v.device for v in variables] == on(0, 1, 2, 0)


DECLARES: dict[str, Any] = {
    'declaring variable "v"': lambda: psync.Variable(0.0, name="v"),
    "get_global_step": psync.get_global_step,
    "get_or_create_global_step": psync.get_or_create_global_step,
    'declaring accumulator "g"': lambda: psync.ConditionalAccumulator("float32", name="g"),
}


@pytest.mark.parametrize("what", DECLARES)
def test_what_is_declared_is_declared_in_a_scope_and_not_in_a_step(what: str) -> None:
    with pytest.raises(UsageError) as caught:
        DECLARES[what]()
    assert caught.value.message == f"{what} outside a strategy's scope"
    assert "in `with strategy.scope():`" in str(caught.value)
    with inside_a_step(), pytest.raises(UsageError, match="inside a step"):
        DECLARES[what]()


def test_scopes_of_two_strategies_do_not_nest() -> None:
    with strategy_of().scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
        with strategy_of().scope():
            pass


def test_the_line_of_the_declaration_is_named_by_errors() -> None:
    with strategy_of().scope(), pytest.raises(PartitionError) as caught:
        psync.Variable(None, name="v")
    line = caught.traceback[0].lineno + 1
    assert f'variable "v" declared at {__file__}:{line}: initial_value is None' in str(caught.value)


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["v", "v", "v"], ["v", "v_1", "v_2"]),
        (["v_1", "v", "v"], ["v_1", "v", "v_2"]),
        (["v", "v", "v_1"], ["v", "v_1", "v_1_1"]),
        ([None, None], ["Variable", "Variable_1"]),
    ],
)
def test_names_are_made_unique(names: list[str | None], unique: list[str]) -> None:
    with strategy_of().scope():
        assert [psync.Variable(0.0, name=name).name for name in names] == unique


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (0.5, None, "float32"),
        ([1.0, 2.0], None, "float32"),
        (7, None, "int64"),
        (True, None, "bool"),
        (np.zeros(2), None, "float64"),
        (np.float32(1), None, "float32"),
        (np.zeros(2), np.float16, "float16"),
        (7, "bfloat16", ml_dtypes.bfloat16),
    ],
)
def test_the_dtype_is_the_values_unless_given(value: Any, dtype: object, expected: str) -> None:
    with strategy_of().scope():
        assert psync.Variable(value, dtype=dtype).dtype == np.dtype(expected)


def test_a_dtype_that_ps_tasks_do_not_hold_is_an_error() -> None:
    with strategy_of().scope(), pytest.raises(PartitionError, match="'complex128' is not support"):
        psync.Variable(1j)


def test_another_shape_than_given_is_an_error() -> None:
    with (
        strategy_of().scope(),
        pytest.raises(
            PartitionError, match=re.escape("expected shape (3,), the initial value has (2,)")
        ),
    ):
        psync.Variable([1, 2], shape=(3,))


def test_a_callable_is_not_called_before_it_is_needed() -> None:
    calls: list[object] = []
    with strategy_of().scope():
        psync.Variable(lambda *args: calls.append(args), shape=(2,), dtype="float32")
    assert calls == []


def test_trainable_variables_are_listed_by_the_strategy() -> None:
    strategy = strategy_of()
    with strategy.scope():
        weight, counter = psync.Variable(0.0), psync.Variable(0, trainable=False)
    assert strategy.variables == (weight, counter)
    assert strategy.trainable_variables == (weight,)


# --- shards ------------------------------------------------------------------------------------


def test_a_partitioner_makes_a_sharded_variable() -> None:
    with strategy_of(2, two_rows_each).scope():
        v = psync.Variable(np.zeros((5, 3), np.float32), name="v", trainable=False)
    assert isinstance(v, psync.ShardedVariable)
    assert (v.name, v.shape, v.dtype) == ("v", (5, 3), np.float32)
    assert repr(v) == "<ShardedVariable 'v' shape=(5, 3) dtype=float32, 2 shards>"
    first, second = v.variables
    assert isinstance(first, psync.Variable)
    assert (first.name, first.shape, first.trainable) == ("v/part_0", (3, 3), False)
    assert (second.name, second.shape, second.dtype) == ("v/part_1", (2, 3), np.float32)
    assert [first.device, second.device] == list(v.device) == on(0, 1)


@for_each("answer", [None, [], [0, 1], [2, 2], [2]])
def test_an_answer_of_the_partitioner_that_makes_no_sense_is_an_error(answer: Any) -> None:
    strategy = strategy_of(2, lambda shape, dtype: answer)
    with strategy.scope(), pytest.raises(PartitionError, match="variable_partitioner"):
        psync.Variable(np.zeros((4, 4)))
    assert strategy.variables == ()


CALLS: dict[str, Any] = {
    'read of "v"': lambda v: v.read(),
    'assign_add to "v"': lambda v: v.assign_add([1.0]),
    'assign to "v"': lambda v: v.assign([1.0], atomic=True),
    'sparse_read of "v"': lambda v: v.sparse_read([0]),
    'read of rows of "v"': lambda v: v[0]._read(),
    "pull": lambda v: psync.pull([v]),
    "empty_like": psync.empty_like,
}


@for_each("operation", CALLS)
def test_before_the_coordinator_runs_there_is_no_connection(operation: str) -> None:
    v = declared(v=np.zeros(1))
    with pytest.raises(UsageError, match=f"{operation}: no connection to the ps tasks here"):
        at_once(CALLS[operation](v))


@pytest.mark.parametrize(
    "arguments", [(), ([],), (None,), ([1, 2],)], ids=["nothing", "empty", "none", "others"]
)
def test_a_sharded_variable_is_made_by_declaring_one(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(psync.UsageError, match=r"created only by psync.Variable\(…\)") as caught:
        psync.ShardedVariable(*arguments)
    assert "psync.FixedShardsPartitioner(2)" in str(caught.value)


def test_scalars_are_not_shown_to_the_partitioner() -> None:
    def fail(shape: object, dtype: object) -> list[int]:
        raise AssertionError

    with strategy_of(2, fail).scope():
        assert type(psync.Variable(0.0)) is psync.Variable


async def test_a_shard_is_read_and_assigned_alone() -> None:
    async with training_of(2, 1, two_rows_each, v=np.arange(6.0).reshape(3, 2)) as (_, v):
        first, second = v.variables
        assert (await v.read()).tolist() == [[0, 1], [2, 3], [4, 5]]
        assert (await first.read()).tolist() == [[0, 1], [2, 3]]
        assert (await second.read()).tolist() == [[4, 5]]
        await second.assign([[7, 8]])
        assert (await v.read()).tolist() == [[0, 1], [2, 3], [7, 8]]


async def test_a_callable_makes_each_shard_alone_on_the_chief() -> None:
    calls: list[object] = []

    def make(shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
        calls.append((shape, offset))
        return np.arange(shape[0]) + offset[0]

    async with training(partitioner=two_rows_each) as (strategy, _):
        with strategy.scope():
            v = psync.Variable(make, shape=(5,), dtype="int32")
        assert (await v.read()).tolist() == [0, 1, 2, 3, 4]
    assert calls == [((3,), (0,)), ((2,), (3,))]


# --- reading and assigning ---------------------------------------------------------------------

PARTITIONERS = pytest.mark.parametrize("partitioner", [None, two_rows_each])


@PARTITIONERS
async def test_assign_add_and_sub_change_the_whole_value(partitioner: Any) -> None:
    start = np.arange(12, dtype=np.float32).reshape(3, 4)
    async with training_of(2, 1, partitioner, v=start) as (_, v):
        assert await v.assign_add(start) is v
        assert np.array_equal(await v.read(), 2 * start)
        assert await v.assign_sub(np.ones((3, 4), np.float32)) is v
        assert np.array_equal(await v.read(), 2 * start - 1)
        assert await v.assign(start) is v
        assert np.array_equal(await v.read(), start)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", 3),
        ("float32", np.float64(0.5)),
        ("float32", np.int64(4)),
        ("float32", True),
        ("bfloat16", np.float32(1.5)),
        ("bfloat16", 1.5),
        ("uint8", 200),
        ("int8", -100),
        ("int64", np.int32(5)),
        ("bool", True),
        ("float16", np.array(2.5, ">f2")),
        ("float64", 1), ("int16", 1), ("int32", 1), ("uint16", 1), ("uint32", 1), ("uint64", 1),
    ],
)  # fmt: skip
async def test_variables_of_every_dtype_are_assigned_what_is_of_the_kind(
    dtype: str, value: Any
) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(0, dtype=dtype)
        await v.assign(value)
        read = await v.read()
    assert (read.dtype.name, read.dtype) == (dtype, v.dtype)
    assert read == value


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        ("float32", np.zeros(3), "expected shape (), got (3,)"),
        ("float32", [[1.0], [2.0, 3.0]], "the value is not an array"),
        ("float32", "one", "expected dtype float32, got <U3"),
        ("int32", 1.5, "expected dtype int32, got float64"),
        ("int32", np.float32(1), "expected dtype int32, got float32"),
        ("uint8", np.int64(1), "expected dtype uint8, got int64"),
        ("uint8", -1, "expected values in the range of uint8, got -1"),
        ("uint8", 256, "expected values in the range of uint8, got 256"),
        ("int8", np.int64(300), "expected values in the range of int8, got 300"),
        ("float32", np.float64(1e300), "expected values in the range of float32, got 1e+300"),
        ("bfloat16", 1e300, "expected values in the range of bfloat16, got 1e+300"),
        ("bool", 1, "expected dtype bool, got int64"),
    ],
)
def test_assign_refuses_what_does_not_fit(dtype: str, value: Any, text: str) -> None:
    with strategy_of().scope():
        v = psync.Variable(0, dtype=dtype, name="v")
    for method in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueMismatchError) as caught:
            at_once(method(value))
        assert str(caught.value).startswith(f'{method.__name__} to "v": {text}')


async def test_what_is_read_is_read_only_unless_it_is_a_copy_or_an_array_of_the_caller() -> None:
    async with training_of(2, 1, two_rows_each, v=np.arange(4.0), large=np.zeros(100_000)) as (
        _,
        v,
        large,
    ):
        with pytest.raises(ValueError, match="read-only"):
            (await v.read())[0] = 1
        for mine in (await v.read(copy=True), await v.read(out=(out := np.empty(4)))):
            assert mine.tolist() == [0, 1, 2, 3]
            mine[0] = 1
        assert mine is out
        assert (await v.read()).tolist() == [0, 1, 2, 3]
        before = await large.read()  # it does not change when the variable does
        await large.assign_add(np.ones(100_000))
        assert not before.any()


@pytest.mark.parametrize(
    ("out", "got"),
    [
        ([0.0, 0.0], "got list"),
        (np.zeros(3), "got shape (3,) float64"),
        (np.zeros(2, np.float32), "got shape (2,) float32"),
        (np.zeros(4)[::2], "got shape (2,) float64, not C-contiguous"),
        (np.broadcast_to(0.0, 2), "got shape (2,) float64, not C-contiguous, read-only"),
    ],
)
def test_an_array_that_cannot_be_read_into_is_an_error(out: Any, got: str) -> None:
    v = declared(v=np.zeros(2))
    with pytest.raises(ValueMismatchError) as caught:
        at_once(v.read(out=out))
    assert str(caught.value) == (
        'out for "v": expected a writable C-contiguous array of shape (2,) float64, ' + got
    )


async def test_variables_of_no_elements_and_of_no_axes_are_read() -> None:
    async with training_of(
        2, 1, two_rows_each, empty=np.zeros((0, 3)), hollow=np.zeros((3, 0)), scalar=2.5
    ) as (_, empty, hollow, scalar):
        assert (await empty.read()).shape == (0, 3)
        assert (await hollow.read()).shape == (3, 0)
        assert (await scalar.read()).shape == ()
        assert await scalar.read() == 2.5


# --- where there is no value -------------------------------------------------------------------


def test_a_handle_is_not_an_array() -> None:
    v = declared(v=np.zeros(2))
    for use in (
        lambda: np.asarray(v), lambda: np.ones(2) * v, lambda: np.sum(v), lambda: [1] @ v,
        lambda: 1 + v, lambda: -v, lambda: v < 5, lambda: float(v),
    ):  # fmt: skip
        with pytest.raises((UsageError, TypeError)):
            use()
    with pytest.raises(UsageError) as caught:
        np.ones(2) @ v
    assert str(caught.value) == (
        'numpy.matmul: variable "v" is not an array: its value is stored on ps tasks\n'
        "hint: await its value first: `value = await v.read()`, or `await psync.pull((v, w))`"
    )
    with pytest.raises(UsageError, match='truth: variable "v" is not an array'):
        bool(v)


async def test_after_the_coordinator_was_closed_the_variables_are_gone() -> None:
    async with training_of(v=0.0) as (coordinator, v):
        await v.read()
    strategy = coordinator.strategy
    text = "the coordinator or session was closed, and its variables with it"
    with pytest.raises(ClosedError, match=f'read of "v": {text}'):
        await v.read()
    with pytest.raises(ClosedError, match=f'assign to "v": {text}'):
        await v.assign(1)
    with strategy.scope(), pytest.raises(ClosedError, match='declaring variable "w": the coord'):
        psync.Variable(0.0, name="w")


def test_a_variable_of_another_strategy_is_refused_in_a_step() -> None:
    foreign = declared(foreign=0.0)
    with (
        inside_a_step(),
        pytest.raises(UsageError, match='"foreign" belongs to another program or strategy'),
    ):
        at_once(foreign.read())


# --- one object per process --------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", [None, two_rows_each])
def test_a_handle_is_one_object_however_it_is_copied(partitioner: Any) -> None:
    v = declared(2, partitioner, v=np.zeros(4))
    assert pickle.loads(pickle.dumps(v)) is v
    assert copy.copy(v) is v
    first = v.variables[0] if partitioner else v  # a shard is one while it is in use
    assert pickle.loads(pickle.dumps(first)) is first
    assert copy.deepcopy({"v": [v]})["v"][0] is v


async def test_on_a_worker_a_handle_is_the_same_object_in_each_step() -> None:
    async with training_of(2, 1, two_rows_each, v=np.zeros(4)) as (coordinator, v):

        async def step(given: Any) -> tuple[bool, str, float]:
            await v.assign_add(np.ones(4))
            return given is v, given.name, (await given.read()).sum()

        values = [coordinator.schedule(step, args=(v,)) for _ in range(2)]
        assert await coordinator.fetch(values) == [(True, "v", 4), (True, "v", 8)]


# --- large ones --------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_constant_table_of_gigabytes_is_declared_created_and_read_by_row_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with training(4, 1, psync.FixedShardsPartitioner(4)) as (strategy, _):
        before = resident_bytes()
        with strategy.scope(), caplog.at_level(logging.WARNING):
            table = psync.Variable(np.broadcast_to(np.float32(0.1), (8_000_000, 64)))
        assert strategy.placement().totals == (512_000_000,) * 4
        part = await table.variables[3].sparse_read([1_999_999])
        assert part.tolist() == [[np.float32(0.1)] * 64]
        assert resident_bytes() - before < 200 << 20  # of 2 GB
        assert caplog.messages == []


# --- the global step: a scalar on ps 0 that takes nobody's turn -------------------------------


def test_it_is_declared_once_and_then_found() -> None:
    with strategy_of(2).scope():
        assert psync.get_global_step() is None
        step = psync.get_or_create_global_step()
        assert psync.get_or_create_global_step() is step
        assert psync.get_global_step() is step
    assert (step.name, step.shape, step.dtype) == ("global_step", (), np.int64)
    assert not step.trainable


def test_it_lies_on_ps_0_and_takes_nobodys_turn() -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        first = psync.Variable(0.0)
        step = psync.get_or_create_global_step()
        second = psync.Variable(0.0)
    assert [v.spec.shards[0].ps for v in (first, step, second)] == [0, 0, 1]
    assert strategy.variables == (first, step, second)


def test_each_strategy_has_its_own() -> None:
    with strategy_of().scope():
        one = psync.get_or_create_global_step()
    with strategy_of().scope():
        assert psync.get_global_step() is None
        assert psync.get_or_create_global_step() is not one


def test_one_that_the_program_declared_itself_is_found() -> None:
    with strategy_of().scope():
        mine = psync.Variable(5, dtype="int32", name="global_step")
        assert psync.get_or_create_global_step() is mine


@pytest.mark.parametrize("value", [0.5, [1, 2]])
def test_a_variable_of_its_name_that_cannot_count_is_an_error(value: object) -> None:
    with strategy_of().scope():
        psync.Variable(value, name="global_step")
        with pytest.raises(UsageError, match="the global step: expected an integer scalar, var"):
            psync.get_or_create_global_step()
        with pytest.raises(UsageError, match=r"declared at .*test_variables.py:\d+ has shape"):
            psync.get_global_step()


async def test_a_step_gets_it_from_the_program() -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            step = psync.get_or_create_global_step()
        assert await step.read() == 0

        async def count() -> None:
            await step.assign_add(1)

        await in_step(coordinator, count)
        assert await step.read() == 1
