"""Replication state of accumulators that checkpoints omit: contents, takes, kept answers.

A snapshot has the definitions and steps of accumulators. Their contents, the waiting takes and the
answers go to the backup as entries before the first one of the log, so that all later entries lead
to the same bits.

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from psync.accumulators import Held
from psync.errors import RemoteProtocolError
from psync.net.connection import Handler, Request
from psync.numerics.memory import bytes_of
from psync.ps.accumulators import AccumulatorService
from psync.ps.executor import Listed
from psync.ps.plans import NO_BYTES
from psync.ps.takes import HostedAccumulator, TakeName, Taker, Wanted
from psync.store.ledger import Client
from psync.store.ledger_snapshot import GradientStates, gradients_of, note_gradients
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import Done, GradientApplied, HoldGradients, KeepAnswers
from psync.wire.tensors import to_bytes_view

T = TypeVar("T")

NOBODY: Client = ("", 0)
"""In place of a client: nobody has asked for these entries."""

PIECE_BYTES = 8 << 20
"""What is copied between two turns of the loop."""

MAX_LISTED = 256
"""Of one message: a frame has room for few."""


class AccumulatorSection:
    """The accumulators of one ps, as a section of its state: see ``service.Section``.

    Args:
        service: Its accumulators.
    """

    def __init__(self, service: AccumulatorService) -> None:
        self._service = service

    def control(self) -> list[Any]:
        """Return what counts and waits."""
        return self._service.control()

    # On the one that is backed up.

    async def entries(self) -> list[Listed]:
        """Return entries that give a backup all of it; meanwhile nothing may be done to it.

        Cancellation: Safe.
        """
        entries: list[Listed] = []
        for name, hosted in self._service.hosted.items():
            held = hosted.rule.held()
            body = [] if held is None else await _copies(held.arrays)
            for message in _contents(name, hosted, held):
                entries.append(_entry(message, body))
                body = []
            entries += [_entry(*each) for each in _kept(hosted)]
        states = gradients_of(self._service.ledger, _pack)
        entries += [_entry(KeepAnswers(answers, [], [])) for answers in _parts(states.answers)]
        entries += [_entry(KeepAnswers([], calls, [])) for calls in _parts(states.calls)]
        return entries

    # On its backup.

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes which entry of a log."""
        return {
            **self._service.replayed(),
            HoldGradients: Handler(self._hold), KeepAnswers: Handler(self._keep),
        }  # fmt: skip

    async def _hold(self, request: Request[HoldGradients]) -> None:
        message, body = request.message, request.segments
        hosted = self._service.hosted[message.accumulator]  # its snapshot has it
        if message.count:
            await _fill(
                hosted.rule.hold(message.count, message.weight, message.shape, message.rows), body
            )
        for task, incarnation, acked_below in message.takers:
            hosted.takers[task, incarnation] = Taker(acked_below)
        for task, incarnation, number, num_required in message.waiting:
            hosted.enter(TakeName((task, incarnation), message.accumulator, number), num_required)
        request.answer(Done())

    def _keep(self, request: Request[KeepAnswers]) -> None:
        message, body = request.message, request.segments
        note_gradients(self._service.ledger, GradientStates(message.answers, message.calls), decode)
        at = 0
        for task, incarnation, accumulator, number, packed, count in message.takes:
            segments = body[at : at + count] or [NO_BYTES] * count  # without elements
            at += count
            client = (task, incarnation)
            name = TakeName(client, accumulator, number)
            kept = Wanted(name, None, (decode(packed), segments))
            self._service.hosted[accumulator].takers[client].takes[number] = kept
        request.answer(Done())


def _entry(message: Message, body: Sequence[memoryview] = ()) -> Listed:
    return NOBODY, message, body


def _contents(name: str, hosted: HostedAccumulator, held: Held | None) -> Iterator[HoldGradients]:
    """Yield messages, the first of which goes with the arrays that are held."""
    takers = [(*client, taker.acked_below) for client, taker in hosted.takers.items()]
    waiting = [
        (*wanted.name.client, wanted.name.number, take.num_required)
        for take, wanted in hosted.waiting.items()
    ]
    if held is not None:
        yield HoldGradients(name, held.count, held.weight, list(held.shape), held.rows, [], [])
    for some in _parts(takers):
        yield HoldGradients(name, 0, 0.0, [], 0, some, [])
    for some_waiting in _parts(waiting):
        yield HoldGradients(name, 0, 0.0, [], 0, [], some_waiting)


def _kept(hosted: HostedAccumulator) -> Iterator[tuple[KeepAnswers, Sequence[memoryview]]]:
    for taker in hosted.takers.values():
        for wanted in taker.takes.values():
            if wanted.answer is not None:
                (task, incarnation), accumulator, number = wanted.name
                answer, brought = wanted.answer
                segments = [cast(memoryview, each) for each in brought]
                packed = encode(answer)
                listed = task, incarnation, accumulator, number, packed, len(segments)
                yield KeepAnswers([], [], [listed]), segments


def _pack(answer: object) -> bytes | None:
    return encode(answer) if isinstance(answer, GradientApplied) else None


def _parts(listed: list[T]) -> Iterator[list[T]]:
    return (listed[at : at + MAX_LISTED] for at in range(0, len(listed), MAX_LISTED))


def _pieces(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the memory of arrays, as bytes."""
    for array in arrays:
        data = bytes_of(array)
        for at in range(0, data.size, PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]


async def _copies(arrays: Iterable[np.ndarray]) -> list[memoryview]:
    copies = []
    for piece in _pieces(arrays):
        copies.append(to_bytes_view(piece.copy()))
        await asyncio.sleep(0)
    return copies


async def _fill(arrays: Iterable[np.ndarray], body: Sequence[memoryview]) -> None:
    """Write to arrays what ``_copies`` has returned for others of the same shapes."""
    pieces = list(_pieces(arrays))
    if list(map(len, pieces)) != list(map(len, body)):
        raise RemoteProtocolError("an accumulator's contents differ from the announced ones")
    for piece, data in zip(pieces, body, strict=True):
        piece[:] = bytes_of(data)
        await asyncio.sleep(0)
