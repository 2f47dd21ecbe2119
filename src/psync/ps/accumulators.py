"""Accumulators of a ps, a section of its state: gradients are applied once, takes wait for enough.

The rules (``psync.accumulators``) decide; this feeds requests to them and delays the answers.

    message               then
    DefineAccumulator     make it; the same again changes nothing, another one is refused
    UpdateAccumulator     judged by the ledger as pushes are, so it happens at most once;
                          a stale gradient leaves no trace, its next run is judged again
    TakeGradient          waits in the rule; its value is kept until the client says it is there
    EndTakes              from the client: it has the answers to takes, or has given them up;
                          from here: no request waits for them any more. They leave the rule

    a take     what it has                       ends
    waits      a place in the rule               when nobody asks for it any more: it gets nothing
    complete   its gradients, which are nobody   when its value is made, whoever is lost meanwhile:
               else's: decided by an entry       a backup has decided the same, and makes it, too
    kept       its value                         when its client has it, or wants it no more, or
                                                 is fenced

The takes of an accumulator have a ledger of their own, by client and number, so that one which
waits for an hour keeps no other answers. A take waits as long as a connection does on which it was
asked for. One whose connection ends, or whose client is fenced or gives it up, leaves the rule at
once and consumes nothing; asked for again on another connection, it waits at the end of the queue.

Each of these messages is an entry of the log (``executor``): the rule decides when it is judged.
What follows for arrays is a compute (``computes``), in the order of entries for each accumulator: a
gradient is answered when it is added, a take gets its gradients at once and its value when that is
made. The log does not record waiting requests: an entry of a take is executed when that waits in
the rule, or is complete.

Whether the values of a large gradient are finite is looked for before it becomes an entry, if it
matters: that is a fact of the message alone.

A snapshot has the definitions and steps of accumulators. Their contents, the waiting takes and the
answers go to a backup beside it, so that all entries lead to the same bits. Source: docs/design.md,
"Failover".
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from psync.accumulators import (
    Accumulator,
    SparseConditionalAccumulator,
    Take,
    count_nonfinite,
    other_parameters,
    rule_of,
)
from psync.errors import (
    CheckpointCorrupt,
    ConfigurationError,
    ConnectionLost,
    FencedError,
    PsyncError,
    RemoteProtocolError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.net.connection import Answer, Handler, OwnRequest, Request
from psync.numerics.memory import bytes_of
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import Pieces, at_once, cuts, sum_dtype
from psync.ps.computes import Compute
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.ps.executor import Executor, nobodys
from psync.ps.plans import NO_BYTES
from psync.specs import dtype_of
from psync.store.ledger import Client, Ledger, Ticket
from psync.store.snapshot_state import NOTHING, SenderState, unpack
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    AccumulatorState,
    DefineAccumulator,
    EndTakes,
    TakeGradient,
    UpdateAccumulator,
)
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Of an array, in a copy for a backup: one message has one, and may not take long."""

MAX_ACCUMULATORS = 65_536
"""Of one ps. Their names come from peers."""


class HostedAccumulator:
    """One accumulator. The owners of its takes are their tickets."""

    def __init__(self, definition: DefineAccumulator) -> None:
        self.definition = definition
        self.rule = rule_of(definition)
        self.takes = Ledger()  # those that are not forgotten; their answer is None until it is made

    def enter(self, ticket: Ticket, num_required: int) -> None:
        """Let a take wait.

        Raises:
            ConfigurationError: ``num_required`` is not above 0.
        """
        self.rule.enter(num_required, ticket)
        self.takes.record(ticket, None)

    def withdraw(self, leaves: Callable[[Ticket], bool]) -> list[Ticket]:
        """Let those of the waiting takes wait no longer that leave, and return them."""
        left = [take for take in self.rule.waiting if leaves(take.owner)]
        for take in left:
            self.rule.withdraw(take)
            self.takes.forget(take.owner.client, take.owner.sequence)
        return [take.owner for take in left]

    def taken(self, arrays: list[memoryview]) -> Sequence[SenderState]:
        """Return what clients have said of takes, and the answers that are kept, for a backup."""

        def pack(answer: object) -> bytes | None:
            if answer is None:
                return None
            message, segments = cast(Answer, answer)
            arrays.extend(cast(list[memoryview], segments))
            return encode(message)

        return self.takes.snapshot(pack).senders

    def restore(self, senders: Iterable[Any], arrays: Iterator[memoryview]) -> None:
        """Know of takes what ``taken`` has returned elsewhere."""

        def unpack(data: bytes) -> Answer:
            message = cast(AccumulatorState, decode(data))
            count = 1 if message.dense_shape is None else 2
            return message, list(itertools.islice(arrays, count))

        known = tuple(SenderState(*each) for each in senders)
        self.takes.restore(replace(NOTHING, senders=known), unpack)

    def state(self, outcome: str = "") -> AccumulatorState:
        """Return how far it is."""
        return AccumulatorState(outcome, self.rule.num_accumulated(), self.rule.step)


