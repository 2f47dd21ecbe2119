"""Values of replicas: put together, taken apart, reduced and gathered."""

import collections
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from psync.errors import ReplicaValueError, UsageError
from psync.numerics.replicas import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    gather_distributed,
    gather_values,
    local_results,
    reduce_distributed,
    reducing_values,
    regroup,
    select,
)
from psync.numerics.sums import at_once

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
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


@pytest.mark.parametrize("value", [PerReplica([1, 2]), Mirrored([3], "v")])
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


def test_equal_numbers_are_no_object_that_replicas_share() -> None:
    assert values_of(regroup([5, 5])) == (5, 5)
    assert values_of(regroup([True, True])) == (True, True)


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


@pytest.mark.parametrize(
    ("values", "said"),
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


@pytest.mark.parametrize("fn", [regroup, lambda none: at_once(reducing_values(SUM, none))])
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
    assert reduce_distributed(SUM, value, 2) == {"loss": 3.0, "zero": 0, "nested": [4]}
    assert reduce_distributed(MEAN, value, 2) == {"loss": 1.5, "zero": 0, "nested": [2.0]}


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0)])
def test_zero_is_zero(op: ReduceOp, zero: float) -> None:
    assert reduce_distributed(op, zero, 2) == 0


def test_the_mean_of_an_ordinary_value_is_itself() -> None:
    assert reduce_distributed(MEAN, ARRAY, 2) is ARRAY
    assert reduce_distributed(MEAN, Mirrored([ARRAY]), 2) is ARRAY
    assert reduce_distributed(MEAN, np.array([1.0, 3.0]), 2, axis=0) == 2.0


@pytest.mark.parametrize("value", [5, ARRAY, Mirrored([1, 1])])
@pytest.mark.parametrize("axis", [None, 0])
def test_the_sum_of_an_ordinary_value_is_refused_if_there_is_more_than_one_replica(
    value: Any, axis: int | None
) -> None:
    with pytest.raises(ReplicaValueError, match="SUM over 2 replicas of a value that is not per"):
        reduce_distributed(SUM, value, 2, axis)


def test_the_only_replica_has_the_sum() -> None:
    assert reduce_distributed(SUM, ARRAY, 1) is ARRAY
    assert reduce_distributed(SUM, ARRAY, 1, axis=0) == 2.0
    assert reduce_distributed(SUM, [None], 2) == [None]


def test_an_axis_counts_in_values_of_replicas() -> None:
    batches = PerReplica([np.ones((4, 1)), np.full((2, 1), 4.0)])
    assert reduce_distributed(MEAN, batches, 2, axis=0).tolist() == [2.0]
    assert reduce_distributed(SUM, batches, 2, axis=[0, 1]) == 12.0
    with pytest.raises(ReplicaValueError, match="axis 0: expected axes of a value of shape"):
        reduce_distributed(SUM, PerReplica([0, 0]), 2, axis=0)


def test_values_are_gathered_wherever_they_stand() -> None:
    value = (PerReplica([[1], [2]]), ARRAY, PerReplica([np.ones(1), np.zeros(2)]))
    with pytest.raises(ReplicaValueError, match="rank 1 or more"):
        gather_distributed(value, 0)  # the first holds numbers, in lists
    assert [part.tolist() for part in gather_distributed(value[1:], 0)] == [[1, 1], [1, 0, 0]]
    assert gather_values([{"x": ARRAY}, {"x": ARRAY}], 0)["x"].shape == (4,)
    assert gather_distributed(Mirrored([ARRAY]), 0).tolist() == [1, 1]
