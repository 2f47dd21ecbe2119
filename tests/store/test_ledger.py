from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from psync.errors import FencedError, LocalProtocolError, UsageError
from psync.store.ledger import AlreadyApplied, Duplicate, Fresh, InProgress, Ledger, Ticket, Verdict

W0, W1 = ("/job:worker/task:0", 1), ("/job:worker/task:1", 1)
SET = 77


def push(
    ledger: Ledger,
    client: tuple[str, int] = W0,
    sequence: int = 0,
    *,
    acked: int = 0,
    closure: int | None = 5,
    ordinal: int = 0,
    variable_set: int = SET,
) -> Verdict:
    return ledger.begin(client, sequence, acked, closure, ordinal, variable_set)


def fresh(verdict: Verdict) -> Ticket:
    assert isinstance(verdict, Fresh)
    return verdict.ticket


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


class TestMessages:
    def test_retry_gets_the_first_answer(self, ledger: Ledger) -> None:
        answer = ledger.finish(fresh(push(ledger)), "accepted")
        assert answer == "accepted"
        for _ in range(2):
            assert push(ledger) == Duplicate("accepted")

    def test_retry_during_the_update_waits_for_it(self, ledger: Ledger) -> None:
        ticket = fresh(push(ledger))
        assert push(ledger) == InProgress(ticket)
        ledger.finish(ticket, "accepted")
        assert push(ledger) == Duplicate("accepted")

    def test_retry_of_a_refused_update_is_judged_anew(self, ledger: Ledger) -> None:
        ledger.fail(fresh(push(ledger)))
        assert ledger.statistics().answers == 0
        assert ledger.statistics().calls == 0
        fresh(push(ledger))

    def test_updates_outside_of_closures_are_known_by_sequence_alone(self, ledger: Ledger) -> None:
        for sequence in (3, 1, 2):  # in any order
            ledger.finish(fresh(push(ledger, sequence=sequence, closure=None)), sequence)
        assert push(ledger, sequence=1, closure=None) == Duplicate(1)
        assert ledger.statistics().calls == 0

    def test_refused_update_outside_of_a_closure(self, ledger: Ledger) -> None:
        ledger.fail(fresh(push(ledger, closure=None)))
        fresh(push(ledger, closure=None))

    def test_clients_have_their_own_sequences(self, ledger: Ledger) -> None:
        fresh(push(ledger, W0, 0, closure=5))
        fresh(push(ledger, W1, 0, closure=6))

    def test_acknowledged_answers_are_forgotten(self, ledger: Ledger) -> None:
        for sequence in range(3):
            ledger.finish(fresh(push(ledger, sequence=sequence, closure=sequence)), "accepted")
        fresh(push(ledger, sequence=3, acked=2, closure=3))
        assert ledger.statistics().answers == 2
        assert push(ledger, sequence=2, acked=1, closure=2) == Duplicate("accepted")

    def test_late_copy_of_an_acknowledged_update_is_refused(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger, closure=None)), "accepted")
        with pytest.raises(
            UsageError,
            match=r"^/job:worker/task:0 sent update 0 again, whose answer it has acknowledged$",
        ):
            push(ledger, acked=1, closure=None)

    def test_answer_is_not_kept_if_its_client_has_stopped_waiting(self, ledger: Ledger) -> None:
        ticket = fresh(push(ledger))
        ledger.acknowledge(W0, 1)
        assert ledger.statistics().answers == 1  # under way: it must not be begun again
        ledger.finish(ticket, "accepted")
        assert ledger.statistics().answers == 0

    def test_sequence_used_for_two_calls_is_an_error(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger, closure=5, ordinal=1)), "accepted")
        with pytest.raises(
            UsageError, match="sent update 0 for closure 5, call 1 and again for no closure"
        ):
            push(ledger, closure=None)

    def test_settling_twice_is_an_error(self, ledger: Ledger) -> None:
        ticket = fresh(push(ledger))
        ledger.finish(ticket, "accepted")
        for settle in (ledger.fail, lambda t: ledger.finish(t, "again")):
            with pytest.raises(
                LocalProtocolError, match=r"^update 0 of /job:worker/task:0 was settled before$"
            ):
                settle(ticket)


