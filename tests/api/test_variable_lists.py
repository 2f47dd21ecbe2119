"""Which variables are meant; in other processes, with two strategies: test_optimizer_handles.py."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import strategy_of
from psync.api.gradient_arguments import listed
from psync.errors import ValueMismatchError


def test_a_nesting_stays_as_it_is_if_it_has_variables() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
    for tree in ({"v": v, "rate": 0.5}, [{"v": v}], (v, [v])):
        assert listed(tree) is tree
    for empty in ({"rate": 0.5}, [[]], ({},)):
        with pytest.raises(ValueMismatchError, match="var_list: expected variables, got none"):
            listed(empty)
