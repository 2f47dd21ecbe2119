"""Tensors of a module by the names of its state_dict(): what is served, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psync import IndexedSlices
from psync.errors import ConfigurationError

torch = pytest.importorskip("torch", reason="torch is not installed")

from psync.integrations.torch_tensors import ModuleTensors  # noqa: E402  # needs torch


def with_buffers() -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("mask", torch.ones(2), persistent=False)
    module[0].bias.requires_grad_(False)
    return module


def test_names_are_those_of_the_state_dict() -> None:
    tensors = ModuleTensors(with_buffers())
    assert list(tensors.names) == list(tensors.module.state_dict())
    assert tensors.trained == ["0.weight", "1.weight", "1.bias"]
    assert tensors.parameters == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert tensors.buffers == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert tensors.declared["1.num_batches_tracked"] == ((), "int64")


def test_tied_parameters_and_shared_modules_are_served_once() -> None:
    module = torch.nn.Module()
    module.embedding = torch.nn.Embedding(5, 4)
    module.output = torch.nn.Linear(4, 5, bias=False)
    module.output.weight = module.embedding.weight
    module.again = module.output
    tensors = ModuleTensors(module)
    assert tensors.parameters == ["embedding.weight"]
    assert set(tensors.names.values()) == {"embedding.weight"}
    assert list(tensors.names) == list(module.state_dict())


def test_tensors_are_found_where_the_module_has_put_others() -> None:
    tensors = ModuleTensors(with_buffers())
    before = tensors.tensor("1.running_mean")
    tensors.module.to(torch.bfloat16)
    assert tensors.tensor("1.running_mean") is not before
    assert tensors.array("0.weight").dtype.name == "bfloat16"
    assert tensors.declared["0.weight"] == ((3, 2), "float32")


def test_what_can_be_written_into_directly_is_its_own_target() -> None:
    module = torch.nn.Linear(2, 3)
    module.bias.data = torch.zeros(6)[::2]  # not contiguous
    tensors = ModuleTensors(module)
    writing = tensors.begin_writing()
    writing.target("weight")[:] = 5
    writing.target("bias")[:] = 6
    assert (module.weight == 5).all()
    assert not module.bias.any()
    assert not writing.is_costly
    version = module.weight._version
    writing.finish()
    assert (module.bias == 6).all()
    assert module.weight._version > version


def test_a_module_of_another_dtype_is_written_through_its_variables_dtype() -> None:
    module = torch.nn.Linear(2, 3)
    tensors = ModuleTensors(module)
    module.half()
    writing = tensors.begin_writing()
    target = writing.target("bias")
    assert target.dtype == np.float32
    target[:] = 1 / 3
    writing.finish()
    assert module.bias.dtype == torch.float16
    assert abs(module.bias[0].item() - 1 / 3) < 1e-3


def test_gradients_are_in_their_memory_or_copied() -> None:
    tensors = ModuleTensors(torch.nn.Linear(2, 3))
    assert tensors.gradients(copy=False) == {"weight": None, "bias": None}
    tensors.module(torch.ones(1, 2)).sum().backward()
    grad = tensors.module.weight.grad
    assert np.shares_memory(tensors.gradients(copy=False)["weight"], grad.numpy())  # type: ignore[arg-type]
    assert not np.shares_memory(tensors.gradients(copy=True)["weight"], grad.numpy())  # type: ignore[arg-type]
    tensors.drop_gradients()
    assert tensors.module.weight.grad is None


@pytest.mark.parametrize("copy", [False, True])
def test_sparse_gradients_are_rows(copy: bool) -> None:
    tensors = ModuleTensors(torch.nn.Embedding(5, 2, sparse=True))
    tensors.module(torch.tensor([4, 1, 4])).sum().backward()
    rows = tensors.gradients(copy=copy)["weight"]
    assert isinstance(rows, IndexedSlices)
    assert rows.indices.tolist() == [4, 1, 4]
    assert rows.dense_shape == (5, 2)


def lazy() -> Any:
    return torch.nn.LazyLinear(3)


def on_meta() -> Any:
    return torch.nn.Linear(2, 3, device="meta")


def of_complex_numbers() -> Any:
    module = torch.nn.Linear(2, 3)
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    return module


def sparse_value() -> Any:
    module = torch.nn.Linear(2, 3)
    module.register_buffer("graph", torch.eye(3).to_sparse())
    return module


def with_other_names() -> Any:
    module = torch.nn.Linear(2, 3)
    module._register_state_dict_hook(lambda module, state, *_: {"x." + k: state[k] for k in state})
    return module


def all_frozen() -> Any:
    return torch.nn.Linear(2, 3).requires_grad_(False)


def tied_by_data() -> Any:
    module = torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 2), "out": torch.nn.Linear(2, 4)})
    module["out"].weight.data = module["table"].weight.data[1:]
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tied_by_data, '"table.weight" and "out.weight" are two tensors in the same'),
        (lazy, 'tensor "weight": it has no shape yet'),
        (on_meta, 'tensor "weight": it is on the meta device'),
        (of_complex_numbers, 'tensor "phase": variables cannot be complex64'),
        (sparse_value, r'tensor "graph": its layout is torch\.sparse_coo'),
        (with_other_names, "names other tensors than it has: bias, weight, x.bias, x.weight"),
        (all_frozen, "the module has no parameter that needs a gradient"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModuleTensors(build())


def grown(module: Any) -> None:
    module.seen = torch.zeros(3)


def dropped(module: Any) -> None:
    module.seen = None


def pruned(module: Any) -> None:
    from torch.nn.utils import prune

    prune.random_unstructured(module, "weight", 0.5)


def with_another_parameter(module: Any) -> None:
    module.gain = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grown, r'"seen": declared shape \(2,\) float32, here shape \(3,\) float32$'),
        (dropped, r'"seen": declared shape \(2,\) float32, here nothing$'),
        (pruned, r'"weight": declared .*, here nothing; "weight_orig": declared nothing, here'),
        (with_another_parameter, r'"gain": declared nothing, here shape \(1,\) float32$'),
    ],
)
def test_a_module_that_a_step_has_given_other_tensors_is_refused(
    change: Callable[[Any], None], message: str
) -> None:
    module = torch.nn.Linear(2, 3)
    module.register_buffer("seen", torch.zeros(2))
    tensors = ModuleTensors(module)
    change(module.to(torch.float64))
    with pytest.raises(ConfigurationError, match=f"(?m)^Net: a step has changed the .*; {message}"):
        tensors.check_unchanged("Net")


def test_a_tie_that_a_step_has_cut_is_refused_and_another_dtype_is_not() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    tensors = ModuleTensors(module)
    module.bfloat16()
    tensors.check_unchanged("Net")
    module["b"].weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match=r'"b.weight": declared nothing, here shape'):
        tensors.check_unchanged("Net")