class TestCalls:
    def test_second_run_is_not_applied(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger, W0)), "accepted")
        verdict = push(ledger, W1, 9)
        assert isinstance(verdict, AlreadyApplied)
        ledger.finish(verdict.ticket, "duplicate")
        assert push(ledger, W1, 9) == Duplicate("duplicate")
        assert push(ledger, W0) == Duplicate("accepted")

    def test_second_run_on_the_same_worker_is_not_applied(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger, W0, 0)), "accepted")
        assert isinstance(push(ledger, W0, 1), AlreadyApplied)

    def test_second_run_waits_for_the_first(self, ledger: Ledger) -> None:
        ticket = fresh(push(ledger, W0))
        assert push(ledger, W1, 9) == InProgress(ticket)
        ledger.finish(ticket, "accepted")
        assert isinstance(push(ledger, W1, 9), AlreadyApplied)

    def test_second_run_is_applied_if_the_first_is_refused(self, ledger: Ledger) -> None:
        ticket = fresh(push(ledger, W0))
        assert push(ledger, W1, 9) == InProgress(ticket)
        ledger.fail(ticket)
        fresh(push(ledger, W1, 9))

    def test_refusing_one_call_keeps_the_others_of_its_closure(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger, W0, 0, ordinal=0)), "accepted")
        ledger.fail(fresh(push(ledger, W0, 1, ordinal=1)))
        assert isinstance(push(ledger, W1, 0, ordinal=0), AlreadyApplied)
        fresh(push(ledger, W1, 1, ordinal=1))

    def test_failed_answer_to_a_second_run_leaves_the_first_one_counted(
        self, ledger: Ledger
    ) -> None:
        ledger.finish(fresh(push(ledger, W0)), "accepted")
        verdict = push(ledger, W1)
        assert isinstance(verdict, AlreadyApplied)
        ledger.fail(verdict.ticket)
        assert isinstance(push(ledger, W1), AlreadyApplied)

    def test_calls_of_a_closure_are_told_apart_by_their_ordinal(self, ledger: Ledger) -> None:
        fresh(push(ledger, W0, 0, ordinal=0))
        fresh(push(ledger, W0, 1, ordinal=1))

    def test_other_variables_in_a_second_run_are_an_error(self, ledger: Ledger) -> None:
        ledger.begin(W0, 0, 0, 5, 1, 77, ["w", "b"])
        with pytest.raises(UsageError) as caught:
            ledger.begin(W1, 0, 0, 5, 1, 78, ["w"])
        assert str(caught.value) == (
            "closure 5, call 1 updates other variables (w) than in its first run (w, b)\n"
            "hint: a closure may run more than once, and every run must update the same variables "
            "in the same order; decide which by its arguments, not by randomness or time"
        )
        with pytest.raises(
            UsageError, match="updates other variables than in its first run \\(w, b"
        ):
            ledger.begin(W1, 0, 0, 5, 1, 78)
        assert ledger.statistics().answers == 1

    def test_final_closures_are_forgotten_and_never_applied_again(self, ledger: Ledger) -> None:
        for sequence, closure in enumerate((3, 4, 5)):
            ledger.finish(fresh(push(ledger, W0, sequence, closure=closure)), "accepted")
        ledger.final_below(5)
        ledger.final_below(4)  # an old notice
        assert ledger.statistics().calls == 1
        assert isinstance(push(ledger, W1, 0, closure=4), AlreadyApplied)
        assert isinstance(push(ledger, W1, 1, closure=2), AlreadyApplied)
        assert isinstance(push(ledger, W1, 2, closure=5), AlreadyApplied)
        fresh(push(ledger, W1, 3, closure=6))

    def test_closure_may_become_final_while_a_call_is_under_way(self, ledger: Ledger) -> None:
        first, second = fresh(push(ledger, W0, 0)), fresh(push(ledger, W0, 1, ordinal=1))
        ledger.final_below(6)
        ledger.finish(first, "accepted")
        ledger.fail(second)
        assert ledger.statistics().calls == 0
        assert isinstance(push(ledger, W0, 1, ordinal=1), AlreadyApplied)


