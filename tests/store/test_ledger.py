from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from psync.errors import FencedError, UsageError
from psync.store.ledger import STEP, AlreadyApplied, Duplicate, Fresh, Ledger, Ticket, Verdict
from psync.wire.closure_numbers import numbered

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
    return ledger.judge(client, sequence, acked, closure, ordinal, variable_set)


def fresh(verdict: Verdict) -> Ticket:
    assert isinstance(verdict, Fresh)
    return verdict


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


class TestMessages:
    @pytest.mark.promise("updates.same-answer")
    def test_retry_gets_the_first_answer(self, ledger: Ledger) -> None:
        answer = ledger.record(fresh(push(ledger)), "accepted")
        assert answer == "accepted"
        for _ in range(2):
            assert push(ledger) == Duplicate("accepted")

    def test_a_retry_gets_the_answer_from_the_turn_on_in_which_it_was_judged(
        self, ledger: Ledger
    ) -> None:
        """Whatever the update is still to do to arrays."""
        verdict = push(ledger)
        ledger.record(fresh(verdict), "accepted")
        assert push(ledger) == Duplicate("accepted")
        assert ledger.statistics()["fresh"] == 1

    def test_retry_of_a_refused_update_is_judged_anew(self, ledger: Ledger) -> None:
        fresh(push(ledger))
        ledger.refuse(W0, 0)
        assert ledger.statistics()["answers"] == 0
        assert ledger.statistics()["calls"] == 0
        fresh(push(ledger))

    def test_updates_outside_of_closures_are_known_by_sequence_alone(self, ledger: Ledger) -> None:
        for sequence in (3, 1, 2):  # in any order
            ledger.record(fresh(push(ledger, sequence=sequence, closure=None)), sequence)
        assert push(ledger, sequence=1, closure=None) == Duplicate(1)
        assert ledger.statistics()["calls"] == 0

    def test_refused_update_outside_of_a_closure(self, ledger: Ledger) -> None:
        fresh(push(ledger, closure=None))
        ledger.refuse(W0, 0)
        fresh(push(ledger, closure=None))

    def test_clients_have_their_own_sequences(self, ledger: Ledger) -> None:
        fresh(push(ledger, W0, 0, closure=5))
        fresh(push(ledger, W1, 0, closure=6))

    @pytest.mark.promise("updates.remembered")
    def test_acknowledged_answers_are_forgotten(self, ledger: Ledger) -> None:
        for sequence in range(3):
            ledger.record(fresh(push(ledger, sequence=sequence, closure=sequence)), "accepted")
        ledger.record(fresh(push(ledger, sequence=3, acked=2, closure=3)), "accepted")
        assert ledger.statistics()["answers"] == 2
        assert push(ledger, sequence=2, acked=1, closure=2) == Duplicate("accepted")

    def test_late_copy_of_an_acknowledged_update_is_refused(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, closure=None)), "accepted")
        with pytest.raises(
            UsageError,
            match=r"^/job:worker/task:0 sent update 0 again, whose answer it has acknowledged$",
        ):
            push(ledger, acked=1, closure=None)

    def test_sequence_used_for_two_calls_is_an_error(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, closure=5, ordinal=1)), "accepted")
        with pytest.raises(
            UsageError, match="sent update 0 for closure 5, call 1 and again for no closure"
        ):
            push(ledger, closure=None)


