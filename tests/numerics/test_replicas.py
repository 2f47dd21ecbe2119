"""Values of replicas: reduced, gathered, regrouped, selected."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from loops import for_each
from psync.errors import ReplicaValueError, UsageError, ValueMismatchError
from psync.numerics.replicas import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    as_axes,
    as_reduce_op,
    gather_arrays,
    gather_distributed,
    gather_values,
    local_results,
    reducing_arrays,
    reducing_distributed,
    reducing_values,
    regroup,
    select,
)
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import PIECE_BYTES, at_once


def reduced(*arguments: Any, **options: Any) -> Any:
    return at_once(reducing_distributed(*arguments, **options))


SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
ROWS_4 = np.arange(8, dtype=np.float32).reshape(4, 2)
ROWS_2 = np.full((2, 2), 10, np.float32)


def reduce_arrays(op: ReduceOp, values: Any, axes: Any) -> Any:
    return at_once(reducing_arrays(op, values, axes))


@for_each("op", ["none", 1, None, object()])
def test_what_is_no_reduction_is_refused(op: object) -> None:
    with pytest.raises(ReplicaValueError, match="expected a reduction, SUM or MEAN, got"):
        as_reduce_op(op)


def test_axes_are_whole_numbers() -> None:
    assert as_axes(None) is None
    assert as_axes(-1) == (-1,)
    assert as_axes([0, np.int64(1)]) == (0, 1)
    for axis in (0.5, "0", True, [0, None]):
        with pytest.raises(ReplicaValueError, match="axis: expected a whole number, or a list"):
            as_axes(axis)


def test_arrays_are_added_in_the_order_of_replicas() -> None:
    big, one = np.array([1e8], np.float32), np.array([1], np.float32)
    assert reduce_arrays(SUM, [big, one, -big], None).tolist() == [0.0]
    assert reduce_arrays(SUM, [big, -big, one], None).tolist() == [1.0]


def test_a_sum_has_the_dtype_of_its_terms_and_a_mean_of_integers_is_float64() -> None:
    ints = [np.array([1, 2], np.int32), np.array([2, 2], np.int32)]
    assert reduce_arrays(SUM, ints, None).dtype == np.int32
    mean = reduce_arrays(MEAN, ints, None)
    assert (mean.tolist(), mean.dtype) == ([1.5, 2.0], np.float64)
    single = reduce_arrays(MEAN, [ROWS_2, ROWS_2 + 1], None)
    assert (single.tolist(), single.dtype) == ([[10.5] * 2] * 2, np.float32)


def test_bools_are_counted() -> None:
    flags = [np.array([True, False]), np.array([True, True])]
    assert reduce_arrays(SUM, flags, None).tolist() == [2, 1]
    assert reduce_arrays(MEAN, flags, None).tolist() == [1.0, 0.5]


@for_each("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_summed_in_single_and_rounded_once(dtype: type) -> None:
    big = 2048 if dtype is np.float16 else 256  # from here on one more is no longer seen
    values = [np.array([number], dtype) for number in (big, 1, 1)]
    total = reduce_arrays(SUM, values, None)
    assert (float(total[0]), total.dtype) == (big + 2, np.dtype(dtype))
    assert reduce_arrays(MEAN, values, None).dtype == np.dtype(dtype)


def test_numbers_stay_numbers() -> None:
    assert reduce_arrays(SUM, [1, 2], None) == 3
    assert reduce_arrays(MEAN, [1.0, 2.0], None) == 1.5
    assert np.isinf(reduce_arrays(SUM, [np.float32(3e38)] * 2, None))
    assert reduce_arrays(SUM, [1j, 2j], None) == 3j


def test_what_is_reduced_is_not_changed() -> None:
    values = [ROWS_2.copy(), ROWS_2.copy()]
    reduce_arrays(SUM, values, None)
    assert all(np.array_equal(value, ROWS_2) for value in values)


@for_each("dtype", [np.float16, np.float32, np.int64])
@for_each("op", ReduceOp)
def test_large_arrays_are_reduced_in_pieces_to_the_same(dtype: type, op: ReduceOp) -> None:
    draw = np.random.default_rng(7)
    values = [draw.integers(0, 9, PIECE_BYTES // 4).astype(dtype) for _ in range(3)]
    pieces = reducing_arrays(op, values, None)
    assert sum(1 for _ in pieces) >= 1
    whole = reduce_arrays(op, values, None)
    parts = [reduce_arrays(op, [value[n : n + 999] for value in values], None) for n in (0, 10**5)]
    assert all(whole[n : n + 999].tolist() == part.tolist()
               for n, part in zip((0, 10**5), parts, strict=True))  # fmt: skip
    rows = [value.reshape(-1, 8) for value in values]
    assert sum(1 for _ in reducing_arrays(op, [row.astype(np.float64) for row in rows], (0,))) == 3


def test_a_sum_along_an_axis_is_one_within_each_replica_and_then_across() -> None:
    assert reduce_arrays(SUM, [ROWS_4, ROWS_2], (0,)).tolist() == [32.0, 36.0]
    assert reduce_arrays(SUM, [ROWS_4, ROWS_2], (0, 1)) == 68.0
    assert reduce_arrays(SUM, [ROWS_4, ROWS_4], (-1,)).tolist() == [2.0, 10.0, 18.0, 26.0]


def test_a_mean_along_an_axis_is_that_of_all_elements() -> None:
    mean = reduce_arrays(MEAN, [ROWS_4, ROWS_2], (0,))
    assert mean.tolist() == pytest.approx([32 / 6, 36 / 6])
    assert mean.dtype == np.float32
    assert reduce_arrays(MEAN, [ROWS_4, ROWS_2], (0, 1)) == pytest.approx(68 / 12)
    assert reduce_arrays(MEAN, [np.array([1, 2, 3, 6]), np.array([0, 0])], (0,)) == 2.0


@for_each("axes", [(2,), (-3,), (0, 0), (1, -1)])
def test_an_axis_that_is_not_there_is_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(ReplicaValueError, match=r"of a value of shape \(4, 2\): (axis|duplicate)"):
        reduce_arrays(SUM, [ROWS_4], axes)


def test_shapes_that_differ_are_refused_and_never_broadcast() -> None:
    with pytest.raises(ReplicaValueError, match=r"one shape on all replicas, got \(4, 2\), \(2,"):
        reduce_arrays(SUM, [ROWS_4, ROWS_2], None)
    with pytest.raises(ReplicaValueError, match=r"got \(2,\), \(\)"):
        reduce_arrays(SUM, [ROWS_4, np.zeros(3)], (0,))


@for_each("value", ["text", object(), [[1], [2, 3]], np.datetime64("2000-01-01")])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ReplicaValueError, match="expected numbers or arrays from replicas"):
        reduce_arrays(SUM, [value], None)


# --- rows ----------------------------------------------------------------------------------------


def rows(indices: list[int], value: float = 1.0, **options: object) -> IndexedSlices:
    return IndexedSlices(np.full((len(indices), 2), value, np.float32), indices, **options)


def test_rows_of_all_replicas_are_put_together_and_those_of_one_index_summed() -> None:
    total = reduce_arrays(SUM, [rows([3, 1], dense_shape=(9, 2)), rows([3], 4.0)], None)
    assert isinstance(total, IndexedSlices)
    assert total.indices.tolist() == [1, 3]
    assert total.values.tolist() == [[1, 1], [5, 5]]
    assert total.dense_shape == (9, 2)


def test_a_mean_of_rows_divides_by_the_replicas_also_what_only_one_of_them_has() -> None:
    mean = reduce_arrays(MEAN, [rows([3, 1]), rows([3])], None)
    assert isinstance(mean, IndexedSlices)
    assert mean.values.tolist() == [[0.5, 0.5], [1, 1]]
    assert (mean.values.dtype, mean.dense_shape) == (np.float32, None)


def test_rows_of_another_library_are_rows() -> None:
    class Slices:
        values, indices, dense_shape = np.ones((1, 2), np.float32), np.array([3]), (9, 2)

    total = reduce_arrays(SUM, [Slices(), rows([3])], None)
    assert isinstance(total, IndexedSlices)
    assert (total.indices.tolist(), total.values.tolist()) == ([3], [[2, 2]])


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ReplicaValueError, match="IndexedSlices on some replicas"):
        reduce_arrays(SUM, [rows([1]), ROWS_2], None)
    with pytest.raises(ReplicaValueError, match="along an axis is not possible"):
        reduce_arrays(SUM, [rows([1])], (0,))
    with pytest.raises(ReplicaValueError, match=r"one shape on all replicas, got \(2,\), \(3,\)"):
        reduce_arrays(SUM, [rows([1]), IndexedSlices(np.zeros((1, 3)), [1])], None)
    with pytest.raises(ReplicaValueError, match="expected one dense_shape, got"):
        reduce_arrays(SUM, [rows([1], dense_shape=(n, 2)) for n in (8, 9)], None)
    with pytest.raises(ValueMismatchError, match="only floating-point"):
        reduce_arrays(SUM, [IndexedSlices(np.ones((1, 2), np.int64), [1])] * 2, None)


# --- gather --------------------------------------------------------------------------------------


def test_what_is_gathered_stands_one_after_the_other_along_the_axis() -> None:
    assert gather_arrays([ROWS_4, ROWS_2], 0).tolist() == [*ROWS_4.tolist(), *ROWS_2.tolist()]
    assert gather_arrays([ROWS_2, np.zeros((2, 1))], -1).tolist() == [[10, 10, 0]] * 2


def test_what_cannot_be_gathered_is_refused() -> None:
    with pytest.raises(
        ReplicaValueError, match=r"axis 1 of values of shape \(4, 2\), \(2, 2\): .* must match"
    ):
        gather_arrays([ROWS_4, ROWS_2], 1)
    with pytest.raises(ReplicaValueError, match="zero-dimensional arrays cannot be concatenated"):
        gather_arrays([1, 2], 0)
    with pytest.raises(ReplicaValueError, match="expected one axis"):
        gather_arrays([ROWS_2], [0, 1])
    with pytest.raises(ReplicaValueError, match="expected one axis"):
        gather_arrays([ROWS_2], None)
    with pytest.raises(
        ReplicaValueError, match=r"values of shape \(2, 2\): axis 2 is out of bounds"
    ):
        gather_arrays([ROWS_2], 2)
    with pytest.raises(ReplicaValueError, match="gather of IndexedSlices is not possible"):
        gather_arrays([rows([1])], 0)


ARRAY = np.ones(2)


class Pair(NamedTuple):
    left: Any
    right: Any


def values_of(value: Any) -> Sequence[Any]:
    assert type(value) is PerReplica
    return value.values


# --- the values ----------------------------------------------------------------------------------


def test_a_value_for_each_replica_is_found_by_its_id() -> None:
    value = PerReplica(["a", "b"])
    assert (value[0], value[1], value.values, list(value), len(value)) == (
        "a", "b", ("a", "b"), ["a", "b"], 2,
    )  # fmt: skip
    assert repr(value) == "PerReplica(0: 'a', 1: 'b')"
    for replica_id in (2, -1):
        with pytest.raises(ReplicaValueError, match=f"replica {replica_id}: only values of 2"):
            value[replica_id]


def test_there_is_one_value_at_least() -> None:
    with pytest.raises(
        ReplicaValueError, match="PerReplica: expected at least one value, got none"
    ):
        PerReplica([])


def test_values_of_replicas_are_no_array_before_they_are_reduced() -> None:
    with pytest.raises(UsageError, match=r"it holds the values of 2 replicas\nhint: reduce it"):
        np.asarray(PerReplica([1, 2]))


def test_a_mirrored_value_is_an_array() -> None:
    value = Mirrored([ARRAY], destination="v")
    assert np.asarray(value).tolist() == [1, 1]
    assert np.asarray(value, np.float32).dtype == np.float32
    assert (value.value is ARRAY, value.destination) == (True, "v")


@for_each("value", [PerReplica([1, 2]), Mirrored([3], "v")])
def test_they_travel(value: DistributedValues) -> None:
    copy = pickle.loads(pickle.dumps(value))
    assert (type(copy), repr(copy)) == (type(value), repr(value))
    assert getattr(copy, "destination", None) == getattr(value, "destination", None)


# --- structures ----------------------------------------------------------------------------------


def test_the_same_object_from_every_replica_is_that_object() -> None:
    variable = object()
    grouped = regroup([(variable, "a", None), (variable, "b", None)])
    assert grouped[0] is variable
    assert values_of(grouped[1]) == ("a", "b")
    assert grouped[2] is None


def test_equal_numbers_and_texts_are_of_each_replica() -> None:
    grouped = regroup([(7, "x", b""), (7, "x", b"")])  # each is one object in this process
    assert [values_of(each) for each in grouped] == [(7, 7), ("x", "x"), (b"", b"")]


def test_what_every_replica_says_is_the_same_stays_so() -> None:
    grouped = regroup([Mirrored([1.0], "v"), Mirrored([1.0], "v")])
    assert (type(grouped), grouped.values, grouped.destination) == (Mirrored, (1.0, 1.0), "v")
    assert values_of(regroup([Mirrored([1.0]), 1.0]))[1] == 1.0


def test_what_one_replica_returned_is_returned() -> None:
    result = {"loss": ARRAY}
    assert regroup([result]) is result


def test_containers_are_regrouped_item_by_item_and_keep_their_type() -> None:
    def of(replica: str) -> Any:
        counts = collections.defaultdict(int, n=replica)
        return ["a" + replica, {"b": Pair("c" + replica, counts)}, ()]

    first, second, third = regroup([of("0"), of("1")])
    assert values_of(first) == ("a0", "a1")
    assert type(second["b"]) is Pair
    assert values_of(second["b"].left) == ("c0", "c1")
    assert type(second["b"].right) is collections.defaultdict
    assert values_of(second["b"].right["n"]) == ("0", "1")
    assert third == ()


@for_each(
    "values, said",
    [
        ([[1], [1, 2]], "list of 1; list of 2"),
        ([[1], (1,)], "list of 1; tuple of 1"),
        ([{"a": 1}, {"b": 1}], "dict with keys .'a'.; dict with keys .'b'."),
        ([1, [1]], "int; list of 1"),
        ([[1], None], "list of 1; NoneType"),
    ],
)
def test_replicas_that_return_other_containers_are_told_so(values: Any, said: str) -> None:
    with pytest.raises(ReplicaValueError, match=f"do not agree on a structure: {said}"):
        regroup(values)


@for_each("fn", [regroup, lambda none: at_once(reducing_values(SUM, none))])
def test_no_replica_is_no_value(fn: Any) -> None:
    with pytest.raises(ReplicaValueError, match="expected a value for each replica, got none"):
        fn([])


def test_each_replica_gets_its_own_back() -> None:
    structure = {"x": PerReplica([1, 2]), "y": [Mirrored([3, 3]), Mirrored([4])], "z": "all"}
    assert select(0, structure) == {"x": 1, "y": [3, 4], "z": "all"}
    assert select(1, structure) == {"x": 2, "y": [3, 4], "z": "all"}
    with pytest.raises(ReplicaValueError, match="replica 2: only values of 2 replicas"):
        select(2, structure)


def test_select_undoes_regroup() -> None:
    returned = [{"a": [n, (n + 1,)], "b": ARRAY} for n in range(3)]
    grouped = regroup(returned)
    assert [select(n, grouped) for n in range(3)] == returned
    assert list(local_results(grouped)) == returned


def test_local_results_are_those_of_each_replica() -> None:
    assert local_results(PerReplica([1, 2])) == (1, 2)
    assert local_results(Mirrored([3, 3])) == (3, 3)
    assert local_results({"x": PerReplica([1, 2]), "y": 0}) == ({"x": 1, "y": 0}, {"x": 2, "y": 0})
    assert local_results([5]) == ([5],)
    with pytest.raises(ReplicaValueError, match="of 2 and of 3 replicas in one structure"):
        local_results([PerReplica([1, 2]), PerReplica([1, 2, 3])])


# --- reductions ----------------------------------------------------------------------------------


def test_structures_are_reduced_item_by_item() -> None:
    gradients = [[np.full(2, n, np.float32), None] for n in (1, 2)]
    total, missing = at_once(reducing_values("sum", gradients))
    assert (total.tolist(), missing) == ([3, 3], None)
    with pytest.raises(ReplicaValueError, match="expected numbers or arrays"):
        at_once(reducing_values(SUM, [ARRAY, None]))


def test_values_of_replicas_are_reduced_wherever_they_stand() -> None:
    value = {"loss": PerReplica([1.0, 2.0]), "zero": 0, "nested": PerReplica([[1], [3]])}
    assert reduced(SUM, value, 2) == {
        "loss": 3.0,
        "zero": 0,
        "nested": [4],
    }
    assert reduced(MEAN, value, 2) == {
        "loss": 1.5,
        "zero": 0,
        "nested": [2.0],
    }


def test_the_mean_of_an_ordinary_value_is_itself() -> None:
    assert reduced(MEAN, ARRAY, 2) is ARRAY
    assert reduced(MEAN, Mirrored([ARRAY]), 2) is ARRAY
    assert reduced(MEAN, np.array([1.0, 3.0]), 2, axis=0) == 2.0


@for_each("value", [5, ARRAY, Mirrored([1, 1])])
@for_each("axis", [None, 0])
def test_the_sum_of_an_ordinary_value_is_refused_if_there_is_more_than_one_replica(
    value: Any, axis: int | None
) -> None:
    with pytest.raises(ReplicaValueError, match="SUM over 2 replicas of a value that is not per"):
        reduced(SUM, value, 2, axis)


def test_the_only_replica_has_the_sum() -> None:
    assert reduced(SUM, ARRAY, 1) is ARRAY
    assert reduced(SUM, ARRAY, 1, axis=0) == 2.0
    assert reduced(SUM, [None], 2) == [None]


def test_an_axis_counts_in_values_of_replicas() -> None:
    batches = PerReplica([np.ones((4, 1)), np.full((2, 1), 4.0)])
    assert reduced(MEAN, batches, 2, axis=0).tolist() == [2.0]
    assert reduced(SUM, batches, 2, axis=[0, 1]) == 12.0
    with pytest.raises(ReplicaValueError, match="axis 0 is out of bounds for array of dimension 0"):
        reduced(SUM, PerReplica([0, 0]), 2, axis=0)


def test_values_are_gathered_wherever_they_stand() -> None:
    value = (PerReplica([[1], [2]]), ARRAY, PerReplica([np.ones(1), np.zeros(2)]))
    with pytest.raises(ReplicaValueError, match="zero-dimensional arrays cannot be concatenated"):
        gather_distributed(value, 0)  # the first holds numbers, in lists
    assert [part.tolist() for part in gather_distributed(value[1:], 0)] == [[1, 1], [1, 0, 0]]
    assert gather_values([{"x": ARRAY}, {"x": ARRAY}], 0)["x"].shape == (4,)
    assert gather_distributed(Mirrored([ARRAY]), 0).tolist() == [1, 1]
