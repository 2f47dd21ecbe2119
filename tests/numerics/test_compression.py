from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from loops import for_each
from psync.errors import ConfigurationError, RemoteProtocolError
from psync.numerics.compression import (
    COMPRESSED,
    Compression,
    Widened,
    checked_compression,
    compensate,
    marker,
    narrow_dtype,
    narrowed,
    round_blocks,
    round_into,
    split_members,
    widen_into,
)
from psync.numerics.sums import PIECE_BYTES
from psync.specs import ShardSpec, VariableSpec

KINDS: tuple[Compression, ...] = ("bf16", "f16")
BITS = {"bf16": 8, "f16": 11}  # significant ones
LARGEST = {"bf16": float.fromhex("0x1.fep127"), "f16": 65504.0}

each_kind = for_each("kind", KINDS)
finite = arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-1e4, 1e4, width=32))


def done(work: Iterator[int]) -> list[int]:
    return list(work)


def rounded(values: Any, kind: Compression) -> np.ndarray:
    values = np.asarray(values, np.float32)
    out = np.empty(values.shape, narrow_dtype(kind))
    round_into(values, out)
    return out.astype(np.float32)


@for_each("value", ["fp16", "float16", 16, True, ["bf16"]])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match='SGD: expected "bf16", "f16" or None as compres'):
        checked_compression("SGD", value)
    assert checked_compression("SGD", "f16") == "f16"


@each_kind
def test_a_variable_of_float32_is_laid_out_in_half_the_bytes(kind: Compression) -> None:
    shards = tuple(ShardSpec("v", 3, i, 2 * i, (2, 5), "float32", i) for i in range(2))
    made = narrowed(VariableSpec("v", 3, (4, 5), "float32", True, shards, "train.py:1"), kind)
    assert (made.nbytes, [shard.nbytes for shard in made.shards]) == (40, [20, 20])
    assert [shard.key for shard in made.shards] == [(3, 0), (3, 1)]


@for_each("dtype", ["float64", "float16", "bfloat16", "int8", "bool"])
def test_variables_of_other_dtypes_stay_as_they_are(dtype: str) -> None:
    spec = VariableSpec("v", 3, (4,), dtype, True, (), "train.py:1")
    assert narrowed(spec, "bf16") is spec


@each_kind
def test_a_set_says_by_its_first_member_how_it_travels(kind: Compression) -> None:
    assert split_members([marker(kind), [3, 0], [4, 1]]) == (kind, ((3, 0), (4, 1)))
    assert split_members([[3, 0], [4, 1]]) == (None, ((3, 0), (4, 1)))
    assert split_members([]) == (None, ())


def test_the_codes_of_the_wire_stay() -> None:
    assert [marker(kind) for kind in KINDS] == [(-1, 1), (-1, 2)]


@for_each("code", [-1, 0, 3])
def test_an_unknown_code_is_refused(code: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"compressed in an unknown way: {code}"):
        split_members([(COMPRESSED, code), (3, 0)])


def test_values_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    step = 2.0**-7  # from 1 to 2 in bfloat16
    ties = [1 + step / 2, 1 + step * 3 / 2, -1 - step / 2]
    assert rounded(ties, "bf16").tolist() == [1, 1 + 2 * step, -1]
    assert rounded([1 + step * 0.51, 1 + step * 0.49], "bf16").tolist() == [1 + step, 1]
    assert rounded([1 + 2.0**-11, 1 + 3 * 2.0**-11], "f16").tolist() == [1, 1 + 2.0**-9]


@each_kind
def test_what_is_too_large_is_the_largest_and_the_rest_stays_what_it_is(kind: Compression) -> None:
    largest = LARGEST[kind]
    beyond = [3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.0, -0.0]
    values = rounded(beyond, kind)
    np.testing.assert_array_equal(
        values, np.array([largest, -largest, np.inf, -np.inf, np.nan, 1, 0], np.float32)
    )
    assert np.signbit(values[-1])
    assert rounded([largest], kind).tolist() == [largest]


