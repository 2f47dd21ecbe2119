"""Closures as messages: small arguments inline, large ones fetched on demand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psync.closures.closure import NO_DATA, Closure, Identity, Needs
from psync.errors import LocalProtocolError, UsageError
from psync.serialization.functions import Function
from psync.serialization.payloads import EMPTY, Payload
from psync.serialization.remote_value import RemoteValue
from psync.wire.messages import RunClosures, RunReplica

INLINE_BYTES = 16 << 10
"""Larger arguments are fetched by the worker when it is about to run the closure: a worker
whose step computes on its loop does not read, and must not have more than 64 KiB unread."""

ITERATOR_BYTES = 4 << 20
"""Taken for what a dataset's iterator holds on the workers."""


@dataclass(slots=True, eq=False)
class ScheduledCall:
    """What the coordinator keeps of a closure until it is final: the closure's payload."""

    function: Function
    arguments: Payload  # keeps the RemoteValues and iterators among them alive
    may_repeat: bool = True  # whether ``reschedule`` runs it again if a rollback undoes it
    replica: tuple[int, int] | None = None  # which one of how many, if it is of a gang
    sent_at: float | None = None  # loop time; None: to nobody so far
    value: weakref.ref[RemoteValue[Any]] = field(init=False)  # the user may have dropped it

    @property
    def inline_bytes(self) -> int:
        """Most bytes that its arguments take in a message that starts it."""
        if self.arguments.remote_values:  # their sizes are not known yet
            return INLINE_BYTES
        nbytes = self.arguments.nbytes
        return nbytes if nbytes <= INLINE_BYTES else 0

    def needs(self) -> Needs:
        """Return the per-worker data that it takes."""
        kept = (*self.arguments.kept, *self.function.payload.kept)
        return NO_DATA.union(*(iterator._needs() for iterator in kept))

    def parts(self) -> list[tuple[Hashable, int]]:
        """Return the memory that keeping this call holds: (key of what may be shared, bytes).

        Iterators hold batches on every worker, whose sizes are unknown here.
        """
        found: list[tuple[Hashable, int]] = [(self.function.key, self.function.payload.nbytes)]
        if self.arguments is not EMPTY:
            found.append((id(self.arguments), self.arguments.nbytes))
        found += [
            (id(value), 0 if value._payload is None else value._payload.nbytes)
            for value in self.arguments.remote_values
        ]
        kept = (*self.arguments.kept, *self.function.payload.kept)
        return found + [(id(iterator), ITERATOR_BYTES) for iterator in kept]

    def segments(self) -> tuple[list[Any], list[int]]:
        """Return all segments of the arguments, and how many of them each RemoteValue has.

        Raises:
            LocalProtocolError: An input has no value yet.
        """
        segments: list[Any] = list(self.arguments.segments)
        counts = []
        for value in self.arguments.remote_values:
            payload = value._payload
            if payload is None:
                raise LocalProtocolError(f"{value!r} is the input of a closure, but has no value")
            segments += payload.segments
            counts.append(len(payload.segments))
        return segments, counts


class EndedCall(NamedTuple):
    """A closure that came to its end on a worker."""

    number: int  # on ps tasks
    updates: int  # that it has made
    closure: Closure | None  # None: of a later run of a data shard
    call: ScheduledCall | None


class ScheduledClosures(dict[int, Closure]):
    """The closures of one coordinator that are not final, by id, and the values to be.

    Args:
        cancel: Cancels the closure with an id.
    """

    def __init__(self, cancel: Callable[[int], None]) -> None:
        super().__init__()
        self._cancel = cancel

    def make(
        self,
        closure_id: int,
        call: ScheduledCall,
        owner: object,
        identity: Identity | None = None,
        needs: Needs | None = None,
    ) -> Closure:
        """Return a new closure of a call, with its identity if it may come again.

        It takes the data of the call's iterators, or ``needs``.

        Raises:
            UsageError: An input belongs to another coordinator than ``owner``.
        """
        arguments, inputs = call.arguments, call.arguments.remote_values
        for value in inputs:
            if value._owner is not owner:
                raise UsageError(
                    f"{value!r} belongs to another coordinator",
                    hint="fetch its value there and pass the value",
                )
        if needs is None:
            needs = call.needs() if arguments.kept or call.function.payload.kept else NO_DATA
        # Without keywords, which cost as much again.
        return Closure(
            closure_id, call, call.function.name, needs,
            call.inline_bytes if arguments is not EMPTY else 0,
            [value._closure for value in inputs] if inputs else (), identity,
        )  # fmt: skip

    def adopt(self, closure: Closure) -> RemoteValue[Any]:
        """Take a closure that is about to be queued; return its value to be."""
        value: RemoteValue[Any] = RemoteValue(closure, self._cancel)
        closure.payload.value = weakref.ref(value)
        self[closure.id] = closure
        return value

    def settle(self, closure: Closure, error: BaseException | None) -> None:
        """Let go of a closure that is final; its value has come before, if it has one."""
        self.pop(closure.id, None)
        if not self:
            self.clear()  # of its table, too, which is as large as it has ever been
        if error is not None:
            value = closure.payload.value()
            if value is not None and not value.done():
                value._set_error(error)
        closure.payload = None


def starting(closures: Sequence[Closure]) -> tuple[RunClosures | RunReplica, list[Any]]:
    """Return the message that starts closures, or one replica of a gang, and its segments."""
    items: list[tuple[int, bytes, int, list[int]]] = []
    numbers: list[tuple[int, int]] = []
    segments: list[Any] = []
    for closure in closures:
        call: ScheduledCall = closure.payload
        key = call.function.key
        if closure.identity is not None:
            numbers.append((closure.id, closure.number))
        if call.arguments is EMPTY:
            items.append((closure.id, key, 0, []))
            continue
        own, counts = call.segments()
        if sum(map(len, own)) > INLINE_BYTES:
            items.append((closure.id, key, -1, []))
        else:
            items.append((closure.id, key, len(own) - sum(counts), counts))
            segments += own
    replica = closures[0].payload.replica
    if replica is not None:
        return RunReplica(items[0], *replica), segments
    return RunClosures(items, numbers or None), segments
