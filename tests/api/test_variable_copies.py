"""Copies of a variable, one for each worker and one for the program: the arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.api.variables import aggregating, repeated, spread
from psync.errors import ReplicaValueError
from psync.numerics.sums import at_once
from psync.specs import VariableAggregation

NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
COPIES = np.array([[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], np.float32)  # 2 workers, the program


def aggregated(copies: np.ndarray, aggregation: VariableAggregation, what: str) -> np.ndarray:
    return at_once(aggregating(copies, aggregation, what))


def test_a_sum_is_that_of_all_copies_and_of_what_the_program_added() -> None:
    assert aggregated(COPIES, SUM, "read").tolist() == [104.0, 108.0]


def test_a_mean_is_that_of_the_workers() -> None:
    assert aggregated(COPIES, MEAN, "read").tolist() == [2.0, 4.0]
    mean = aggregated(np.array([1, 2, 9]), MEAN, "read")
    assert (float(mean), mean.dtype) == (1.5, np.float64)


def test_the_first_replica_is_worker_0() -> None:
    first = aggregated(COPIES, FIRST, "read")
    assert first.tolist() == [1.0, 2.0]
    assert not np.shares_memory(first, COPIES)


def test_without_an_aggregation_the_copies_do_not_become_one() -> None:
    with pytest.raises(ReplicaValueError, match='read of "n": each worker has its own value'):
        aggregated(COPIES, NONE, 'read of "n"')


@pytest.mark.parametrize("aggregation", [NONE, MEAN, FIRST])
def test_a_value_that_is_not_summed_is_that_of_each_copy(aggregation: VariableAggregation) -> None:
    value = np.array([1.0, 2.0], np.float32)
    assert spread(value, 2, aggregation).tolist() == [[1, 2]] * 3


def test_of_a_value_that_is_summed_each_worker_has_its_share() -> None:
    assert spread(np.array([1.0, 3.0], np.float32), 2, SUM).tolist() == [[0.5, 1.5]] * 2 + [[0, 0]]
    assert spread(np.array(6.0), 3, SUM).tolist() == [2, 2, 2, 0]
    assert spread(np.array(6, ml_dtypes.bfloat16), 4, SUM).dtype == ml_dtypes.bfloat16


def test_what_begins_with_a_value_has_it_on_each_worker() -> None:
    assert repeated(np.array(5), 2, SUM).tolist() == [5, 5, 0]
    assert repeated(np.array(5), 2, MEAN).tolist() == [5, 5, 5]


def test_integers_are_shared_out() -> None:
    assert spread(np.array(7), 2, SUM).tolist() == [4, 3, 0]
    assert spread(np.array([-7, 0]), 2, SUM).tolist() == [[-3, 0], [-4, 0], [0, 0]]
    assert spread(np.array(7, np.uint8), 300, SUM).sum() == 7


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(1, 9),
    st.sampled_from([np.int8, np.int64, np.uint8, np.uint64]),
)
def test_no_integer_is_lost(number: int, num_workers: int, dtype: type) -> None:
    value = np.array([number]).astype(dtype)
    copies = spread(value, num_workers, SUM)
    assert copies.dtype == dtype
    assert aggregated(copies, SUM, "read").tolist() == value.tolist()
    assert int(copies[:-1].max()) - int(copies[:-1].min()) <= 1
