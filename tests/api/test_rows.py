"""Rows of variables: indexed, gathered and scattered, over ps tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, declare, in_step, strategy_of, training, training_of
from memory_cluster import coordinating
from psync.errors import (
    IndexTypeError,
    IndexValueError,
    UsageError,
    ValueMismatchError,
    VariableIndexError,
)
from psync.wire.limits import Limits

VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)


shards = psync.FixedShardsPartitioner


def made(num_shards: int = 3, value: Any = VALUE, name: str = "v") -> Any:
    with strategy_of(3, shards(num_shards)).scope():
        return psync.Variable(value, name=name)


# --- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
async def test_an_index_gives_what_numpy_gives(num_shards: int) -> None:
    mask = VALUE[:, 0] % 4 == 0
    async with training_of(3, 1, shards(num_shards), v=VALUE) as (_, v):
        for index in (
            3, -1, np.int64(7), slice(2, 7), slice(None, None, -3), slice(5, 5), ..., None, mask,
            [3, 3, 9], [[1, 2], [9, 0]], (slice(None), 1), (..., 0), (2, 1), VALUE > 7, [],
            ([4, 9], [0, 1]), (mask, 1), slice(4, None, 2**63), slice(8, None, -(10**30)),
        ):  # fmt: skip
            got = await v[index]
            expected = VALUE[index]
            assert type(got) is type(expected)
            np.testing.assert_array_equal(got, expected)
            assert got.shape == expected.shape
        rows = await v.sparse_read([9, 0, 4, 4, 3])  # in the order of the request
        np.testing.assert_array_equal(rows, VALUE[[9, 0, 4, 4, 3]])
        assert (await v.sparse_read([])).shape == (0, 2)


async def test_what_is_awaited_twice_is_read_twice() -> None:
    async with training_of(v=VALUE, scalar=7.0) as (_, v, scalar):
        row, number = v[1], scalar[()]  # a scalar can be indexed, too
        first = await row
        assert await number == 7
        await v.assign(VALUE + 1)
        np.testing.assert_array_equal(await row, first + 1)
        await scalar.assign(8)
        assert await number == 8
        assert (await scalar[None]).tolist() == [8]


async def test_gather_nd_takes_rows_or_elements() -> None:
    async with training_of(3, 1, shards(3), v=VALUE) as (_, v):
        np.testing.assert_array_equal(await v.gather_nd([[9], [0]]), VALUE[[9, 0]])
        np.testing.assert_array_equal(await v.gather_nd([[9, 1], [0, 0]]), [19, 0])
        np.testing.assert_array_equal(await v.gather_nd([3]), VALUE[3])


@pytest.mark.parametrize(
    ("indices", "kind", "text"),
    [
        ([[9, 2]], VariableIndexError, 'gather_nd of "v", axis 1: index 2 is out'),
        (3, IndexValueError, "with k from 1 to 2"),
        (np.zeros((2, 3), int), IndexValueError, "with k from 1 to 2"),
        (np.zeros((2, 0), int), IndexValueError, "with k from 1 to 2"),
        ([[1], [1, 0]], IndexValueError, 'gather_nd of "v": the indices are not an array'),
    ],
)
def test_indices_that_gather_nd_cannot_take_are_named(
    indices: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        at_once(made().gather_nd(indices))


@pytest.mark.parametrize("plain", [False, True])
async def test_steps_read_and_scatter_rows(plain: bool) -> None:
    async with training_of(3, 1, shards(3), v=VALUE) as (coordinator, v):

        async def step() -> Any:
            await v.scatter_add(([0, 9], [[1, 1], [2, 2]]))
            return await v[[0, 9]]

        def plain_step() -> Any:
            psync.wait(v.scatter_add(([0, 9], [[1, 1], [2, 2]])))
            return psync.wait(v[[0, 9]])

        rows = await in_step(coordinator, plain_step if plain else step)
        np.testing.assert_array_equal(rows, [[1, 2], [20, 21]])


# --- scattering -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("scatter_update", {1: 30, 8: 20}),
        ("batch_scatter_update", {1: 30, 8: 20}),
        ("scatter_add", {1: 2 + 10 + 30, 8: 16 + 20}),
        ("scatter_sub", {1: 2 - 40, 8: 16 - 20}),
        ("scatter_mul", {1: 2 * 300, 8: 16 * 20}),
        ("scatter_div", {1: 2 / 300, 8: 16 / 20}),
        ("scatter_min", {1: 2, 8: 16}),
        ("scatter_max", {1: 30, 8: 20}),
    ],
)
@pytest.mark.parametrize("num_shards", [1, 3])
async def test_scattering_changes_the_rows_that_are_named(
    method: str, expected: dict[int, float], num_shards: int
) -> None:
    async with training_of(3, 1, shards(num_shards), v=VALUE[:, :1]) as (_, v):
        result = await getattr(v, method)(
            psync.IndexedSlices(np.array([[10], [20], [30]], np.float32), [1, 8, 1])
        )
        assert result is v
        value = VALUE[:, :1].copy()
        for row, number in expected.items():
            value[row] = number
        np.testing.assert_allclose(await v.read(), value, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("uint8", 200), ("int8", -1), ("int64", np.int8(1)), ("float16", 1), ("bfloat16", 0.5),
        ("float64", np.float32(0.5)), ("bool", True), ("float32", 7),
    ],
)  # fmt: skip
async def test_a_pair_with_one_number_for_all_is_cast_like_a_list_of_numbers(
    dtype: str, number: Any
) -> None:
    async with training(3, partitioner=shards(3)) as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros((3, 2)), dtype=dtype)
        await v.scatter_update(([0, 2], number))
        expected = [[number] * 2, [0] * 2, [number] * 2]
        assert (await v.read()).tolist() == expected
        await v.scatter_update(([], np.zeros((0, 2), v.dtype)))
        assert (await v.read()).tolist() == expected


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        (10, VariableIndexError),
        (slice(None, None, 0), IndexValueError),
        (1.5, IndexTypeError),
        ((0, 0, 0), VariableIndexError),
    ],
)
def test_an_index_that_is_none_is_an_error_at_once(index: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match='"v"'):
        made()[index]


def test_a_variable_or_a_part_of_one_cannot_be_an_index() -> None:
    v, other = made(), made(1, 3, "i")
    for index in (other, v[2:], slice(other, None), [0, other]):
        with pytest.raises(IndexTypeError, match="is not allowed, because its value is remote"):
            v[index]


def test_items_cannot_be_assigned() -> None:
    with pytest.raises(UsageError) as caught:
        made()[2:7] = 0
    assert "await v.scatter_update((rows, values))" in str(caught.value)


def test_a_variable_has_a_length_and_cannot_be_iterated() -> None:
    v = made()
    assert len(v) == 10
    with pytest.raises(TypeError, match=r"len\(\) of variable \"s\""):
        len(made(1, 0.0, "s"))
    for use in (lambda: list(v), lambda: 3 in v, lambda: v * 2, lambda: v < 1, lambda: float(v)):
        with pytest.raises(UsageError, match='variable "v" is not an array'):
            use()
    with pytest.raises(UsageError, match='part of variable "v" is not an array') as caught:
        v[2:7] + 1
    assert "`part = await v[…]`" in str(caught.value)
    assert repr(v[2:7]) == '<part of "v", to be awaited>'


@pytest.mark.parametrize(
    ("delta", "kind", "text"),
    [
        (([[0]], [[[1, 1]]]), IndexValueError, r"expected indices of shape \(n,\), got \(1, 1\)"),
        (([0, 10], np.zeros((2, 2))), VariableIndexError, "index 10 is out of bounds"),
        (([-1], np.zeros((1, 2))), VariableIndexError, "index -1 is out of bounds"),
        (([0.0], np.zeros((1, 2))), IndexTypeError, "expected integers as indices"),
        (([0, 1], np.zeros((1, 2))), ValueMismatchError, r"expected shape \(2, 2\), got \(1, 2\)"),
        (([0], np.zeros((1, 2), complex)), ValueMismatchError, "expected dtype float32"),
        (([0], None), ValueMismatchError, r"expected shape \(1, 2\), got \(\)"),
        (([0], 1j), ValueMismatchError, "expected dtype float32"),
        (([0], "1"), ValueMismatchError, r"expected shape \(1, 2\), got \(\)"),
        (7, ValueMismatchError, r"expected IndexedSlices or a pair \(indices, values\), got int"),
    ],
)
def test_what_cannot_be_scattered_is_named(delta: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        at_once(made().scatter_add(delta))
    assert 'scatter_add to "v"' in str(caught.value)


def test_a_number_that_does_not_fit_is_refused() -> None:
    for dtype, number in ((np.int8, 300), (np.uint8, -1), (np.int64, 0.5), (np.int8, 2**70)):
        with pytest.raises(ValueMismatchError, match='scatter_add to "v": expected'):
            at_once(made(1, np.zeros((3, 2), dtype)).scatter_add(([0], number)))
    with pytest.raises(IndexValueError, match="the variable is a scalar and has no rows"):
        at_once(made(1, 0.0).scatter_add(([0], 1)))


async def test_more_rows_than_a_ps_gathers_at_once_are_an_error_that_says_what_to_do() -> None:
    limits = Limits(gathered_bytes=1 << 10)
    async with coordinating(1, 1, limits) as (_, coordinator):
        v = declare(coordinator.strategy, v=np.zeros((1000, 8), np.float32))
        assert (await v[0:30]).shape == (30, 8)
        with pytest.raises(UsageError, match="at most 1024 are gathered"):
            await v[0:500:2]
