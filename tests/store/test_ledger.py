"""Which updates count: whatever is sent in whatever order, and what a snapshot knows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec import msgpack

from psync.errors import FencedError, UsageError
from psync.store.ledger import Ledger, Ticket
from psync.store.snapshot_state import NOTHING, SenderState
from psync.wire.closure_numbers import PART_BITS, numbered

FLOOR = 20
W0, W1 = ("/job:worker/task:0", 21), ("/job:worker/task:1", 21)
NEXT = (W0[0], 22)
SET, GRADIENT = -77, b"gradient of a"


def judge(
    ledger: Ledger, client: tuple[str, int] = W0, sequence: int = 0, *,
    acked: int = 0, closure: int | None = 5, ordinal: int = 0, variable_set: Any = SET,
    spread: Any = (), arrived: bool = False,
) -> Ticket:  # fmt: skip
    names = ("w", "b")
    return ledger.judge(
        client, sequence, acked, closure, ordinal, variable_set, names, spread, arrived=arrived
    )


def fresh(ticket: Ticket) -> Ticket:
    assert ticket.first
    assert not ticket.recorded
    return ticket


def apply(ledger: Ledger, *args: Any, answer: object = "accepted", **kwargs: Any) -> Ticket:
    ticket = fresh(judge(ledger, *args, **kwargs))
    ledger.record(ticket, answer)
    return ticket


def acknowledge(ledger: Ledger, client: tuple[str, int], below: int) -> None:
    """Send an update that is refused, which says what has been heard."""
    judge(ledger, client, below + 99, acked=below, closure=None)


def pack(answer: object) -> bytes | None:
    return answer.encode() if isinstance(answer, str) else None


def copy_of(ledger: Ledger) -> Ledger:
    made = Ledger(FLOOR)
    made.restore(ledger.snapshot(pack), bytes.decode)
    return made


def control(ledger: Ledger) -> list[Any]:
    return ledger.control(lambda answer: str(answer).encode())


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(FLOOR)


class Sent(NamedTuple):
    client: tuple[str, int]
    sequence: int
    closure: int | None
    ordinal: int


class Updates(RuleBasedStateMachine):
    """Any order of sends, retries, second runs, refusals, fences, snapshots and what is final."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(FLOOR)
        self.incarnations = {W0[0]: 21, W1[0]: 21}
        self.sequences: Counter[tuple[str, int]] = Counter()
        self.sent: list[Sent] = []
        self.answered: set[Sent] = set()
        self.calls_applied: Counter[tuple[int, int]] = Counter()
        self.messages_applied: Counter[Sent] = Counter()
        self.final_below = 0

    def client(self, worker: int) -> tuple[str, int]:
        task = f"/job:worker/task:{worker}"
        return task, self.incarnations[task]

    def acked_below(self, client: tuple[str, int]) -> int:
        waiting = [s.sequence for s in self.sent if s.client == client and s not in self.answered]
        return min(waiting, default=self.sequences[client])

    @rule(
        worker=st.integers(0, 1),
        closure=st.none() | st.integers(0, 3),
        ordinal=st.integers(0, 1),
        refused=st.booleans(),
        heard=st.booleans(),
    )
    def run_a_call(
        self, worker: int, closure: int | None, ordinal: int, refused: bool, heard: bool
    ) -> None:
        client = self.client(worker)
        self.sent.append(Sent(client, self.sequences[client], closure, ordinal))
        self.sequences[client] += 1
        self.deliver(len(self.sent) - 1, refused, heard)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), refused=st.booleans(), heard=st.booleans())
    def deliver(self, which: int, refused: bool, heard: bool) -> None:
        """A message comes; it may be refused for what it says, or its answer be lost."""
        message = self.sent[which % len(self.sent)]
        client, sequence, closure, ordinal = message
        acked_below = self.acked_below(client)
        try:
            ticket = self.ledger.judge(client, sequence, acked_below, closure, ordinal, SET)
        except FencedError:
            assert client[1] < self.incarnations[client[0]]
            return
        except UsageError:
            assert sequence < acked_below
            return
        assert client[1] == self.incarnations[client[0]]
        if ticket.recorded:
            assert ticket.answer in (f"accepted {message}", f"duplicate {message}")
        elif not ticket.first:
            assert closure is not None
            assert closure < self.final_below or self.calls_applied[closure, ordinal] == 1
            self.ledger.record(ticket, f"duplicate {message}")
        elif refused:
            self.ledger.refuse(client, sequence)
            assert self.ledger.is_settled(client, sequence)
            return
        else:
            self.apply(message, ticket)
        assert self.ledger.is_settled(client, sequence)
        if heard:  # else the client sends again
            self.answered.add(message)

    def apply(self, message: Sent, ticket: Ticket) -> None:
        self.messages_applied[message] += 1
        assert self.messages_applied[message] == 1
        if message.closure is not None:
            assert message.closure >= self.final_below
            self.calls_applied[message.closure, message.ordinal] += 1
            assert self.calls_applied[message.closure, message.ordinal] == 1
        answer = f"accepted {message}"
        assert self.ledger.record(ticket, answer) == answer

    @rule(worker=st.integers(0, 1), told=st.booleans())
    def restart(self, worker: int, told: bool) -> None:
        task, incarnation = self.client(worker)
        self.incarnations[task] = incarnation + 1
        if told:
            self.ledger.fence(task, incarnation + 1)
            self.ledger.fence(task, incarnation)  # an old notice
        else:  # the new incarnation speaks before the coordinator does
            self.run_a_call(worker, None, 0, refused=False, heard=True)

    @rule(closure=st.integers(0, 4))
    def make_final(self, closure: int) -> None:
        self.final_below = max(self.final_below, closure)
        self.ledger.final_below(closure)

    @rule()
    def another_goes_on_from_a_snapshot(self) -> None:
        before, self.ledger = self.ledger, copy_of(self.ledger)
        assert self.ledger.snapshot(pack) == before.snapshot(pack)
        assert control(self.ledger) == control(before)

    def teardown(self) -> None:
        for task, incarnation in self.incarnations.items():
            client = task, incarnation
            self.ledger.judge(client, 999, self.sequences[client], None, 0, SET)
        self.ledger.final_below(10)
        statistics = self.ledger.statistics()
        assert (statistics["answers"], statistics["calls"]) == (0, 0)


