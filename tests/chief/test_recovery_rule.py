"""The rule of recovery: which actions follow which events, without a loop, a clock or a cluster."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.chief.recovery_rule import (
    MAX_ATTEMPTS,
    MAX_STARTS,
    UNSAVED,
    Action,
    Attach,
    Do,
    End,
    FailedOver,
    GoHome,
    LetAlone,
    Promote,
    RecoveryRule,
    RollbackStep,
    RolledBack,
    State,
    Step,
    Warn,
)
from psync.errors import CheckpointError, ConnectionLost, FencedError, ParameterServerLost

READ, ATTACH, LOAD, SWITCH, CREATE, ADOPT = RollbackStep
HOLD, END_SESSIONS, RESUME = Do


def away(ps: int) -> ParameterServerLost:
    return ParameterServerLost(f"/job:ps/task:{ps}", "is away")


class Cluster:
    """A rule, and what it has said. ``hosts``: in whose process the backup of each ps is."""

    def __init__(self, *hosts: int | None, saved: bool = True, fresh: bool = False) -> None:
        self.saved = saved
        self.rule = RecoveryRule(list(range(len(hosts))), lambda: self.saved, lambda: fresh)
        self.rule.started = True
        for ps, host in enumerate(hosts):
            self.rule.hosts[ps] = host

    def lose(self, ps: int) -> list[Action]:
        return quiet(self.rule.lost(ps, away(ps)))

    def done(self) -> list[Action]:
        return quiet(self.rule.done())

    def fail(self, error: Exception) -> list[Action]:
        return quiet(self.rule.failed(error))


def quiet(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Warn)]


# --- failover --------------------------------------------------------------------------------


def test_a_ps_with_a_backup_fails_over_once_others_do_not_wait_for_what_died_with_it() -> None:
    cluster = Cluster(1, 2, 0)  # process 0 hosts the backup of ps 2
    assert cluster.lose(0) == [HOLD, LetAlone(2)]
    assert cluster.done() == [Promote(0, 1)]
    assert cluster.rule.state is State.FAILOVER
    assert cluster.done() == [Attach(0)]
    assert cluster.done() == [END_SESSIONS, FailedOver({0: 1}), RESUME]
    assert cluster.rule.state is State.RUNNING
    assert cluster.rule.homes == [1, 1, 2]
    assert cluster.rule.hosts == [None, 2, None]


def test_ps_0_is_told_where_another_one_is_served_now() -> None:
    cluster = Cluster(1, 2, 1)
    assert cluster.lose(1) == [HOLD, LetAlone(0)]
    assert cluster.done() == [LetAlone(2)]
    assert cluster.done() == [Promote(1, 2)]
    assert cluster.done() == [Attach(1)]
    assert cluster.done() == [Attach(0)]
    assert cluster.done() == [END_SESSIONS, FailedOver({1: 2}), RESUME]


def test_what_is_served_in_the_same_process_is_lost_with_it_if_it_has_a_backup() -> None:
    cluster = Cluster(2, 2, None, None)
    cluster.rule.homes[:] = [1, 1, 2, 1]  # ps 3 has no backup: its link will say that it is lost
    assert cluster.lose(1) == [HOLD, Promote(1, 2)]
    assert cluster.done() == [Attach(1)]
    assert cluster.done() == [Promote(0, 2)]
    assert cluster.done() == [Attach(0)]
    assert cluster.done() == [END_SESSIONS, FailedOver({1: 2, 0: 2}), RESUME]


def test_another_one_that_is_lost_meanwhile_is_promoted_next() -> None:
    cluster = Cluster(1, 0, 1, 2)
    assert cluster.lose(2) == [HOLD, LetAlone(3)]
    assert cluster.lose(3) == []
    assert cluster.fail(away(3)) == [Promote(2, 1)], "that order is not needed any more"
    cluster = Cluster(1, 0, 1, 0)
    assert cluster.lose(2) == [HOLD, Promote(2, 1)]
    assert cluster.lose(3) == []
    assert cluster.done() == [Attach(2)]
    assert cluster.done() == [Promote(3, 0)]
    assert cluster.done() == [Attach(3)]
    assert cluster.done() == [Attach(0)]
    assert cluster.done() == [END_SESSIONS, FailedOver({2: 1, 3: 0}), RESUME]


@pytest.mark.parametrize("error", [away(0), TimeoutError(), RuntimeError("a bug")])
def test_all_roll_back_where_a_backup_cannot_be_promoted(error: Exception) -> None:
    cluster = Cluster(1, None)
    cluster.lose(0)
    assert cluster.fail(error) == [HOLD, END_SESSIONS, GoHome(0), READ]
    assert cluster.rule.state is State.ROLLBACK


def test_the_promoted_one_is_lost_before_it_is_attached_and_looked_for_at_home() -> None:
    cluster = Cluster(1, 0)
    for _ in (cluster.lose(0), cluster.done(), cluster.done()):
        pass
    assert cluster.lose(0) == []
    assert cluster.fail(away(0)) == [HOLD, END_SESSIONS, GoHome(0), GoHome(1), READ]
    assert cluster.rule.homes == [0, 1]


def test_a_failover_that_fails_without_a_checkpoint_is_the_end() -> None:
    cluster = Cluster(1, None, saved=False)
    cluster.lose(0)
    (end,) = cluster.fail(TimeoutError())
    assert isinstance(end, End)
    assert end.error.args == away(0).args
    assert not end.all_lost, "others may be asked"
    assert cluster.rule.state is State.GONE


# --- rollback --------------------------------------------------------------------------------


def test_all_roll_back_step_by_step() -> None:
    cluster = Cluster(None, 0)
    assert cluster.lose(0) == [HOLD, END_SESSIONS, GoHome(0), READ]
    assert cluster.rule.hosts == [None, None], "backups are of the old timeline"
    assert [cluster.done() for _ in range(5)] == [
        [ATTACH], [LOAD], [SWITCH], [RolledBack((0,)), ADOPT], [RESUME],
    ]  # fmt: skip
    assert cluster.rule.state is State.RUNNING


@pytest.mark.parametrize("done", range(5))
def test_a_loss_on_the_way_begins_it_again(done: int) -> None:
    cluster = Cluster(None, None)
    cluster.lose(0)
    for _ in range(done):
        cluster.done()
    assert cluster.lose(1) == [GoHome(1)]
    assert cluster.fail(away(1)) == [READ]
    assert [cluster.done() for _ in range(5)][-2:] == [[RolledBack((0, 1)), ADOPT], [RESUME]]


def test_what_no_checkpoint_can_bring_back_is_the_end_of_all_ps_tasks() -> None:
    cluster = Cluster(None, None)
    cluster.lose(1)
    (end,) = cluster.fail(CheckpointError("there is no checkpoint yet"))
    assert isinstance(end, End)
    assert end.all_lost
    assert str(end.error).startswith(
        "/job:ps/task:1 was lost, and the rollback to a checkpoint failed: there is no checkpoint"
    )
    assert cluster.rule.gone is end.error


def test_ps_tasks_that_die_again_and_again_are_given_up() -> None:
    cluster = Cluster(None)
    cluster.lose(0)
    for _ in range(MAX_ATTEMPTS - 1):
        assert cluster.fail(ConnectionLost("again")) == [READ]
    (end,) = cluster.fail(ConnectionLost("again"))
    assert isinstance(end, End)


def test_without_a_backup_and_a_checkpoint_a_loss_is_the_end_and_later_ones_say_nothing() -> None:
    cluster = Cluster(1, None, saved=False)
    (end,) = cluster.lose(1)
    assert end.error is cluster.rule.lost_ps[1]
    assert end.why == f"/job:ps/task:1 cannot be recovered: {UNSAVED}: "
    assert cluster.lose(0) == []
    assert cluster.rule.gone is not None
    assert cluster.rule.gone.args == away(1).args


# --- a fresh start ---------------------------------------------------------------------------


def test_before_anything_was_computed_lost_ones_get_their_variables_again() -> None:
    cluster = Cluster(None, None, saved=False, fresh=True)
    assert cluster.lose(1) == [HOLD, END_SESSIONS, GoHome(1), ATTACH]
    assert cluster.rule.state is State.FRESH_START
    assert [cluster.done() for _ in range(3)] == [[CREATE], [ADOPT], [RESUME]]
    assert cluster.rule.state is State.RUNNING


def test_a_checkpoint_is_gone_back_to_even_if_nothing_was_computed() -> None:
    assert Cluster(None, fresh=True).lose(0)[-1] is READ


@pytest.mark.parametrize("done", range(3))
def test_a_loss_in_a_fresh_start_begins_it_again(done: int) -> None:
    cluster = Cluster(None, None, saved=False, fresh=True)
    cluster.lose(0)
    for _ in range(done):
        cluster.done()
    assert cluster.lose(1) == [GoHome(1)]
    assert cluster.fail(away(1)) == [ATTACH]
    assert sorted(cluster.rule.lost_ps) == [0, 1]
    assert [cluster.done() for _ in range(3)][-1] == [RESUME]


def test_a_ps_that_dies_whenever_it_is_started_afresh_is_the_end_with_the_first_error() -> None:
    cluster = Cluster(None, saved=False, fresh=True)
    for _ in range(2):
        first = cluster.lose(0)
        assert first[-1] is ATTACH
        assert [cluster.done() for _ in range(3)][-1] == [RESUME]
    cluster.lose(0)
    for _ in range(MAX_STARTS - 4):
        assert cluster.fail(ConnectionLost("again")) == [ATTACH]
    (end,) = cluster.fail(ConnectionLost("again"))
    assert isinstance(end, End)
    assert end.error.args == away(0).args


def test_a_coordinator_that_has_not_started_is_made_anew() -> None:
    cluster = Cluster(None, None, saved=False)
    cluster.rule.started = False
    (end,) = cluster.rule.lost(0, away(0))
    assert isinstance(end, End), "and no warning that nothing was saved"


# --- the end ---------------------------------------------------------------------------------


def test_a_newer_coordinator_is_the_reason_even_after_a_loss_and_the_first_one_counts() -> None:
    cluster, first = Cluster(None, saved=False), FencedError("a newer one")
    cluster.lose(0)
    assert cluster.rule.replaced(first) == [End(first)]
    assert cluster.rule.replaced(FencedError("the newest one")) == []
    assert cluster.rule.gone is first


def test_whoever_is_replaced_recovers_nothing_more() -> None:
    cluster = Cluster(None, None)
    cluster.lose(0)
    assert cluster.rule.replaced(error := FencedError("a newer one")) == [End(error)]
    assert cluster.done() == []
    assert cluster.fail(away(0)) == []
    assert cluster.lose(1) == []


@pytest.mark.parametrize("recovering", [False, True])
def test_who_is_closed_recovers_nothing_and_lets_go_of_what_waits(recovering: bool) -> None:
    cluster = Cluster(None, None)
    if recovering:
        cluster.lose(1)
        (end,) = cluster.rule.close()
        assert isinstance(end, End)
        assert end.all_lost
        assert "/job:ps/task:1 was lost while the coordinator was being closed" in str(end.error)
    else:
        assert cluster.rule.close() == []
    assert cluster.rule.state is State.CLOSED
    assert cluster.lose(0) == cluster.rule.replaced(FencedError("a newer one")) == []


# --- laws ------------------------------------------------------------------------------------


class RecoveryMachine(RuleBasedStateMachine):
    """Processes die and come back, steps succeed and fail, in every order that hypothesis finds."""

    @initialize(num_ps=st.integers(2, 4), saved=st.booleans(), fresh=st.booleans())
    def begin(self, num_ps: int, saved: bool, fresh: bool) -> None:
        self.cluster = Cluster(*[None] * num_ps, saved=saved, fresh=fresh)
        self.rule_ = self.cluster.rule
        self.step: Step | None = None
        self.is_held = False
        self.lost: set[int] = set()  # not promoted, and not back from a checkpoint
        self.since_attach: set[int] = set()  # lost since it was last begun to attach all

    def perform(self, actions: list[Action]) -> None:
        for at, action in enumerate(actions):
            if action is HOLD:
                self.is_held = True
            elif action is RESUME:
                assert not self.lost, "all that was lost is there"
                self.is_held = False
            elif isinstance(action, End):
                self.is_held = False
            elif isinstance(action, RolledBack):
                assert self.cluster.saved
                assert self.lost <= set(action.lost)
            elif isinstance(action, Step):
                assert at == len(actions) - 1, "a step is the last"
                assert self.step is None, "one at a time"
                assert self.is_held
                self.step = action
                if action is ATTACH:
                    self.since_attach.clear()
                if isinstance(action, Promote):
                    assert action.ps in self.rule_.lost_ps
                    assert action.host != self.rule_.homes[action.ps]

    @rule(data=st.data())
    def backed_up(self, data: st.DataObject) -> None:
        if self.rule_.state is State.RUNNING:
            homes = self.rule_.homes
            ps = data.draw(st.sampled_from(range(len(homes))))
            hosts = [host for host in range(len(homes)) if host != homes[ps]]
            self.rule_.hosts[ps] = data.draw(st.sampled_from([None, *hosts]))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        ps = data.draw(st.sampled_from(range(len(self.rule_.homes))))
        if self.rule_.state not in (State.GONE, State.CLOSED):
            self.lost.add(ps)
            self.since_attach.add(ps)
        self.perform(self.rule_.lost(ps, away(ps)))

    @precondition(lambda self: getattr(self, "step", None) is not None)
    @rule()
    def succeed(self) -> None:
        step, self.step = self.step, None
        if isinstance(step, Promote):
            self.lost.discard(step.ps)
        elif step is ADOPT and not self.since_attach:
            self.lost.clear()
        self.perform(self.rule_.done())

    @precondition(lambda self: getattr(self, "step", None) is not None)
    @rule(error=st.sampled_from([away(0), ConnectionLost("once"), CheckpointError("none")]))
    def fail(self, error: Exception) -> None:
        self.step = None
        self.perform(self.rule_.failed(error))

    @precondition(lambda self: hasattr(self, "rule_"))
    @invariant()
    def everything_stands_still_exactly_while_it_recovers_and_then_a_step_is_under_way(
        self,
    ) -> None:
        recovering = self.rule_.state in (State.FAILOVER, State.ROLLBACK, State.FRESH_START)
        assert self.is_held is recovering
        assert (self.step is not None) is recovering

    @precondition(lambda self: hasattr(self, "rule_"))
    @invariant()
    def no_backup_is_where_its_primary_is(self) -> None:
        for home, host in zip(self.rule_.homes, self.rule_.hosts, strict=True):
            assert home != host


RecoveryMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None
)
TestRecovery = RecoveryMachine.TestCase