class Accumulators:
    """The accumulators of one ps, on one timeline of one coordinator: see
    ``backups.primary.Section``.

    Args:
        task: Name of the ps, for messages.
        work: What takes long.
        ledger: Which updates were seen, and who has been replaced.
        executor: In whose order all is done.
        packed: Those that there are, as a snapshot has them; of two of a name the second.

    Attributes:
        hosted: The accumulators, by their names.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        ledger: Ledger,
        executor: Executor,
        packed: Iterable[tuple[bytes, int]] = (),
    ) -> None:
        self.hosted: dict[str, HostedAccumulator] = {}
        self._task = task
        self._work = work
        self._ledger = ledger
        self._executor = executor
        # Requests that wait for a take, by client, accumulator and number of the take.
        self._waiting: dict[tuple[Client, str, int], list[Request[TakeGradient]]] = {}
        self._left: list[Request[TakeGradient]] = []  # of them: whose connections have ended
        for definition, step in unpack_accumulators(packed):
            hosted = self.hosted[definition.name] = HostedAccumulator(definition)
            hosted.rule.set_global_step(step)

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            DefineAccumulator: self._executor.logged(Handler(self._define)),
            UpdateAccumulator: Handler(self._gradient),
            TakeGradient: Handler(self._take),
            EndTakes: self._executor.logged(Handler(self._end)),
        }

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who does which entry of the log of the one that is backed up."""
        return {**self.handlers(), TakeGradient: self._executor.logged(Handler(self._enter))}

    def packed(self) -> tuple[tuple[bytes, int], ...]:
        """Return how a snapshot keeps what accumulators are, and their steps."""
        return tuple((encode(each.definition), each.rule.step) for each in self.hosted.values())

    def control(self) -> list[Any]:
        """Return what counts and waits, as plain data in an order of its own, for a digest."""
        return [
            [name, hosted.rule.num_accumulated(), hosted.rule.step,
             [[*take.owner.client, take.owner.sequence] for take in hosted.rule.waiting],
             hosted.takes.control(lambda _: b"")[0]]
            for name, hosted in sorted(self.hosted.items())
        ]  # fmt: skip

    def end(self) -> None:
        """Another snapshot or coordinator is served: whoever waits asks again, if it may."""
        error = ConnectionLost(f"{self._task} serves another snapshot, or coordinator")
        for requests in self._waiting.values():
            for request in requests:
                request.fail(error)
        self._waiting.clear()

    def promoted(self) -> None:
        """The log that it has followed has ended: takes wait no longer, nobody waits for them.

        The connections are gone on which they were asked for. Who wants one asks again.
        """
        for hosted in self.hosted.values():
            hosted.withdraw(lambda _: True)

    def fence(self, task: str, below: int) -> Compute | None:
        """Let incarnations of ``task`` below ``below`` wait no more, and forget their values."""
        error = FencedError(f"{self._task}: {task} has been replaced by incarnation {below}")
        left = []
        for hosted in self.hosted.values():
            hosted.takes.fence(task, below)
            tickets = hosted.withdraw(
                lambda ticket: ticket.client[0] == task and ticket.client[1] < below
            )
            self._settle(hosted, tickets, error)
            if tickets:
                left.append(hosted)
        return self._serve(left)  # not before all have left: those that leave get nothing

    def statistics(self) -> dict[str, int]:
        """Return sizes, and how many takes wait or have answers that are kept."""
        hosted = self.hosted.values()
        waiting = sum(len(each.rule.waiting) for each in hosted)
        return {
            "accumulators": len(self.hosted),
            "gradients": sum(each.rule.num_accumulated() for each in hosted),
            "bytes": sum(each.rule.nbytes for each in hosted),
            "waiting": waiting,
            "kept": sum(each.takes.statistics()["answers"] for each in hosted) - waiting,
        }

    def _known(self, client: Client, name: str) -> HostedAccumulator:
        self._ledger.check_incarnation(*client)
        hosted = self.hosted.get(name)
        if hosted is None:
            raise UnknownVariableError(f'{self._task}: accumulator "{name}" is not defined')
        return hosted

    def _define(self, request: Request[DefineAccumulator]) -> None:
        message = request.message
        self._ledger.check_incarnation(*request.peer.client)
        known = self.hosted.get(message.name)
        if known is None:
            if len(self.hosted) >= MAX_ACCUMULATORS:
                raise UsageError(f"{self._task}: more than {MAX_ACCUMULATORS} accumulators")
            self.hosted[message.name] = HostedAccumulator(message)
        elif known.definition != message:
            raise other_parameters(known.definition, message)
        request.answer(self.hosted[message.name].state())

    # What changes an accumulator.

    def _gradient(self, request: Request[UpdateAccumulator]) -> None:
        hosted = self.hosted.get(request.message.accumulator)
        is_large = sum(map(len, request.segments)) > INLINE_BYTES
        if is_large and hosted is not None and hosted.rule.forbid_nonfinite:
            request.start(self._when_looked_through(request, hosted.rule.dtype))
        else:
            self._submit(request)

    async def _when_looked_through(
        self, request: Request[UpdateAccumulator], dtype: np.dtype[Any]
    ) -> None:
        """Count values that are not finite, with the loop running in between; then do it."""
        data = bytes_of(request.segments[-1])
        values = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
        nonfinite = 0
        for part in cuts(values.size, dtype.itemsize):
            nonfinite += count_nonfinite(values[part])
            await asyncio.sleep(0)
        self._submit(request, nonfinite)

    def _submit(self, request: Request[UpdateAccumulator], nonfinite: int | None = None) -> None:
        self._executor.submit(
            request, request.message, request.segments, lambda: self._change(request, nonfinite)
        )

    def _change(self, request: Request[UpdateAccumulator], nonfinite: int | None) -> Compute | None:
        """Do what changes an accumulator, at most once."""
        client, message = request.peer.client, request.message
        hosted = self._known(client, message.accumulator)
        closure = message.closure if message.closure >= 0 else None
        what = f"{'step' if message.shape is None else 'gradient'} of {message.accumulator}"
        try:
            ticket = self._ledger.judge(
                client, message.sequence, message.acked_below, closure, message.ordinal,
                what.encode(), (message.accumulator,),
            )  # fmt: skip
            if ticket.recorded or not ticket.first:
                pass
            elif message.shape is not None:
                return self._offer(request, message.shape, hosted, ticket, nonfinite)
            else:
                warning = hosted.rule.set_global_step(message.step)
                if warning is not None:
                    logger.warning("%s: %s", self._task, warning)
                request.answer(self._ledger.record(ticket, hosted.state("accepted")))
                return None
        except Exception:
            self._ledger.refuse(client, message.sequence)
            raise
        if not ticket.recorded:
            self._ledger.record(ticket, hosted.state("duplicate"))
        # What it repeats may not be added yet.
        return Compute([message.accumulator], lambda: request.answer(ticket.answer))

    def _offer(
        self,
        request: Request[UpdateAccumulator],
        shape: Sequence[int],
        hosted: HostedAccumulator,
        ticket: Ticket,
        nonfinite: int | None,
    ) -> Compute | None:
        """Offer a gradient to the rule."""
        rule, body, message = hosted.rule, request.segments, request.message
        gradient = gradient_of(shape, message.dense_shape, body, rule)
        nbytes = rule.nbytes + sum(map(len, body))
        applied = rule.offer(gradient, message.step, message.weight, nonfinite)
        answer = AccumulatorState(applied.outcome.value, applied.count, applied.step)
        if applied.adding is None:  # nothing has changed: the closure's next run is judged anew
            self._ledger.refuse(ticket.client, ticket.sequence)
            request.answer(answer)
            return None
        self._ledger.record(ticket, answer)
        completed = [] if applied.completed is None else [(hosted, applied.completed)]
        return self._compute(
            [rule.name], applied.work(), nbytes, completed, lambda: request.answer(answer)
        )

    # Takes.

    def _take(self, request: Request[TakeGradient]) -> None:
        peer = request.peer
        if peer.is_closed:
            raise ConnectionLost(f"{self._task}: {peer.task} has gone")
        self._waiting.setdefault(_name(request), []).append(request)
        request.on_given_up = self._given_up

        def entered(outcome: object) -> None:
            if isinstance(outcome, PsyncError):  # any other: the task ends, and its backup answers
                self._waits_no_more(request)
                request.fail(outcome)

        own = OwnRequest(peer, request.message, [], entered)
        self._executor.submit(own, request.message, (), lambda: self._enter(own))

    def _enter(self, request: Request[TakeGradient]) -> Compute | None:
        """Let a take wait; one that waits goes on waiting, one that has its value gets it."""
        client, message = request.peer.client, request.message
        hosted = self._known(client, message.accumulator)
        hosted.rule.as_required(message.num_required)
        ticket = hosted.takes.judge(client, message.take, message.acked_below, None, 0, 0)
        changed = self._acknowledged(hosted, client, message.acked_below)
        if not ticket.recorded:
            hosted.enter(ticket, message.num_required)
            changed = True
        elif ticket.answer is not None:
            self._settle(hosted, [ticket], ticket.answer)
        return self._serve([hosted]) if changed else None

    def _end(self, request: Request[EndTakes]) -> Compute | None:
        client, message = request.peer.client, request.message
        hosted = self.hosted.get(message.accumulator)  # nobody hears of an error
        if hosted is None:
            return None
        changed = bool(
            hosted.withdraw(lambda each: each.client == client and each.sequence in message.takes)
        )
        if not message.takes:  # the ledger forgets those below; this number is not used up
            hosted.takes.judge(client, message.acked_below, message.acked_below, None, 0, 0)
            changed |= self._acknowledged(hosted, client, message.acked_below)
        return self._serve([hosted]) if changed else None

    def _acknowledged(self, hosted: HostedAccumulator, client: Client, below: int) -> bool:
        """Let takes wait no longer that their client has given up; return whether some waited.

        Those of its older incarnations, too: the ledger of takes has forgotten them.
        """
        task, newest = client[0], (client[1], below)
        left = hosted.withdraw(
            lambda each: each.client[0] == task and (each.client[1], each.sequence) < newest
        )
        self._settle(hosted, left, UsageError(f"{self._task}: this take was cancelled"))
        return bool(left)

    def _serve(self, changed: Iterable[HostedAccumulator]) -> Compute | None:
        """Complete takes that have enough gradients now."""
        nbytes, completed = 0, []
        for hosted in changed:
            size = hosted.rule.nbytes
            if (take := hosted.rule.complete()) is not None:
                completed.append((hosted, take))
                nbytes += size
        if not completed:
            return None
        names = [hosted.rule.name for hosted, _ in completed]
        making = (piece for _, take in completed for piece in take.making())
        return self._compute(names, making, nbytes, completed)

    def _compute(
        self,
        names: Sequence[str],
        pieces: Pieces[None],
        nbytes: int,
        completed: Sequence[tuple[HostedAccumulator, Take[Any]]],
        answer: Callable[[], None] = lambda: None,
    ) -> Compute:
        def done() -> None:
            for hosted, take in completed:
                take.owner.answer = taken = answer_of(take)
                self._settle(hosted, [take.owner], taken)
            answer()

        return Compute(
            names, done, nbytes, lambda: at_once(pieces), lambda: self._work.finish(pieces)
        )

    # Requests that wait for takes.

    def _settle(
        self, hosted: HostedAccumulator, tickets: Iterable[Ticket], outcome: object
    ) -> None:
        """Answer all requests that wait for takes."""
        for ticket in tickets:
            name = ticket.client, hosted.rule.name, ticket.sequence
            for request in self._waiting.pop(name, ()):
                if isinstance(outcome, Exception):
                    request.fail(outcome)
                else:
                    request.answer(*cast(Answer, outcome))

    def _given_up(self, request: Request[TakeGradient]) -> None:
        """Let a request wait no longer; all those of a connection that has ended go together."""
        self._left.append(request)
        if not request.peer.is_closed:
            self._end_left()
        elif len(self._left) == 1:
            asyncio.get_running_loop().call_soon(self._end_left)

    def _end_left(self) -> None:
        left, self._left = self._left, []
        ended: dict[tuple[Client, str], list[int]] = {}
        for request in left:
            if self._waits_no_more(request):
                client, accumulator, take = _name(request)
                ended.setdefault((client, accumulator), []).append(take)
        for (client, accumulator), takes in ended.items():
            ending = nobodys(client, EndTakes(accumulator, 0, takes))
            self._executor.submit(ending, ending.message, (), partial(self._end, ending))

    def _waits_no_more(self, request: Request[TakeGradient]) -> bool:
        """Note that a request waits no more; return whether no other waits for its take."""
        name = _name(request)
        requests = self._waiting.get(name)
        if requests is None:
            return False
        self._waiting[name] = others = [each for each in requests if each is not request]
        if not others:
            del self._waiting[name]
        return not others

    # What a backup has to know beside a snapshot.

    async def live(self, arrays: list[memoryview]) -> Any:
        """Return contents, takes and answers; see ``backups.primary.Section``."""
        hosted = []
        for name, each in self.hosted.items():
            contents: tuple[Any, ...] | None = None
            if (held := each.rule.held()) is not None:
                copies = [await asyncio.to_thread(piece.copy) for piece in _pieces(held[1])]
                arrays += map(to_bytes_view, copies)
                contents = *held[0], len(copies)
            waiting = [
                (*take.owner.client, take.owner.sequence, take.num_required)
                for take in each.rule.waiting
            ]
            hosted.append((name, contents, each.taken(arrays), waiting))
        updates = self._ledger.snapshot(_pack, bytes)
        return hosted, updates.senders, updates.variable_sets, updates.calls

    async def restore(self, state: Any, arrays: Iterator[memoryview]) -> None:
        """Take what ``live`` has returned; the snapshot had the accumulators."""
        hosted, senders, sets, calls = state
        for name, contents, takers, waiting in hosted:
            each = self.hosted[name]
            if contents is not None:
                *held, count = contents
                here = _pieces(each.rule.hold(*held))
                came = list(itertools.islice(arrays, count))
                if list(map(len, here)) != list(map(len, came)):
                    raise RemoteProtocolError(f'the contents of "{name}" do not have its size')
                for piece, data in zip(here, came, strict=True):
                    await asyncio.to_thread(np.copyto, piece, bytes_of(data))
            each.restore(takers, arrays)
            for task, incarnation, number, num_required in waiting:
                ticket = each.takes.judge((task, incarnation), number, 0, None, 0, 0)
                each.enter(ticket, num_required)
        known = tuple(SenderState(*each) for each in senders)
        updates = replace(NOTHING, senders=known, variable_sets=sets, calls=calls)
        self._ledger.restore(updates, decode)


