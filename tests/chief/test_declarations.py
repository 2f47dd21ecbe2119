from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import psync
from psync.chief import declarations
from psync.chief.declarations import (
    Declaration,
    describe,
    initial_shards,
    is_constant,
    split,
    takes_shard,
)
from psync.errors import PartitionError, UsageError
from psync.partitioners import FixedShardsPartitioner
from psync.specs import VariableSpec

WHERE = "train.py:12"
SUBJECT = f'variable "w" declared at {WHERE}'


def declared(value: Any, dtype: object = None, shape: tuple[int, ...] | None = None) -> Any:
    array, got_shape, got_dtype = describe(value, "w", dtype, shape, WHERE)
    return array, got_shape, got_dtype


def whole(shape: tuple[int, ...], dtype: str = "float32") -> VariableSpec:
    return VariableSpec("w", 7, shape, dtype, False, (), WHERE)


def declaration(
    value: Any, shape: tuple[int, ...], shards: int = 3, dtype: str = "float32"
) -> Declaration:
    spec = split(whole(shape, dtype), FixedShardsPartitioner(shards), lambda nbytes: 0)
    return Declaration(spec, value)


def made(value: Any, shape: tuple[int, ...], shards: int = 3) -> list[np.ndarray]:
    return [array for _, array in initial_shards(declaration(value, shape, shards))]


class TestDtypes:
    @pytest.mark.parametrize(
        ("value", "dtype"),
        [
            (0.5, "float32"),
            ([0.5, 1], "float32"),
            (3, "int64"),
            ([[1, 2]], "int64"),
            (True, "bool"),
            (np.float64(0.5), "float64"),
            (np.ones(2), "float64"),
            (np.ones(2, np.float16), "float16"),
            (np.ones(2, ">f4"), "float32"),
            (np.ones(2, ml_dtypes.bfloat16), "bfloat16"),
            (np.ones(2, np.uint8), "uint8"),
        ],
    )
    def test_what_a_value_becomes_by_itself(self, value: Any, dtype: str) -> None:
        array, shape, name = declared(value)
        assert (name, shape) == (dtype, np.shape(value))
        assert np.array_equal(array, np.asarray(value))
        assert array.dtype.isnative

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [(3, "float16"), (0.1, np.float64), ([1, 0], bool), ([1, 2], np.uint8), (2.0, int),
         (np.ones(2), ml_dtypes.bfloat16)],
    )  # fmt: skip
    def test_what_it_is_converted_to(self, value: Any, dtype: object) -> None:
        array, _, name = declared(value, dtype)
        assert name == array.dtype.name == np.dtype(dtype).name  # type: ignore[call-overload]

    @pytest.mark.parametrize(
        ("value", "dtype", "came"),
        [(0.5, "int64", "float64"), ([300], "uint8", "int64"), (np.nan, "int32", "float64"),
         ([2], "bool", "int64"), (np.full(2, 1e30), "int64", "float64")],
    )  # fmt: skip
    def test_an_integer_that_would_be_another_number_is_an_error(
        self, value: Any, dtype: str, came: str
    ) -> None:
        with pytest.raises(PartitionError) as caught:
            declared(value, dtype)
        assert str(caught.value) == (
            f"{SUBJECT}: {came} values would change when converted to {dtype}\nhint: round them, "
            "or use another dtype"
        )

    @pytest.mark.parametrize(
        ("value", "dtype", "came"),
        [
            (1e300, None, "1e+300"),
            ([0.5, -1e300], np.float32, "-1e+300"),
            (np.array([0, 1e300]), "bfloat16", "1e+300"),
            (70000, "float16", "70000"),
            ([1, 10**39], "float32", "1" + 39 * "0"),
            (np.broadcast_to(1e300, (5, 2)), "float32", "1e+300"),
            (lambda: [1e300], None, "1e+300"),
        ],
    )
    def test_a_number_that_would_become_infinite_is_an_error(
        self, value: Any, dtype: object, came: str
    ) -> None:
        with pytest.raises(PartitionError) as caught:
            declared(value, dtype)
        name = np.dtype(dtype or np.float32).name  # type: ignore[call-overload]
        assert caught.value.message == (
            f"{SUBJECT}: expected values in the range of {name}, got {came}"
        )

    @pytest.mark.parametrize(
        ("value", "dtype", "text"),
        [
            (1j, "float32", "expected float32, got complex128"),
            (1j, None, "dtype 'complex128' is not supported"),
            ("abc", None, "dtype 'str96' is not supported"),
            (2**70, None, "dtype 'object' is not supported"),
            (1.0, "flaot", "expected a dtype, got 'flaot'"),
            (1.0, "complex64", "dtype 'complex64' is not supported"),
            ([[1], [1, 2]], None, "the value is not an array: "),
            ("abc", "float32", "cannot be converted to float32: could not convert string"),
            (None, None, "initial_value is None"),
        ],
    )
    def test_what_is_no_value_is_an_error_that_names_the_line(
        self, value: Any, dtype: str | None, text: str
    ) -> None:
        with pytest.raises(PartitionError) as caught:
            declared(value, dtype)
        assert caught.value.message.startswith(f"{SUBJECT}: {text}")

    def test_the_value_is_a_copy_in_c_order(self) -> None:
        value = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        array, _, _ = declared(value)
        value[:] = 0
        assert array.flags.c_contiguous
        assert array.ravel().tolist() == [0, 1, 2, 3, 4, 5]


