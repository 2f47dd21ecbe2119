from __future__ import annotations

import numpy as np
import pytest

from psync.errors import UnknownVariableError, UsageError, ValueMismatchError
from psync.numerics.memory import BLOCK_BYTES
from psync.numerics.rules import SGD, Lamb, RuleOptions
from psync.specs import ShardSpec
from psync.store.store import ShardStore

TASK = "/job:ps/task:1"
OPTIMIZER = 4
KEY = (0, 0)


def made(shape: tuple[int, ...] = (20, 3), dtype: str = "float32") -> ShardStore:
    store = ShardStore(TASK)
    store.create(ShardSpec("w", 0, 0, 0, shape, dtype, 1))
    return store


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([3, 3], "got row 3 after row 3"),
        ([3, 1, 2], "got row 1 after row 3"),
        ([-1, 2], "row -1 of the shard does not exist, it has 20"),
        ([2, 20], "row 20 of the shard does not exist, it has 20"),
        ([1], r"expected 1 rows of 12 bytes, got 24 bytes"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_named(rows: list[int], expected: str) -> None:
    with pytest.raises(ValueMismatchError, match=f'"w/part_0" on {TASK}: .*{expected}'):
        made().check_rows(KEY, rows_of(*rows), np.zeros((2, 3), np.float32))


def test_bool_values_are_0_or_1() -> None:
    with pytest.raises(ValueMismatchError, match="bytes other than 0 and 1"):
        made((4, 1), "bool").check_rows(KEY, rows_of(1), b"\2")


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(ValueMismatchError, match="a scalar has no rows"):
        made(()).check_row_numbers(KEY, rows_of(0))


def test_slots_of_half_precision_are_in_float32() -> None:
    assert made(dtype="float16").row_bytes(KEY) == 6
    assert made(dtype="float16").row_bytes(KEY, OPTIMIZER) == 12
    with pytest.raises(ValueMismatchError, match="only floating-point"):
        made(dtype="int8").row_bytes(KEY, OPTIMIZER)


def test_who_needs_the_whole_gradient_refuses_some_rows() -> None:
    accumulating = SGD(0.5).with_options(RuleOptions(gradient_accumulation_steps=2))
    for rule, why in ((Lamb(0.1), "norm over the whole"), (accumulating, "accumulates")):
        store = made()
        store.define_optimizer(OPTIMIZER, rule.to_config())
        with pytest.raises(
            ValueMismatchError, match=f'"w/part_0" on {TASK}: .*{why}.*\nhint: push'
        ):
            store.check_apply_rows(OPTIMIZER, KEY)


def test_what_has_no_gradient_or_is_not_there_is_refused() -> None:
    store = made(dtype="int32")
    with pytest.raises(UsageError, match="optimizer 4 is not defined"):
        store.check_apply_rows(OPTIMIZER, KEY)
    store.define_optimizer(OPTIMIZER, SGD(0.5).to_config())
    with pytest.raises(ValueMismatchError, match=r"only floating-point variables"):
        store.check_apply_rows(OPTIMIZER, KEY)
    with pytest.raises(UnknownVariableError):
        store.check_apply_rows(OPTIMIZER, (9, 9))


def test_no_such_scatter_operation() -> None:
    with pytest.raises(UsageError, match=f'"w/part_0" on {TASK}: unknown operation'):
        made().check_scatter(KEY, "xor")


def test_a_whole_shard_of_blocks_that_must_move_first_is_what_few_rows_cost() -> None:
    store = made((1 << 16, 64))
    assert store.rows_cost(KEY, rows_of(1, 2)) == 2 * (256 + 64)
    for _ in store.assign(KEY, "assign", np.ones((1 << 16, 64), np.float32)):
        pass
    assert store.rows_cost(KEY, rows_of(1)) == 256 + 64 + 16 * BLOCK_BYTES
    assert store.rows_cost(KEY, range(0, 10, 2)) == 5 * (256 + 64) + 16 * BLOCK_BYTES
    assert store.rows_cost(KEY, rows_of()) == 0


def test_it_knows_its_task() -> None:
    assert made().task == TASK


@pytest.mark.parametrize("rows", [(19, 0, 19), (3,), ()])
def test_rows_to_read_come_in_any_order_and_as_often_as_one_likes(rows: tuple[int, ...]) -> None:
    made().check_row_numbers(KEY, rows_of(*rows))


@pytest.mark.parametrize(("rows", "wrong"), [((3, -1, 2), "row -1"), ((20, 3), "row 20")])
def test_rows_to_read_that_do_not_exist_are_named(rows: tuple[int, ...], wrong: str) -> None:
    with pytest.raises(ValueMismatchError, match=f"{wrong} of the shard does not exist, it has 20"):
        made().check_row_numbers(KEY, rows_of(*rows))