class TestFences:
    def test_old_incarnation_is_refused(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 3)
        with pytest.raises(
            FencedError, match=r"^incarnation 1 of /job:worker/task:0 has been replaced by 3$"
        ):
            push(ledger)
        with pytest.raises(FencedError):
            ledger.check_incarnation(*W0)
        with pytest.raises(FencedError):
            ledger.acknowledge(W0, 1)
        ledger.check_incarnation(*W1)
        ledger.check_incarnation(W0[0], 3)
        assert ledger.statistics().fenced == 3

    def test_fences_only_rise(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 3)
        ledger.fence(W0[0], 2)
        with pytest.raises(FencedError, match="replaced by 3"):
            push(ledger, (W0[0], 2))

    def test_newer_incarnation_fences_the_older(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger)), "accepted")
        assert isinstance(push(ledger, (W0[0], 2)), AlreadyApplied)  # its sequences start again
        with pytest.raises(FencedError):
            push(ledger)

    def test_fence_at_the_present_incarnation_forgets_nothing(self, ledger: Ledger) -> None:
        ledger.finish(fresh(push(ledger)), "accepted")
        ledger.fence(*W0)
        assert push(ledger) == Duplicate("accepted")

    def test_update_under_way_of_a_fenced_client_counts(self, ledger: Ledger) -> None:
        """What has begun is finished: its closure's next run must not be applied."""
        ticket = fresh(push(ledger))
        ledger.fence(W0[0], 2)
        assert push(ledger, W1) == InProgress(ticket)
        ledger.finish(ticket, "accepted")
        assert isinstance(push(ledger, W1), AlreadyApplied)

    def test_refused_update_of_a_fenced_client_does_not_count(self, ledger: Ledger) -> None:
        ticket = fresh(push(ledger))
        ledger.fence(W0[0], 2)
        ledger.fail(ticket)
        fresh(push(ledger, W1))


def test_statistics_count_verdicts_and_sizes(ledger: Ledger) -> None:
    ticket = fresh(push(ledger))
    push(ledger)
    ledger.finish(ticket, "accepted")
    push(ledger)
    push(ledger, W1)
    ledger.fail(fresh(push(ledger, W1, 1, closure=None)))
    ledger.fence(W1[0], 2)
    with pytest.raises(FencedError):
        push(ledger, W1)
    statistics = ledger.statistics()
    assert (statistics.fresh, statistics.duplicate, statistics.already_applied) == (2, 1, 1)
    assert (statistics.in_progress, statistics.fenced, statistics.failed) == (1, 1, 1)
    assert (statistics.clients, statistics.answers, statistics.calls) == (2, 1, 1)


class Sent(NamedTuple):
    client: tuple[str, int]
    sequence: int
    closure: int | None
    ordinal: int


