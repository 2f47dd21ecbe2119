"""Tensors of a torch module by their names in ``state_dict()``: values in, gradients out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from psync.client.tensors import array_of, tensor_of
from psync.errors import ConfigurationError
from psync.gradients import gradient_of
from psync.integrations.served import Kind, check_same
from psync.numerics.rows import IndexedSlices
from psync.specs import DTYPE_NAMES, dtype_of

COSTLY_BYTES = 1 << 20
"""More than this is copied in a thread: it takes some 100 µs."""


class ModuleTensors:
    """The tensors of a module that are served.

    They are looked up where the module has them: ``module.to`` may put others into their place.

    Args:
        module: As it was built.

    Attributes:
        module: As given.
        names: Each name in ``state_dict()`` → the name of its variable: the first one of a tensor.
        parameters: Names of the parameters.
        trained: Those of them that needed gradients when this was made.
        buffers: Names of the persistent buffers.
        declared: Shapes and dtypes as they were when this was made; those of the variables.

    Raises:
        ConfigurationError: A tensor cannot be served.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._served = served = getattr(module, "_orig_mod", module)  # if torch.compile wrapped it
        self.names: dict[str, str] = {}
        self.parameters: list[str] = []
        self.trained: list[str] = []
        self.buffers: list[str] = []
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        first_names: dict[int, str] = {}  # of tensors, by id
        for name, tensors, key, is_parameter in _places_in(served):
            tensor = tensors[key]
            own = self.names[name] = first_names.setdefault(id(tensor), name)
            if own != name:
                continue
            _check(name, tensor)
            self._places[name] = tensors, key
            if is_parameter:
                self.parameters.append(name)
                if tensor.requires_grad:
                    self.trained.append(name)
            else:
                self.buffers.append(name)
        self.declared = dict(self.kinds())
        _check_apart({name: self.tensor(name) for name in self.parameters})
        listed = {
            name for name, value in served.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }  # fmt: skip
        if listed != self.names.keys():
            raise ConfigurationError(
                "PSModule: state_dict() of the module names other tensors than it has: "
                f"{', '.join(sorted(listed ^ self.names.keys())[:5])}",
                hint="serve the module without the hooks that rename its state",
            )
        if not self.trained:
            raise ConfigurationError(
                "PSModule: the module has no parameter that needs a gradient",
                hint="set requires_grad=True for the parameters to train",
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is now."""
        tensors, key = self._places[name]
        found: torch.Tensor = tensors[key]
        return found

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as an array, in its memory if that is the CPU's."""
        return array_of(self.tensor(name))

    def kinds(self) -> Iterator[tuple[str, Kind]]:
        """Yield names, shapes and dtypes."""
        for name in self._places:
            tensor = self.tensor(name)
            yield name, (tuple(tensor.shape), _dtype_name(tensor))

    def check_unchanged(self, what: str) -> None:
        """Check that the module still has the tensors that it was built with, of their shapes.

        Another dtype, another device, and other tensors in their places are no matter.

        Args:
            what: The model, for messages.

        Raises:
            ConfigurationError: It has not; the first differences are named.
        """
        now: dict[str, Kind] = {}
        tied: dict[str, torch.Tensor] = {}
        for name, tensors, key, _ in _places_in(self._served):
            tensor, own = tensors[key], self.names.get(name, name)
            if tied.setdefault(own, tensor) is not tensor or own == name:
                _, dtype = self.declared.get(name, ((), _dtype_name(tensor)))
                now[name] = tuple(tensor.shape), dtype
        check_same(
            what, self.declared, now.items(),
            problem="a step has changed the tensors of its module",
            hint="parameters and buffers are variables on the ps tasks and never change shape: let "
            "build_module create everything to be trained; register a buffer that grows, or that "
            "belongs to one task, with persistent=False",
        )  # fmt: skip

    def on_cpu(self) -> bool:
        """Return whether all parameters are in the CPU's memory."""
        return all(self.tensor(name).is_cpu for name in self.parameters)

    def gradients(self, *, copy: bool) -> dict[str, np.ndarray | IndexedSlices | None]:
        """Return the gradients of all parameters, in their memory unless copies are asked for."""
        found = {}
        for name in self.parameters:
            gradient = gradient_of(torch, self.tensor(name).grad)
            if copy and isinstance(gradient, IndexedSlices):
                gradient = IndexedSlices(
                    np.array(gradient.values), np.array(gradient.indices), gradient.dense_shape
                )
            elif copy and gradient is not None:
                gradient = np.array(gradient)
            found[name] = gradient
        return found

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for name in self.parameters:
            self.tensor(name).grad = None

    def begin_writing(self) -> Writing:
        """Return what takes new values."""
        return Writing(self)

    @staticmethod
    def array_of(value: Any) -> Any:
        """Return a tensor as an array, and anything else as it is."""
        return array_of(value) if isinstance(value, torch.Tensor) else value

    @staticmethod
    def tensor_of(array: np.ndarray) -> torch.Tensor:
        """Return a tensor in the array's memory."""
        made: torch.Tensor = tensor_of(torch, array)
        return made


class Writing:
    """New values on their way into the tensors of a module.

    Args:
        tensors: Of the module.
    """

    def __init__(self, tensors: ModuleTensors) -> None:
        self._tensors = tensors
        self._direct: list[torch.Tensor] = []  # written into already
        self._copied: list[tuple[torch.Tensor, np.ndarray]] = []

    def target(self, name: str) -> np.ndarray:
        """Return the array into which a value is read: the tensor's own memory, or other memory."""
        tensor, (shape, dtype) = self._tensors.tensor(name), self._tensors.declared[name]
        if tensor.is_cpu and tensor.is_contiguous() and _dtype_name(tensor) == dtype:
            self._direct.append(tensor)
            return array_of(tensor)
        array = np.empty(shape, dtype_of(dtype))
        self._copied.append((tensor, array))
        return array

    @property
    def is_costly(self) -> bool:
        """Return whether ``finish`` takes long."""
        return any(not tensor.is_cpu for tensor, _ in self._copied) or (
            sum(array.nbytes for _, array in self._copied) > COSTLY_BYTES
        )

    def finish(self) -> None:
        """Copy what could not be read into the tensors' memory, and tell autograd of the rest.

        So a graph that was made with the values of before is an error when it is used, as after
        any change in place.
        """
        with torch.no_grad():
            for tensor, array in self._copied:
                tensor.copy_(tensor_of(torch, array))
        for tensor in self._direct:
            torch.autograd.graph.increment_version(tensor)


def _places_in(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    """Yield what ``state_dict()`` names: (name, where the tensor is, under which key, whether it is
    a parameter), in its order."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for key, tensor in inner._parameters.items():
            if tensor is not None:
                yield f"{prefix}.{key}".lstrip("."), inner._parameters, key, True
        for key, tensor in inner._buffers.items():
            if tensor is not None and key not in inner._non_persistent_buffers_set:
                yield f"{prefix}.{key}".lstrip("."), inner._buffers, key, False


def _check(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor can be served.

    Raises:
        ConfigurationError: It cannot.
    """
    problem = hint = ""
    if torch.nn.parameter.is_lazy(tensor):
        problem = "it has no shape yet"
        hint = "run one batch through the lazy module in build_module"
    elif tensor.is_meta:
        problem = "it is on the meta device, and has no value"
        hint = "build the module with real values: the program's are the first ones"
    elif tensor.layout != torch.strided:
        problem = f"its layout is {tensor.layout}"
        hint = "gradients may be sparse, values must be dense"
    elif _dtype_name(tensor) not in DTYPE_NAMES:
        problem = f"variables cannot be {_dtype_name(tensor)}"
        hint = "register_buffer(…, persistent=False) keeps it out of state_dict()"
    if problem:
        raise ConfigurationError(f'PSModule: tensor "{name}": {problem}', hint=hint)


def _check_apart(parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that no two parameters lie in the same memory, where a pull of one changes the other.

    Raises:
        ConfigurationError: Two do; names them.
    """
    extents = []
    for name, tensor in parameters.items():
        if tensor.numel():
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            start = tensor.data_ptr()
            extents.append((str(tensor.device), start, start + (last + 1) * tensor.itemsize, name))
    for (device, _, end, one), (its, start, _, other) in itertools.pairwise(sorted(extents)):
        if device == its and start < end:
            raise ConfigurationError(
                f'PSModule: parameters "{one}" and "{other}" are two tensors in the same memory; '
                "as two variables they would overwrite each other",
                hint="to tie them let both be one nn.Parameter, `self.out.weight = "
                "self.table.weight`, without `.data`; otherwise clone() one of them",
            )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