class TestCalls:
    @pytest.mark.promise("updates.same-answer")
    def test_second_run_is_not_applied(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, W0)), "accepted")
        verdict = push(ledger, W1, 9)
        assert isinstance(verdict, AlreadyApplied)
        ledger.record(verdict, "duplicate")
        assert push(ledger, W1, 9) == Duplicate("duplicate")
        assert push(ledger, W0) == Duplicate("accepted")

    def test_second_run_on_the_same_worker_is_not_applied(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, W0, 0)), "accepted")
        assert isinstance(push(ledger, W0, 1), AlreadyApplied)

    def test_second_run_is_applied_if_the_first_is_refused(self, ledger: Ledger) -> None:
        fresh(push(ledger, W0))
        ledger.refuse(W0, 0)
        fresh(push(ledger, W1, 9))

    def test_refusing_one_call_keeps_the_others_of_its_closure(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, W0, 0, ordinal=0)), "accepted")
        fresh(push(ledger, W0, 1, ordinal=1))
        ledger.refuse(W0, 1)
        assert isinstance(push(ledger, W1, 0, ordinal=0), AlreadyApplied)
        fresh(push(ledger, W1, 1, ordinal=1))

    def test_a_second_run_that_gets_no_answer_leaves_the_first_one_counted(
        self, ledger: Ledger
    ) -> None:
        ledger.record(fresh(push(ledger, W0)), "accepted")
        assert isinstance(push(ledger, W1), AlreadyApplied)
        ledger.refuse(W1, 0)
        assert isinstance(push(ledger, W1), AlreadyApplied)

    def test_calls_of_a_closure_are_told_apart_by_their_ordinal(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, W0, 0, ordinal=0)), "accepted")
        fresh(push(ledger, W0, 1, ordinal=1))

    def test_other_variables_in_a_second_run_are_an_error(self, ledger: Ledger) -> None:
        ledger.record(fresh(ledger.judge(W0, 0, 0, 5, 1, 77, ["w", "b"])), "accepted")
        with pytest.raises(UsageError) as caught:
            ledger.judge(W1, 0, 0, 5, 1, 78, ["w"])
        assert str(caught.value) == (
            "closure 5, call 1 updates other variables (w) than in its first run (w, b)\n"
            "hint: a closure may run more than once, and every run must update the same variables "
            "in the same order; decide which by its arguments, not by randomness or time"
        )
        with pytest.raises(
            UsageError, match="updates other variables than in its first run \\(w, b"
        ):
            ledger.judge(W1, 0, 0, 5, 1, 78)
        assert ledger.statistics()["answers"] == 1

    def test_a_shard_that_comes_again_with_other_variables_is_told_what_to_do(
        self, ledger: Ledger
    ) -> None:
        ledger.record(fresh(ledger.judge(W0, 0, 0, 5, 1, 77, ["w"])), "accepted")
        ledger.final_below(9, [(5, 1)])
        with pytest.raises(UsageError, match=r"^closure 5, call 1 .*\nhint: what a data sh"):
            ledger.judge(W1, 0, 0, numbered(5, 1), 1, 78, ["b"])

    def test_what_may_come_again_is_remembered_and_its_run_before_is_refused(
        self, ledger: Ledger
    ) -> None:
        for sequence, closure in enumerate((3, 4)):
            ledger.record(fresh(push(ledger, W0, sequence, closure=closure)), "accepted")
        ledger.final_below(9, [(3, 1)])
        assert ledger.statistics()["calls"] == 1
        late = push(ledger, W1, 0, closure=3, ordinal=7)
        assert isinstance(late, AlreadyApplied)
        ledger.record(late, "duplicate")
        again = numbered(3, 1)
        assert isinstance(push(ledger, W1, 1, closure=again), AlreadyApplied)
        ledger.record(fresh(push(ledger, W1, 2, closure=again, ordinal=7)), "accepted")
        ledger.final_below(9, [])
        assert ledger.statistics()["calls"] == 0
        assert isinstance(push(ledger, W1, 3, closure=again, ordinal=8), AlreadyApplied)

    @pytest.mark.promise("updates.remembered")
    def test_final_closures_are_forgotten_and_never_applied_again(self, ledger: Ledger) -> None:
        for sequence, closure in enumerate((3, 4, 5)):
            ledger.record(fresh(push(ledger, W0, sequence, closure=closure)), "accepted")
        ledger.final_below(5)
        ledger.final_below(4)  # an old notice
        assert ledger.statistics()["calls"] == 1
        assert isinstance(push(ledger, W1, 0, closure=4), AlreadyApplied)
        assert isinstance(push(ledger, W1, 1, closure=2), AlreadyApplied)
        assert isinstance(push(ledger, W1, 2, closure=5), AlreadyApplied)
        fresh(push(ledger, W1, 3, closure=6))


class TestArrivals:
    """An update that arrived before its client was replaced, and had to wait."""

    def judge(self, ledger: Ledger, closure: int | None, sequence: int = 1) -> Verdict:
        return ledger.judge(W0, sequence, 0, closure, 0, SET, arrived=True)

    def test_it_is_judged_by_its_call(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 2)
        ledger.record(fresh(self.judge(ledger, 5)), "accepted")
        assert isinstance(self.judge(ledger, 5), AlreadyApplied)  # it came twice
        assert isinstance(push(ledger, W1), AlreadyApplied)  # the closure runs again
        assert not ledger.knows(W0, 1)
        assert not ledger.knows((W0[0], 2), 1)

    def test_it_counts_no_more_when_its_closure_is_final(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 2)
        ledger.final_below(6)
        assert isinstance(self.judge(ledger, 5), AlreadyApplied)

    @pytest.mark.promise("updates.outside-closures")
    def test_one_of_no_closure_is_refused(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 2)
        with pytest.raises(FencedError):
            self.judge(ledger, None)

    def test_a_newer_coordinator_changes_nothing_for_it(self, ledger: Ledger) -> None:
        ledger.raise_floor(100)
        for closure, sequence in ((5, 1), (None, 2)):
            ledger.record(fresh(self.judge(ledger, closure, sequence)), "accepted")
            assert self.judge(ledger, closure, sequence) == Duplicate("accepted")
        with pytest.raises(FencedError):
            push(ledger, W0, 3)