class Updates(RuleBasedStateMachine):
    """Any order of sends, retries, second runs, refusals, fences and low-water marks."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.incarnations = {"/job:worker/task:0": 1, "/job:worker/task:1": 1}
        self.sequences: Counter[tuple[str, int]] = Counter()
        self.sent: list[Sent] = []
        self.answered: set[Sent] = set()
        self.under_way: list[tuple[Sent, Ticket]] = []
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
    )
    def run_a_call(self, worker: int, closure: int | None, ordinal: int) -> None:
        client = self.client(worker)
        self.sent.append(Sent(client, self.sequences[client], closure, ordinal))
        self.sequences[client] += 1
        self.deliver(len(self.sent) - 1)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000))
    def deliver(self, which: int) -> None:
        message = self.sent[which % len(self.sent)]
        client, sequence, closure, ordinal = message
        acked_below = self.acked_below(client)
        try:
            verdict = self.ledger.begin(client, sequence, acked_below, closure, ordinal, SET)
        except FencedError:
            assert client[1] < self.incarnations[client[0]]
        except UsageError:
            assert sequence < acked_below
        else:
            assert client[1] == self.incarnations[client[0]]
            if isinstance(verdict, Fresh):
                assert closure is None or closure >= self.final_below
                self.under_way.append((message, verdict.ticket))
            elif isinstance(verdict, AlreadyApplied):
                assert closure is not None
                assert closure < self.final_below or self.calls_applied[closure, ordinal] == 1
                self.ledger.finish(verdict.ticket, ("duplicate", message))
                self.answered.add(message)
            elif isinstance(verdict, Duplicate):
                assert verdict.answer[1] == message  # type: ignore[index]
                self.answered.add(message)
            else:
                assert verdict.ticket in [ticket for _, ticket in self.under_way]

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 1000), heard=st.booleans())
    def finish(self, which: int, heard: bool) -> None:
        message, ticket = self.under_way.pop(which % len(self.under_way))
        self.messages_applied[message] += 1
        assert self.messages_applied[message] == 1
        if message.closure is not None:
            self.calls_applied[message.closure, message.ordinal] += 1
            assert self.calls_applied[message.closure, message.ordinal] == 1
        self.ledger.finish(ticket, ("accepted", message))
        if heard:  # else the answer is lost, and the client sends again
            self.answered.add(message)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 1000))
    def refuse(self, which: int) -> None:
        _, ticket = self.under_way.pop(which % len(self.under_way))
        self.ledger.fail(ticket)

    @rule(worker=st.integers(0, 1), told=st.booleans())
    def restart(self, worker: int, told: bool) -> None:
        task, incarnation = self.client(worker)
        self.incarnations[task] = incarnation + 1
        if told:
            self.ledger.fence(task, incarnation + 1)
        else:  # the new incarnation speaks before the coordinator does
            self.run_a_call(worker, None, 0)

    @rule(closure=st.integers(0, 4))
    def make_final(self, closure: int) -> None:
        self.final_below = max(self.final_below, closure)
        self.ledger.final_below(closure)

    def teardown(self) -> None:
        while self.under_way:
            self.finish(0, True)
        for task, incarnation in self.incarnations.items():
            self.ledger.acknowledge((task, incarnation), self.sequences[task, incarnation])
        self.ledger.final_below(10)
        statistics = self.ledger.statistics()
        assert (statistics.answers, statistics.calls) == (0, 0)


TestUpdates = Updates.TestCase
TestUpdates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_message_is_settled_once_it_can_change_nothing_any_more() -> None:
    ledger = Ledger(floor=3)
    client = ("/job:worker/task:0", 5)
    assert not ledger.is_settled(client, 1)  # nobody has heard of it
    assert ledger.is_settled(("/job:worker/task:0", 2), 1)  # below the floor
    verdict = ledger.begin(client, 1, 0, None, 0, 1)
    assert isinstance(verdict, Fresh)
    assert not ledger.is_settled(client, 1)
    assert not ledger.is_settled((client[0], 6), 1)  # a newer incarnation that is yet to come
    ledger.finish(verdict.ticket, "accepted")
    assert ledger.is_settled(client, 1)
    ledger.acknowledge(client, 2)
    assert ledger.is_settled(client, 1)  # forgotten, since its client has the answer
    assert not ledger.knows(client, 1)
    assert ledger.is_settled((client[0], 4), 9)  # of an incarnation that was replaced


def test_a_refused_message_is_settled_until_it_is_acknowledged_or_begun_anew() -> None:
    ledger = Ledger(floor=3)
    client = ("/job:worker/task:0", 5)
    ledger.refuse((client[0], 2), 1)  # below the floor: nothing to remember
    ledger.refuse(client, 1)  # before it was judged
    assert ledger.is_settled(client, 1)
    again = ledger.begin(client, 1, 0, None, 0, 1)
    assert isinstance(again, Fresh)
    assert not ledger.is_settled(client, 1)
    ledger.refuse(client, 1)  # it is being applied: nothing to note
    ledger.fail(again.ticket)
    assert ledger.is_settled(client, 1)
    ledger.acknowledge(client, 1)
    assert ledger.is_settled(client, 1)
    ledger.acknowledge(client, 2)
    late = ledger.begin(client, 2, 2, None, 0, 1)
    assert isinstance(late, Fresh)
    ledger.acknowledge(client, 3)
    ledger.fail(late.ticket)  # its client has given up waiting
    assert ledger.is_settled(client, 2)


def test_once_its_floor_is_raised_it_serves_nobody_below() -> None:
    ledger = Ledger(floor=100)
    ledger.check_incarnation("w", 150)
    ledger.raise_floor(200)
    ledger.raise_floor(120)
    for incarnation in (150, 199):
        with pytest.raises(FencedError, match="has been replaced by 200"):
            ledger.check_incarnation("w", incarnation)
    ledger.check_incarnation("w", 200)


def test_what_belongs_to_updates_elsewhere_is_listed_until_it_is_acknowledged() -> None:
    ledger = Ledger()
    client = ("/job:worker/task:0", 5)
    verdict = ledger.begin(client, 1, 0, None, 0, 1, spread=[(1, 7), (2, 4)])
    assert isinstance(verdict, Fresh)
    assert ledger.others() == [(1, *client, 7), (2, *client, 4)]
    ledger.finish(verdict.ticket, "accepted")
    assert len(ledger.others()) == 2
    ledger.acknowledge(client, 2)
    assert ledger.others() == []


def test_it_serves_the_present_incarnation_of_whoever_it_has_heard_of() -> None:
    ledger = Ledger()
    assert not ledger.serves(("/job:worker/task:0", 2))
    ledger.acknowledge(("/job:worker/task:0", 2), 1)
    assert ledger.serves(("/job:worker/task:0", 2))
    assert not ledger.serves(("/job:worker/task:0", 1))
    assert not ledger.serves(("/job:worker/task:0", 3))
