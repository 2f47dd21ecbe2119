"""Tensors of torch and arrays of numpy in the same memory.

torch is never imported here: who has a tensor has torch. numpy has no bfloat16 of its own; between
the two these numbers travel as integers, and are those of ``ml_dtypes`` here.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from psync.specs import dtype_of


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch, such as an ``nn.Parameter``."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def array_of(tensor: Any) -> np.ndarray:
    """Return a dense tensor as an array, in the tensor's memory if that is on the CPU.

    Tensors with gradients and tensors on other devices are accepted. The array has the tensor's
    strides.

    Raises:
        TypeError: numpy has no such dtype.
    """
    torch = sys.modules["torch"]
    here = tensor.detach().cpu().resolve_conj().resolve_neg()
    if here.dtype == torch.bfloat16:
        array: np.ndarray = here.view(torch.int16).numpy().view(dtype_of("bfloat16"))
        return array
    return here.numpy()  # type: ignore[no-any-return]


def tensor_of(torch: Any, array: np.ndarray) -> Any:
    """Return a tensor in the array's memory, or in a copy if torch does not support the strides.

    Unlike torch, it does not warn about read-only arrays. Tensors that require gradients cannot be
    changed in place, and data arrays belong to the caller. Memory that this process cannot write,
    such as a ps's, is copied, because torch would otherwise end the process by a signal.
    """
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(_shared(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(_shared(array))


class _Writable:
    """The memory of an array, whether it is read-only or not."""

    def __init__(self, array: np.ndarray) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self.array = array  # owns it


def _shared(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        return array
    return array.copy() if _is_foreign(array) else np.asarray(_Writable(array))


def _is_foreign(array: np.ndarray) -> bool:
    """Whether it lies in memory that was given to be read only."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, memoryview) and owner.readonly