class TestFences:
    @pytest.mark.promise("updates.lost-worker-refused")
    def test_old_incarnation_is_refused(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 3)
        with pytest.raises(
            FencedError, match=r"^incarnation 1 of /job:worker/task:0 has been replaced by 3$"
        ):
            push(ledger)
        with pytest.raises(FencedError):
            ledger.check_incarnation(*W0)
        ledger.check_incarnation(*W1)
        ledger.check_incarnation(W0[0], 3)
        assert ledger.statistics()["fenced"] == 2

    def test_fences_only_rise(self, ledger: Ledger) -> None:
        ledger.fence(W0[0], 3)
        ledger.fence(W0[0], 2)
        with pytest.raises(FencedError, match="replaced by 3"):
            push(ledger, (W0[0], 2))

    def test_newer_incarnation_fences_the_older(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger)), "accepted")
        assert isinstance(push(ledger, (W0[0], 2)), AlreadyApplied)  # its sequences start again
        with pytest.raises(FencedError):
            push(ledger)

    def test_fence_at_the_present_incarnation_forgets_nothing(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger)), "accepted")
        ledger.fence(*W0)
        assert push(ledger) == Duplicate("accepted")

    def test_an_update_of_a_client_that_is_fenced_later_counts(self, ledger: Ledger) -> None:
        """Its closure's next run must not be applied, though its answer is forgotten."""
        ledger.record(fresh(push(ledger)), "accepted")
        ledger.fence(W0[0], 2)
        assert ledger.statistics()["answers"] == 0
        assert isinstance(push(ledger, W1), AlreadyApplied)

    def test_a_refused_update_of_a_fenced_client_does_not_count(self, ledger: Ledger) -> None:
        fresh(push(ledger))
        ledger.refuse(W0, 0)
        ledger.fence(W0[0], 2)
        fresh(push(ledger, W1))


def test_statistics_count_verdicts_and_sizes(ledger: Ledger) -> None:
    ledger.record(fresh(push(ledger)), "accepted")
    push(ledger)
    verdict = push(ledger, W1)
    assert isinstance(verdict, AlreadyApplied)
    ledger.record(verdict, "duplicate")
    fresh(push(ledger, W1, 1, closure=None))
    ledger.refuse(W1, 1)
    ledger.fence(W1[0], 2)
    with pytest.raises(FencedError):
        push(ledger, W1)
    ledger.refuse(W1, 2)  # of who was replaced: it was counted as such
    statistics = ledger.statistics()
    assert statistics == {
        "fresh": 1, "duplicate": 1, "already_applied": 1, "fenced": 1, "refused": 1,
        "clients": 2, "answers": 1, "calls": 1,
    }  # fmt: skip


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
            verdict = self.ledger.judge(client, sequence, acked_below, closure, ordinal, SET)
        except FencedError:
            assert client[1] < self.incarnations[client[0]]
            return
        except UsageError:
            assert sequence < acked_below
            return
        assert client[1] == self.incarnations[client[0]]
        if isinstance(verdict, Duplicate):
            assert verdict.answer[1] == message  # type: ignore[index]
        elif isinstance(verdict, AlreadyApplied):
            assert closure is not None
            assert closure < self.final_below or self.calls_applied[closure, ordinal] == 1
            self.ledger.record(verdict, ("duplicate", message))
        elif refused:
            self.ledger.refuse(client, sequence)
            assert self.ledger.is_settled(client, sequence)
            return
        else:
            self.apply(message, verdict)
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
        self.ledger.record(ticket, ("accepted", message))

    @rule(worker=st.integers(0, 1), told=st.booleans())
    def restart(self, worker: int, told: bool) -> None:
        task, incarnation = self.client(worker)
        self.incarnations[task] = incarnation + 1
        if told:
            self.ledger.fence(task, incarnation + 1)
        else:  # the new incarnation speaks before the coordinator does
            self.run_a_call(worker, None, 0, refused=False, heard=True)

    @rule(closure=st.integers(0, 4))
    def make_final(self, closure: int) -> None:
        self.final_below = max(self.final_below, closure)
        self.ledger.final_below(closure)

    def teardown(self) -> None:
        for task, incarnation in self.incarnations.items():
            self.ledger._acknowledge((task, incarnation), self.sequences[task, incarnation])
        self.ledger.final_below(10)
        statistics = self.ledger.statistics()
        assert (statistics["answers"], statistics["calls"]) == (0, 0)


