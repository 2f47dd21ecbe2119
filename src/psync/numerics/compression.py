"""Compression: float32 that travels in 16 bits, as bfloat16 or float16, with error feedback.

Of a set of shards that is *compressed*, each value or gradient of a float32 shard travels rounded
to the nearest number of 16 bits (ties to even), and is widened again, which is exact, before
anything is computed with it. All else of the set travels as it is: other dtypes, for whoever
declares float64 wants the digits; and rows of gradients.

Error feedback: what rounding has taken from one gradient is added to the next one. So the sum of
all that was sent differs from the sum of all gradients by one rounding error, and not by as many as
there were steps.

              significant bits   largest        what is larger
    float32   24                 3.4e38
    bfloat16  8                  3.4e38
    float16   11, below 6e-5     65504          is sent as 65504; the rest of a gradient waits
              fewer                             for the next one. Infinities and NaN stay

On the wire a compressed set differs from another one in its definition alone: it begins with a
member that is no shard, (``COMPRESSED``, code). So every message that names sets by their numbers
can carry it, and the log of a ps, and nothing is added to a message of other sets.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", whose residual this is; Karimireddy
    et al. 2019, "Error Feedback Fixes SignSGD". ``fp16_compress_hook`` and ``bf16_compress_hook``
    of torch's DDP and ``Compression.fp16`` of Horovod have no error feedback, and what is too large
    for float16 becomes infinite there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import numpy as np

from psync.errors import RemoteProtocolError, check_fits
from psync.numerics.sums import cuts
from psync.specs import VariableSpec, dtype_of

Compression = Literal["bf16", "f16"]

COMPRESSED = -1
"""In place of a variable's id, in the first member of a set: the set is compressed. Such a member
has the code, from 1, in place of the shard's index."""

WIDE = "float32"
"""The dtype that is compressed."""

_NARROW: dict[Compression, str] = {"bf16": "bfloat16", "f16": "float16"}
_KINDS: tuple[Compression, ...] = tuple(_NARROW)  # in the order of their codes
_LARGEST = {"bfloat16": np.float32(2.0**128 - 2.0**120), "float16": np.float32(65504)}


def checked_compression(what: str, value: object) -> Compression | None:
    """Return what a user has given as ``compression``.

    Args:
        what: Takes it, for messages.
        value: "bf16", "f16" or None.

    Raises:
        ConfigurationError: It is something else.
    """
    fits = value is None or (isinstance(value, str) and value in _NARROW)
    check_fits(fits, f'{what}: expected "bf16", "f16" or None as compression', value)
    return cast("Compression | None", value)


def narrow_dtype(kind: Compression) -> np.dtype:
    """Return the dtype in which float32 travels."""
    return dtype_of(_NARROW[kind])


def narrowed(variable: VariableSpec, kind: Compression) -> VariableSpec:
    """Return a variable as it travels."""
    return variable.with_dtype(_NARROW[kind]) if variable.dtype == WIDE else variable


def marker(kind: Compression) -> tuple[int, int]:
    """Return the member with which a compressed set begins."""
    return COMPRESSED, _KINDS.index(kind) + 1


def split_members(
    members: Sequence[Sequence[int]],
) -> tuple[Compression | None, tuple[tuple[int, int], ...]]:
    """Return how a set travels, None: as it is; and its shards.

    Args:
        members: (variable id, shard index), as they came.

    Raises:
        RemoteProtocolError: It is compressed in a way that is not known here.
    """
    keys = tuple([(variable, index) for variable, index in members])
    if not keys or keys[0][0] != COMPRESSED:
        return None, keys
    code = keys[0][1]
    if not 1 <= code <= len(_KINDS):
        raise RemoteProtocolError(f"a set of shards is compressed in an unknown way: {code}")
    return _KINDS[code - 1], keys[1:]


def round_into(values: np.ndarray, out: np.ndarray) -> None:
    """Write float32 values, rounded, to an array of 16 bits an element.

    Finite ones stay finite; infinities and NaN stay what they are.
    """
    with np.errstate(all="ignore"):
        largest = _LARGEST[out.dtype.name]
        if not values.size or np.abs(values).max() <= largest:
            np.copyto(out, values, casting="unsafe")
            return
        np.copyto(out, np.clip(values, -largest, largest), casting="unsafe")
        beyond = ~np.isfinite(values)
        out[beyond] = values[beyond]


def compensate(
    gradient: np.ndarray, owed: np.ndarray | None, out: np.ndarray, rest: np.ndarray
) -> Iterator[int]:
    """Round a gradient and what earlier ones are owed; say what this one is owed then.

    Args:
        gradient: float32, C-contiguous.
        owed: Of the same shape and dtype; None: nothing.
        out: Of 16 bits: gets the sum, rounded.
        rest: float32: gets the sum less ``out``; 0 where that is not finite.

    Yields:
        Bytes that are done, after each piece.
    """
    gradient, out, rest = gradient.reshape(-1), out.reshape(-1), rest.reshape(-1)
    before = None if owed is None else owed.reshape(-1)
    for part in cuts(gradient.size, rest.itemsize):
        left = rest[part]
        with np.errstate(all="ignore"):
            if before is None:
                np.copyto(left, gradient[part])
            else:
                np.add(gradient[part], before[part], out=left)
            round_into(left, out[part])
            np.subtract(left, out[part].astype(np.float32), out=left)
        finite = np.isfinite(left)
        if not finite.all():
            left[~finite] = 0
        yield left.nbytes


def round_blocks(blocks: Sequence[np.ndarray], out: np.ndarray) -> Iterator[int]:
    """Round float32 values that lie in several arrays, a piece for each; yield as ``compensate``.

    Args:
        blocks: 1-D, one behind the other.
        out: Of 16 bits, 1-D.
    """
    start = 0
    for block in blocks:
        round_into(block, out[start : start + block.size])
        start += block.size
        yield block.nbytes


def widen_into(values: np.ndarray, out: np.ndarray) -> Iterator[int]:
    """Write values of 16 bits to float32, piece by piece; yield as ``compensate``.

    Args:
        values: C-contiguous.
        out: Likewise, of the same shape.
    """
    values, out = values.reshape(-1), out.reshape(-1)
    for part in cuts(out.size, out.itemsize):
        np.copyto(out[part], values[part])
        yield out[part].nbytes


class Widened:
    """A gradient that came in 16 bits, as one of float32; each part is widened when it is cut.

    Args:
        values: As they came, 1-D.
    """

    __slots__ = ("_values",)

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    @property
    def nbytes(self) -> int:
        """Size in float32."""
        return self._values.size * np.dtype(WIDE).itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return these elements, in memory of their own."""
        return self._values[part].astype(WIDE)