def gradient_of(
    shape: Sequence[int],
    dense_shape: Sequence[int] | None,
    body: Sequence[memoryview],
    rule: Accumulator[Any, Any],
) -> object:
    """Return what a rule takes for a gradient."""
    sparse = isinstance(rule, SparseConditionalAccumulator)
    segments = list(body) or [NO_BYTES] * (1 + sparse)  # of a gradient without rows
    if len(segments) != 1 + sparse:
        raise ValueMismatchError(f"{rule}: expected {1 + sparse} arrays, got {len(segments)}")
    expected = math.prod(shape) * rule.dtype.itemsize
    if min(shape, default=0) < 0 or len(segments[-1]) != expected:
        raise ValueMismatchError(
            f"{rule}: expected {expected} bytes for shape {tuple(shape)} {rule.dtype}, "
            f"got {len(segments[-1])}"
        )
    try:
        values = bytes_of(segments[-1]).view(rule.dtype).reshape(shape)
        if not values.size:  # then numpy bounds the shape by the size of an element
            np.empty(values.shape, sum_dtype(rule.dtype))
    except (ValueError, OverflowError) as exc:
        raise ValueMismatchError(f"{rule}: no array has the shape {shape!r:.80}") from exc
    if not sparse:
        return values
    if len(segments[0]) % 8:
        raise ValueMismatchError(f"{rule}: {len(segments[0])} bytes are not int64 indices")
    indices = bytes_of(segments[0]).view(dtype_of("int64"))
    return indices, values, dense_shape


