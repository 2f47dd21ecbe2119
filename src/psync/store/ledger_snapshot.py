"""Snapshots of a ledger, as plain values.

A ledger restored from the state of another one gives the same verdicts: Duplicate to a message
that was answered, with that answer; AlreadyApplied to the call of another run.

Updates of conditional accumulators are left out, since snapshots omit the contents of these: a
closure that runs again accumulates again. A backup, which has the contents, gets these updates by
``gradients_of``. The other parts of an update (``Ledger.others``) are left out too: a cut has all
of them or none. Counters start at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psync.store.ledger import Call, Ledger, Ticket, _Sender
from psync.store.reattach import HeldUpdates
from psync.wire.closure_numbers import Finality


class SenderState(NamedTuple):
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
    failures: tuple[tuple[str, int, int, bytes], ...] = ()
    """Of updates that failed while they were computed, by ``FailureKey``, what is answered."""
    kept: tuple[tuple[int, int], ...] = ()
    """(closure, run) of those below ``final_below`` that may come again, as in ``Finality``."""

    @property
    def final(self) -> Finality:
        """Which closures are final."""
        return Finality(self.final_below, self.kept)


def state_of(ledger: Ledger, pack: Callable[[object], bytes | None]) -> LedgerState:
    """Return what a ledger remembers.

    Args:
        ledger: At a position at which nothing is being computed.
        pack: Makes bytes of an answer; None: that message is left out.
    """
    calls, parts = [], []
    for closure, by_ordinal in ledger._closures.items():
        for ordinal, applied in by_ordinal.items():
            if isinstance(applied.variable_set, int):  # else it is an accumulator's
                names = tuple(applied.variables)
                calls.append((closure, ordinal, applied.variable_set, names))
                if applied.parts > 1:
                    parts.append((closure, ordinal, applied.parts))
    senders = []
    for task, sender in ledger._senders.items():
        answers = []
        for sequence, message in sender.messages.items():
            answer = pack(message.answer)
            if answer is not None:
                answers.append((sequence, message.call, answer))
        senders.append(SenderState(task, sender.incarnation, sender.acked_below, tuple(answers)))
    return LedgerState(
        tuple(senders), tuple(calls), ledger.final.below, ledger._floor, tuple(parts),
        tuple((*key, failure) for key, failure in ledger._failures.items()),
        tuple(ledger.final.listed()),
    )  # fmt: skip


def control_of(ledger: Ledger, pack: Callable[[Any], bytes]) -> list[Any]:
    """Return all that a ledger remembers, as plain data in an order of its own, for a digest."""
    senders = [
        [task, sender.incarnation, sender.acked_below,
         sorted([sequence, each.call or (), pack(each.answer)]
                for sequence, each in sender.messages.items())]
        for task, sender in sorted(ledger._senders.items())
    ]  # fmt: skip
    calls = sorted(
        [closure, ordinal, str(each.variable_set), each.parts]
        for closure, by_ordinal in ledger._closures.items()
        for ordinal, each in by_ordinal.items()
    )
    return [senders, calls, ledger.final.below, ledger.final.listed()]


def restore_ledger(ledger: Ledger, state: LedgerState, unpack: Callable[[bytes], object]) -> None:
    """Let a new ledger remember what another one did.

    Args:
        ledger: That remembers nothing.
        state: Of the other one.
        unpack: Makes answers of what ``pack`` of ``state_of`` returned.
    """
    for sender in state.senders:
        ledger._senders[sender.task] = _Sender(sender.incarnation, sender.acked_below)
        for sequence, call, packed in sender.answers:
            _remember(ledger, sender.task, sequence, call, unpack(packed))
    parts = {(closure, ordinal): count for closure, ordinal, count in state.parts}
    for closure, ordinal, variable_set, names in state.calls:
        count = parts.get((closure, ordinal), 1)
        _remember_call(ledger, (closure, ordinal), variable_set, names, count)
    ledger._failures.update({(task, a, b): failure for task, a, b, failure in state.failures})
    ledger.final_below(state.final_below, state.kept)


def held_updates(ledger: Ledger, coordinator: int) -> HeldUpdates:
    """Return what a ledger knows of updates over several ps tasks, and of those of no closure.

    Args:
        ledger: The ledger.
        coordinator: Incarnation of the coordinator that it has served.
    """
    calls = [
        (closure, ordinal, applied.parts)
        for closure, by_ordinal in ledger._closures.items()
        for ordinal, applied in by_ordinal.items()
        if applied.parts > 1
    ]
    acked, messages = [], []
    for task, sender in ledger._senders.items():
        acked.append((task, sender.incarnation, sender.acked_below))
        for sequence, message in sender.messages.items():
            if message.call is None:
                others = tuple((ps, number) for ps, number in message.spread)
                messages.append((task, sender.incarnation, sequence, others))
    return HeldUpdates(
        coordinator, ledger.final.below, tuple(calls), tuple(acked), tuple(messages),
        tuple(ledger.final.listed()),
    )  # fmt: skip


def gradients_of(ledger: Ledger, pack: Callable[[object], bytes | None]) -> GradientStates:
    """Return what ``state_of`` leaves out of a ledger.

    Args:
        ledger: The ledger.
        pack: Makes bytes of an answer; None: it is not that of an accumulator.
    """
    answers = []
    for task, sender in ledger._senders.items():
        for sequence, message in sender.messages.items():
            answer = pack(message.answer)
            if answer is not None:
                closure, ordinal = message.call or (-1, 0)
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
    for task, _, sequence, closure, ordinal, packed in states.answers:
        call = None if closure < 0 else (closure, ordinal)
        _remember(ledger, task, sequence, call, unpack(packed))
    for closure, ordinal, what, accumulator in states.calls:
        _remember_call(ledger, (closure, ordinal), what, (accumulator,))


def _remember(ledger: Ledger, task: str, sequence: int, call: Call | None, answer: object) -> None:
    sender = ledger._senders[task]
    client = task, sender.incarnation
    sender.messages[sequence] = Ticket(client, sequence, call, True, answer=answer)


def _remember_call(
    ledger: Ledger, call: Call, what: int | bytes, names: Sequence[str], parts: int = 1
) -> None:
    ticket = Ticket(("", 0), 0, call, True, what, names, ((),) * (parts - 1))
    ledger._closures.setdefault(call[0], {})[call[1]] = ticket