TestUpdates = Updates.TestCase
TestUpdates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_message_is_settled_once_it_can_change_nothing_any_more() -> None:
    ledger = Ledger(floor=3)
    client = ("/job:worker/task:0", 5)
    assert not ledger.is_settled(client, 1)  # nobody has heard of it
    assert ledger.is_settled(("/job:worker/task:0", 2), 1)  # below the floor
    ledger.record(fresh(ledger.judge(client, 1, 0, None, 0, 1)), "accepted")
    assert ledger.knows(client, 1)
    assert ledger.is_settled(client, 1)
    assert not ledger.is_settled((client[0], 6), 1)  # a newer incarnation that is yet to come
    ledger._acknowledge(client, 2)
    assert ledger.is_settled(client, 1)  # forgotten, since its client has the answer
    assert not ledger.knows(client, 1)
    assert ledger.is_settled((client[0], 4), 9)  # of an incarnation that was replaced


def test_a_refused_message_is_settled_until_it_is_acknowledged() -> None:
    ledger = Ledger(floor=3)
    client = ("/job:worker/task:0", 5)
    ledger.refuse((client[0], 2), 1)  # below the floor: nothing to remember
    ledger.refuse(client, 1)  # before it was judged
    assert ledger.is_settled(client, 1)
    assert not ledger.knows(client, 1)
    fresh(ledger.judge(client, 1, 0, None, 0, 1))
    ledger.refuse(client, 1)  # in vain
    assert ledger.is_settled(client, 1)
    ledger._acknowledge(client, 1)
    assert ledger.is_settled(client, 1)
    ledger._acknowledge(client, 2)
    assert ledger.is_settled(client, 1)  # as all that its client has heard of
    assert not ledger.is_settled(client, 2)


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
    verdict = ledger.judge(client, 1, 0, None, 0, 1, spread=[(1, 7), (2, 4)])
    assert ledger.others() == []
    ledger.record(fresh(verdict), "accepted")
    assert ledger.others() == [(1, *client, 7), (2, *client, 4)]
    ledger._acknowledge(client, 2)
    assert ledger.others() == []


def test_what_is_recorded_is_not_noted_as_refused(ledger: Ledger) -> None:
    verdict = ledger.judge(W0, 0, 0, None, 0, 1)
    assert isinstance(verdict, Fresh)
    ledger.record(verdict, "answer")
    ledger.refuse(W0, 0)
    assert ledger.is_settled(W0, 0)
    assert ledger.statistics()["refused"] == 1


class TestFailures:
    """What is noted when an update that was recorded fails while it is computed."""

    def test_a_message_and_its_call_are_answered_so(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, sequence=1, closure=5)), "answer")
        ledger.note_failure(("/job:worker/task:0", 1), 1, (5, 0), b"failed")
        assert ledger.failure_of(("/job:worker/task:0", 1), 1, (5, 0)) == b"failed"
        assert ledger.failure_of(("/job:worker/task:1", 1), 9, (5, 0)) == b"failed"
        assert ledger.failure_of(("/job:worker/task:1", 1), 9, (5, 1)) is None
        assert ledger.failure_of(("/job:worker/task:1", 1), 1, None) is None

    def test_verdicts_do_not_know_of_it(self, ledger: Ledger) -> None:
        ledger.record(fresh(push(ledger, sequence=1, closure=5)), "answer")
        ledger.note_failure(("/job:worker/task:0", 1), 1, (5, 0), b"failed")
        assert push(ledger, sequence=1, closure=5) == Duplicate("answer")

    def test_it_is_forgotten_with_the_message_and_the_closure(self, ledger: Ledger) -> None:
        client = ("/job:worker/task:0", 1)
        ledger.record(fresh(push(ledger, sequence=1, closure=5)), "answer")
        ledger.note_failure(client, 1, (5, 0), b"failed")
        ledger._acknowledge(client, 2)
        assert ledger.failure_of(client, 1, None) is None
        assert ledger.failure_of(client, 1, (5, 0)) == b"failed"
        ledger.final_below(6)
        assert ledger.failure_of(client, 1, (5, 0)) is None

    def test_it_is_forgotten_with_a_client_that_is_fenced(self, ledger: Ledger) -> None:
        client = ("/job:worker/task:0", 1)
        ledger.record(fresh(push(ledger, sequence=1, closure=5)), "answer")
        ledger.fence("/job:worker/task:0", 2)
        ledger.note_failure(client, 1, (5, 0), b"failed")  # as late as the arrays
        assert ledger.failure_of(client, 1, None) is None
        assert ledger.failure_of(("/job:worker/task:0", 2), 1, (5, 0)) == b"failed"

    def test_that_of_a_synchronous_step_stays(self, ledger: Ledger) -> None:
        ledger.note_failure((STEP, 3), 7, None, b"failed")
        ledger.final_below(100)
        assert ledger.failure_of((STEP, 3), 7, None) == b"failed"
        assert ledger.failure_of((STEP, 3), 8, None) is None