def answer_of(take: Take[Any]) -> Answer:
    """Return what is answered to a take whose value is made."""
    result: np.ndarray | IndexedSlices = take.result
    if isinstance(result, IndexedSlices):
        arrays, dense_shape = [result.indices, result.values], list(result.dense_shape or ())
    else:
        arrays, dense_shape = [result], None
    shape = list(arrays[-1].shape)
    message = AccumulatorState("", take.count, take.step, shape, dense_shape)
    return message, [to_bytes_view(array) for array in arrays]


def _name(request: Request[TakeGradient]) -> tuple[Client, str, int]:
    return request.peer.client, request.message.accumulator, request.message.take


def unpack_accumulators(packed: Iterable[tuple[bytes, int]]) -> list[tuple[DefineAccumulator, int]]:
    """Return what ``Accumulators.packed`` has returned.

    Raises:
        CheckpointCorrupt: It is no such thing.
    """
    definitions = []
    for data, step in packed:
        definition = unpack(data, DefineAccumulator, "an accumulator")
        try:
            rule_of(definition)
        except (RemoteProtocolError, ConfigurationError) as exc:
            raise CheckpointCorrupt(f"an accumulator in a snapshot: {exc.message}") from exc
        definitions.append((definition, step))
    return definitions


def _pack(answer: object) -> bytes | None:
    return encode(answer) if isinstance(answer, AccumulatorState) else None


def _pieces(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
    return [
        data[at : at + PIECE_BYTES]
        for data in map(bytes_of, arrays)
        for at in range(0, data.size, PIECE_BYTES)
    ]
