"""Tensors of torch as arrays, and back: one memory, every dtype, no numpy of its own needed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from psync.client.tensors import array_of, is_tensor, tensor_of


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def test_a_parameter_and_its_array_share_memory(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    assert is_tensor(parameter)
    array_of(parameter)[1, 2] = 7
    assert parameter[1, 2].item() == 7


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16", "int64", "bool"])
def test_there_and_back(torch: Any, name: str) -> None:
    array = np.array([[1, 0, 1], [0, 1, 0]]).astype(
        ml_dtypes.bfloat16 if name == "bfloat16" else name
    )
    tensor = tensor_of(torch, array)
    assert tensor.dtype == getattr(torch, name)
    again = array_of(tensor)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)
    assert np.shares_memory(again, array)


def test_strides_stay(torch: Any) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    array = array_of(tensor)
    assert array.shape == (3, 2)
    np.testing.assert_array_equal(array.astype(np.float32), [[0, 3], [1, 4], [2, 5]])


def test_read_only_and_reversed_arrays_become_tensors_without_a_warning(torch: Any) -> None:
    array = np.arange(3.0)
    array.setflags(write=False)
    assert tensor_of(torch, array).tolist() == [0, 1, 2]
    assert tensor_of(torch, array[::-1]).tolist() == [2, 1, 0]


def test_memory_that_only_another_process_may_write_is_copied() -> None:
    class Torch:
        from_numpy = staticmethod(lambda array: array)

    lent = np.frombuffer(memoryview(np.arange(3.0)).toreadonly()).reshape(3, 1)[::1]
    made = tensor_of(Torch, lent)
    made += 1  # and does not end the process
    assert made.tolist() == [[1], [2], [3]]
    assert lent.tolist() == [[0], [1], [2]]


def test_a_dtype_that_numpy_lacks_is_an_error(torch: Any) -> None:
    with pytest.raises(TypeError):
        array_of(torch.ones(2).to(torch.float8_e4m3fn))