TestUpdates = pytest.mark.promise(
    "updates.same-answer", "updates.remembered", "updates.lost-worker-refused"
)(Updates.TestCase)
TestUpdates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_statistics_count_verdicts_and_sizes(ledger: Ledger) -> None:
    apply(ledger)
    judge(ledger)
    ticket = judge(ledger, W1)
    assert not ticket.first
    ledger.record(ticket, "duplicate")
    judge(ledger, W1, 1, closure=None)
    ledger.refuse(W1, 1)
    fenced: list[tuple[str, int]] = []
    ledger.on_fence = lambda *client: fenced.append(client)
    ledger.fence(W1[0], 22)
    assert fenced == [(W1[0], 22)]
    with pytest.raises(FencedError, match=f"^incarnation 21 of {W1[0]} has been replaced by 22$"):
        judge(ledger, W1)
    ledger.refuse(W1, 2)  # of who was replaced: it was counted as such
    assert ledger.statistics() == {
        "fresh": 1, "duplicate": 1, "already_applied": 1, "fenced": 1, "refused": 1,
        "clients": 2, "answers": 1, "calls": 1,
    }  # fmt: skip


def test_once_its_floor_is_raised_it_serves_nobody_below(ledger: Ledger) -> None:
    ledger.check_incarnation("w", 25)
    ledger.raise_floor(30)
    ledger.raise_floor(22)
    with pytest.raises(FencedError, match="has been replaced by 30"):
        ledger.check_incarnation("w", 29)
    ledger.check_incarnation("w", 30)


def test_a_message_that_is_forgotten_may_come_again(ledger: Ledger) -> None:
    apply(ledger, W0, 3)
    ledger.forget(W0, 3)
    ledger.forget(W0, 4)  # which has not come
    fresh(judge(ledger, W0, 3, closure=6))


def test_a_number_is_used_for_one_call(ledger: Ledger) -> None:
    apply(ledger, ordinal=1 << PART_BITS)
    for each in (ledger, copy_of(ledger)):
        with pytest.raises(UsageError, match="update 0 for closure 5, call 1 and again for no clo"):
            judge(each, closure=None)


@pytest.mark.parametrize(
    ("run", "hint"),
    [
        (0, "a closure may run more than once, and every run must update the same variables "
            "in the same order; decide which by its arguments, not by randomness or time"),
        (1, "what a data sh"),
    ],
)  # fmt: skip
def test_another_run_updates_the_same_variables(ledger: Ledger, run: int, hint: str) -> None:
    apply(ledger, ordinal=1 << PART_BITS)
    ledger.final_below(9, [(5, 1)])
    again = numbered(5, run)
    text = "^closure 5, call 1 updates other variables{} than in its first run \\(w, b\\)\nhint: "
    for each in (ledger, copy_of(ledger)):
        with pytest.raises(UsageError, match=text.format(r" \(w\)") + hint):
            each.judge(W1, 0, 0, again, 1 << PART_BITS, 78, ["w"])
        with pytest.raises(UsageError, match=text.format("")):
            each.judge(W1, 0, 0, again, 1 << PART_BITS, 78)
        assert each.statistics()["answers"] == 1