class TestShapes:
    def test_given_and_found_must_agree(self) -> None:
        assert declared(np.ones((2, 3)), shape=(2, 3))[1] == (2, 3)
        with pytest.raises(PartitionError) as caught:
            declared(np.ones((2, 3)), shape=(3, 2))
        assert caught.value.message == (
            f"{SUBJECT}: expected shape (3, 2), the initial value has (2, 3)"
        )

    @pytest.mark.parametrize("shape", [(-1,), (2.5,), (None, 3)])
    def test_a_shape_is_made_of_whole_numbers(self, shape: Any) -> None:
        with pytest.raises(PartitionError) as caught:
            declared(lambda: 0, "float32", shape)
        assert caught.value.message == f"{SUBJECT}: expected a shape of integers, got {shape}"


class TestCallables:
    def test_one_whose_shape_and_dtype_are_given_is_not_called(self) -> None:
        def never() -> None:
            raise AssertionError

        assert declared(never, "float32", (2,)) == (never, (2,), "float32")

    @pytest.mark.parametrize(("dtype", "shape"), [(None, None), ("float32", None), (None, (2, 2))])
    def test_else_it_is_called_once_and_its_value_kept(
        self, dtype: str | None, shape: tuple[int, ...] | None
    ) -> None:
        calls = []

        def value() -> np.ndarray:
            calls.append(1)
            return np.ones((2, 2), np.float32)

        array, got_shape, name = declared(value, dtype, shape)
        assert (calls, got_shape, name) == ([1], (2, 2), "float32")
        assert array.all()

    def test_one_that_takes_a_shard_needs_the_shape(self) -> None:
        with pytest.raises(PartitionError) as caught:
            declared(lambda shape, offset: np.zeros(shape), "float32")
        assert str(caught.value) == (
            f"{SUBJECT}: its initial_value takes (shape, offset), but shape is not given\n"
            "hint: Variable(initializer, shape=…, dtype=…)"
        )

    @pytest.mark.parametrize(("dtype", "shape"), [("float32", (2,)), (None, None)])
    def test_one_that_takes_something_else_is_an_error(
        self, dtype: str | None, shape: tuple[int, ...] | None
    ) -> None:
        with pytest.raises(PartitionError) as caught:
            declared(lambda shape: np.zeros(shape), dtype, shape)
        assert caught.value.message == (
            f"{SUBJECT}: expected an initial_value that takes no arguments, or the (shape, offset) "
            "of a shard"
        )

    @pytest.mark.parametrize(
        ("initializer", "by_shard"),
        [
            (lambda: 0, False),
            (lambda shape, offset: 0, True),
            (lambda shape, offset, seed=1: 0, True),
            (lambda shape=(), offset=(): 0, False),
            (lambda *args: 0, False),
            (functools.partial(np.zeros, (2, 2)), False),
            (functools.partial(np.full, (2, 2), 1.0), False),
            (dict.fromkeys, True),
            (np.random.default_rng(0).random, False),
            (type("", (), {"__call__": lambda self, shape, offset: 0})(), True),
        ],
    )
    def test_which_take_a_shard(self, initializer: Callable[..., Any], by_shard: bool) -> None:
        assert takes_shard(initializer, SUBJECT) is by_shard


