"""Who takes part in training without a coordinator: the rule, by hand and by a state machine."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psync.compat.session_members import DESERTED_S, GRACE_S, SessionMembers
from psync.errors import FencedError
from psync.wire.messages import Done, SessionEntered, TrainingOver

CHIEF = "/job:chief/task:0"
A, B, C = (f"/job:worker/task:{index}" for index in range(3))


Answer = namedtuple("Answer", "waiter answer")
SetMembers = namedtuple("SetMembers", "alive missing")
FenceTask = namedtuple("FenceTask", "task below")
CloseTokens = namedtuple("CloseTokens", "reason")

Action = Answer | SetMembers | FenceTask | CloseTokens


class Recorded:
    """The rule, whose methods return what they have done."""

    def __init__(self) -> None:
        self._done: list[Action] = []
        self._rule = SessionMembers(self)  # type: ignore[arg-type]
        kinds = {"answer": Answer, "set_members": SetMembers, "fence": FenceTask}
        for name, kind in {**kinds, "close_tokens": CloseTokens}.items():
            setattr(self, name, lambda *args, kind=kind: self._done.append(kind(*args)))
        self.statistics, self.next_deadline = self._rule.statistics, self._rule.next_deadline

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> list[Action]:
            getattr(self._rule, name)(*args)
            done, self._done = self._done, []
            return done

        return call


def only(actions: Sequence[Action], kind: type) -> list[Any]:
    """The actions of a kind, or the answers."""
    return [action for action in actions if isinstance(getattr(action, "answer", action), kind)]


def entering(waiter: str, incarnation: int) -> Answer:
    return Answer(waiter, SessionEntered(incarnation))


def told_over(waiter: str, reason: str, failed: bool, error: Any = None) -> Answer:
    return Answer(waiter, TrainingOver(reason, failed, error))


def opened(*workers: str, trains: bool = True) -> Recorded:
    """A session of a chief of incarnation 100 and of workers who have connected at time 0."""
    members = Recorded()
    members.attached(100)
    members.declared("open", CHIEF, trains, 0, 0.0)
    for worker in workers:
        (entered,) = only(members.ask(f"ask {worker}", worker, 50, 0.0), SessionEntered)
        members.connected(worker, entered.answer.incarnation)
    return members


# --- beginning ---------------------------------------------------------------------------------


def test_the_chief_waits_for_its_workers_and_all_enter_together() -> None:
    members = Recorded()
    members.attached(100)
    assert members.declared("open", CHIEF, False, 2, 0.0) == []
    assert members.ask("a", A, 50, 0.0) == []
    actions = members.ask("b", B, 50, 0.0)
    assert actions[0] == SetMembers({A: 101, B: 101}, ())
    assert actions[1:] == [entering("a", 101), entering("b", 101), Answer("open", Done())]


def test_a_worker_that_comes_later_enters_at_once() -> None:
    members = opened(A)
    assert members.ask("b", B, 50, 1.0) == [
        SetMembers({CHIEF: 100, A: 101, B: 101}, ()),
        entering("b", 101),
    ]


@pytest.mark.parametrize(("boot", "expected"), [(7, 101), (100, 101), (5000, 5000)])
def test_a_worker_bears_an_incarnation_above_the_chiefs(boot: int, expected: int) -> None:
    members = opened()
    (entered,) = only(members.ask("a", A, boot, 0.0), SessionEntered)
    assert entered.answer.incarnation == expected


def test_a_worker_that_asks_again_while_it_waits_is_answered_once() -> None:
    members = Recorded()
    members.attached(100)
    members.ask("first", A, 50, 0.0)
    (refused,) = members.ask("second", A, 60, 0.0)
    assert isinstance(refused.answer, FencedError)
    assert refused.waiter == "first"
    assert only(members.declared("open", CHIEF, True, 1, 0.0), SessionEntered) == [
        entering("second", 101)
    ]


def test_a_worker_that_has_given_up_does_not_count() -> None:
    members = Recorded()
    members.attached(100)
    members.ask("a", A, 50, 0.0)
    members.forget("a")
    assert members.declared("open", CHIEF, True, 1, 0.0) == []


def test_a_chief_that_has_given_up_opens_nothing() -> None:
    members = Recorded()
    members.attached(100)
    members.declared("open", CHIEF, True, 1, 0.0)
    members.forget("open")
    assert members.ask("a", A, 50, 0.0) == []


def test_a_chief_that_is_lost_before_its_workers_have_come_opens_nothing() -> None:
    members = Recorded()
    members.attached(100)
    members.declared("open", CHIEF, True, 1, 0.0)
    members.disconnected(CHIEF, 100, 1.0)
    (refused,) = members.tick(1.0 + GRACE_S)
    assert isinstance(refused.answer, FencedError)
    assert members.ask("a", A, 50, 9.0) == []


def test_a_declaration_that_is_repeated_is_answered_again() -> None:
    members = opened()
    assert members.declared("again", CHIEF, True, 0, 0.0) == [Answer("again", Done())]


# --- losses ------------------------------------------------------------------------------------


def test_a_replica_that_leaves_is_no_member_any_more() -> None:
    members = opened(A, B)
    assert members.leave(A, 101, 1.0) == [SetMembers({CHIEF: 100, B: 101}, ())]
    assert members.statistics()["left"] == [A]
    assert members.next_deadline() is None


def test_the_leave_of_an_earlier_life_changes_nothing() -> None:
    members = opened(A)
    members.ask("again", A, 60, 1.0)
    assert members.leave(A, 101, 1.0) == []


def test_a_replica_without_a_connection_is_lost_after_a_while_and_fenced() -> None:
    members = opened(A, B)
    members.disconnected(A, 101, 1.0)
    assert members.next_deadline() == 1.0 + GRACE_S
    assert members.tick(0.9 + GRACE_S) == []
    assert members.tick(1.0 + GRACE_S) == [
        FenceTask(A, 102),
        SetMembers({CHIEF: 100, B: 101}, (A,)),
    ]


def test_a_replica_that_connects_again_in_time_is_not_lost() -> None:
    members = opened(A)
    members.disconnected(A, 101, 1.0)
    members.connected(A, 101)
    assert members.next_deadline() is None
    assert members.tick(100.0) == []


def test_a_replica_that_never_connects_after_it_has_entered_is_lost() -> None:
    members = opened()
    members.ask("a", A, 50, 2.0)
    assert only(members.tick(2.0 + GRACE_S), SetMembers) == [SetMembers({CHIEF: 100}, (A,))]


def test_a_connection_of_another_incarnation_does_not_count() -> None:
    members = opened()
    members.ask("a", A, 50, 2.0)
    members.connected(A, 2**62)
    assert members.next_deadline() == 2.0 + GRACE_S


def test_a_replica_that_is_started_again_replaces_its_earlier_life() -> None:
    members = opened(A)
    assert members.ask("again", A, 50, 1.0) == [
        SetMembers({CHIEF: 100, A: 102}, ()),
        FenceTask(A, 102),
        entering("again", 102),
    ]
    members.disconnected(A, 101, 1.0)  # the earlier one's connection
    members.connected(A, 102)
    assert members.next_deadline() is None


# --- the end -----------------------------------------------------------------------------------


def test_the_end_reaches_whoever_waits_for_it_and_whoever_asks_later() -> None:
    members = opened(A)
    assert members.await_end("watch") == []
    assert members.end("step 10 is reached", False) == [
        CloseTokens("step 10 is reached"),
        told_over("watch", "step 10 is reached", False),
    ]
    assert members.end("another reason", True) == []
    assert members.await_end("later") == [told_over("later", "step 10 is reached", False)]


def test_a_worker_that_comes_at_the_end_enters_and_finds_it_there() -> None:
    members = opened(A)
    members.end("done", False)
    assert only(members.ask("b", B, 50, 1.0), SessionEntered) == [entering("b", 101)]


def test_workers_who_wait_for_a_chief_that_fails_are_told() -> None:
    members = Recorded()
    members.connected(CHIEF, 100)
    members.attached(100)
    members.ask("a", A, 50, 0.0)
    assert members.end("the chief failed", True) == [
        CloseTokens("the chief failed"),
        told_over("a", "the chief failed", True),
    ]
    assert members.ask("b", B, 50, 0.0) == [told_over("b", "the chief failed", True)]


def test_who_asks_when_a_chief_that_failed_has_gone_waits_for_the_next_one() -> None:
    members = opened(A)
    members.connected(CHIEF, 100)
    members.end("the chief failed", True)
    members.connected(CHIEF, 90)  # an earlier one, which knows nothing yet
    members.disconnected(CHIEF, 90, 0.0)
    assert members.ask("b", B, 50, 0.0) == [told_over("b", "the chief failed", True)]
    members.disconnected(CHIEF, 100, 0.0)
    assert members.ask("b again", B, 60, 0.0) == []
    members.connected(CHIEF, 200)
    members.attached(200)
    assert only(members.declared("open", CHIEF, True, 1, 0.0), SessionEntered) == [
        entering("b again", 201)
    ]


def test_the_chiefs_leave_ends_training_and_waits_for_all_others() -> None:
    members = opened(A, B)
    actions = members.leave_as_chief("bye", 1.0)
    assert actions == [CloseTokens("the chief has left"), SetMembers({A: 101, B: 101}, ())]
    members.leave(A, 101, 1.0)
    told = told_over("bye", "the chief has left", False)
    assert told in members.leave(B, 101, 2.0)


def test_the_chief_does_not_wait_for_those_who_are_lost() -> None:
    members = opened(A)
    members.leave_as_chief("bye", 1.0)
    members.disconnected(A, 101, 1.0)
    assert told_over("bye", "the chief has left", False) in members.tick(1.0 + GRACE_S)


def test_a_chief_that_gives_up_its_leave_is_not_answered() -> None:
    members = opened(A)
    members.leave_as_chief("bye", 1.0)
    members.forget("bye")
    assert only(members.leave(A, 101, 2.0), TrainingOver) == []


def test_a_chief_without_others_leaves_at_once() -> None:
    told = told_over("bye", "the chief has left", False)
    assert told in opened().leave_as_chief("bye", 1.0)


def test_without_its_chief_training_ends() -> None:
    members = opened(A)
    members.await_end("watch")
    members.disconnected(CHIEF, 100, 1.0)
    actions = members.tick(1.0 + GRACE_S)
    reason = f"the chief, {CHIEF}, was lost"
    assert SetMembers({A: 101}, (CHIEF,)) in actions
    assert actions[-2:] == [CloseTokens(reason), told_over("watch", reason, True)]


def test_a_chief_that_does_not_train_is_missed_as_well() -> None:
    members = opened(A, trains=False)
    members.disconnected(CHIEF, 100, 1.0)
    assert members.tick(1.0 + GRACE_S) == [CloseTokens(f"the chief, {CHIEF}, was lost")]


def test_when_all_replicas_have_left_training_ends() -> None:
    members = opened(A, B, trains=False)
    members.leave(A, 101, 1.0)
    actions = members.leave(B, 101, 2.0)
    assert actions == [SetMembers({}, ()), CloseTokens("all replicas have left")]


def test_when_the_last_replica_is_lost_it_has_time_to_come_back() -> None:
    members = opened(A, trains=False)
    members.disconnected(A, 101, 0.0)
    assert only(members.tick(GRACE_S), CloseTokens) == []
    assert members.next_deadline() == GRACE_S + DESERTED_S
    members.ask("again", A, 50, 9.0)
    members.connected(A, 102)
    assert members.next_deadline() is None


def test_when_nobody_comes_back_training_ends() -> None:
    members = opened(A, trains=False)
    members.disconnected(A, 101, 0.0)
    members.tick(GRACE_S)
    (closed,) = members.tick(GRACE_S + DESERTED_S)
    assert closed == CloseTokens(f"no replica is left: {A} did not come back")
    assert members.next_deadline() is None


ERROR = ("NameError", "no such name\nreally", "Traceback …")
FAILED = f"{A} failed: NameError: no such name"


def test_a_replica_that_leaves_by_an_error_ends_training_for_all() -> None:
    members = opened(A, B, trains=False)
    members.await_end("watch")
    assert members.fail(A, 101, ERROR, 1.0) == [
        CloseTokens(FAILED),
        told_over("watch", FAILED, True, (A, *ERROR)),
        SetMembers({B: 101}, ()),
    ]
    assert members.await_end("later") == [told_over("later", FAILED, True, (A, *ERROR))]


def test_the_first_error_counts() -> None:
    members = opened(A, B, trains=False)
    members.fail(A, 101, ERROR, 1.0)
    assert members.fail(B, 101, ("ValueError", "", ""), 1.0) == [SetMembers({}, ())]
    assert members.await_end("later") == [told_over("later", FAILED, True, (A, *ERROR))]


def test_an_error_after_the_last_step_reaches_the_chief_that_waits_for_the_others() -> None:
    members = opened(A, trains=False)
    members.end("step 10 is reached", False)
    members.leave_as_chief("bye", 1.0)
    assert members.fail(A, 101, ERROR, 2.0) == [
        SetMembers({}, ()),
        told_over("bye", FAILED, True, (A, *ERROR)),
    ]


def test_the_error_of_an_earlier_life_or_of_a_lost_replica_ends_nothing() -> None:
    members = opened(A)
    members.ask("again", A, 60, 1.0)
    assert members.fail(A, 101, ERROR, 1.0) == []
    assert members.fail(B, 101, ERROR, 1.0) == []


# --- a new chief -------------------------------------------------------------------------------


def test_a_new_chief_begins_anew() -> None:
    members = opened(A)
    members.await_end("watch")
    members.leave_as_chief("bye", 1.0)
    members.await_end("later")
    members.ask("b", B, 50, 1.0)
    actions = members.attached(200)
    assert [refused.waiter for refused in only(actions, FencedError)] == ["bye"]
    assert all(isinstance(refused.answer, FencedError) for refused in only(actions, FencedError))
    assert members.statistics() == {
        "members": [], "asking": [], "missing": [], "left": [], "over": "",
    }  # fmt: skip
    members.declared("open", CHIEF, True, 0, 0.0)
    (entered,) = only(members.ask("a", A, 50, 0.0), SessionEntered)
    assert entered.answer.incarnation == 201


def test_those_who_wait_for_the_end_hear_of_a_new_chief() -> None:
    members = opened(A)
    members.await_end("watch")
    assert members.attached(200) == [
        told_over("watch", "a new chief has attached the ps tasks", True)
    ]


def test_workers_who_wait_for_a_chief_wait_for_the_new_one() -> None:
    members = Recorded()
    members.attached(100)
    members.ask("a", A, 50, 0.0)
    members.attached(200)
    assert only(members.declared("open", CHIEF, True, 1, 0.0), SessionEntered) == [
        entering("a", 201)
    ]


def test_a_chief_that_attaches_again_changes_nothing() -> None:
    members = opened(A)
    assert members.attached(100) == []
    assert members.statistics()["members"] == [CHIEF, A]


# --- all of it ---------------------------------------------------------------------------------


class Sessions(RuleBasedStateMachine):
    """Tasks come, go and die at any moment. Nobody may wait for ever, no answer comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Recorded()
        self.now = 0.0
        self.numbers = itertools.count()
        self.coordinator = 0
        self.waiting: dict[int, str] = {}  # waiter → what for
        self.alive: dict[str, int] = {}  # as the synchronous groups were told last
        self.fenced: dict[str, int] = {}
        self.lives: dict[str, int] = {}  # incarnation of each worker that runs
        self.asked: dict[int, str] = {}  # waiter → worker
        self.closed = False

    def wait(self, what: str) -> int:
        waiter = next(self.numbers)
        self.waiting[waiter] = what
        return waiter

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                assert isinstance(action.waiter, int)
                assert action.waiter in self.waiting, f"{action} was answered before"
                del self.waiting[action.waiter]
            if isinstance(action, Answer) and isinstance(action.answer, SessionEntered):
                task, incarnation = self.asked[action.waiter], action.answer.incarnation
                assert incarnation > self.coordinator
                assert incarnation >= self.fenced.get(task, 0)
                assert incarnation > self.lives.get(task, 0)
                assert self.alive[task] == incarnation  # counted before it hears of it
                self.lives[task] = incarnation
            elif isinstance(action, SetMembers):
                self.alive = dict(action.alive)
                assert not set(action.alive) & set(action.missing)
            elif isinstance(action, FenceTask):
                self.fenced[action.task] = max(self.fenced.get(action.task, 0), action.below)
            elif isinstance(action, CloseTokens):
                assert not self.closed, "training ended twice"
                self.closed = True

    @rule(step=st.sampled_from([0.0, 1.0, GRACE_S, DESERTED_S]))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.perform(self.members.tick(self.now))
        deadline = self.members.next_deadline()
        assert deadline is None or deadline > self.now

    @rule()
    def a_chief_attaches(self) -> None:
        self.coordinator += 100
        self.members.connected(CHIEF, self.coordinator)
        self.perform(self.members.attached(self.coordinator))
        self.closed = False
        self.alive = {}

    @rule(trains=st.booleans(), count=st.integers(0, 2))
    def it_declares(self, trains: bool, count: int) -> None:
        if self.coordinator:
            waiter = self.wait("workers")
            self.perform(self.members.declared(waiter, CHIEF, trains, count, self.now))

    @rule(task=st.sampled_from([A, B, C]), boot=st.integers(1, 500))
    def a_worker_asks(self, task: str, boot: int) -> None:
        waiter = self.wait("the chief")
        self.asked[waiter] = task
        self.perform(self.members.ask(waiter, task, boot, self.now))

    @rule(task=st.sampled_from([A, B, C]))
    def it_connects(self, task: str) -> None:
        if task in self.lives:
            self.members.connected(task, self.lives[task])

    @rule(task=st.sampled_from([A, B, C, CHIEF]))
    def a_connection_breaks(self, task: str) -> None:
        incarnation = self.coordinator if task == CHIEF else self.lives.get(task, 0)
        self.members.disconnected(task, incarnation, self.now)

    @rule(task=st.sampled_from([A, B, C]))
    def it_leaves(self, task: str) -> None:
        self.perform(self.members.leave(task, self.lives.get(task, 0), self.now))

    @rule(task=st.sampled_from([A, B, C]))
    def it_leaves_by_an_error(self, task: str) -> None:
        incarnation = self.lives.get(task, 0)
        takes_part = self.alive.get(task) == incarnation
        self.perform(self.members.fail(task, incarnation, ERROR, self.now))
        if takes_part:
            (told,) = self.members.await_end(self.wait("the end"))
            assert isinstance(told.answer, TrainingOver)
            assert told.answer.failed
            self.perform([told])

    @rule()
    def it_watches(self) -> None:
        self.perform(self.members.await_end(self.wait("the end")))

    @rule(data=st.data())
    def it_gives_up(self, data: st.DataObject) -> None:
        if self.waiting:
            waiter = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[waiter]
            self.members.forget(waiter)

    @rule(failed=st.booleans())
    def training_ends(self, failed: bool) -> None:
        self.perform(self.members.end("done", failed))

    @rule()
    def the_chief_leaves(self) -> None:
        if self.coordinator:
            self.perform(self.members.leave_as_chief(self.wait("the others"), self.now))

    @invariant()
    def who_takes_part_is_known(self) -> None:
        assert self.members.statistics()["members"] == sorted(self.alive)

    @invariant()
    def after_the_end_nobody_waits_for_it(self) -> None:
        if self.closed:
            assert "the end" not in self.waiting.values()

    @invariant()
    def nobody_waits_for_others_that_are_not_there(self) -> None:
        if not self.alive:
            assert "the others" not in self.waiting.values()


TestSessions = Sessions.TestCase