def test_what_may_come_again_is_remembered_and_its_run_before_is_refused(ledger: Ledger) -> None:
    for sequence, closure in enumerate((3, 4)):
        apply(ledger, W0, sequence, closure=closure)
    ledger.final_below(9, [(3, 1)])
    for each in (ledger, copy_of(ledger)):
        assert each.statistics()["calls"] == 1
        late = judge(each, W1, 0, closure=3, ordinal=7)
        assert not late.first
        each.record(late, "duplicate")
        again = numbered(3, 1)
        assert not judge(each, W1, 1, closure=again).first
        apply(each, W1, 2, closure=again, ordinal=7)
        each.final_below(9, [])
        assert each.statistics()["calls"] == 0
        assert not judge(each, W1, 3, closure=again, ordinal=8).first


class TestArrivals:
    """An update that arrived before its client was replaced, and had to wait."""

    def test_it_is_judged_by_its_call(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 22)
        apply(ledger, arrived=True)
        assert not judge(ledger, arrived=True).first  # it came twice
        assert not judge(ledger, W1).first  # the closure runs again
        assert not ledger.knows(W0, 0)
        assert not ledger.knows(NEXT, 0)

    def test_it_counts_no_more_when_its_closure_is_final(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 22)
        ledger.final_below(6)
        assert not judge(ledger, arrived=True).first

    @pytest.mark.promise("updates.outside-closures")
    def test_one_of_no_closure_is_refused(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 22)
        with pytest.raises(FencedError):
            judge(ledger, closure=None, arrived=True)

    def test_a_newer_coordinator_changes_nothing_for_it(self, ledger: Ledger) -> None:
        ledger.raise_floor(100)
        for closure, sequence in ((5, 1), (None, 2)):
            apply(ledger, W0, sequence, closure=closure, arrived=True)
            again = judge(ledger, W0, sequence, closure=closure, arrived=True)
            assert again.answer == "accepted"
        with pytest.raises(FencedError):
            judge(ledger, W0, 3)


def test_a_message_is_settled_once_it_can_change_nothing_any_more(ledger: Ledger) -> None:
    assert not ledger.is_settled(W0, 1)  # nobody has heard of it
    assert ledger.is_settled((W0[0], FLOOR - 1), 1)
    ledger.refuse((W0[0], FLOOR - 1), 1)  # nothing to remember
    apply(ledger, W0, 1, closure=None)
    ledger.refuse(W0, 2)  # before it was judged
    ledger.refuse(W0, 1)  # in vain
    for below in (0, 1, 2, 3):
        acknowledge(ledger, W0, below)
        assert [ledger.is_settled(W0, number) for number in (1, 2, 3)] == [True, True, False]
        assert ledger.knows(W0, 1) == (below < 2)
    assert not ledger.is_settled(NEXT, 1)  # a newer incarnation that is yet to come
    ledger.refuse(W0, 4)
    ledger.fence(*NEXT)
    assert ledger.is_settled(W0, 9)


def test_what_belongs_to_updates_elsewhere_is_listed_until_it_is_acknowledged(
    ledger: Ledger,
) -> None:
    ticket = fresh(judge(ledger, W0, 1, closure=None, spread=[(1, 7), (2, 4)]))
    assert ledger.others() == []
    ledger.record(ticket, "accepted")
    assert ledger.others() == [(1, *W0, 7), (2, *W0, 4)]
    acknowledge(ledger, W0, 2)
    assert ledger.others() == []
    with pytest.raises(UsageError, match=f"^{W0[0]} sent update 1 again, whose answer it has ack"):
        judge(ledger, W0, 1, closure=None)


class TestFailures:
    """What is noted when an update that was recorded fails while it is computed."""

    def test_a_message_and_its_call_are_answered_so_until_they_are_forgotten(
        self, ledger: Ledger
    ) -> None:
        ticket = apply(ledger)
        before = control(ledger)
        ticket.failure = b"failed"
        ledger.step_failures[3, 7] = b"too"
        assert control(ledger) == before, "no digest knows of it"
        for each in (ledger, copy_of(ledger)):
            assert judge(each).answer == "accepted", "no verdict knows of it"
            other_run = judge(each, W1, 9)
            assert each.failure_of(judge(each)) == each.failure_of(other_run) == b"failed"
            for other in (judge(each, W1, 9, ordinal=1), judge(each, W1, 9, closure=None)):
                assert each.failure_of(other) is None
            acknowledge(each, W0, 1)
            assert each.failure_of(other_run) == b"failed"
            each.final_below(6)
            assert each.failure_of(other_run) is None
            assert copy_of(each).step_failures == {(3, 7): b"too"}, "that of a step stays"

    def test_that_of_an_update_that_a_snapshot_does_not_know_is_left_out(self) -> None:
        state = replace(NOTHING, failures=((*W0, 0, b"failed"), ("a call", 5, 0, b"failed")))
        Ledger().restore(state, bytes.decode)

    def test_it_is_forgotten_with_a_client_that_is_fenced(self, ledger: Ledger) -> None:
        ticket = apply(ledger)
        ledger.fence(*NEXT)
        ticket.failure = b"failed"  # as late as the arrays
        assert [each[0] for each in ledger.snapshot(pack).failures] == ["a call"]
        assert ledger.failure_of(judge(ledger, NEXT)) == b"failed"


