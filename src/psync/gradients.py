"""Gradients from torch and jax, in the form that ``compute_gradients`` and ``minimize`` take.

Layer: L4. Imports: errors, indexed_slices.

Both libraries are imported when a gradient is first computed, by the task that computes it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from psync.errors import ConfigurationError, GradientError
from psync.indexed_slices import IndexedSlices

Loss = Callable[..., Any]


def from_torch(loss_fn: Loss) -> GradientFunction:
    """Return a function that computes a loss and its gradients with torch, on the CPU.

    Args:
        loss_fn: Called with a tensor for each variable, then the data; returns a scalar tensor.

    Returns:
        What ``minimize`` takes; see ``GradientFunction``. The tensors share memory with the values
        that were pulled, and torch refuses to change them in place. A gradient is None where the
        loss does not depend on a variable or a variable is not floating, and IndexedSlices where
        torch makes a sparse one, as ``torch.nn.functional.embedding(…, sparse=True)`` does.

    Raises:
        ConfigurationError: When it is called: torch is not installed.

    Example:
        def loss(w, b, x, y):
            return torch.nn.functional.cross_entropy(x @ w + b, y)

        value_and_grad = psync.gradients.from_torch(loss)

        async def step(batches):
            return await optimizer.minimize(value_and_grad.on(*next(batches)), (w, b))
    """
    return _TorchGradients(loss_fn)


def from_jax(loss_fn: Loss, *, jit: bool = True) -> GradientFunction:
    """Return a function that computes a loss and its gradients with jax.

    Make it once, outside of the step: what is compiled is kept with it.

    Args:
        loss_fn: Called with an array for each variable, then the data; returns a scalar.
        jit: Compile it, anew for other shapes.

    Returns:
        What ``minimize`` takes; see ``GradientFunction``. A gradient is None where a variable is
        not floating. Unless jax was told to ``jax_enable_x64``, float64 variables are computed in
        float32.

    Raises:
        ConfigurationError: When it is called: jax is not installed.

    Example:
        def loss(w, b, x, y):
            return jnp.mean((x @ w + b - y) ** 2)

        value_and_grad = psync.gradients.from_jax(loss)

        async def step(batches):
            return await optimizer.minimize(value_and_grad.on(*next(batches)), (w, b))
    """
    return _JaxGradients(loss_fn, jit)


class GradientFunction(ABC):
    """Computes a loss and its gradients: ``loss, grads = function(*values)``.

    Values and gradients are numpy arrays, one for each variable, the loss is a float. Values are
    not changed and, where their memory allows it, not copied. It may be captured by a step.

    Args:
        loss_fn: Called with the values, then the data, as the library's arrays.
    """

    def __init__(self, loss_fn: Loss) -> None:
        if not callable(loss_fn):
            raise ConfigurationError(f"expected a loss function, got {type(loss_fn).__name__}")
        self._loss_fn = loss_fn

    def __repr__(self) -> str:
        name = getattr(self._loss_fn, "__qualname__", self._loss_fn)
        return f"<gradients of {name}>"

    def on(self, *data: Any) -> Callable[..., tuple[float, list[Any]]]:
        """Return the function of the values alone, with the data that the loss gets besides.

        Args:
            data: Arrays of numpy become those of the library; all else is passed as it is.
        """
        return lambda *values: self._compute(values, data)

    def __call__(self, *values: np.ndarray) -> tuple[float, list[Any]]:
        """Return the loss and the gradients, in the order of the values."""
        return self._compute(values, ())

    @abstractmethod
    def _compute(
        self, values: Sequence[np.ndarray], data: Sequence[Any]
    ) -> tuple[float, list[Any]]: ...


class _TorchGradients(GradientFunction):
    def __reduce__(self) -> tuple[Any, ...]:
        return from_torch, (self._loss_fn,)

    def _compute(
        self, values: Sequence[np.ndarray], data: Sequence[Any]
    ) -> tuple[float, list[Any]]:
        torch = _library("torch")
        tensors = [_tensor(torch, np.asarray(value)) for value in values]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        for tensor in floating:
            tensor.requires_grad_(True)
        rest = [_tensor(torch, each) if isinstance(each, np.ndarray) else each for each in data]
        loss = self._loss_fn(*tensors, *rest)
        _check_scalar(loss, self)
        grads = iter(torch.autograd.grad(loss, floating, allow_unused=True))
        return loss.item(), [
            _from_tensor(torch, next(grads), value) if tensor.is_floating_point() else None
            for tensor, value in zip(tensors, values, strict=True)
        ]


class _JaxGradients(GradientFunction):
    def __init__(self, loss_fn: Loss, jit: bool) -> None:
        super().__init__(loss_fn)
        self._jit = jit
        self._made: dict[tuple[int, ...], Callable[..., Any]] = {}  # by positions of what varies

    def __reduce__(self) -> tuple[Any, ...]:
        return _JaxGradients, (self._loss_fn, self._jit)

    def _compute(
        self, values: Sequence[np.ndarray], data: Sequence[Any]
    ) -> tuple[float, list[Any]]:
        jax = _library("jax")
        arrays = [np.asarray(value) for value in values]
        floating = [jax.numpy.issubdtype(array.dtype, jax.numpy.floating) for array in arrays]
        varies = tuple(i for i, yes in enumerate(floating) if yes)
        made = self._made.get(varies)
        if made is None:
            made = jax.value_and_grad(self._loss_fn, varies)
            made = self._made[varies] = jax.jit(made) if self._jit else made
        loss, computed = made(*arrays, *data)
        grads: list[Any] = [None] * len(arrays)
        for i, gradient in zip(varies, computed, strict=True):
            grads[i] = np.asarray(gradient).astype(arrays[i].dtype, copy=False)
        return float(loss), grads


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigurationError(
            f"psync.gradients.from_{name} needs the package {name}, which cannot be imported here",
            hint=f"pip install {name}, on every worker",
        ) from exc


class _Writable:
    """The memory of an array, whether it is read-only or not."""

    def __init__(self, array: np.ndarray) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self.array = array  # owns it


def _tensor(torch: Any, array: np.ndarray) -> Any:
    """Return a tensor in the array's memory.

    torch warns of read-only arrays, since a tensor might be changed. Those that are differentiated
    cannot be, in place; data are the caller's own.
    """
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(_shared(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(_shared(array))


def _shared(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else np.asarray(_Writable(array))


def _from_tensor(torch: Any, tensor: Any, value: np.ndarray) -> Any:
    if tensor is None:
        return None
    if tensor.layout == torch.sparse_coo and tensor.sparse_dim() == 1:
        (indices,) = tensor._indices().numpy()
        return IndexedSlices(_array(torch, tensor._values(), value), indices, value.shape)
    return _array(torch, tensor if tensor.layout == torch.strided else tensor.to_dense(), value)


def _array(torch: Any, tensor: Any, value: np.ndarray) -> np.ndarray:
    array: np.ndarray
    if tensor.dtype == torch.bfloat16:
        array = tensor.contiguous().view(torch.int16).numpy().view(value.dtype)
    else:
        array = tensor.numpy()
    return array


def _check_scalar(loss: Any, function: GradientFunction) -> None:
    shape = getattr(loss, "shape", None)
    if shape is None or tuple(shape) not in ((), (1,)):
        got = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
        raise GradientError(f"{function!r}: expected a scalar tensor as loss, got {got}")
