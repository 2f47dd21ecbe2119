"""Takes of accumulators on a ps: the accumulator, its takes, and the requests that wait for them.

``HostedAccumulator`` is one accumulator with its rule. ``GradientTakes`` has the takes of all; it
knows no connection. ``TakeWaits`` has the requests, and the connections over which they came.

    a take     what it has                       ends
    waits      a place in the rule               when nobody asks for it any more: it gets nothing
    complete   its gradients, which are nobody   when its value is made, whoever is lost meanwhile:
               else's: decided by an entry       a backup has decided the same, and makes it, too
    kept       its value                         when its client has it, or wants it no more, or
                                                 is fenced

What completes takes returns the compute that makes their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from psync.accumulators import Accumulator, Applied, Take
from psync.errors import (
    ConfigurationError,
    FencedError,
    RemoteProtocolError,
    UsageError,
    ValueMismatchError,
)
from psync.net.connection import Answer, Connection, Request
from psync.numerics.memory import bytes_of
from psync.numerics.sums import Pieces, at_once, sum_dtype
from psync.ps.computes import Compute
from psync.ps.cooperative_work import LongWork
from psync.ps.plans import NO_BYTES
from psync.specs import dtype_name, dtype_of
from psync.store.dense_accumulators import ConditionalAccumulator
from psync.store.ledger import Client
from psync.store.sparse_accumulators import SparseConditionalAccumulator, SparseGradient
from psync.wire.codec import Message
from psync.wire.messages import (
    ApplyGradient,
    DefineAccumulator,
    EndTakes,
    ForgetTakes,
    GradientTaken,
    TakeGradient,
)
from psync.wire.tensors import to_bytes_view


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
    answer: Answer | None = None  # once its value is made


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
        self.takers: dict[Client, Taker] = {}
        self.waiting: dict[Take[Any], Wanted] = {}  # in the order in which they are served

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


def other_parameters(first: DefineAccumulator, second: DefineAccumulator) -> ConfigurationError:
    """Return the error for two accumulators of one name."""
    names = [n for n in first.__slots__ if getattr(first, n) != getattr(second, n)]
    expected, got = (
        ", ".join(f"{name}={getattr(each, name)!r}" for name in names) for each in (first, second)
    )
    return ConfigurationError(
        f'accumulator "{first.name}": other parameters than at first: expected {expected}, '
        f"got {got}",
        hint="use another shared_name, or the same parameters",
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


def rule_of(definition: DefineAccumulator) -> Accumulator[Any, Any]:
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
    message: ApplyGradient, body: Sequence[memoryview], rule: Accumulator[Any, Any]
) -> object:
    """Return what a rule takes for a gradient."""
    sparse = isinstance(rule, SparseConditionalAccumulator)
    segments = list(body) or [NO_BYTES] * (1 + sparse)  # of a gradient without rows
    if len(segments) != 1 + sparse:
        raise ValueMismatchError(f"{rule}: expected {1 + sparse} arrays, got {len(segments)}")
    expected = math.prod(message.shape) * rule.dtype.itemsize
    if min(message.shape, default=0) < 0 or len(segments[-1]) != expected:
        raise ValueMismatchError(
            f"{rule}: expected {expected} bytes for shape {tuple(message.shape)} {rule.dtype}, "
            f"got {len(segments[-1])}"
        )
    try:
        values = bytes_of(segments[-1]).view(rule.dtype).reshape(message.shape)
        if not values.size:  # then numpy bounds the shape by the size of an element
            np.empty(values.shape, sum_dtype(rule.dtype))
    except (ValueError, OverflowError) as exc:
        raise ValueMismatchError(f"{rule}: no array has the shape {message.shape!r:.80}") from exc
    if not sparse:
        return values
    if len(segments[0]) % 8:
        raise ValueMismatchError(f"{rule}: {len(segments[0])} bytes are not int64 indices")
    indices = bytes_of(segments[0]).view(dtype_of("int64"))
    return indices, values, message.dense_shape


def reply_of(take: Take[Any]) -> Answer:
    result: np.ndarray | SparseGradient = take.result()
    if isinstance(result, SparseGradient):
        arrays, dense_shape = [result.indices, result.values], list(result.dense_shape)
    else:
        arrays, dense_shape = [result], None
    message = GradientTaken(take.count, take.step, list(arrays[-1].shape), dense_shape)
    return message, [to_bytes_view(array) for array in arrays]


class TakeWaits:
    """Who waits for takes on one ps.

    Args:
        left: Told of takes of one client for which no request waits any more, though they have
            not been settled.
    """

    def __init__(self, left: Callable[[Client, list[TakeName]], None]) -> None:
        self._left = left
        self._waiting: dict[TakeName, list[Request[Any]]] = {}
        self._peers: set[Connection] = set()  # whose end is heard of

    def add(self, name: TakeName, request: Request[Any]) -> None:
        """Let a request wait."""
        self._waiting.setdefault(name, []).append(request)
        request.on_given_up = self._given_up
        if request.peer not in self._peers:
            self._peers.add(request.peer)
            request.peer.on_closed.append(self._note_closed)

    def settle(self, name: TakeName, outcome: Answer | Exception) -> None:
        """Answer all requests that wait for a take."""
        for request in self._waiting.pop(name, ()):
            if isinstance(outcome, Exception):
                request.fail(outcome)
            else:
                request.answer(*outcome)

    def settle_all(self, error: Exception) -> None:
        """Let nobody wait, and forget the connections, which may outlive this."""
        for name in list(self._waiting):
            self.settle(name, error)
        for peer in self._peers:
            peer.on_closed.remove(self._note_closed)
        self._peers.clear()

    def _given_up(self, request: Request[Any]) -> None:
        if not request.peer.is_closed:  # else with all others of that connection
            self.end(lambda each: each is request)

    def _note_closed(self, peer: Connection) -> None:
        self._peers.discard(peer)
        self.end(lambda each: each.peer is peer)

    def end(self, ends: Callable[[Request[Any]], bool]) -> None:
        """Let these requests wait no longer."""
        left: dict[Client, list[TakeName]] = {}
        for name, requests in list(self._waiting.items()):
            self._waiting[name] = [each for each in requests if not ends(each)]
            if not self._waiting[name]:
                del self._waiting[name]
                left.setdefault(name.client, []).append(name)
        for client, names in left.items():  # together: those that leave get nothing
            self._left(client, names)


class GradientTakes:
    """What clients take of the accumulators of one ps.

    Args:
        task: Name of the ps, for messages.
        work: Of the process.
        waits: Who waits for takes.
    """

    def __init__(self, task: str, work: LongWork, waits: TakeWaits) -> None:
        self._task = task
        self._work = work
        self._waits = waits

    def enter(
        self, hosted: HostedAccumulator, client: Client, message: TakeGradient
    ) -> Compute | None:
        """Let a take wait; one that waits goes on waiting, one that has its value gets it.

        Raises:
            ConfigurationError: It is of no gradients.
            UsageError: Its client has said that it does not want it.
        """
        hosted.rule.as_required(message.num_required)
        taker = hosted.takers.setdefault(client, Taker())
        if message.take < max(taker.acked_below, message.acked_below):
            raise UsageError(f"{self._task}: {client[0]} has cancelled take {message.take}")
        changed = self._acknowledge(hosted, taker, message.acked_below)
        name = TakeName(client, message.accumulator, message.take)
        wanted = taker.takes.get(message.take)
        if wanted is None:
            hosted.enter(name, message.num_required)
            changed = True
        elif wanted.answer is not None:
            self._waits.settle(name, wanted.answer)
        return self._serve((hosted,)) if changed else None

    def forget(
        self, hosted: HostedAccumulator, client: Client, message: ForgetTakes
    ) -> Compute | None:
        """Forget takes that a client has, or does not want any more."""
        taker = hosted.takers.get(client)
        if taker is not None and self._acknowledge(hosted, taker, message.acked_below):
            return self._serve((hosted,))
        return None

    def _acknowledge(self, hosted: HostedAccumulator, taker: Taker, acked_below: int) -> bool:
        """Do ``forget``; return whether some of them waited."""
        if acked_below <= taker.acked_below:
            return False
        taker.acked_below = acked_below
        error = UsageError(f"{self._task}: this take was cancelled")
        waited = False
        for number in [n for n in taker.takes if n < acked_below]:
            wanted = taker.takes.pop(number)
            if hosted.withdraw(wanted):
                waited = True
                self._waits.settle(wanted.name, error)
        return waited

    def end(
        self, accumulators: Mapping[str, HostedAccumulator], client: Client, message: EndTakes
    ) -> Compute | None:
        """Let takes wait no longer for which no request waits."""
        left: dict[HostedAccumulator, None] = {}
        for accumulator, number in message.takes:
            hosted = accumulators.get(accumulator)
            wanted = None if hosted is None else hosted.wanted(client, number)
            if hosted is not None and wanted is not None and hosted.withdraw(wanted):
                left[hosted] = None
        return self._serve(left)  # not before all have left: those that leave get nothing

    def fence(
        self, accumulators: Iterable[HostedAccumulator], task: str, below: int
    ) -> Compute | None:
        """Let incarnations of ``task`` below ``below`` wait no more, and forget their values."""
        error = FencedError(f"{self._task}: {task} has been replaced by incarnation {below}")
        left: dict[HostedAccumulator, None] = {}
        for hosted in accumulators:
            for client in [c for c in hosted.takers if c[0] == task and c[1] < below]:
                for wanted in hosted.takers.pop(client).takes.values():
                    if hosted.withdraw(wanted):
                        left[hosted] = None
                        self._waits.settle(wanted.name, error)
        return self._serve(left)

    def _serve(self, changed: Iterable[HostedAccumulator]) -> Compute | None:
        """Complete takes that have enough gradients now."""
        completed: dict[Take[Any], Wanted] = {}
        nbytes = 0
        for hosted in changed:
            size = hosted.rule.nbytes
            if (take := hosted.rule.complete()) is not None:
                completed[take] = hosted.waiting.pop(take)
                nbytes += size
        if not completed:
            return None
        names = [wanted.name.accumulator for wanted in completed.values()]
        making = (piece for take in completed for piece in take.making())
        return self._compute(names, making, nbytes, completed)

    def add(
        self,
        request: Request[Any],
        hosted: HostedAccumulator,
        applied: Applied[Any],
        answer: Message,
        nbytes: int,
    ) -> Compute:
        """Add a gradient that has been accepted, and complete what it has completed."""
        take = applied.completed
        completed = {} if take is None else {take: hosted.waiting.pop(take)}
        return self._compute(
            [hosted.rule.name], applied.work(), nbytes, completed, lambda: request.answer(answer)
        )

    def _compute(
        self,
        accumulators: Sequence[str],
        pieces: Pieces[None],
        nbytes: int,
        completed: Mapping[Take[Any], Wanted],
        answer: Callable[[], None] = lambda: None,
    ) -> Compute:
        def done() -> None:
            for take, wanted in completed.items():
                wanted.answer = reply_of(take)
                self._waits.settle(wanted.name, wanted.answer)
            answer()

        return Compute(
            accumulators, done, nbytes, lambda: at_once(pieces), lambda: self._work.finish(pieces)
        )
