"""The ledger of a ps: exactly-once judgement of updates, by message and by closure.

An update (push or assign) has two identities. (client, sequence) names the *message*: a retry
after a lost connection carries the same one, and gets the first one's answer. (closure, ordinal
of the call in the closure) names the *intent*: when a worker is lost its closure runs again on
another, and the second run makes the same calls under other sequences. Of the runs of a
closure, the first whose update reaches a ps wins there.

``begin`` judges an update; the first line that fits decides:

    the update                                            verdict
    client's incarnation is older than the one served     FencedError
    (client, sequence) came for another call              UsageError: the client has a bug
    (client, sequence) is being applied now               InProgress: ask again when it is settled
    (client, sequence) has been answered                  Duplicate: that answer again
    sequence below what the client has acknowledged       UsageError: no answer is waited for
    closure is None                                       Fresh
    closure is final                                      AlreadyApplied: decided without it
    (closure, ordinal) is new                             Fresh
    (closure, ordinal) has another variable set           UsageError: the step is not repeatable
    (closure, ordinal) is being applied now               InProgress: ask again when it is settled
    (closure, ordinal) has been applied                   AlreadyApplied: answer "duplicate"

Fresh and AlreadyApplied carry a ticket, which the caller settles: ``finish`` records the answer,
``fail`` forgets the update. A refused update has changed nothing, so its retry is judged again.
After InProgress the caller waits until that ticket is settled and calls ``begin`` again: the
outcome may be either.

Nothing is forgotten because a cache is full. Answers go when their client says that it has
them (``acked_below``) or is fenced; calls go when the coordinator says that their closures are
final. What remains is one small record per task that ever sent an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from psync.errors import FencedError, LocalProtocolError, UsageError

Client = tuple[str, int]
"""Task name and incarnation."""

Call = tuple[int, int]
"""Closure and the ordinal of the call within it."""

A = TypeVar("A")


@dataclass(eq=False, slots=True)
class Ticket:
    """One judged update that is to be finished or failed. Compared by identity."""

    client: Client
    sequence: int
    call: Call | None  # None outside of closures
    first: bool  # whether it is this update that is applied for ``call``
    settled: bool = False  # finished or failed


@dataclass(frozen=True, slots=True)
class Fresh:
    """Apply it, then settle the ticket."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AlreadyApplied:
    """Do not apply it: another run of its closure was first. Finish the ticket with an answer."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Do not apply it: a retry of a message that has been answered."""

    answer: object


@dataclass(frozen=True, slots=True)
class InProgress:
    """Wait until ``ticket`` is settled, then begin again."""

    ticket: Ticket


Verdict = Fresh | AlreadyApplied | Duplicate | InProgress


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """A snapshot of a ledger. The first six count verdicts."""

    fresh: int
    duplicate: int
    already_applied: int
    in_progress: int
    fenced: int
    failed: int  # fresh ones that were refused afterwards
    clients: int  # tasks known
    answers: int  # messages remembered
    calls: int  # (closure, ordinal) remembered


@dataclass(slots=True)
class _Message:
    ticket: Ticket
    answer: object = None  # None until finished
    spread: Sequence[Sequence[int]] = ()  # (ps, sequence there) of the same update's others


@dataclass(slots=True)
class _Sender:
    incarnation: int  # the lowest one served
    acked_below: int = 0  # it has the answers to all sequences below
    messages: dict[int, _Message] = field(default_factory=dict)  # by sequence
    refused: set[int] = field(default_factory=set)  # sequences, not below ``acked_below``


@dataclass(slots=True)
class _Applied:
    ticket: Ticket  # of the run that is or was first
    variable_set: int | bytes
    variables: Sequence[str]
    parts: int = 1  # of the update, on all ps tasks together


