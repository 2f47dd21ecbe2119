"""Names of the leaves of pytrees, structures that travel, and memory that jax takes over."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from psync.errors import ConfigurationError, ValueMismatchError

jax = pytest.importorskip("jax", reason="jax is not installed")

from psync.integrations.jax_trees import (  # noqa: E402  # needs jax
    ALIGNMENT,
    NamedTree,
    aligned,
    check_present,
    first_value,
)

ONE = np.ones(2, np.float32)


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Boxed:
    """What Flax NNX has for each variable: a node with one field."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    value: Any
    scale: Any


class Module:
    """A node with settings, as those of Equinox, which are equal only if they are the same."""

    def __init__(self, w: Any, setting: Any) -> None:
        self.w, self.setting = w, setting


jax.tree_util.register_pytree_with_keys(
    Module,
    lambda m: (((jax.tree_util.GetAttrKey("w"), m.w),), m.setting),
    lambda setting, leaves: Module(*leaves, setting),
)


def names_of(tree: Any) -> list[str]:
    return NamedTree(tree, "params", "params").names


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"dense": {"kernel": ONE, "bias": ONE}}, ["dense/bias", "dense/kernel"]),
        ([ONE, (ONE, None, {"a": ONE})], ["0", "1/0", "1/2/a"]),
        (OrderedDict(z=ONE, a=ONE), ["z", "a"]),
        ({"layer": Pair(ONE, ONE)}, ["layer/kernel", "layer/bias"]),
        ({1: Boxed(ONE)}, ["1"]),
        ({"q": Scaled(ONE, ONE)}, ["q/value", "q/scale"]),
        ({"value": ONE}, ["value"]),
        (Module(ONE, object()), ["w"]),
        (ONE, ["params"]),
    ],
)
def test_leaves_are_called_by_their_paths(tree: Any, names: list[str]) -> None:
    assert names_of(tree) == names


def test_a_structure_travels_without_its_leaves() -> None:
    tree = {"a": [ONE, Pair(None, ONE)], "b": Module(ONE, Pair)}
    named = NamedTree(tree, "params", "params")
    data = pickle.dumps(named)
    assert ONE.tobytes() not in data
    arrived = pickle.loads(data)
    assert arrived.names == named.names == ["a/0", "a/1/bias", "b/w"]
    filled = arrived.filled({"a/0": 1, "a/1/bias": 2, "b/w": 3})
    assert filled["a"] == [1, Pair(None, 2)]
    assert (filled["b"].w, filled["b"].setting) == (3, Pair)
    assert arrived.taken_apart(filled, "grads") == {"a/0": 1, "a/1/bias": 2, "b/w": 3}


@pytest.mark.parametrize(
    ("tree", "difference"),
    [
        ({"a": 1}, "; missing: 'b/0'"),
        ({"a": 1, "b": [2], "c": 3}, "; unknown: 'c'"),
        ({"a": None, "b": 2}, "; missing: 'b/0'; unknown: 'b'"),
        ({"a": 1, "b": (2,)}, ", got other containers, such as dict"),
        (None, "; missing: 'a', 'b/0'"),
    ],
)
def test_another_tree_is_refused(tree: Any, difference: str) -> None:
    named = NamedTree({"a": ONE, "b": [ONE]}, "the params", "params")
    with pytest.raises(ValueMismatchError) as refused:
        named.taken_apart(tree, "grads")
    told = str(refused.value).splitlines()[0]
    assert told == f"grads: expected the same tree as the params{difference}"


@pytest.mark.parametrize("value", [2.5, np.float64(2.5), np.full(3, 2.5), ONE.astype("float16")])
def test_first_values_have_the_dtypes_of_jax(value: Any) -> None:
    array = first_value("w", value, "Served")
    assert type(array) is np.ndarray
    assert array.dtype == (np.float16 if getattr(value, "dtype", 0) == np.float16 else np.float32)
    np.testing.assert_array_equal(array, np.asarray(value, array.dtype))


@pytest.mark.parametrize(
    "leaf", ["text", np.tanh, jax.random.key(0), jax.ShapeDtypeStruct((2,), np.float32)]
)
def test_what_is_no_array_is_refused_by_name(leaf: Any) -> None:
    message = (
        f'Served: leaf "dense/act" is {type(leaf).__name__}, which jax cannot convert to an array'
    )
    with pytest.raises(ConfigurationError, match=message):
        first_value("dense/act", leaf, "Served")


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (1000, 100)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_jax_on_a_cpu_takes_over_aligned_memory(shape: tuple[int, ...], dtype: str) -> None:
    array = aligned(shape, jax.numpy.dtype(dtype))
    assert (array.shape, array.dtype.name) == (shape, dtype)
    assert array.flags.c_contiguous
    array[...] = 1
    made = jax.device_put(array, jax.devices("cpu")[0])
    if array.size:  # else there is no memory
        assert array.ctypes.data % ALIGNMENT == 0
        assert made.unsafe_buffer_pointer() == array.ctypes.data


def test_memory_that_jax_has_taken_over_is_not_written_when_it_is_donated() -> None:
    array = aligned((1000,), np.dtype(np.float32))
    array[...] = 1
    made = jax.device_put(array, jax.devices("cpu")[0])
    other = jax.jit(lambda x: x + 1, donate_argnums=0)(made)
    assert made.is_deleted()
    assert (np.asarray(other) == 2).all()
    assert (array == 1).all()


def test_arrays_without_values_are_refused_by_name() -> None:
    gone = jax.numpy.ones(2)
    gone.delete()
    with pytest.raises(ValueMismatchError, match='gradient "w" was deleted, or donated'):
        check_present({"v": ONE, "w": gone}, "gradient")

    @jax.jit
    def traced(x: Any) -> Any:
        with pytest.raises(ValueMismatchError, match='gradient "w" is traced: it has no value yet'):
            check_present({"w": x}, "gradient")
        return x

    traced(ONE)
