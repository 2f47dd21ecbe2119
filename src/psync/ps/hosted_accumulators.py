"""One accumulator on a ps: its rule, its lock, who wants what of it; and its messages.

``AccumulatorService`` says when what happens to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from psync.accumulators import ArrayAccumulator, Take
from psync.errors import ConfigurationError, GradientError, RemoteProtocolError
from psync.net.peer import Reply
from psync.numerics.blocks import bytes_of
from psync.numerics.sums import Pieces
from psync.ps.cooperative_work import INLINE_BYTES
from psync.ps.update import NO_BYTES
from psync.specs import dtype_name, dtype_of
from psync.store.dense_accumulators import ConditionalAccumulator
from psync.store.ledger import Client
from psync.store.sparse_accumulators import SparseConditionalAccumulator, SparseGradient
from psync.wire.accumulator_messages import ApplyGradient, DefineAccumulator, GradientTaken
from psync.wire.tensors import to_bytes_view

T = TypeVar("T")


class TakeName(NamedTuple):
    """What a take is known by."""

    client: Client
    accumulator: str
    number: int


@dataclass(slots=True, eq=False)
class Wanted:
    """A take that a client has asked for."""

    name: TakeName
    take: Take[Any] | None  # None: the one that is backed up has made its value
    answer: Reply | None = None  # once it has its value


@dataclass(slots=True)
class Taker:
    """What one client wants of one accumulator."""

    acked_below: int = 0
    takes: dict[int, Wanted] = field(default_factory=dict)  # by number


class HostedAccumulator:
    """One accumulator."""

    def __init__(self, definition: DefineAccumulator) -> None:
        self.definition = definition
        self.rule = rule_of(definition)
        self.lock = asyncio.Lock()  # held while something is done to it in pieces
        self.takers: dict[Client, Taker] = {}
        self.waiting: dict[Take[Any], Wanted] = {}  # in the order in which they are served

    def fits_now(self, nbytes: int) -> bool:
        """Return whether work on so many bytes, and on the sum held, may be done at once."""
        return not self.lock.locked() and nbytes + self.rule.nbytes <= INLINE_BYTES

    def enter(self, name: TakeName, num_required: int) -> None:
        """Let a take wait.

        Raises:
            ConfigurationError: ``num_required`` is not above 0.
        """
        wanted = Wanted(name, self.rule.enter(num_required))
        self.takers[name.client].takes[name.number] = wanted
        assert wanted.take is not None, "it was made here"
        self.waiting[wanted.take] = wanted

    def wanted(self, client: Client, number: int) -> Wanted | None:
        """Return a take, if it waits or its value is kept."""
        taker = self.takers.get(client)
        return None if taker is None else taker.takes.get(number)

    def withdraw(self, wanted: Wanted) -> bool:
        """Let a take wait no longer; False: it does not wait, and stays as it is."""
        if wanted.take is None or self.waiting.pop(wanted.take, None) is None:
            return False
        if (taker := self.takers.get(wanted.name.client)) is not None:
            taker.takes.pop(wanted.name.number, None)
        self.rule.withdraw(wanted.take)
        return True

    async def in_turn(self, begin: Callable[[], Pieces[T]]) -> T:
        """Do work in pieces, with the loop running in between, when it is its turn."""
        async with self.lock:
            pieces = begin()
            while True:
                try:
                    next(pieces)
                except StopIteration as end:
                    return cast(T, end.value)
                await asyncio.sleep(0)


def other_parameters(first: DefineAccumulator, second: DefineAccumulator) -> ConfigurationError:
    """Return the error for two accumulators of one name."""
    names = [n for n in first.__slots__ if getattr(first, n) != getattr(second, n)]
    expected, got = (
        ", ".join(f"{name}={getattr(each, name)!r}" for name in names) for each in (first, second)
    )
    return ConfigurationError(
        f'accumulator "{first.name}": other parameters than at first: expected {expected}, '
        f"got {got}",
        hint="give another shared_name, or the same parameters",
    )


def definition_of(
    rule: ConditionalAccumulator | SparseConditionalAccumulator,
) -> DefineAccumulator:
    """Return the message that describes accumulators like ``rule``."""
    divisor = rule.divisor if isinstance(rule, SparseConditionalAccumulator) else ""
    return DefineAccumulator(
        rule.name, "sparse" if divisor else "dense", dtype_name(rule.dtype),
        None if rule.shape is None else list(rule.shape), rule.reduction.upper(),
        divisor, rule.forbid_nonfinite, rule.max_staleness,
    )  # fmt: skip


def rule_of(definition: DefineAccumulator) -> ArrayAccumulator[Any, Any]:
    """Return a rule of that kind, empty.

    Raises:
        ConfigurationError, RemoteProtocolError: It describes none.
    """
    options: dict[str, Any] = {
        "name": definition.name, "reduction_type": definition.reduction,
        "forbid_nonfinite": definition.forbid_nonfinite,
        "max_staleness": definition.max_staleness,
    }  # fmt: skip
    if definition.kind == "dense":
        return ConditionalAccumulator(definition.dtype, definition.shape, **options)
    if definition.kind == "sparse":
        options["divisor"] = definition.divisor
        return SparseConditionalAccumulator(definition.dtype, definition.shape, **options)
    raise RemoteProtocolError(
        f'accumulator "{definition.name}": expected kind "dense" or "sparse", got '
        f"{definition.kind!r}"
    )


def gradient_of(
    message: ApplyGradient, body: Sequence[memoryview], rule: ArrayAccumulator[Any, Any]
) -> object:
    """Return what a rule takes for a gradient."""
    sparse = isinstance(rule, SparseConditionalAccumulator)
    segments = list(body) or [NO_BYTES] * (1 + sparse)  # of a gradient without rows
    if len(segments) != 1 + sparse:
        raise GradientError(f"{rule}: expected {1 + sparse} arrays, got {len(segments)}")
    expected = math.prod(message.shape) * rule.dtype.itemsize
    if min(message.shape, default=0) < 0 or len(segments[-1]) != expected:
        raise GradientError(
            f"{rule}: expected {expected} bytes for shape {tuple(message.shape)} {rule.dtype}, "
            f"got {len(segments[-1])}"
        )
    values = bytes_of(segments[-1]).view(rule.dtype).reshape(message.shape)
    if not sparse:
        return values
    if len(segments[0]) % 8:
        raise GradientError(f"{rule}: {len(segments[0])} bytes are no int64 indices")
    indices = bytes_of(segments[0]).view(dtype_of("int64"))
    return indices, values, message.dense_shape


def reply_of(take: Take[Any]) -> Reply:
    result: np.ndarray | SparseGradient = take.result()
    if isinstance(result, SparseGradient):
        arrays, dense_shape = [result.indices, result.values], list(result.dense_shape)
    else:
        arrays, dense_shape = [result], None
    message = GradientTaken(take.count, take.step, list(arrays[-1].shape), dense_shape)
    return Reply(message, [to_bytes_view(array) for array in arrays])