class Ledger:
    """The updates that one ps has seen. Single owner, no clock; never blocks.

    Args:
        floor: No task is served under a lower incarnation: that of the coordinator, which gives
            its workers higher ones. So whoever worked for an earlier coordinator is refused.
    """

    def __init__(self, floor: int = 0) -> None:
        self._floor = floor
        self._senders: dict[str, _Sender] = {}  # by task
        self._closures: dict[int, dict[int, _Applied]] = {}  # by closure, by ordinal
        self._final_below = 0  # closures below are final
        self._fresh = 0
        self._duplicate = 0
        self._already_applied = 0
        self._in_progress = 0
        self._fenced = 0
        self._failed = 0

    def begin(
        self,
        client: Client,
        sequence: int,
        acked_below: int,
        closure: int | None,
        ordinal: int,
        variable_set: int | bytes,
        variables: Sequence[str] = (),
        spread: Sequence[Sequence[int]] = (),
    ) -> Verdict:
        """Judge an update by the table above.

        Args:
            client: Who sends it. A newer incarnation fences the older ones of its task.
            sequence: Number of the message, unique in the client.
            acked_below: The client has the answers to all its sequences below this.
            closure: Number of the closure that makes the call, unique for ever; None outside.
            ordinal: Number of the call within the closure.
            variable_set: Hash of the variables that the call updates, the same in each process.
            variables: Their names, for messages.
            spread: (ps, sequence there) of the other messages of the same update.

        Raises:
            FencedError: If the client has been replaced by a newer incarnation.
            UsageError: If the update contradicts an earlier one, or was acknowledged.
        """
        self.acknowledge(client, acked_below)
        sender = self._senders[client[0]]
        call = None if closure is None else (closure, ordinal)
        message = sender.messages.get(sequence)
        if message is not None:
            return self._seen(message, call)
        if sequence < sender.acked_below:
            raise UsageError(
                f"{client[0]} sent update {sequence} again, whose answer it has acknowledged"
            )
        first = True
        if call is not None:
            applied = self._closures.get(call[0], {}).get(ordinal)
            if applied is not None:
                self._check_variables(call, applied, variable_set, variables)
                if not applied.ticket.settled:
                    self._in_progress += 1
                    return InProgress(applied.ticket)
            first = applied is None and call[0] >= self._final_below
        ticket = Ticket(client, sequence, call, first)
        sender.messages[sequence] = _Message(ticket, None, spread)
        if not first:
            self._already_applied += 1
            return AlreadyApplied(ticket)
        if call is not None:
            calls = self._closures.setdefault(call[0], {})
            calls[ordinal] = _Applied(ticket, variable_set, variables, 1 + len(spread))
        self._fresh += 1
        return Fresh(ticket)

    def finish(self, ticket: Ticket, answer: A) -> A:
        """Record that the update was applied, or answered as a duplicate. Returns ``answer``.

        Raises:
            LocalProtocolError: If the ticket was settled before.
        """
        sender = self._settle(ticket)
        if sender is not None:
            if ticket.sequence < sender.acked_below:  # its client has stopped waiting
                del sender.messages[ticket.sequence]
            else:
                sender.messages[ticket.sequence].answer = answer
        return answer

    def fail(self, ticket: Ticket) -> None:
        """Forget an update that was refused and has changed nothing.

        Raises:
            LocalProtocolError: If the ticket was settled before.
        """
        sender = self._settle(ticket)
        self._failed += 1
        if sender is not None:
            del sender.messages[ticket.sequence]
            if ticket.sequence >= sender.acked_below:
                sender.refused.add(ticket.sequence)
        if ticket.call is not None and ticket.first:
            closure, ordinal = ticket.call
            calls = self._closures.get(closure)
            if calls is not None:  # None: the closure became final meanwhile
                del calls[ordinal]
                if not calls:
                    del self._closures[closure]

    def acknowledge(self, client: Client, acked_below: int) -> None:
        """Forget the answers that a client has received; ``begin`` does it too.

        Raises:
            FencedError: If the client has been replaced by a newer incarnation.
        """
        task, incarnation = client
        self.check_incarnation(task, incarnation)
        self.fence(task, incarnation)
        sender = self._senders[task]
        if acked_below > sender.acked_below:
            sender.acked_below = acked_below
            messages = sender.messages
            for sequence in [
                s for s, m in messages.items() if s < acked_below and m.ticket.settled
            ]:
                del messages[sequence]
            if sender.refused:
                sender.refused = {s for s in sender.refused if s >= acked_below}

    def refuse(self, client: Client, sequence: int) -> None:
        """Note that a message was refused before it was judged: ``is_settled`` knows of it."""
        if client[1] < self._floor:
            return
        self.fence(*client)
        sender = self._senders[client[0]]
        known = sequence in sender.messages or sequence < sender.acked_below
        if sender.incarnation == client[1] and not known:
            sender.refused.add(sequence)

    def knows(self, client: Client, sequence: int) -> bool:
        """Return whether a message has been judged, and is not forgotten yet."""
        sender = self._senders.get(client[0])
        return (
            sender is not None and sender.incarnation == client[1] and sequence in sender.messages
        )

    def serves(self, client: Client) -> bool:
        """Return whether a client has been judged before, and is the present one of its task."""
        sender = self._senders.get(client[0])
        return sender is not None and sender.incarnation == client[1]

    def is_settled(self, client: Client, sequence: int) -> bool:
        """Return whether a message will change nothing here any more.

        It has been answered, or refused, or its client has been replaced.
        """
        sender = self._senders.get(client[0])
        if sender is None or sender.incarnation < client[1]:
            return client[1] < self._floor
        if sender.incarnation > client[1] or sequence < sender.acked_below:
            return True
        message = sender.messages.get(sequence)
        return sequence in sender.refused if message is None else message.ticket.settled

    def others(self) -> list[tuple[int, str, int, int]]:
        """Return what belongs to the updates that are known here, and is for other ps tasks.

        Returns:
            (ps, client's task, its incarnation, sequence) of each message.
        """
        return [
            (ps, task, sender.incarnation, number)
            for task, sender in self._senders.items()
            for message in sender.messages.values()
            for ps, number in message.spread
        ]

    def final_below(self, closure: int) -> None:
        """Forget the calls of all closures below ``closure``: none will count any more."""
        if closure <= self._final_below:
            return
        self._final_below = closure
        for number in [number for number in self._closures if number < closure]:
            del self._closures[number]

    def fence(self, task: str, incarnation: int) -> None:
        """Serve only this and newer incarnations of ``task`` from now on."""
        sender = self._senders.get(task)
        if sender is None or sender.incarnation < incarnation:
            self._senders[task] = _Sender(incarnation)

    def raise_floor(self, floor: int) -> None:
        """Serve nobody below ``floor`` from now on, whichever task: another ledger does."""
        self._floor = max(self._floor, floor)

    def check_incarnation(self, task: str, incarnation: int) -> None:
        """Raise FencedError if ``incarnation`` of ``task`` is not served any more."""
        sender = self._senders.get(task)
        lowest = self._floor if sender is None else max(sender.incarnation, self._floor)
        if incarnation < lowest:
            self._fenced += 1
            raise FencedError(f"incarnation {incarnation} of {task} has been replaced by {lowest}")

    def statistics(self) -> LedgerStatistics:
        """Return counters and sizes as of now."""
        return LedgerStatistics(
            fresh=self._fresh,
            duplicate=self._duplicate,
            already_applied=self._already_applied,
            in_progress=self._in_progress,
            fenced=self._fenced,
            failed=self._failed,
            clients=len(self._senders),
            answers=sum(len(sender.messages) for sender in self._senders.values()),
            calls=sum(map(len, self._closures.values())),
        )

    def _seen(self, message: _Message, call: Call | None) -> Verdict:
        ticket = message.ticket
        if ticket.call != call:
            raise UsageError(
                f"{ticket.client[0]} sent update {ticket.sequence} for {_named(ticket.call)} "
                f"and again for {_named(call)}"
            )
        if not ticket.settled:
            self._in_progress += 1
            return InProgress(ticket)
        self._duplicate += 1
        return Duplicate(message.answer)

    def _check_variables(
        self, call: Call, applied: _Applied, variable_set: int | bytes, variables: Sequence[str]
    ) -> None:
        if applied.variable_set == variable_set:
            return
        first, second = (
            f" ({', '.join(names)})" if names else "" for names in (applied.variables, variables)
        )
        raise UsageError(
            f"{_named(call)} updates other variables{second} than in its first run{first}",
            hint="a closure may run more than once, and every run must update the same variables "
            "in the same order; decide which by its arguments, not by randomness or time",
        )

    def _settle(self, ticket: Ticket) -> _Sender | None:
        """Mark the ticket; return its sender unless that has been fenced meanwhile."""
        if ticket.settled:
            raise LocalProtocolError(
                f"update {ticket.sequence} of {ticket.client[0]} was settled before"
            )
        ticket.settled = True
        sender = self._senders[ticket.client[0]]
        return sender if sender.incarnation == ticket.client[1] else None


def _named(call: Call | None) -> str:
    return "no closure" if call is None else f"closure {call[0]}, call {call[1]}"