@given(finite, st.sampled_from(KINDS))
def test_the_error_is_at_most_half_of_the_last_bit(values: np.ndarray, kind: Compression) -> None:
    error = np.abs(rounded(values, kind).astype(np.float64) - values)
    smallest = 2.0**-25 if kind == "f16" else 2.0**-134  # subnormal numbers have fewer bits
    assert (
        error <= np.maximum(np.abs(values.astype(np.float64)) * 2.0 ** -BITS[kind], smallest)
    ).all()


@given(st.lists(finite, min_size=1, max_size=8), st.sampled_from(KINDS))
def test_what_is_sent_and_what_is_owed_is_what_was_given(
    gradients: list[np.ndarray], kind: Compression
) -> None:
    size = min(map(len, gradients))
    gradients = [gradient[:size] for gradient in gradients]
    owed: np.ndarray | None = None
    sent = np.zeros(size)
    for gradient in gradients:
        out, rest = np.empty(size, narrow_dtype(kind)), np.empty(size, np.float32)
        total = gradient if owed is None else gradient + owed
        done(compensate(gradient, owed, out, rest))
        np.testing.assert_array_equal(out.astype(np.float32) + rest, total)  # nothing is lost
        np.testing.assert_array_equal(out.astype(np.float32), rounded(total, kind))
        sent += out.astype(np.float64)
        owed = rest
    given_in_all = np.sum(gradients, axis=0, dtype=np.float64)
    # One rounding error, however many gradients; and the sums in float32 round, too.
    bound = np.abs(owed) + len(gradients) * 2.0**-24 * 1.1e4
    assert (np.abs(given_in_all - sent) <= bound).all()


def test_what_is_too_large_for_float16_waits_and_what_is_not_finite_is_not_owed() -> None:
    gradient = np.array([1e5, np.inf, -np.inf, np.nan, 1], np.float32)
    out, rest = np.empty(5, np.float16), np.empty(5, np.float32)
    done(compensate(gradient, np.full(5, 0.5, np.float32), out, rest))
    np.testing.assert_array_equal(out, np.array([65504, np.inf, -np.inf, np.nan, 1.5], np.float16))
    assert rest.tolist() == [1e5 + 0.5 - 65504, 0, 0, 0, 0]


def test_large_arrays_are_done_in_pieces_with_the_same_result() -> None:
    size = PIECE_BYTES // 4 * 2 + 5
    gradient = np.random.default_rng(0).normal(size=(1, size)).astype(np.float32)
    owed = gradient / 1000
    out, rest = np.empty(gradient.shape, narrow_dtype("bf16")), np.empty_like(gradient)
    assert done(compensate(gradient, owed, out, rest)) == [PIECE_BYTES, PIECE_BYTES, 20]
    np.testing.assert_array_equal(out.astype(np.float32), rounded(gradient + owed, "bf16"))
    blocks = [gradient[0, :100], gradient[0, 100:100], gradient[0, 100:]]
    together = np.empty(size, narrow_dtype("bf16"))
    assert done(round_blocks(blocks, together)) == [400, 0, 4 * size - 400]
    np.testing.assert_array_equal(together.astype(np.float32), rounded(gradient[0], "bf16"))
    wide = np.empty_like(gradient)
    assert done(widen_into(out, wide)) == [PIECE_BYTES, PIECE_BYTES, 20]
    np.testing.assert_array_equal(wide, out.astype(np.float32))


@for_each("shape", [(), (0,), (0, 3), (2, 3)])
@each_kind
def test_any_shape(shape: tuple[int, ...], kind: Compression) -> None:
    gradient = np.full(shape, 1.5, np.float32)
    out, rest = np.empty(shape, narrow_dtype(kind)), np.empty(shape, np.float32)
    done(compensate(gradient, None, out, rest))
    wide = np.empty(shape, np.float32)
    done(widen_into(out, wide))
    np.testing.assert_array_equal(wide, gradient)
    assert not rest.any()


@each_kind
def test_a_gradient_is_widened_as_it_is_cut(kind: Compression) -> None:
    values = np.arange(10).astype(narrow_dtype(kind))
    widened = Widened(values)
    assert widened.nbytes == 40
    part = widened[3:5]
    assert (part.dtype, part.tolist()) == (np.float32, [3, 4])
    part[:] = 9  # memory of its own
    assert widened[3:5].tolist() == [3, 4]
