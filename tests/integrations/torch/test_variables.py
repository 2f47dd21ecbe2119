"""Variables of psync that begin with what torch and jax have."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import strategy_of, training
from psync.errors import PartitionError

torch = pytest.importorskip("torch", reason="torch is not installed")


async def test_a_parameter_is_an_initial_value() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(parameter, name="w")
            half = psync.Variable(parameter.detach().bfloat16(), name="half")
        with torch.no_grad():
            parameter.zero_()  # the variable has a copy
        np.testing.assert_array_equal(await w.read(), [[0, 3], [1, 4], [2, 5]])
        assert half.dtype.name == "bfloat16"
        np.testing.assert_array_equal(await half.read(), await w.read())


def test_what_numpy_cannot_hold_is_refused() -> None:
    with strategy_of().scope():
        with pytest.raises(PartitionError, match=r"the value is not an array: .* Float8"):
            psync.Variable(torch.ones(2).to(torch.float8_e4m3fn))
        with pytest.raises(PartitionError, match="dtype 'complex64' is not supported"):
            psync.Variable(torch.ones(2, dtype=torch.complex64))