class TestInitialShards:
    def test_arrays_are_cut_without_a_copy(self) -> None:
        value = np.arange(10, dtype=np.float32).reshape(5, 2)
        first, second, third = made(value, (5, 2))
        assert np.shares_memory(first, value)
        assert (first.tolist(), second.tolist()) == ([[0, 1], [2, 3]], [[4, 5], [6, 7]])
        assert third.tolist() == [[8, 9]]

    def test_a_callable_by_shard_gets_shape_and_offset(self) -> None:
        calls = []

        def value(shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
            calls.append((shape, offset))
            return np.full(shape, offset[0] if offset else -1.0)

        shards = made(value, (5, 2))
        assert calls == [((2, 2), (0, 0)), ((2, 2), (2, 0)), ((1, 2), (4, 0))]
        assert [shard.dtype.name for shard in shards] == ["float32"] * 3
        assert [shard[0, 0] for shard in shards] == [0, 2, 4]
        assert made(value, ())[0] == -1
        assert calls[-1] == ((), ())

    def test_a_callable_of_the_whole_is_called_once(self) -> None:
        rng = np.random.default_rng(0)
        shards = made(lambda: rng.random((5, 2)), (5, 2))
        expected = np.random.default_rng(0).random((5, 2)).astype(np.float32)
        assert np.array_equal(np.concatenate(shards), expected)

    def test_a_very_large_whole_is_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(declarations, "WHOLE_VALUE_WARNING_ELEMENTS", 9)
        with caplog.at_level(logging.WARNING):
            made(lambda: np.zeros((5, 2)), (5, 2))
            made(lambda shape, offset: np.zeros(shape), (5, 2))
        assert [record.message for record in caplog.records] == [
            f"{SUBJECT}: its initial_value creates all elements at once, not shard by shard"
        ]

    def test_a_value_that_does_not_fit_names_the_line_and_the_shard(self) -> None:
        with pytest.raises(PartitionError) as caught:
            made(lambda: np.zeros((2, 5)), (5, 2))
        assert caught.value.message == (
            f"{SUBJECT}: expected shape (5, 2), its initial_value returned (2, 5)"
        )
        with pytest.raises(PartitionError) as caught:
            made(lambda shape, offset: np.zeros((2, 2)), (5, 2))
        assert caught.value.message == (
            f'{SUBJECT}, "w/part_2": expected shape (1, 2), its initial_value returned (2, 2)'
        )

    def test_what_a_callable_raises_is_raised_and_names_the_line(self) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            made(lambda: 1 / 0, (5, 2))
        assert caught.value.__notes__ == [f"while making the initial value of {SUBJECT}"]


class TestConstants:
    """An array whose elements are one in memory stays one."""

    @pytest.mark.parametrize(
        ("element", "dtype", "made_dtype"),
        [
            (np.float32(0.1), None, "float32"),
            (np.float64(0.1), "bfloat16", "bfloat16"),
            (np.int64(-1), "int8", "int8"),
            (np.array(1, ">i4"), None, "int32"),
            (np.True_, None, "bool"),
            (0.5, None, "float64"),
        ],
    )
    def test_of_any_dtype(self, element: Any, dtype: object, made_dtype: str) -> None:
        array, shape, name = declared(np.broadcast_to(element, (10**6, 10**4)), dtype)
        assert (shape, name) == ((10**6, 10**4), made_dtype)
        assert is_constant(array)
        assert array[0, 0] == np.asarray(element).astype(array.dtype)
        assert array.dtype.isnative

    def test_shards_of_one_are_constants_also_if_a_callable_makes_it(self) -> None:
        whole = np.broadcast_to(np.float32(2), (7, 3))
        for value in (whole, lambda: whole, lambda shape, offset: np.broadcast_to(2.0, shape)):
            shards = made(value, (7, 3))
            assert [shard.shape for shard in shards] == [(3, 3), (2, 3), (2, 3)]
            assert all(is_constant(shard) for shard in shards)

    @pytest.mark.parametrize(
        "value",
        [np.zeros((3, 3)), np.broadcast_to(np.arange(3), (3, 3)), np.broadcast_to(1.0, (0, 3)),
         np.float32(3), np.ones((1, 1))],
    )  # fmt: skip
    def test_what_has_elements_of_its_own_or_only_one_is_made_as_ever(self, value: Any) -> None:
        array, shape, _ = declared(value)
        assert not is_constant(array)
        assert array.flags.c_contiguous
        assert array.shape == shape


class TestSplit:
    def test_each_shard_takes_a_place_of_its_own(self) -> None:
        sizes: list[int] = []
        spec = split(
            whole((13, 2), "float16"), FixedShardsPartitioner(5),
            lambda nbytes: (sizes.append(nbytes), len(sizes) % 2)[1],
        )  # fmt: skip
        assert [shard.offset for shard in spec.shards] == [0, 3, 6, 9, 11]
        assert [shard.shape for shard in spec.shards] == [(3, 2)] * 3 + [(2, 2)] * 2
        assert sizes == [12, 12, 12, 8, 8]
        assert [shard.ps for shard in spec.shards] == [1, 0, 1, 0, 1]
        assert (spec.variable_id, spec.trainable, spec.declared_at) == (7, False, WHERE)

    @pytest.mark.parametrize("shape", [(), (0, 3)])
    def test_what_has_no_rows_is_not_asked_about(self, shape: tuple[int, ...]) -> None:
        def never(*_: object) -> list[int]:
            raise AssertionError

        spec = split(whole(shape), never, lambda n: 0)
        assert [shard.shape for shard in spec.shards] == [shape]

    def test_a_partitioner_that_answers_nonsense_names_the_line(self) -> None:
        with pytest.raises(PartitionError) as caught:
            split(whole((4, 2)), lambda *_: [2, 2], lambda n: 0)
        assert caught.value.message.endswith(f"got [2, 2]; declared at {WHERE}")
        assert "variable_partitioner" in caught.value.message

    def test_a_shard_that_no_message_can_carry_is_an_error_with_the_remedy(self) -> None:
        with pytest.raises(PartitionError) as caught:
            split(whole((1 << 20, 1 << 10), "float64"), None, lambda n: 0)
        assert str(caught.value) == (
            f"{SUBJECT}: a shard of shape (1048576, 1024) float64 has 8589934592 bytes, expected "
            "at most 1073741824\nhint: split it into more shards: ParameterServerStrategy(…, "
            "variable_partitioner=psync.MaxSizePartitioner(256 << 20))"
        )


@pytest.mark.parametrize(
    ("name", "got"),
    [
        (5, "got int"),
        ("x" * 1025, "got 1025 characters"),
        ("a\udcff", "got half a surrogate pair"),
    ],
)
def test_a_name_that_no_message_can_carry_is_an_error(name: Any, got: str) -> None:
    with pytest.raises(UsageError, match=rf"declared at {WHERE}: expected a name .*{got}") as info:
        describe(1.0, name, None, None, WHERE)
    assert "at most 1024 characters of text" in info.value.message


def test_a_name_beside_another_variable_can_be_sent_too() -> None:
    strategy = psync.ParameterServerStrategy(
        psync.SimpleClusterResolver(psync.ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]}))
    )
    with strategy.scope():
        v = psync.Variable(np.zeros(2, np.float32), name="w" * 1020)
        with pytest.raises(UsageError, match=r"declared at .*: expected a name .*got 1045 ch"):
            psync.ExponentialMovingAverage(0.9).apply([v])
