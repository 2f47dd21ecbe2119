"""Copies of a variable, one for each worker and one for the program: the arithmetic."""

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psync.api.variables import aggregating, spread
from psync.numerics.sums import at_once
from psync.specs import VariableAggregation

SUM = VariableAggregation.SUM


def test_of_a_value_that_is_summed_each_worker_has_its_share() -> None:
    assert spread(np.array([1.0, 3.0], np.float32), 2, SUM).tolist() == [[0.5, 1.5]] * 2 + [[0, 0]]
    assert spread(np.array(6, ml_dtypes.bfloat16), 4, SUM).dtype == ml_dtypes.bfloat16


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(1, 300),
    st.sampled_from([np.int8, np.int64, np.uint8, np.uint64]),
)
def test_no_integer_is_lost(number: int, num_workers: int, dtype: type) -> None:
    value = np.array([number]).astype(dtype)
    copies = spread(value, num_workers, SUM)
    assert copies.dtype == dtype
    assert at_once(aggregating(copies, SUM, "read")).tolist() == value.tolist()
    assert int(copies[:-1].max()) - int(copies[:-1].min()) <= 1
