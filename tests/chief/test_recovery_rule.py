"""The rule of recovery: which actions follow which events, without a loop, a clock or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import coroutine
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.chief.recovery_rule import MAX_ATTEMPTS, MAX_STARTS, OVER, UNSAVED, RecoveryRule, State
from psync.errors import CheckpointError, ConnectionLost, FencedError, ParameterServerLost

Action = tuple[Any, ...]

READ, ATTACH, RESTORE, ADOPT = ("read",), ("attach_all",), ("restore",), ("adopt",)
HOLD, END_SESSIONS, RESUME = ("hold",), ("end_sessions",), ("resume",)
STEPS = {"let_alone", "promote", "attach", "read", "attach_all", "restore", "create", "adopt"}


def away(ps: int) -> ParameterServerLost:
    return ParameterServerLost(f"/job:ps/task:{ps}", "is away")


@coroutine
def takes_time() -> Generator[None, Exception | bool, bool]:
    result = yield
    if isinstance(result, Exception):
        raise result
    return result


class Cluster:
    """A rule, and what it has its hands do. ``hosts``: where the backup of each ps is."""

    def __init__(self, *hosts: int | None, saved: bool = True, fresh: bool = False) -> None:
        self.saved = saved
        homes = list(range(len(hosts)))
        self.rule = RecoveryRule(cast(Any, self), homes, lambda: self.saved, lambda: fresh)
        self.rule.started = True
        self.rule.hosts[:] = hosts
        self.actions: list[Action] = []
        self.recovery: Any = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            self.actions.append((name, *args, *options.values()))
            return takes_time() if name in STEPS else None

        return act

    def recover(self, recovery: Callable[[], Any]) -> None:
        assert self.recovery is None, "one at a time"
        self.recovery = recovery()
        self._send(None)

    def abandon(self) -> None:
        self.recovery = None

    def _send(self, result: Exception | bool | None) -> None:
        try:
            self.recovery.send(result)
        except StopIteration:
            self.recovery = None

    def news(self) -> list[Action]:
        news, self.actions = self.actions, []
        return news

    def lose(self, ps: int) -> list[Action]:
        self.rule.lost(ps, away(ps))
        return self.news()

    def done(self, result: bool = True) -> list[Action]:
        self._send(result)
        return self.news()

    def fail(self, error: Exception) -> list[Action]:
        self._send(error)
        return self.news()

    def replace(self, error: FencedError) -> list[Action]:
        self.rule.replaced(error)
        return self.news()


# --- failover --------------------------------------------------------------------------------


def test_a_ps_with_a_backup_fails_over_once_others_do_not_wait_for_what_died_with_it() -> None:
    cluster = Cluster(1, 2, 0)  # process 0 hosts the backup of ps 2
    assert cluster.lose(0) == [HOLD, ("let_alone", 2)]
    assert cluster.done() == [("promote", 0, 1)]
    assert cluster.rule.state is State.FAILOVER
    assert cluster.done() == [("attach", 0)]
    assert cluster.done() == [END_SESSIONS, ("failed_over", {0: 1}), RESUME]
    assert cluster.rule.state is State.RUNNING
    assert cluster.rule.homes == [1, 1, 2]
    assert cluster.rule.hosts == [None, 2, None]


def test_what_is_served_in_the_same_process_is_lost_with_it_if_it_has_a_backup() -> None:
    cluster = Cluster(2, 2, None, None)
    cluster.rule.homes[:] = [1, 1, 2, 1]  # ps 3 has no backup: its link will say that it is lost
    assert cluster.lose(1) == [HOLD, ("promote", 1, 2)]
    assert cluster.done() == [("attach", 1)]
    assert cluster.done() == [("promote", 0, 2)]
    assert cluster.done() == [("attach", 0)]
    assert cluster.done() == [END_SESSIONS, ("failed_over", {1: 2, 0: 2}), RESUME]


def test_another_one_that_is_lost_meanwhile_is_promoted_next() -> None:
    cluster = Cluster(1, 0, 1, 2)
    assert cluster.lose(2) == [HOLD, ("let_alone", 3)]
    assert cluster.lose(3) == []
    assert cluster.fail(away(3)) == [("promote", 2, 1)], "that order is not needed any more"
    cluster = Cluster(1, 0, 1, 0)
    assert cluster.lose(2) == [HOLD, ("promote", 2, 1)]
    assert cluster.lose(3) == []
    assert cluster.done() == [("attach", 2)]
    assert cluster.done() == [("promote", 3, 0)]
    assert cluster.done() == [("attach", 3)]
    assert cluster.done() == [("attach", 0)]
    assert cluster.done() == [END_SESSIONS, ("failed_over", {2: 1, 3: 0}), RESUME]


@pytest.mark.parametrize("error", [away(0), TimeoutError(), RuntimeError("a bug")])
def test_all_roll_back_where_a_backup_cannot_be_promoted(error: Exception) -> None:
    cluster = Cluster(1, None)
    cluster.lose(0)
    assert cluster.fail(error) == [HOLD, END_SESSIONS, ("go_home", 0), READ]
    assert cluster.rule.state is State.ROLLBACK
    cluster = Cluster(1, 0)
    assert cluster.lose(0)[-1] == ("let_alone", 1)
    assert cluster.fail(TimeoutError())[-1] == READ


def test_the_promoted_one_is_lost_before_it_is_attached_and_looked_for_at_home() -> None:
    cluster = Cluster(1, 0)
    cluster.lose(0)
    assert [cluster.done() for _ in range(2)] == [[("promote", 0, 1)], [("attach", 0)]]
    assert cluster.lose(0) == []
    assert cluster.fail(away(0)) == [HOLD, END_SESSIONS, ("go_home", 0), ("go_home", 1), READ]
    assert cluster.rule.homes == [0, 1]


def test_a_failover_that_fails_without_a_checkpoint_is_the_end() -> None:
    cluster = Cluster(1, None, saved=False)
    cluster.lose(0)
    ((end, error, all_lost, _),) = cluster.fail(TimeoutError())
    assert end == "end"
    assert error.message == f"{away(0).message}; its backup cannot take over: TimeoutError()"
    assert not all_lost, "others may be asked"
    assert cluster.rule.state is State.GONE


def test_an_error_says_with_which_process_a_backup_died() -> None:
    cluster = Cluster(1, 0, saved=False)
    assert [*cluster.lose(0), *cluster.lose(1)] == [HOLD, ("let_alone", 1)]
    ((_, error, *_),) = cluster.done()
    assert error.message.endswith("take over: it died with the process of /job:ps/task:1")


# --- rollback --------------------------------------------------------------------------------


def test_all_roll_back_step_by_step() -> None:
    cluster = Cluster(None, 0)
    assert cluster.lose(0) == [HOLD, END_SESSIONS, ("go_home", 0), READ]
    assert cluster.rule.hosts == [None, None], "backups are of the old timeline"
    assert [cluster.done() for _ in range(4)] == [
        [ATTACH], [RESTORE], [("rolled_back", (0,)), ADOPT], [RESUME],
    ]  # fmt: skip
    assert cluster.rule.state is State.RUNNING


@pytest.mark.parametrize("done", range(4))
def test_a_loss_on_the_way_begins_it_again(done: int) -> None:
    cluster = Cluster(None, None)
    cluster.lose(0)
    for _ in range(done):
        cluster.done()
    assert cluster.lose(1) == [("go_home", 1)]
    assert cluster.fail(away(1)) == [READ]
    assert [cluster.done() for _ in range(4)][-2:] == [[("rolled_back", (0, 1)), ADOPT], [RESUME]]


def test_a_damaged_checkpoint_is_passed_over() -> None:
    cluster = Cluster(None)
    cluster.lose(0)
    assert [cluster.done(), cluster.done(), cluster.done(False)] == [[ATTACH], [RESTORE], [READ]]
    assert [cluster.done(), cluster.done()] == [[RESTORE], [("rolled_back", (0,)), ADOPT]]


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        (CheckpointError("there is no checkpoint yet", hint="save one"), "save one"),
        (OSError("there is no checkpoint here"), "restart the program"),
    ],
)
def test_what_no_checkpoint_can_bring_back_is_the_end_of_all_ps_tasks(
    cause: Exception, hint: str
) -> None:
    cluster = Cluster(None, None)
    cluster.lose(1)
    ((end, error, all_lost, _),) = cluster.fail(cause)
    assert end == "end"
    assert all_lost
    assert str(error).startswith(
        "/job:ps/task:1 was lost, and the rollback to a checkpoint failed: there is no checkpoint"
    )
    assert error.hint is not None
    assert error.hint.startswith(hint)
    assert cluster.rule.gone is error


def test_ps_tasks_that_die_again_and_again_are_given_up() -> None:
    cluster = Cluster(None)
    cluster.lose(0)
    for _ in range(MAX_ATTEMPTS - 1):
        assert cluster.fail(ConnectionLost("again")) == [READ]
    ((end, *_),) = cluster.fail(ConnectionLost("again"))
    assert end == "end"


def test_without_a_backup_and_a_checkpoint_a_loss_is_the_end_and_later_ones_say_nothing() -> None:
    cluster = Cluster(1, None, saved=False)
    ((end, error, _, why),) = cluster.lose(1)
    assert (end, error) == ("end", cluster.rule.lost_ps[1])
    assert why == f"/job:ps/task:1 cannot be recovered: {UNSAVED}: "
    assert cluster.lose(0) == []
    assert cluster.rule.gone is not None
    assert cluster.rule.gone.args == away(1).args


# --- a fresh start ---------------------------------------------------------------------------


def test_before_anything_was_computed_lost_ones_get_their_variables_again() -> None:
    cluster = Cluster(None, None, saved=False, fresh=True)
    assert cluster.lose(1) == [HOLD, END_SESSIONS, ("go_home", 1), ATTACH]
    assert cluster.rule.state is State.FRESH_START
    assert [cluster.done() for _ in range(3)] == [[("create", (1,))], [ADOPT], [RESUME]]
    assert cluster.rule.state is State.RUNNING


def test_a_checkpoint_is_gone_back_to_even_if_nothing_was_computed() -> None:
    assert Cluster(None, fresh=True).lose(0)[-1] == READ


@pytest.mark.parametrize("done", range(3))
def test_a_loss_in_a_fresh_start_begins_it_again(done: int) -> None:
    cluster = Cluster(None, None, saved=False, fresh=True)
    cluster.lose(0)
    for _ in range(done):
        cluster.done()
    assert cluster.lose(1) == [("go_home", 1)]
    assert cluster.fail(away(1)) == [ATTACH]
    assert sorted(cluster.rule.lost_ps) == [0, 1]
    assert [cluster.done() for _ in range(3)][-1] == [RESUME]


def test_a_ps_that_dies_whenever_it_is_started_afresh_is_the_end_with_the_first_error() -> None:
    cluster = Cluster(None, saved=False, fresh=True)
    for _ in range(2):
        first = cluster.lose(0)
        assert first[-1] == ATTACH
        assert [cluster.done() for _ in range(3)][-1] == [RESUME]
    cluster.lose(0)
    for _ in range(MAX_STARTS - 4):
        assert cluster.fail(ConnectionLost("again")) == [ATTACH]
    ((end, error, *_),) = cluster.fail(ConnectionLost("again"))
    assert end == "end"
    assert error.args == away(0).args


def test_a_coordinator_that_has_not_started_is_made_anew() -> None:
    cluster = Cluster(None, None, saved=False)
    cluster.rule.started = False
    ((end, _, _, why),) = cluster.lose(0)
    assert (end, why) == ("end", ""), "and not that nothing was saved"


# --- the end ---------------------------------------------------------------------------------


def test_a_newer_coordinator_is_the_reason_even_after_a_loss_and_the_first_one_counts() -> None:
    cluster, first = Cluster(None, saved=False), FencedError("a newer one")
    cluster.lose(0)
    assert cluster.replace(first) == [("end", first, False, "")]
    assert cluster.replace(FencedError("the newest one")) == []
    assert cluster.rule.gone is first


def test_whoever_is_replaced_recovers_nothing_more() -> None:
    cluster = Cluster(None, None)
    cluster.lose(0)
    assert cluster.replace(error := FencedError("a newer one")) == [("end", error, False, "")]
    assert cluster.recovery is None
    assert cluster.lose(1) == []


@pytest.mark.parametrize("recovering", [False, True])
def test_who_is_closed_recovers_nothing_and_lets_go_of_what_waits(recovering: bool) -> None:
    cluster = Cluster(None, None)
    if recovering:
        cluster.lose(1)
        cluster.rule.close()
        ((end, error, all_lost, _),) = cluster.news()
        assert (end, all_lost) == ("end", True)
        assert "/job:ps/task:1 was lost while the coordinator was being closed" in str(error)
    else:
        cluster.rule.close()
        assert cluster.news() == []
    assert cluster.recovery is None
    assert cluster.rule.state is State.CLOSED
    assert cluster.lose(0) == cluster.replace(FencedError("a newer one")) == []


# --- laws ------------------------------------------------------------------------------------


class RecoveryMachine(RuleBasedStateMachine):
    """Processes die and come back, steps succeed and fail, in every order that hypothesis finds."""

    @initialize(num_ps=st.integers(2, 4), saved=st.booleans(), fresh=st.booleans())
    def begin(self, num_ps: int, saved: bool, fresh: bool) -> None:
        self.cluster = Cluster(*[None] * num_ps, saved=saved, fresh=fresh)
        self.rule_ = self.cluster.rule
        self.step: Action | None = None
        self.is_held = False
        self.lost: set[int] = set()  # not promoted, and not back from a checkpoint
        self.since_attach: set[int] = set()  # lost since it was last begun to attach all

    def perform(self, actions: list[Action]) -> None:
        for at, action in enumerate(actions):
            if action == HOLD:
                self.is_held = True
            elif action == RESUME:
                assert not self.lost, "all that was lost is there"
                self.is_held = False
            elif action[0] == "end":
                self.is_held = False
            elif action[0] == "rolled_back":
                assert self.cluster.saved
                assert self.lost <= set(action[1])
            elif action[0] in STEPS:
                assert at == len(actions) - 1, "a step is the last"
                assert self.step is None, "one at a time"
                assert self.is_held
                self.step = action
                if action == ATTACH:
                    self.since_attach.clear()
                if action[0] == "promote":
                    _, ps, host = action
                    assert ps in self.rule_.lost_ps
                    assert host != self.rule_.homes[ps]

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
        if self.rule_.state not in OVER:
            self.lost.add(ps)
            self.since_attach.add(ps)
        self.perform(self.cluster.lose(ps))

    @precondition(lambda self: getattr(self, "step", None) is not None)
    @rule()
    def succeed(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        if step[0] == "promote":
            self.lost.discard(step[1])
        elif step == ADOPT and not self.since_attach:
            self.lost.clear()
        self.perform(self.cluster.done())

    @precondition(lambda self: getattr(self, "step", None) == RESTORE)
    @rule()
    def is_damaged(self) -> None:
        self.step = None
        self.perform(self.cluster.done(False))
        assert self.step == READ

    @precondition(lambda self: getattr(self, "step", None) is not None)
    @rule(error=st.sampled_from([away(0), ConnectionLost("once"), CheckpointError("none")]))
    def fail(self, error: Exception) -> None:
        self.step = None
        self.perform(self.cluster.fail(error))

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
