from __future__ import annotations

import dataclasses
import pickle
import sys

import ml_dtypes
import numpy as np
import pytest

from psync.errors import ConfigurationError, PartitionError
from psync.specs import (
    DTYPE_NAMES,
    HiddenValues,
    ShardSpec,
    VariableSpec,
    as_integer,
    check_not_masked,
    checked_kind,
    count_of,
    dtype_name,
    dtype_of,
    marked_after,
    plain_array,
    some_of,
)


def test_each_dtype_has_a_name_and_each_name_a_dtype() -> None:
    for name in DTYPE_NAMES:
        dtype = dtype_of(name)
        assert dtype_name(dtype) == dtype_name(name) == dtype_name(dtype.type) == name
        assert dtype.newbyteorder("<") == dtype


def test_what_numpy_takes_for_a_dtype_has_a_name() -> None:
    assert dtype_name(float) == "float64"
    assert dtype_name(">f4") == "float32"
    assert dtype_name(bool) == "bool"
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16"


def test_a_dtype_that_variables_do_not_have() -> None:
    for wrong in [complex, "U3", object, "datetime64[s]"]:
        with pytest.raises(PartitionError) as caught:
            dtype_name(wrong)
        assert caught.value.message == f"dtype {np.dtype(wrong).name!r} is not supported"
        assert caught.value.hint == f"use one of {', '.join(DTYPE_NAMES)}"


def test_what_is_no_dtype_at_all() -> None:
    with pytest.raises(PartitionError, match="expected a dtype, got 'flaot32'"):
        dtype_name("flaot32")
    with pytest.raises(PartitionError, match="dtype 'flaot32' is not supported"):
        dtype_of("flaot32")


def test_a_shard_knows_its_key_size_and_name() -> None:
    shard = ShardSpec("layer/w", 3, 1, 5, (5, 4), "float16", 0)
    assert (shard.key, shard.size, shard.nbytes, str(shard)) == ((3, 1), 20, 40, '"layer/w/part_1"')
    scalar = ShardSpec("s", 0, 0, 0, (), "float64", 0)
    assert (scalar.size, scalar.nbytes) == (1, 8)
    assert ShardSpec("e", 0, 0, 0, (0, 7), "int8", 0).nbytes == 0


def test_sizes_beyond_what_machine_integers_hold() -> None:
    huge = VariableSpec("v", 0, (1 << 40, 1 << 40), "float64", True, (), "train.py:1")
    assert huge.nbytes == 1 << 83


def test_specs_are_values_that_travel() -> None:
    shard = ShardSpec("v", 0, 0, 0, (2,), "float32", 1)
    spec = VariableSpec("v", 0, (2,), "float32", True, (shard,), "train.py:1")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    assert spec.with_dtype("float32") == spec != spec.with_dtype("float16")
    assert spec.with_dtype("float16").shards[0].nbytes == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.ps = 0  # type: ignore[misc]


def test_integers_of_all_kinds_are_integers() -> None:
    for value in [0, -3, np.int64(7), np.array(7, np.uint8)]:
        assert as_integer(value) == value
        assert type(as_integer(value)) is int


def test_nothing_else_is_an_integer() -> None:
    array = np.array
    for value in [True, np.True_, 1.0, np.float32(1), "1", None, [1], array([1]), array(True)]:
        assert as_integer(value) is None


def test_of_many_names_the_first_are_told() -> None:
    assert some_of(["a", "b"], 2) == ["a", "b"]
    assert some_of(["a", "b", "c"], 1) == ["a", "and 2 more"]


def test_what_is_of_another_class_is_named() -> None:
    assert checked_kind("expected a text", "x", str) == "x"
    with pytest.raises(ConfigurationError, match="expected a text, got int"):
        checked_kind("expected a text", 1, str)


def test_a_step_that_was_set_is_more_than_all_that_were_known_before() -> None:
    known = 10**12
    for count in (0, 7):
        known, before = marked_after(known, count), known
        assert known > before + 10**12
        assert count_of(known) == count
        assert [count_of(known + n) for n in range(3)] == [count, count + 1, count + 2]


def test_values_that_a_mask_hides_are_refused_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masked = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])
    for value in (masked, [1.0, masked], {"a": {"b": (masked,)}}):
        with pytest.raises(HiddenValues, match="whose mask hides 1 of 3 values"):
            check_not_masked(value)
    check_not_masked([np.ma.masked_array([1.0, 2.0]), 3, "text", None])
    monkeypatch.delitem(sys.modules, "numpy.ma")  # nobody has imported it, so there are none
    assert plain_array([1, 2]).tolist() == [1, 2]