# --- snapshots -------------------------------------------------------------------------------


@pytest.mark.parametrize("closure", [5, None])
def test_what_is_judged_is_in_the_state_once_it_is_recorded(
    ledger: Ledger, closure: int | None
) -> None:
    ticket = fresh(judge(ledger, closure=closure, spread=[(1, 3), (2, 9)]))
    assert ledger.snapshot(pack).senders == (SenderState(*W0, 0, ()),)
    ledger.record(ticket, "accepted")
    call = None if closure is None else (5, 0)
    assert ledger.snapshot(pack) == replace(
        NOTHING,
        senders=(SenderState(*W0, 0, ((0, call, b"accepted"),)),),
        variable_sets=((SET, ("w", "b")),) if call else (),
        calls=((*call, 0),) if call else (),
        coordinator=FLOOR,
        parts=((*call, 3),) if call else (),
    )
    assert copy_of(ledger).snapshot(pack) == ledger.snapshot(pack)
    assert not ledger.snapshot(pack).final.is_final(5)


def test_updates_of_accumulators_are_left_out_and_had_apart(ledger: Ledger) -> None:
    apply(ledger, answer="a push")
    apply(ledger, sequence=1, closure=6, variable_set=GRADIENT, answer=7)
    apply(ledger, sequence=2, closure=None, variable_set=GRADIENT, answer=8)
    state = ledger.snapshot(lambda a: b"%d" % a if isinstance(a, int) else None, bytes)
    answers = (1, (6, 0), b"7"), (2, None, b"8")
    assert state.senders == (SenderState(*W0, 0, answers),)
    assert (state.calls, state.variable_sets) == (((6, 0, 0),), ((GRADIENT, ("w", "b")),))
    copy = copy_of(ledger)
    fresh(judge(copy, sequence=1, closure=6, variable_set=GRADIENT))
    fresh(judge(copy, sequence=2, closure=None))
    copy.restore(state, int)
    assert judge(copy).answer == "a push"
    assert judge(copy, sequence=1, closure=6, variable_set=GRADIENT).answer == 7
    assert judge(copy, sequence=2, closure=None, variable_set=GRADIENT).answer == 8
    assert not judge(copy, W1, closure=6, variable_set=GRADIENT).first
    with pytest.raises(UsageError, match="updates other variables"):
        judge(copy, W1, 1, closure=6)


def test_what_is_compared_does_not_depend_on_the_order_in_which_it_was_learnt() -> None:
    one, other = Ledger(FLOOR), Ledger(FLOOR)
    pushes = [(W0, 0, 5), (W1, 0, 6), (W0, 1, None)]
    for each, order in ((one, pushes), (other, pushes[::-1])):
        for client, sequence, closure in order:
            apply(each, client, sequence, closure=closure)
    assert control(one) == control(other)
    msgpack.encode(control(one))  # plain data


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: apply(ledger, W0, 7, closure=None),
        lambda ledger: apply(ledger, W0, 7, closure=6, variable_set=GRADIENT),
        lambda ledger: acknowledge(ledger, W0, 1),
        lambda ledger: ledger.fence(W1[0], 30),
        lambda ledger: ledger.final_below(3),
        lambda ledger: ledger.final_below(0, [(3, 1)]),
    ],
)
def test_whatever_it_learns_is_compared(ledger: Ledger, change: Callable[[Ledger], object]) -> None:
    apply(ledger)
    before = control(ledger)
    judge(ledger)
    ledger.refuse(W0, 3)
    assert control(ledger) == before, "what was refused, or asked again, is nothing new"
    change(ledger)
    assert control(ledger) != before


def test_what_another_program_must_know_of_updates_is_held(ledger: Ledger) -> None:
    """Calls over several ps tasks, also those that may come again, and updates of no closure."""
    for sequence, closure, spread in ((1, 5, [(1, 4)]), (2, 6, []), (3, None, [(2, 6)])):
        apply(ledger, W0, sequence, acked=1, closure=closure, spread=spread)
    held = ledger.held_updates(5)
    assert (held.coordinator, held.final_below, held.calls, held.kept) == (5, 0, ((5, 0, 2),), ())
    assert held.acked == ((*W0, 1),)
    assert held.messages == ((*W0, 3, ((2, 6),)),)
    ledger.final_below(7, [(5, 1)])
    held = ledger.held_updates(3)
    assert (held.final_below, held.kept, held.calls) == (7, ((5, 1),), ((5, 0, 2),))
