"""Snapshots of a ledger, as plain values.

A ledger restored from the state of another one gives the same verdicts: Duplicate to a message
that was answered, with that answer; AlreadyApplied to the call of another run. What is still being
applied has no place in a state: there is none at a cut.

Updates of conditional accumulators are left out, since snapshots omit the contents of these: a
closure that runs again accumulates again. A backup, which has the contents, gets these updates by
``gradients_of``. The other parts of an update (``Ledger.others``) are left out too: a cut has all
of them or none. Counters start at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psync.errors import BusyError
from psync.store.ledger import Call, Client, Ledger, Ticket, _Applied, _Message, _Sender

_NOBODY: Client = ("", 0)


@dataclass(frozen=True, slots=True)
class SenderState:
    """A task that has sent updates, or was fenced."""

    task: str
    incarnation: int  # the lowest one served
    acked_below: int  # it has the answers to all sequences below
    answers: tuple[tuple[int, Call | None, bytes], ...]  # (sequence, call, answer)


@dataclass(frozen=True, slots=True)
class GradientStates:
    """What a ledger remembers of conditional accumulators."""

    answers: list[tuple[str, int, int, int, int, bytes]]
    """(task, incarnation, sequence, closure or -1, ordinal, answer) of each message."""
    calls: list[tuple[int, int, bytes, str]]
    """(closure, ordinal, what was called, accumulator) of each call that counted."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a ledger remembers."""

    senders: tuple[SenderState, ...] = ()
    calls: tuple[tuple[int, int, int, tuple[str, ...]], ...] = ()
    """(closure, ordinal, hash of its variables, their names) of each call that was applied."""
    final_below: int = 0  # closures below are final
    coordinator: int = 0  # whose closures these numbers are; 0: it is not known
    parts: tuple[tuple[int, int, int], ...] = ()
    """(closure, ordinal, parts of the update on all ps tasks) of each call that has several."""


def state_of(ledger: Ledger, pack: Callable[[object], bytes | None]) -> LedgerState:
    """Return what a ledger remembers.

    Args:
        ledger: Of which nothing is being applied.
        pack: Makes bytes of an answer; None: that message is left out.

    Raises:
        BusyError: An update is being applied.
    """
    calls, parts = [], []
    for closure, by_ordinal in ledger._closures.items():
        for ordinal, applied in by_ordinal.items():
            _check_settled(applied.ticket)
            if isinstance(applied.variable_set, int):  # else it is an accumulator's
                names = tuple(applied.variables)
                calls.append((closure, ordinal, applied.variable_set, names))
                if applied.parts > 1:
                    parts.append((closure, ordinal, applied.parts))
    senders = []
    for task, sender in ledger._senders.items():
        answers = []
        for sequence, message in sender.messages.items():
            _check_settled(message.ticket)
            answer = pack(message.answer)
            if answer is not None:
                answers.append((sequence, message.ticket.call, answer))
        senders.append(SenderState(task, sender.incarnation, sender.acked_below, tuple(answers)))
    return LedgerState(
        tuple(senders), tuple(calls), ledger._final_below, ledger._floor, tuple(parts)
    )


def _check_settled(ticket: Ticket) -> None:
    if not ticket.settled:
        raise BusyError(
            f"update {ticket.sequence} of {ticket.client[0]} is being applied, so there can be no "
            "snapshot"
        )


def restore_ledger(ledger: Ledger, state: LedgerState, unpack: Callable[[bytes], object]) -> None:
    """Let a new ledger remember what another one did.

    Args:
        ledger: That remembers nothing.
        state: Of the other one.
        unpack: Makes answers of what ``pack`` of ``state_of`` returned.
    """
    for sender in state.senders:
        client = (sender.task, sender.incarnation)
        made = ledger._senders[sender.task] = _Sender(sender.incarnation, sender.acked_below)
        for sequence, call, packed in sender.answers:
            ticket = Ticket(client, sequence, call, first=False, settled=True)
            made.messages[sequence] = _Message(ticket, unpack(packed))
    parts = {(closure, ordinal): count for closure, ordinal, count in state.parts}
    for closure, ordinal, variable_set, names in state.calls:
        ticket = Ticket(_NOBODY, 0, (closure, ordinal), first=True, settled=True)
        calls = ledger._closures.setdefault(closure, {})
        count = parts.get((closure, ordinal), 1)
        calls[ordinal] = _Applied(ticket, variable_set, names, count)
    ledger.final_below(state.final_below)


def gradients_of(ledger: Ledger, pack: Callable[[object], bytes | None]) -> GradientStates:
    """Return what ``state_of`` leaves out of a ledger of which nothing is being applied.

    Args:
        ledger: The ledger.
        pack: Makes bytes of an answer; None: it is not that of an accumulator.
    """
    answers = []
    for task, sender in ledger._senders.items():
        for sequence, message in sender.messages.items():
            answer = pack(message.answer)
            if answer is not None:
                closure, ordinal = message.ticket.call or (-1, 0)
                answers.append((task, sender.incarnation, sequence, closure, ordinal, answer))
    calls = [
        (closure, ordinal, applied.variable_set, applied.variables[0])
        for closure, by_ordinal in ledger._closures.items()
        for ordinal, applied in by_ordinal.items()
        if isinstance(applied.variable_set, bytes)
    ]
    return GradientStates(answers, calls)


def note_gradients(
    ledger: Ledger, states: GradientStates, unpack: Callable[[bytes], object]
) -> None:
    """Let a ledger remember what ``gradients_of`` another one has returned.

    Args:
        ledger: Made of the ``state_of`` the other one.
        states: Of the other one.
        unpack: Makes answers of what ``pack`` returned.
    """
    for task, incarnation, sequence, closure, ordinal, packed in states.answers:
        call = None if closure < 0 else (closure, ordinal)
        ticket = Ticket((task, incarnation), sequence, call, first=False, settled=True)
        ledger._senders[task].messages[sequence] = _Message(ticket, unpack(packed))
    for closure, ordinal, what, accumulator in states.calls:
        ticket = Ticket(_NOBODY, 0, (closure, ordinal), first=True, settled=True)
        calls = ledger._closures.setdefault(closure, {})
        calls[ordinal] = _Applied(ticket, what, (accumulator,))
