"""Specs of elements: the same nest, with a shape and a dtype for each array."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from psync.errors import UsageError
from psync.worker.data_sources import TensorSpec, leaves_of, map_nest, spec_of

Pair = namedtuple("Pair", ["x", "y"])


class OfAnotherLibrary:
    """An array as torch has it: its shape is no tuple, its dtype none of numpy's."""

    def __init__(self) -> None:
        self.shape = [2, 3]
        self.dtype = "torch.float32"


@pytest.mark.parametrize(
    ("element", "spec"),
    [
        (np.zeros((2, 3), np.float32), TensorSpec((2, 3), "float32")),
        (3, TensorSpec((), "int64")),
        (2.5, TensorSpec((), "float64")),
        (np.float32(1), TensorSpec((), "float32")),
        ("text", TensorSpec((), "str")),
        (b"text", TensorSpec((), "bytes")),
        (np.array(["a", "bc"]), TensorSpec((2,), "str")),
        (object(), TensorSpec((), "object")),
        (OfAnotherLibrary(), TensorSpec((2, 3), "float32")),
        (TensorSpec((None,), "int8"), TensorSpec((None,), "int8")),
        (None, None),
        ((1, [2.0]), (TensorSpec((), "int64"), [TensorSpec((), "float64")])),
        ({"b": 1, "a": None}, {"b": TensorSpec((), "int64"), "a": None}),
        (Pair(1, "t"), Pair(TensorSpec((), "int64"), TensorSpec((), "str"))),
    ],
)
def test_the_spec_of_an_element_is_the_same_nest(element: Any, spec: Any) -> None:
    found = spec_of([element])
    assert found == spec
    assert type(found) is type(spec)


def test_what_differs_between_elements_is_unknown() -> None:
    full, rest, row = np.zeros((4, 3)), np.zeros((2, 3)), np.zeros(3)
    assert spec_of([full, rest, full]) == TensorSpec((None, 3), "float64")
    assert spec_of([full, row, full]) == TensorSpec(None, "float64")
    assert spec_of([(full, 1), (full, 2)]) == (
        TensorSpec((4, 3), "float64"), TensorSpec((), "int64"),
    )  # fmt: skip


def test_no_element_has_no_spec() -> None:
    assert spec_of([]) is None


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([1, 2.0], r"^elements of one dataset differ in dtype: int64 and float64$"),
        ([(1, 2), [1, 2]], r"differ in structure: of type tuple and of type list\nhint: give"),
        ([(1, 2), 1], r"differ in structure: of type tuple and of type array"),
        ([(1, 2), None], r"differ in structure: of type tuple and of type NoneType"),
        ([None, 1], r"differ in structure: of type NoneType and of type array"),
        ([(1, 2), (1,)], r"differ in structure: with 2 parts and with 1 parts"),
        ([{"a": 1}, {"b": 1}], r"with keys \['a'\] and with keys \['b'\]"),
    ],
)
def test_elements_that_differ_otherwise_are_refused(elements: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(elements)


def test_leaves_come_in_the_order_of_the_nest() -> None:
    nest = {"b": (1, [2, None]), "a": Pair(3, 4)}
    assert leaves_of(nest) == [1, 2, 3, 4]
    assert map_nest(lambda a, b: a + b, nest, nest) == {"b": (2, [4, None]), "a": Pair(6, 8)}
