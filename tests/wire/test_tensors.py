"""Arrays become bytes and bytes arrays, whatever the array looks like."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from psync.errors import PartitionError
from psync.specs import DTYPE_NAMES, dtype_of
from psync.wire.tensors import array_from_bytes, cut, to_bytes_view, to_bytes_views

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
READ_ONLY = BASE.copy()
READ_ONLY.flags.writeable = False

ARRAYS = {
    "plain": BASE,
    "0-d": np.array(3.5, np.float64),
    "empty": np.empty(0, np.int32),
    "0 in the middle": np.empty((3, 0, 2), np.float32),
    "strided": BASE[::2, ::3],
    "reversed": BASE[::-1],
    "transposed": BASE.T,
    "Fortran": np.asfortranarray(BASE),
    "big endian": BASE.astype(">f4"),
    "big endian strided": BASE.astype(">f4")[:, ::2],
    "read-only": READ_ONLY,
    "broadcast": np.broadcast_to(np.float32(7), (3, 2)),
    "bool": np.array([True, False, True]),
    "bfloat16": np.arange(5, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "bfloat16 Fortran": np.asfortranarray(np.ones((2, 3), ml_dtypes.bfloat16)),
    "float16 0-d": np.array(1, np.float16),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_kind_survive_the_way_through_bytes(name: str) -> None:
    array = ARRAYS[name]
    view = to_bytes_view(array)
    assert view.format == "B"
    assert view.ndim == 1
    assert view.contiguous
    assert len(view) == array.nbytes
    back = array_from_bytes(view, array.shape, array.dtype.name)
    assert back.shape == array.shape
    assert back.dtype == dtype_of(array.dtype.name)
    np.testing.assert_array_equal(back, array)


def test_many_become_bytes_as_each_alone() -> None:
    plain = [each for each in ARRAYS.values() if each.flags.c_contiguous and each.size]
    native = [each for each in plain if each.dtype.kind == "f" and each.dtype.isnative]
    for arrays in (native, plain, list(ARRAYS.values())):
        expected = [bytes(to_bytes_view(each)) for each in arrays]
        assert list(map(bytes, to_bytes_views(arrays))) == expected


def test_the_bytes_are_in_c_order_and_little_endian() -> None:
    array = np.asfortranarray(np.array([[1, 2], [3, 4]], ">i2"))
    assert bytes(to_bytes_view(array)) == b"\1\0\2\0\3\0\4\0"


def test_a_contiguous_array_is_not_copied() -> None:
    array = np.zeros((2, 3), np.float32)
    view = to_bytes_view(array)
    array[1, 2] = 1
    assert bytes(view[-4:]) == np.float32(1).tobytes()
    view[:4] = np.float32(2).tobytes()
    assert array[0, 0] == 2


def test_the_view_of_a_read_only_array_is_read_only() -> None:
    assert to_bytes_view(READ_ONLY).readonly
    assert not to_bytes_view(BASE).readonly


@pytest.mark.parametrize("data", [bytearray(8), memoryview(bytearray(8)), np.zeros(8, np.uint8)])
def test_an_array_over_writable_memory_shares_it(data: bytearray) -> None:
    array = array_from_bytes(data, (2,), "int32")
    array[0] = 5
    assert bytes(data[:4]) == b"\5\0\0\0"


def test_an_array_over_bytes_is_read_only() -> None:
    assert not array_from_bytes(bytes(8), (2,), "float32").flags.writeable


def test_an_array_may_lie_anywhere_in_its_buffer() -> None:
    data = memoryview(bytes(1) + np.arange(3, dtype=np.float64).tobytes())
    np.testing.assert_array_equal(array_from_bytes(data[1:], (3,), "float64"), [0, 1, 2])


@pytest.mark.parametrize(
    ("nbytes", "shape"),
    [(4, (2,)), (12, (2,)), (0, ()), (8, (1, 1)), (16, (-2, -2)), (4, (-1, -1))],
)
def test_bytes_that_do_not_fit_are_refused(nbytes: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError, match=rf"for shape .* float32, got {nbytes} bytes"):
        array_from_bytes(bytes(nbytes), shape, "float32")


def test_the_text_names_what_was_expected() -> None:
    with pytest.raises(PartitionError) as caught:
        array_from_bytes(bytes(10), (2, 2), "float32")
    assert caught.value.message == "expected 16 bytes for shape (2, 2) float32, got 10 bytes"


def test_a_product_beyond_64_bits_does_not_wrap_around() -> None:
    with pytest.raises(PartitionError, match="expected 73786976294838206464 bytes"):
        array_from_bytes(b"", (1 << 32, 1 << 32), "float32")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PartitionError, match="dtype 'object' is not supported"):
        array_from_bytes(bytes(8), (1,), "object")


@settings(max_examples=150, deadline=None)
@given(
    array=npst.arrays(
        dtype=st.sampled_from([name for name in DTYPE_NAMES if name != "bfloat16"]),
        shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    order=st.sampled_from("CF"),
    big=st.booleans(),
)
def test_any_array_comes_back_bit_for_bit(array: np.ndarray, order: str, big: bool) -> None:
    shape, name, raw = array.shape, array.dtype.name, array.tobytes()
    sent = np.asarray(array, order=order)  # type: ignore[call-overload]
    sent = sent.astype(sent.dtype.newbyteorder(">")) if big else sent
    back = array_from_bytes(bytes(to_bytes_view(sent)), shape, name)
    assert back.shape == shape
    assert back.tobytes() == raw


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_a_body_is_cut_wherever_its_views_end(views: list[bytes], data: st.DataObject) -> None:
    body = b"".join(views)
    ends = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    parts = [body[start:end] for start, end in zip([0, *ends], [*ends, len(body)], strict=True)]
    segments = cut([memoryview(view) for view in views], [len(part) for part in parts])
    assert [b"".join(pieces) for pieces in segments] == parts
