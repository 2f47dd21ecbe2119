"""Gradient functions from torch and jax, for ``compute_gradients`` and ``minimize``.

The task that computes gradients imports the library when it first needs one.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from psync.api.pulls import is_flat, leaves, mapped
from psync.client.tensors import array_of, tensor_of
from psync.errors import ConfigurationError, ValueMismatchError
from psync.numerics.rows import IndexedSlices
from psync.specs import check_not_masked

Loss = Callable[..., Any]


@runtime_checkable
class _Array(Protocol):
    """What numpy makes an array of by itself: those of all libraries."""

    def __array__(self) -> Any: ...


_ARRAY = _Array, numbers.Number


def from_torch(loss_fn: Loss) -> GradientFunction:
    """Return a function that computes a loss and its gradients with torch, on the CPU.

    Args:
        loss_fn: Function of one tensor per variable, then the data. It returns a scalar tensor, or
            a pair of loss and predictions. If the variables are nested in anything but a list, the
            tensors are one argument with the same nesting.

    Returns:
        A function for ``minimize`` and ``Trainer``; see ``GradientFunction``. Its tensors share
        memory with the pulled values, and torch refuses to change them in place. A gradient is None
        if the loss does not depend on the variable or the variable is not floating. It is an
        IndexedSlices if torch returns a sparse gradient, as
        ``torch.nn.functional.embedding(…, sparse=True)`` does.

    Raises:
        ConfigurationError: torch is not installed; raised when the function is called.

    Example:
        def loss(w, b, x, y):
            return torch.nn.functional.cross_entropy(x @ w + b, y)

        value_and_grad = psync.gradients.from_torch(loss)

        async def step(batches):
            return await optimizer.minimize(value_and_grad.on(*next(batches)), (w, b))

        trainer = psync.Trainer(strategy, (w, b), value_and_grad, optimizer)  # or so
    """
    return _TorchGradients(loss_fn)


def from_jax(loss_fn: Loss, *, jit: bool = True) -> GradientFunction:
    """Return a function that computes a loss and its gradients with jax.

    Create it once, outside the step, because it keeps the compiled code.

    Args:
        loss_fn: Function of one array per variable, then the data. It returns a scalar, or a pair
            of loss and predictions. If the variables are nested in anything but a list, the arrays
            are one argument with the same nesting.
        jit: Whether to compile the function, once for each combination of shapes.

    Returns:
        A function for ``minimize`` and ``Trainer``; see ``GradientFunction``. A gradient is None if
        the variable is not floating. Unless ``jax_enable_x64`` is set, float64 variables are
        computed in float32.

    Raises:
        ConfigurationError: jax is not installed; raised when the function is called.

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

    Values and gradients are numpy arrays, one for each variable, and the loss is a float. If a
    single value is a nesting of arrays, the gradients have the same nesting. If the loss function
    returns predictions, they come third, as numpy arrays. Values are not changed and, if their
    memory allows it, not copied. A step may capture the function.

    Args:
        loss_fn: Function of the values, then the data, as the library's arrays.
    """

    def __init__(self, loss_fn: Loss) -> None:
        if not callable(loss_fn):
            raise ConfigurationError(f"expected a loss function, got {type(loss_fn).__name__}")
        self._loss_fn = loss_fn

    def __repr__(self) -> str:
        name = getattr(self._loss_fn, "__qualname__", self._loss_fn)
        return f"<gradients of {name}>"

    def on(self, *data: Any) -> Callable[..., tuple[Any, ...]]:
        """Return a function of the values alone, bound to the data of the loss.

        Args:
            data: Further arguments of the loss. numpy arrays are converted to the library's; all
                other objects are passed unchanged.
        """
        return lambda *values: self._compute(values, data)

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Return the loss and the gradients, in the order of the values."""
        return self._compute(values, ())

    def of_batch(self, values: Any, batch: Any) -> tuple[Any, ...]:
        """Return the loss, the gradients and, if any, the predictions, as a ``Trainer`` expects.

        Args:
            values: Values with the nesting of the trainer's variables.
            batch: Data of the loss; the items of a tuple or list become separate arguments.
        """
        data = batch if isinstance(batch, list | tuple) else (batch,)
        if is_flat(values, _ARRAY):
            return self._compute(values, data)
        loss, grads, *predictions = self._compute((values,), data)
        return loss, grads[0] if isinstance(values, _ARRAY) else grads, *predictions

    def _compute(self, values: Sequence[Any], data: Sequence[Any]) -> tuple[Any, ...]:
        try:
            check_not_masked(data)
        except TypeError as exc:
            raise ValueMismatchError(f"a batch: expected arrays, got {exc}") from exc
        numbered = itertools.count()
        structure = mapped(tuple(values), lambda _: next(numbered), _ARRAY)
        arrays = [np.asarray(value) for value in leaves(tuple(values), _ARRAY)]
        loss, computed, predictions = self._differentiate(arrays, structure, data)
        grads = list(mapped(structure, computed.__getitem__, int))
        if len(values) == 1 and not isinstance(values[0], _ARRAY):
            (grads,) = grads
        return (loss, grads) if predictions is None else (loss, grads, predictions)

    def _loss_of(
        self, arrays: Sequence[Any], structure: tuple[Any, ...], data: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Return the loss, and the predictions or None.

        Args:
            arrays: The values, as the library's arrays.
            structure: The arguments of the loss function; arrays are their positions there.
            data: Its other arguments.
        """
        made = self._loss_fn(*mapped(structure, arrays.__getitem__, int), *data)
        loss, predictions = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        return loss, predictions

    @abstractmethod
    def _differentiate(
        self, arrays: Sequence[np.ndarray], structure: tuple[Any, ...], data: Sequence[Any]
    ) -> tuple[float, Sequence[Any], Any]:
        """Return the loss, a gradient for each array, and the predictions or None."""


class _TorchGradients(GradientFunction):
    def _differentiate(
        self, arrays: Sequence[np.ndarray], structure: tuple[Any, ...], data: Sequence[Any]
    ) -> tuple[float, Sequence[Any], Any]:
        torch = _library("torch")
        tensors = [tensor_of(torch, array) for array in arrays]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        for tensor in floating:
            tensor.requires_grad_(True)
        rest = [tensor_of(torch, each) if isinstance(each, np.ndarray) else each for each in data]
        loss, predictions = self._loss_of(tensors, structure, rest)
        shape = getattr(loss, "shape", None)
        if shape is None or tuple(shape) not in ((), (1,)):
            got = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ValueMismatchError(f"{self!r}: expected a scalar tensor as loss, got {got}")
        grads = iter(torch.autograd.grad(loss, floating, allow_unused=True))
        computed = [
            gradient_of(torch, next(grads)) if tensor.is_floating_point() else None
            for tensor in tensors
        ]
        predicted = functools.partial(_predicted, torch)
        return loss.item(), computed, mapped(predictions, predicted, torch.Tensor)


class _JaxGradients(GradientFunction):
    def __init__(self, loss_fn: Loss, jit: bool) -> None:
        super().__init__(loss_fn)
        self._jit = jit
        self._made: list[tuple[tuple[int, ...], tuple[Any, ...], Callable[..., Any]]] = []
        """Positions of what varies, structure of the arguments, and what computes gradients."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _JaxGradients, (self._loss_fn, self._jit)

    def _differentiate(
        self, arrays: Sequence[np.ndarray], structure: tuple[Any, ...], data: Sequence[Any]
    ) -> tuple[float, Sequence[Any], Any]:
        jax = _library("jax")
        floating = [jax.numpy.issubdtype(array.dtype, jax.numpy.floating) for array in arrays]
        varies = tuple(i for i, yes in enumerate(floating) if yes)
        made = self._function(jax, varies, structure, len(arrays))
        (loss, predictions), computed = made(*arrays, *data)
        grads: list[Any] = [None] * len(arrays)
        for i, gradient in zip(varies, computed, strict=True):
            grads[i] = np.asarray(gradient).astype(arrays[i].dtype, copy=False)
        return float(loss), grads, mapped(predictions, np.asarray, _ARRAY)

    def _function(
        self, jax: Any, varies: tuple[int, ...], structure: tuple[Any, ...], count: int
    ) -> Callable[..., Any]:
        """Return what computes the gradients; it is made once."""
        for known, of, made in self._made:
            if (known, of) == (varies, structure):
                return made

        def loss_of(*arguments: Any) -> tuple[Any, Any]:
            return self._loss_of(arguments[:count], structure, arguments[count:])

        made = jax.value_and_grad(loss_of, varies, has_aux=True)
        self._made.append((varies, structure, jax.jit(made) if self._jit else made))
        return self._made[-1][2]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigurationError(
            f"psync.gradients.from_{name} needs the package {name}, which cannot be imported here",
            hint=f"pip install {name}, on every worker",
        ) from exc


def gradient_of(torch: Any, tensor: Any) -> np.ndarray | IndexedSlices | None:
    """Return a gradient of torch as an array in its memory; sparse rows become IndexedSlices."""
    if tensor is None:
        return None
    if tensor.layout == torch.sparse_coo and tensor.sparse_dim() == 1:
        (indices,) = array_of(tensor._indices())
        return IndexedSlices(array_of(tensor._values()), indices, tuple(tensor.shape))
    return array_of(tensor if tensor.layout == torch.strided else tensor.to_dense())


def _predicted(torch: Any, tensor: Any) -> np.ndarray:
    """Return a tensor as an array; numpy has no bfloat16, so metrics get float32."""
    detached = tensor.detach()
    array: np.ndarray = (detached.float() if tensor.dtype == torch.bfloat16 else detached).numpy()
    return array
