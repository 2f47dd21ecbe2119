"""The ledger of a ps: exactly-once judgement of updates, by message and by closure.

An update (push or assign) has two identities. (client, sequence) names the *message*: a retry
after a lost connection carries the same one, and gets the first one's answer. (closure, ordinal
of the call in the closure) names the *intent*: when a worker is lost its closure runs again on
another, and the second run makes the same calls under other sequences. Of the runs of a
closure, the first whose update reaches a ps wins there. A data shard that comes again after an
error is a further run of its closure, too (``wire.closure_numbers``).

``judge`` judges an update; the first line that fits decides:

    the update                                            verdict
    client's incarnation is older than the one served     FencedError
    (client, sequence) came for another call              UsageError: the client has a bug
    (client, sequence) is recorded                        its ticket: its answer again
    sequence below what the client has acknowledged       UsageError: no answer is waited for
    closure is None                                       a new ticket: apply it
    (closure, ordinal) has another variable set           UsageError: the step is not repeatable
    (closure, ordinal) is recorded, or closure is final   a new ticket, not ``first``: answer
                                                          "duplicate"
    else                                                  a new ticket: apply it

An update that arrived whole before its client was replaced, and had to wait since, is judged by its
call alone: other ps tasks may have applied their parts of it. One outside of closures is refused,
since nobody knows any more whether it was a retry.

In the same turn ``record`` notes the answer that the update of a new ticket gets; of one that is
refused nothing is recorded, and it has changed nothing, so its retry is judged again. The answer is
recorded when it is known, which is before the arrays are changed: the answer to a repetition waits
for these as the first one does (``ps.computes``).

A synchronous push is judged by its group (``sync.steps``), which numbers and remembers the messages
of each client itself: an answer may wait for long. Its calls are here, on ps 0: ``is_first`` says
whether it may count, ``count`` that it does. A snapshot has them once their step is applied.

A rule of a user's may raise while the arrays are changed. What it raised is noted on the ticket, as
the answer to a repetition of the message, and to the same call of another run (``failure_of``). No
verdict depends on it, and no digest: it is known as late as the arrays are.

Nothing is forgotten because a cache is full. Answers go when their client says that it has
them (``acked_below``) or is fenced; calls go when the coordinator says that their closures are
final, and not kept. What remains is one small record per task that ever sent an update.

A ledger that ``restore`` has made of the ``snapshot`` of another one gives the same verdicts: to a
message that was answered, and to the call of another run. Updates of conditional accumulators are
left out, since snapshots omit the contents of these: a closure that runs again accumulates again. A
backup, which has the contents, gets a snapshot of these updates, too. The other parts of an update
(``others``) are left out too: a cut has all of them or none. Counters start at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from psync.errors import FencedError, UsageError
from psync.store.snapshot_state import NOTHING, SenderState, SnapshotState
from psync.store.untrusted_json import Text, Whole
from psync.wire.closure_numbers import FIRST, PART_BITS, Finality, call_of, first_of

Client = tuple[str, int]
"""Task name and incarnation."""

Call = tuple[int, int]
"""Closure and the ordinal of the call within it."""

STEP = "a synchronous step"
"""In place of a task, in a snapshot: the failure is that of (STEP, group, step)."""

CALL = "a call"
"""Likewise: that of (CALL, closure, ordinal)."""

A = TypeVar("A")

Variables: TypeAlias = int | bytes | tuple[int, bytes]
"""What a call updates: a hash of the variables, or of those of an accumulator a digest; of a
synchronous push its group, and a digest."""


class Ticket(msgspec.Struct, eq=False):
    """One update that is judged, and remembered once it is recorded. Compared by identity."""

    client: Client
    sequence: int
    call: Call | None  # None outside of closures
    first: bool  # apply it: no other run of its closure was first
    variable_set: Variables = 0
    variables: Sequence[str] = ()
    spread: Sequence[Sequence[int]] = ()  # (ps, sequence there) of the same update's others
    recorded: bool = False
    answer: Any = None  # once it is recorded
    failure: bytes | None = None  # what it raised; the arrays are as before

    @property
    def parts(self) -> int:
        """Of the update, on all ps tasks together."""
        return 1 + len(self.spread)


@dataclass(slots=True)
class _Sender:
    incarnation: int  # the lowest one served
    acked_below: int = 0  # it has the answers to all sequences below
    messages: dict[int, Ticket] = field(default_factory=dict)  # recorded, by sequence


_NONE: dict[int, Ticket] = {}


class HeldUpdates(NamedTuple):
    """The updates of one coordinator's program that one ps has applied, as far as it knows them.

    Those of closures that are final are forgotten, and those of which the client has all answers:
    they are on all ps tasks.
    """

    coordinator: Whole  # its incarnation
    final_below: Whole  # closures below are final, unless they are kept
    calls: tuple[tuple[Whole, Whole, Whole], ...]  # (closure, ordinal, messages to all ps tasks)
    acked: tuple[
        tuple[Text, Whole, Whole], ...
    ]  # (client, incarnation, sequences below are answered)
    # Of no closure: (client, incarnation, sequence here, (ps, sequence there) of its other parts).
    messages: tuple[tuple[Text, Whole, Whole, tuple[tuple[Whole, Whole], ...]], ...]
    kept: tuple[
        tuple[Whole, Whole], ...
    ] = ()  # of those below, that may come again: see ``Finality``


class Ledger:
    """The updates that one ps has seen. Single owner, no clock; never blocks.

    Args:
        floor: No task is served under a lower incarnation: that of the coordinator, which gives
            its workers higher ones. So whoever worked for an earlier coordinator is refused.

    Attributes:
        step_failures: What was raised by synchronous steps, by group and step.
    """

    def __init__(self, floor: int = 0) -> None:
        self._floor = floor
        self._senders: dict[str, _Sender] = {}  # by task
        # Told of a task of which lower incarnations than this are not served any more.
        self.on_fence: Callable[[str, int], None] | None = None
        self._closures: dict[int, dict[int, Ticket]] = {}  # applied, by first run, by ordinal
        self.final = Finality()
        self.step_failures: dict[tuple[int, int], bytes] = {}
        # Sequences that were refused, by client: no part of the state, only cuts ask.
        self._refused: dict[Client, set[int]] = {}
        self._fresh = 0
        self._duplicate = 0
        self._already_applied = 0
        self._fenced = 0
        self._num_refused = 0

    def judge(
        self,
        client: Client,
        sequence: int,
        acked_below: int,
        closure: int | None,
        ordinal: int,
        variable_set: int | bytes,
        variables: Sequence[str] = (),
        spread: Sequence[Sequence[int]] = (),
        *,
        arrived: bool = False,
    ) -> Ticket:
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
            arrived: Whether its client was served when it arrived.

        Raises:
            FencedError: If the client has been replaced by a newer incarnation.
            UsageError: If the update contradicts an earlier one, or was acknowledged.
        """
        task, incarnation = client
        call = None if closure is None else (closure, ordinal)
        sender = self._senders.get(task)
        if sender is None or sender.incarnation != incarnation or incarnation < self._floor:
            is_replaced = sender is not None and incarnation < sender.incarnation
            if arrived and call is not None and is_replaced:
                sender = None
            else:
                if not arrived or is_replaced:
                    self.check_incarnation(task, incarnation)
                self.fence(task, incarnation)
                sender = self._senders[task]
        if sender is not None:
            if acked_below > sender.acked_below:
                sender.acked_below = acked_below
                for known in list(sender.messages):
                    if known < acked_below:
                        del sender.messages[known]
                if client in self._refused:
                    self._refused[client] = {s for s in self._refused[client] if s >= acked_below}
            message = sender.messages.get(sequence)
            if message is not None:
                return self._seen(client, sequence, message, call)
            if sequence < sender.acked_below:
                raise UsageError(
                    f"{task} sent update {sequence} again, whose answer it has acknowledged"
                )
        first = call is None or self.is_first(call, variable_set, variables)
        return Ticket(client, sequence, call, first, variable_set, variables, spread)

    def record(self, ticket: Ticket, answer: A) -> A:
        """Note that an update is applied, or answered as a duplicate. Returns ``answer``.

        Args:
            ticket: A new one of ``judge``, since which nothing else was judged.
            answer: What its client is told.
        """
        sender, call = self._senders[ticket.client[0]], ticket.call
        if sender.incarnation == ticket.client[1]:  # else it was replaced while this waited
            sender.messages[ticket.sequence] = ticket
        ticket.recorded, ticket.answer = True, answer
        if not ticket.first:
            self._already_applied += 1
            return answer
        if call is not None:
            self._closures.setdefault(call[0] & FIRST, {})[call[1]] = ticket
        self._fresh += 1
        return answer

    def is_first(
        self, call: Call, variable_set: Variables, variables: Sequence[str] = (), of: str = ""
    ) -> bool:
        """Return whether a call counts: its closure is not final, and no other run has made it.

        Args:
            call: Closure, and ordinal of the message.
            variable_set: What the call updates.
            variables: Their names, for messages.
            of: Whose they are, for messages.

        Raises:
            UsageError: The run that has made it updated other variables.
        """
        first_run = call[0] & FIRST
        applied = self._closures.get(first_run, _NONE).get(call[1])
        if applied is None:
            return first_run >= self.final.below or not self.final.is_final(call[0])
        if applied.variable_set == variable_set:
            return False
        first, second = (
            f" ({', '.join(names)})" if names else "" for names in (applied.variables, variables)
        )
        raise UsageError(
            f"{of}{_named(call)} updates other variables{second} than in its first run{first}",
            hint=same_in_each_run(call[0]),
        )

    def count(
        self,
        call: Call,
        variable_set: Variables,
        variables: Sequence[str] = (),
        spread: Sequence[Sequence[int]] = (),
    ) -> None:
        """Note that the call of a synchronous push counts; its group knows the message."""
        self._closures.setdefault(call[0] & FIRST, {})[call[1]] = Ticket(
            ("", 0), 0, call, True, variable_set, variables, spread, recorded=True
        )

    def counted(self) -> list[tuple[int, int, int, bytes]]:
        """Return (group, closure, ordinal of the call, digest) of each synchronous push."""
        return [
            (group, closure, call_of(ordinal), digest)
            for closure, ordinal, applied in self._applied()
            if isinstance(applied.variable_set, tuple)
            for group, digest in [applied.variable_set]
        ]

    def failure_of(self, ticket: Ticket) -> bytes | None:
        """Return what a recorded update raised, or the same call of another run; None: nothing."""
        if ticket.failure is None and ticket.call is not None:
            applied = self._applied_for(ticket.call)
            return None if applied is None else applied.failure
        return ticket.failure

    def refuse(self, client: Client, sequence: int) -> None:
        """Note that a message was refused, or judged in vain: ``is_settled`` knows of it."""
        if client[1] >= self._lowest(client[0]):
            self._num_refused += 1
            if not self.knows(client, sequence):
                self._refused.setdefault(client, set()).add(sequence)

    def forget(self, client: Client, sequence: int) -> None:
        """Forget a message that was recorded; it may come again, and is judged anew."""
        if self.knows(client, sequence):
            del self._senders[client[0]].messages[sequence]

    def knows(self, client: Client, sequence: int) -> bool:
        """Return whether a message has been judged, and is not forgotten yet."""
        return self._recorded(client, sequence) is not None

    def _recorded(self, client: Client, sequence: int) -> Ticket | None:
        sender = self._senders.get(client[0])
        if sender is None or sender.incarnation != client[1]:
            return None
        return sender.messages.get(sequence)

    def _applied_for(self, call: Call) -> Ticket | None:
        return self._closures.get(first_of(call[0]), _NONE).get(call[1])

    def is_settled(self, client: Client, sequence: int) -> bool:
        """Return whether a message will change nothing here any more.

        It has been answered, or refused, or its client has been replaced.
        """
        if client[1] < self._lowest(client[0]) or sequence in self._refused.get(client, ()):
            return True
        sender = self._senders.get(client[0])
        if sender is None or sender.incarnation < client[1]:
            return False
        return sequence < sender.acked_below or sequence in sender.messages

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

    def final_below(self, closure: int, kept: Iterable[tuple[int, int]] = ()) -> None:
        """Forget the calls of all closures below ``closure``: none will count any more.

        Args:
            closure: Id of the lowest closure that is not final.
            kept: Those below it that may come again, as in ``Finality``: they are not forgotten.
        """
        if self.final.update(closure, kept):
            for first in [first for first in self._closures if self.final.is_over(first)]:
                del self._closures[first]

    def fence(self, task: str, incarnation: int) -> None:
        """Serve only this and newer incarnations of ``task`` from now on."""
        sender = self._senders.get(task)
        if sender is None or sender.incarnation < incarnation:
            self._senders[task] = _Sender(incarnation)
            if self.on_fence is not None:
                self.on_fence(task, incarnation)
            for client in [c for c in self._refused if c[0] == task and c[1] < incarnation]:
                del self._refused[client]

    def raise_floor(self, floor: int) -> None:
        """Serve nobody below ``floor`` from now on, whichever task: another ledger does."""
        self._floor = max(self._floor, floor)

    def check_incarnation(self, task: str, incarnation: int) -> None:
        """Raise FencedError if ``incarnation`` of ``task`` is not served any more."""
        sender = self._senders.get(task)
        if incarnation < self._floor or (sender is not None and incarnation < sender.incarnation):
            lowest = self._lowest(task)
            self._fenced += 1
            raise FencedError(f"incarnation {incarnation} of {task} has been replaced by {lowest}")

    def _lowest(self, task: str) -> int:
        sender = self._senders.get(task)
        return self._floor if sender is None else max(sender.incarnation, self._floor)

    def statistics(self) -> dict[str, int]:
        """Return counters and sizes as of now.

        The first five count verdicts: ``fresh`` and ``already_applied`` those that were recorded,
        ``refused`` the messages that were refused for another reason than ``fenced``. Then come the
        tasks that are known, the answers and the calls that are remembered.
        """
        return {
            "fresh": self._fresh,
            "duplicate": self._duplicate,
            "already_applied": self._already_applied,
            "fenced": self._fenced,
            "refused": self._num_refused,
            "clients": len(self._senders),
            "answers": sum(len(sender.messages) for sender in self._senders.values()),
            "calls": sum(map(len, self._closures.values())),
        }

    # What is remembered, as plain data.

    def snapshot(
        self,
        pack: Callable[[object], bytes | None],
        kind: type[int | bytes] = int,
        pending: Collection[tuple[int, int]] = (),
    ) -> SnapshotState:
        """Return what this remembers, at a position at which nothing is being computed.

        Args:
            pack: Makes bytes of an answer; None: that message is left out.
            kind: Of the variable sets whose calls are wanted: those of accumulators are bytes.
            pending: (closure, ordinal) of the synchronous pushes whose steps are not applied.
        """
        sets: dict[tuple[Any, tuple[str, ...]], int] = {}
        calls, parts = [], []
        failures = [(STEP, *key, raised) for key, raised in self.step_failures.items()]
        for closure, ordinal, applied in self._applied():
            if applied.failure is not None:
                failures.append((CALL, closure, ordinal, applied.failure))
            if isinstance(applied.variable_set, kind):
                known = applied.variable_set, tuple(applied.variables)
                calls.append((closure, ordinal, sets.setdefault(known, len(sets))))
                if applied.parts > 1:
                    parts.append((closure, ordinal, applied.parts))
        senders = []
        for task, sender in self._senders.items():
            answers = []
            for sequence, message in sender.messages.items():
                if message.failure is not None:
                    failures.append((task, sender.incarnation, sequence, message.failure))
                answer = pack(message.answer)
                if answer is not None:
                    answers.append((sequence, message.call, answer))
            senders.append(
                SenderState(task, sender.incarnation, sender.acked_below, tuple(answers))
            )
        return replace(
            NOTHING, senders=tuple(senders), calls=tuple(calls), parts=tuple(parts),
            variable_sets=tuple(sets),
            final_below=self.final.below, kept=tuple(self.final.listed()), coordinator=self._floor,
            counted=tuple(call for call in self.counted() if call[1:3] not in pending),
            pending=tuple(sorted({closure for closure, _ in pending})), failures=tuple(failures),
        )  # fmt: skip

    def restore(self, state: SnapshotState, unpack: Callable[[bytes], object]) -> None:
        """Remember what another ledger did.

        Args:
            state: ``snapshot`` of the other one; that of another kind may have come before.
            unpack: Makes answers of what its ``pack`` has returned.
        """
        for sender in state.senders:
            client, known = (sender.task, sender.incarnation), _Sender(*sender[1:3])
            messages = self._senders.setdefault(sender.task, known).messages
            for sequence, call, packed in sender.answers:
                messages[sequence] = Ticket(
                    client, sequence, call and (call[0], call[1]), True, recorded=True,
                    answer=unpack(packed),
                )  # fmt: skip
        parts = {(closure, ordinal): count for closure, ordinal, count in state.parts}
        for closure, ordinal, place in state.calls:
            others = ((),) * (parts.get((closure, ordinal), 1) - 1)
            self.count((closure, ordinal), *state.variable_sets[place], others)
        for group, closure, ordinal, digest in state.counted:
            self.count((closure, ordinal << PART_BITS), (group, digest))
        for task, number, place, failure in state.failures:
            if task == STEP:
                self.step_failures[number, place] = failure
                continue
            key = number, place
            failed = (
                self._applied_for(key) if task == CALL else self._recorded((task, number), place)
            )
            if failed is not None:
                failed.failure = failure
        if state.final_below:
            self.final_below(state.final_below, state.kept)

    def control(self, pack: Callable[[Any], bytes]) -> list[Any]:
        """Return all that verdicts depend on, in an order of its own, for a digest."""
        state = self.snapshot(pack)
        senders = sorted([*sender[:3], sorted(sender.answers)] for sender in state.senders)
        calls = sorted(
            [closure, ordinal, str(each.variable_set), each.parts]
            for closure, ordinal, each in self._applied()
        )
        return [senders, calls, state.final_below, state.kept]

    def held_updates(self, coordinator: int) -> HeldUpdates:
        """Return what is known of updates over several ps tasks, and of those of no closure.

        Args:
            coordinator: Incarnation of the coordinator that this has served.
        """
        state = self.snapshot(lambda _: None)
        messages = tuple(
            (*message.client, sequence, tuple((ps, number) for ps, number in message.spread))
            for sender in self._senders.values()
            for sequence, message in sender.messages.items()
            if message.call is None
        )
        acked = tuple(sender[:3] for sender in state.senders)
        return HeldUpdates(coordinator, state.final_below, state.parts, acked, messages, state.kept)

    def _applied(self) -> list[tuple[int, int, Ticket]]:
        """Return (closure, ordinal, its first update) of all calls."""
        return [
            (closure, ordinal, ticket)
            for closure, by_ordinal in self._closures.items()
            for ordinal, ticket in by_ordinal.items()
        ]

    def _seen(self, client: Client, sequence: int, message: Ticket, call: Call | None) -> Ticket:
        if message.call != call:
            raise UsageError(
                f"{client[0]} sent update {sequence} for {_named(message.call)} "
                f"and again for {_named(call)}"
            )
        self._duplicate += 1
        return message


def same_in_each_run(number: int) -> str:
    """Return the hint to a run, by its closure's number, that does other things than the first."""
    if number == first_of(number):
        return (
            "a closure may run more than once, and every run must update the same variables in the "
            "same order; decide which by its arguments, not by randomness or time"
        )
    return (
        "what a data shard has updated before its step raised or was cancelled counts, so its next "
        "run must update the same variables in the same order; to run another step for what is "
        "left, use distribute_once(shards, state=visits.state())"
    )


def _named(call: Call | None) -> str:
    if call is None:
        return "no closure"
    return f"closure {first_of(call[0])}, call {call_of(call[1])}"
