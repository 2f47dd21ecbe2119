"""When ps 0 closes a synchronous step, with whom, and who may go on."""

from __future__ import annotations

import pytest

from psync.errors import (
    ConfigurationError,
    LocalProtocolError,
    NotEnoughReplicas,
    ParameterServerLost,
    PsyncError,
)
from psync.store.ledger import Ledger
from psync.sync.steps import (
    Answer,
    Close,
    Contribution,
    Group,
    Refuse,
    Replica,
    SyncSteps,
    Taker,
    TokenChannel,
)
from psync.wire.closure_numbers import numbered
from sync_tools import GROUP, Steps, answers, closes, config, refusals, replica

A, B, C = (Replica((f"/job:worker/task:{index}", 1)) for index in range(3))


def ask(replica: Replica, number: int = 1) -> Taker:
    return (replica, number)


def test_free_tokens_go_to_whoever_asks_first() -> None:
    channel = TokenChannel()
    assert channel.put(0, 2) == []
    assert channel.take(ask(A, 1)) == 0
    assert channel.take(ask(A, 2)) == 0  # what was meant for B
    assert channel.take(ask(B)) is None
    assert list(channel.waiting) == [ask(B)]


def test_who_asks_again_while_waiting_keeps_its_place() -> None:
    channel = TokenChannel()
    assert channel.take(ask(A)) is None
    assert channel.take(ask(B)) is None
    assert channel.take(ask(A)) is None
    assert channel.put(1, 1) == [(ask(A), 1)]


def test_a_new_step_voids_older_tokens() -> None:
    channel = TokenChannel()
    channel.put(0, 3)
    channel.put(1, 1)
    assert channel.take(ask(A)) == 1
    assert channel.take(ask(B)) is None
    statistics = channel.statistics()
    assert (statistics["published"], statistics["taken"], statistics["void"]) == (4, 1, 3)
    assert (statistics["left"], len(channel.waiting)) == (0, 1)


def test_older_tokens_stay_and_come_first_where_they_are_kept() -> None:
    channel = TokenChannel(keeps_old=True)
    channel.put(0, 1)
    channel.put(1, 1)
    assert [channel.take(ask(A, n)) for n in (1, 2, 3)] == [0, 1, None]


def test_bound_tokens_give_each_replica_its_allowance_of_each_step() -> None:
    channel = TokenChannel(2)
    channel.put(0, 0)
    assert [channel.take(ask(A, n)) for n in (1, 2, 3)] == [0, 0, None]
    assert channel.take(ask(B)) == 0
    assert channel.put(1, 0) == [(ask(A, 3), 1)]


def test_bound_tokens_skip_who_has_had_its_share_and_serve_who_stands_behind() -> None:
    channel = TokenChannel(1)
    channel.put(0, 0)
    channel.charge(A, 0)  # began without a token
    channel.charge(B, 0)
    assert channel.take(ask(A)) is None
    assert channel.take(ask(B)) is None
    channel.put(0, 0)
    assert list(channel.waiting) == [ask(A), ask(B)]
    assert channel.put(1, 0) == [(ask(A), 1), (ask(B), 1)]
    assert channel.take(ask(A, 2)) is None


def test_what_is_charged_to_the_next_step_counts_when_that_begins() -> None:
    channel = TokenChannel(2)
    channel.put(0, 0)
    channel.void_below(1)
    channel.charge(A, 1)
    assert channel.take(ask(A, 1)) is None  # of no step any more
    assert channel.put(1, 0) == [(ask(A, 1), 1)]
    assert channel.take(ask(A, 2)) is None
    assert [channel.take(ask(B, n)) for n in (1, 2, 3)] == [1, 1, None]


def test_release_lets_all_go_on_who_wait() -> None:
    channel = TokenChannel()
    channel.take(ask(A))
    channel.take(ask(B))
    assert channel.release(4) == [(ask(A), 4), (ask(B), 4)]
    assert list(channel.waiting) == []
    statistics = channel.statistics()
    assert statistics["published"] == statistics["taken"] == 2


def accepted(index: int, token: int) -> tuple[int, str, int]:
    return (index, "accepted", token)


# Repetitions, other runs, other incarnations.


def test_a_repeated_push_gets_the_first_answer_again() -> None:
    steps = Steps(2)
    assert steps.push(0, 0) == []
    assert steps.push(0, 0, number=1) == []  # goes on waiting, and counts once
    assert closes(steps.push(1, 0)) == [(0, [0, 1], False)]
    first = next(act for act in steps.closed(GROUP, 0) if isinstance(act, Answer))
    assert steps.push(0, 0, number=1) == [first]


def test_a_repeated_push_whose_request_was_given_up_waits_again() -> None:
    steps = Steps(2)
    steps.push(0, 0)
    steps.forget(GROUP, replica(0), 1)
    steps.forget(99, replica(0), 1)
    steps.push(1, 0)
    assert answers(steps.closed(GROUP, 0)) == [accepted(1, 1)]
    assert answers(steps.push(0, 0, number=1)) == [accepted(0, 1)]


def test_a_push_that_comes_late_takes_no_token_with_it() -> None:
    """Its replica has sent it again and has had the answer: a token would be lost with it."""
    steps = Steps(1, 2)  # two tokens a step, for two workers
    steps.push(0, 0, acked_below=1, closure=11)
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1)]
    steps.push(0, 1, acked_below=2, closure=12)
    late = steps.push(0, 0, number=1, acked_below=1, closure=11)
    assert refusals(late) == [(0, "UsageError")]
    assert answers(steps.closed(GROUP, 1)) == [accepted(0, 2)]
    again = Steps(1, 2)
    again.restore(steps.snapshot(), {GROUP: config(1, 2)})  # what a backup knows of it
    assert refusals(again.push(0, 0, number=1, acked_below=1, closure=11))
    assert [group["waiting"] for group in steps.statistics().values()] == [0]


def test_another_run_of_a_counted_closure_is_a_duplicate_and_takes_a_token() -> None:
    steps = Steps(2)
    steps.live(0, 1)
    steps.push(0, 0, closure=11)
    steps.live(1)
    steps.closed(GROUP, 0)  # the target has followed: worker 0's push was enough
    assert answers(steps.push(1, 1, closure=11)) == [(1, "duplicate", 1)]


def test_another_run_must_push_the_same_variables() -> None:
    steps = Steps(2)
    steps.push(0, 0, closure=5)
    (refused,) = steps.push(1, 0, closure=5, variable_set=b"v")
    assert isinstance(refused, Refuse)
    assert "opt: closure 5, call 0 updates other variables than" in str(refused.error)


def test_a_final_closure_counts_no_more() -> None:
    steps = Steps(1)
    steps.push(0, 0, closure=5)
    steps.closed(GROUP, 0)
    steps.ledger.final_below(6)
    steps.ledger.final_below(3)
    assert steps.calls() == []
    assert steps.push(1, 1, closure=4) == []
    assert steps.counted() == 0
    assert closes(steps.push(0, 1, closure=7)) == [(1, [0], False)]
    assert answers(steps.closed(GROUP, 1)) == [(1, "duplicate", 2)]


def test_a_shard_that_comes_again_counts_once_and_its_run_before_no_more() -> None:
    steps = Steps(1)
    steps.push(0, 0, closure=5)
    steps.closed(GROUP, 0)
    steps.ledger.final_below(9, [(5, 1)])
    again = numbered(5, 1)
    assert [call[1] for call in steps.calls()] == [5]
    assert steps.push(1, 1, closure=again) == []
    assert steps.push(2, 1, closure=5, ordinal=1) == []
    assert steps.counted() == 0
    assert closes(steps.push(0, 1, closure=again, ordinal=1)) == [(1, [0], False)]
    assert steps.pending() == {(5, 1)}
    assert answers(steps.closed(GROUP, 1)) == [(1, "duplicate", 2)]
    steps.ledger.final_below(9)
    assert steps.calls() == []


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    assert refusals(Steps(1).push(0, 0, weight=weight)) == [(0, "ValueMismatchError")]


def test_deterministic_sums_are_in_the_order_of_the_replicas() -> None:
    steps = Steps(3, deterministic=True)
    for index in (2, 0):
        steps.push(index, 0)
    assert closes(steps.push(1, 0)) == [(0, [0, 1, 2], False)]


def test_statistics_count_drops_by_worker() -> None:
    steps = Steps(1, 2)
    steps.push(0, 0)
    steps.closed(GROUP, 0)
    steps.push(1, 0)
    statistics = steps.statistics()["opt"]
    assert statistics["replicas"] == {
        "/job:worker/task:0": {"accepted": 1, "stale": 0, "duplicate": 0},
        "/job:worker/task:1": {"accepted": 0, "stale": 1, "duplicate": 0},
    }
    assert statistics["staleness"] == {"0": 1, "1": 1}
    assert (statistics["steps"], statistics["partial_steps"], statistics["step"]) == (1, 0, 1)


def test_initial_tokens_are_put_once() -> None:
    steps = Steps(3, 1)
    assert steps.init_tokens(GROUP, 2) == []
    assert steps.init_tokens(GROUP, 2) == []  # a chief that was started again
    assert answers(steps.push(0, 0)) == [accepted(0, 0)]
    tokens = steps.statistics()["opt"]["tokens"]
    assert tokens == {"published": 2, "taken": 1, "void": 0, "left": 1}


def test_too_few_initial_tokens_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="too few tokens"):
        Steps(3, 1).init_tokens(GROUP, 1)


# The order of calls, which ``SyncSteps`` keeps.


def test_a_step_is_not_closed_twice_nor_without_a_push() -> None:
    group = Group(number=GROUP, config=config(1), others=1, ledger=Ledger(), step=0, first_step=0)
    with pytest.raises(AssertionError, match="nothing to close at step 0"):
        group.close(partial=True)
    group.judge(Contribution(replica(0), 1, 1, None, b"v", 0, 1.0, []))
    group.close(partial=False)
    with pytest.raises(AssertionError, match="nothing to close at step 1"):
        group.close(partial=False)
    with pytest.raises(LocalProtocolError, match="step 1 is not being closed, but step 0"):
        group.closed(1)
    group.closed(0)
    with pytest.raises(LocalProtocolError, match="step 0 is not being closed, but none"):
        group.closed(0)


# The sequence of a step.


def test_tokens_come_only_when_the_step_has_been_applied() -> None:
    steps = Steps(1)
    (close,) = steps.push(0, 0)
    assert isinstance(close, Close)
    # What is pulled while it is being applied is stale already.
    assert steps.present(GROUP) == 1
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1)]


@pytest.mark.parametrize("strict", [False, True])
def test_who_has_a_part_on_every_ps_gets_its_token_with_the_step(strict: bool) -> None:
    steps = Steps(2, 3, strict=strict)
    steps.closed(GROUP, [*steps.push(0, 0), *steps.push(1, 0)][-1].step)  # type: ignore[union-attr]
    assert answers(steps.push(2, 0)) == [(2, "stale", 1)]
    assert steps.push(2, 1) == []  # no part on ps 1
    (close,) = steps.push(0, 1, others=[1])
    assert isinstance(close, Close)
    assert answers([*close.answers]) == [accepted(0, 2)]
    assert close.answers[0].count == 2
    assert answers(steps.push(0, 1, number=2, others=[1])) == [accepted(0, 2)]  # asked again
    # The other replicas share what is left.
    assert answers(steps.closed(GROUP, 1)) == [accepted(2, 2)]
    tokens = steps.statistics()["opt"]["tokens"]
    assert tokens["published"] == tokens["taken"] + tokens["void"] + tokens["left"]


def test_only_what_is_acknowledged_is_forgotten() -> None:
    steps = Steps(4, 1)
    for _ in range(3):
        steps.push(0, 0, acked_below=1)
    assert steps.remembered(replica(0)) == [1, 2, 3]
    steps.push(0, 0, acked_below=3)
    assert steps.remembered(replica(0)) == [3, 4]


def test_who_waits_longer_comes_first_where_there_are_more_replicas_than_tokens() -> None:
    steps = Steps(2, 2)
    steps.closed(GROUP, [*steps.push(0, 0), *steps.push(1, 0)][-1].step)  # type: ignore[union-attr]
    assert steps.push(2, 0) == []  # stale: both tokens are taken
    steps.push(0, 1, others=[1])
    (close,) = steps.push(1, 1, others=[1])
    assert isinstance(close, Close)
    assert answers([*close.answers]) == [accepted(0, 2)]
    assert [who for who, *_ in answers(steps.closed(GROUP, 1))] == [2]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_token_that_nobody_waits_for_any_more_is_anothers(strict: bool, is_fenced: bool) -> None:
    steps = Steps(2, strict=strict)
    steps.push(0, 0, others=[1])
    steps.push(1, 0, others=[1])
    if is_fenced:
        steps.fence(replica(0)[0], 2)
    else:
        steps.forget(GROUP, replica(0), 1)
        steps.forget(GROUP, replica(0), 1)
    steps.closed(GROUP, 0)
    push = steps.push(0, 0, incarnation=1 + is_fenced, others=[1])
    assert answers(push) == [(0, "stale", 1)]
    tokens = steps.statistics()["opt"]["tokens"]
    assert tokens["published"] == tokens["taken"] + tokens["void"] + tokens["left"]


def test_a_step_that_fails_refuses_also_who_has_its_token() -> None:
    steps = Steps(2)
    steps.push(0, 0, others=[1])
    (close,) = steps.push(1, 0, others=[1])
    assert isinstance(close, Close)
    assert answers([*close.answers]) == [accepted(0, 1), accepted(1, 1)]
    lost = ParameterServerLost("/job:ps/task:1")
    refused = [(0, "ParameterServerLost"), (1, "ParameterServerLost")]
    assert refusals(steps.close_failed(GROUP, lost)) == refused


def test_the_straggler_of_three_with_one_backup_is_told_and_goes_on_at_once() -> None:
    steps = Steps(2, 3)
    steps.push(0, 0)
    assert closes(steps.push(1, 0)) == [(0, [0, 1], False)]
    steps.closed(GROUP, 0)
    (answer,) = steps.push(2, 0)
    assert isinstance(answer, Answer)
    assert (answer.outcome, answer.staleness, answer.token) == ("stale", 1, 1)
    assert not answer.count


def test_a_push_while_the_step_is_being_applied_is_stale_and_waits_for_its_token() -> None:
    steps = Steps(2, 3)
    steps.push(0, 0)
    steps.push(1, 0)
    assert steps.push(2, 0) == []
    assert answers(steps.closed(GROUP, 0)) == [
        accepted(0, 1),
        accepted(1, 1),
        (2, "stale", 1),
    ]


def test_one_replica_of_three_gradients_a_step_goes_on_by_initial_tokens() -> None:
    steps = Steps(3, 1)
    assert answers(steps.push(0, 0)) == [accepted(0, 0)]
    assert answers(steps.push(0, 0)) == [accepted(0, 0)]
    assert closes(steps.push(0, 0)) == [(0, [0, 0, 0], False)]
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1)]
    for _ in range(2):
        assert answers(steps.push(0, 1)) == [accepted(0, 1)]
    assert closes(steps.push(0, 1)) == [(1, [0, 0, 0], False)]


def test_bound_tokens_let_each_replica_contribute_once_a_step() -> None:
    steps = Steps(2, 3, strict=True)
    steps.push(0, 0)
    steps.push(1, 0)
    steps.closed(GROUP, 0)
    assert steps.push(0, 1) == []
    assert answers(steps.push(2, 0)) == [(2, "stale", 1)]
    refused = refusals(steps.push(0, 1, acked_below=2))  # without awaiting the first
    assert refused == [(0, "UsageError")]
    assert closes(steps.push(2, 1)) == [(1, [0, 2], False)]


def test_who_contributes_to_a_later_step_than_its_bound_token_has_had_its_share_of_it() -> None:
    steps = Steps(2, 3, strict=True)
    steps.push(0, 0)
    steps.push(1, 0)
    steps.closed(GROUP, 0)
    assert answers(steps.push(2, 0)) == [(2, "stale", 1)]  # a token of step 1, kept for long
    steps.push(0, 1)
    steps.push(1, 1)
    steps.closed(GROUP, 1)
    assert steps.push(2, 2) == []  # it pulled after the end of step 1
    assert closes(steps.push(0, 2)) == [(2, [2, 0], False)]
    assert answers(steps.closed(GROUP, 2)) == [accepted(2, 3), accepted(0, 3)]


def test_who_does_not_wait_for_its_bound_token_is_too_early() -> None:
    steps = Steps(2, strict=True)
    steps.push(0, 0)
    steps.forget(GROUP, replica(0), 1)  # a closure that was cancelled; its push stays counted
    assert steps.push(0, 0, acked_below=1) == []  # its client has not acknowledged that yet
    assert closes(steps.push(1, 0)) == [(0, [0, 1], False)]
    assert answers(steps.closed(GROUP, 0)) == [(0, "stale", 1), accepted(1, 1)]
    steps.push(0, 1)
    assert closes(steps.push(1, 1)) == [(1, [0, 1], False)]


def test_no_bound_token_is_taken_while_a_step_is_being_applied() -> None:
    steps = Steps(1, 2, strict=True)
    steps.push(0, 0)
    assert steps.push(1, 1) == []  # it pulled from ps tasks that had applied the step
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1)]
    assert steps.push(0, 2) == []


def test_the_wasted_first_step_of_tensorflow() -> None:
    steps = Steps(2, tensorflow_compat=True)
    assert answers(steps.push(0, 0)) == [accepted(0, 0)]
    done = steps.push(1, 0)
    assert closes(done) == [(0, [0, 1], False)]
    assert answers(done) == [accepted(1, 0)]
    steps.closed(GROUP, 0)
    assert answers(steps.push(0, 0)) == [(0, "stale", 1)]
    assert answers(steps.push(1, 0)) == [(1, "stale", 1)]
    steps.push(0, 1)
    assert closes(steps.push(1, 1)) == [(1, [0, 1], False)]


def test_values_of_before_the_first_step_are_those_of_where_the_group_began() -> None:
    steps = Steps(1, 2, begin=40)
    assert steps.present(GROUP) == 40
    assert [steps.is_stale(GROUP, step) for step in (-1, 39, 40)] == [False, True, False]
    assert not steps.is_stale(GROUP + 1, 39)  # which nobody has defined
    assert closes(steps.push(0, -1)) == [(40, [0], False)]
    steps.closed(GROUP, 40)
    assert steps.is_stale(GROUP, -1)
    (answer,) = steps.push(1, -1)
    assert isinstance(answer, Answer)
    assert (answer.outcome, answer.staleness, answer.token) == ("stale", 1, 41)


@pytest.mark.parametrize("is_over", [True, False])
def test_nothing_counts_once_training_is_over_or_the_group_is_broken(is_over: bool) -> None:
    steps = Steps(1, 1)
    steps.push(0, 0)
    assert not steps.is_stale(GROUP, 1)
    if is_over:
        steps.end("enough")
    else:
        steps.close_failed(GROUP, PsyncError("lost"))
    assert steps.is_stale(GROUP, 1)


# Who lives.


@pytest.mark.promise("steps.target-follows-workers")
def test_the_target_shrinks_at_once_and_grows_with_the_next_step() -> None:
    steps = Steps(3)
    steps.live(0, 1, 2)
    assert steps.push(0, 0) == []
    assert steps.push(1, 0) == []
    assert closes(steps.live(0, 1)) == [(0, [0, 1], False)]
    steps.live(0, 1, 2)  # while the step is applied
    steps.closed(GROUP, 0)
    steps.push(0, 1)
    assert steps.push(1, 1) == []
    assert closes(steps.push(2, 1)) == [(1, [0, 1, 2], False)]


def test_who_joins_does_not_raise_the_target_of_the_present_step() -> None:
    steps = Steps(3)
    steps.live(0, 1)
    steps.push(0, 0)
    steps.live(0, 1, 2)
    assert closes(steps.push(1, 0)) == [(0, [0, 1], False)]


def test_several_gradients_a_replica_lower_the_target_by_as_many() -> None:
    steps = Steps(4, 2)
    steps.live(0, 1)
    assert answers(steps.push(0, 0)) == [accepted(0, 0)]
    assert closes(steps.push(0, 0)) == []
    assert closes(steps.live(0)) == [(0, [0, 0], False)]


def test_a_dead_replica_waits_no_more_and_its_push_stays_counted() -> None:
    steps = Steps(2)
    steps.live(0, 1)
    steps.push(0, 0)
    gone = steps.live(1)
    assert refusals(gone) == [(0, "FencedError")]
    assert closes(gone) == [(0, [0], False)]


def test_a_worker_that_is_out_of_data_takes_part_no_more_and_still_gets_its_answer() -> None:
    steps = Steps(2)
    steps.live(0, 1)
    steps.push(0, 0)
    # Not named any more, and not fenced: it lives.
    assert closes(steps.members(dict([replica(1)]), [], 0.0)) == [(0, [0], False)]
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1)]


def test_who_waits_though_it_takes_no_part_does_not_stand_for_who_does() -> None:
    steps = Steps(3)
    steps.live(0, 1, 2)
    for index in (0, 1, 2):
        steps.push(index, 0)
    steps.closed(GROUP, 0)
    for index in (2, 0):
        assert steps.push(index, 0) == []  # stale, and all tokens are taken
    # As many wait as take part, but worker 1 does not, and may still push.
    assert steps.members(dict([replica(0), replica(1)]), [], 0.0) == []


@pytest.mark.promise("steps.never-stuck")
def test_where_all_wait_the_step_is_closed_as_a_partial_one() -> None:
    steps = Steps(3, 2)
    steps.live(0, 1)
    for index in (0, 0, 1):
        steps.push(index, 0)
    steps.closed(GROUP, 0)
    assert answers(steps.push(0, 1)) == [accepted(0, 1)]
    steps.live(0, 1, incarnation=2)  # worker 0 was started again; its token is gone
    assert steps.push(0, 0, incarnation=2) == []  # stale
    assert closes(steps.push(1, 1)) == [(1, [0, 1], True)]


def test_when_a_token_died_with_its_replica_the_others_go_on() -> None:
    steps = Steps(2, 2)
    steps.live(0, 1)
    for index in (0, 1):
        steps.push(index, 0)
    steps.closed(GROUP, 0)
    for index in (0, 1):
        steps.push(index, 1)
    steps.closed(GROUP, 1)
    steps.live(0)  # with it went a token of step 2
    assert answers(steps.push(0, 1)) == [(0, "stale", 2)]  # nothing counted, nobody else: go on
    assert closes(steps.push(0, 2)) == [(2, [0], False)]


def test_too_few_replicas_are_waited_for_and_then_named() -> None:
    steps = Steps(3, min_replicas=2, patience_s=10.0)
    steps.live(0, 1, 2)
    steps.push(0, 0)
    assert steps.live(0, now=5.0) == []
    assert steps.live(0, now=9.0) == []
    assert steps.next_deadline() == 15.0
    assert steps.tick(14.9) == []
    (refuse,) = steps.tick(15.0)
    assert isinstance(refuse, Refuse)
    assert isinstance(refuse.error, NotEnoughReplicas)
    assert "at least 2" in str(refuse.error)
    assert "missing: /job:worker/task:1, /job:worker/task:2" in str(refuse.error)
    assert steps.next_deadline() is None


def test_what_was_accepted_is_applied_when_nothing_is_left_to_do_however_few_live() -> None:
    steps = Steps(3, min_replicas=2)
    steps.live(0, 1)
    steps.push(0, 0)
    steps.live(now=1.0)  # who waits hears that it is over, and its push counts
    assert not steps.is_settled
    assert closes(steps.finish()) == [(0, [0], True)]
    steps.closed(GROUP, 0)
    assert steps.is_settled


def test_replicas_that_come_back_in_time_go_on() -> None:
    steps = Steps(2, min_replicas=2)
    steps.live(0, 1)
    steps.push(0, 0)
    steps.live(0, now=1.0)
    assert steps.live(0, 1, now=2.0) == []  # the target has not followed: two are the least
    assert steps.next_deadline() is None
    assert closes(steps.push(1, 0)) == [(0, [0, 1], False)]


# What is left to do.


def test_the_odd_closure_at_the_end_is_a_partial_step() -> None:
    steps = Steps(2)
    steps.live(0, 1)
    steps.schedule(True, [])
    assert steps.push(0, 0, closure=100) == []
    (close,) = steps.schedule(False, [100])
    assert isinstance(close, Close)
    assert close.partial
    (answer,) = steps.closed(GROUP, 0)
    assert isinstance(answer, Answer)
    assert (answer.outcome, answer.partial, answer.count) == ("accepted", True, 1)


def test_a_closure_in_flight_that_does_not_wait_may_still_push() -> None:
    steps = Steps(2)
    steps.live(0, 1)
    steps.schedule(False, [100, 101])
    assert steps.push(0, 0, closure=100) == []
    assert closes(steps.push(1, 0, closure=101)) == [(0, [0, 1], False)]


def test_closures_that_wait_in_two_groups_release_each_other() -> None:
    steps = Steps(2)
    steps.define(8, config(2), 0)
    steps.live(0, 1, 2)
    steps.push(0, 0, closure=1)
    steps.contribute(8, Contribution(replica(1), 1, 1, (2, 0), b"w", 0, 1.0, []))
    assert [step for step, *_ in closes(steps.schedule(False, [1, 2]))] == [0, 0]


def test_what_was_counted_is_applied_when_nothing_is_left_to_do() -> None:
    steps = Steps(3, 1)
    steps.live(0)
    assert steps.is_settled
    assert answers(steps.push(0, 0, closure=1)) == [accepted(0, 0)]  # its closure ends with this
    steps.schedule(False, [])
    assert not steps.is_settled
    assert closes(steps.finish()) == [(0, [0], True)]
    assert not steps.is_settled
    assert steps.finish() == []
    steps.closed(GROUP, 0)
    assert steps.is_settled


# Tokens, ends and failures.


def test_the_end_of_training_releases_everybody() -> None:
    steps = Steps(2)
    steps.push(0, 0)
    assert refusals(steps.end("done")) == [(0, "TrainingEnded")]
    assert refusals(steps.push(1, 0)) == [(1, "TrainingEnded")]
    assert refusals(steps.push(0, 0, number=1)) == [(0, "TrainingEnded")]


def test_who_counts_in_the_step_that_is_being_applied_when_training_ends_is_told_so() -> None:
    steps = Steps(2, 3)
    steps.push(0, 0)
    steps.push(1, 0)
    assert steps.push(2, 0) == []  # stale, and waits for the token of step 1
    assert refusals(steps.end("done")) == [(2, "TrainingEnded")]
    assert steps.push(1, 0, number=1) == []  # sent again, after a lost connection
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1), accepted(1, 1)]
    assert refusals(steps.push(0, 1)) == [(0, "TrainingEnded")]


def test_no_step_is_closed_after_the_end_of_training() -> None:
    steps = Steps(2)
    steps.live(0, 1)
    steps.push(0, 0)
    steps.end("done")
    assert steps.live(1) == []  # the target has shrunk to what was counted
    assert steps.finish() == []
    assert steps.is_settled
    assert steps.present(GROUP) == 0


def test_a_step_that_could_not_be_applied_is_told_to_all() -> None:
    steps = Steps(2)
    steps.push(0, 0)
    steps.push(1, 0)
    lost = ParameterServerLost("/job:ps/task:1")
    assert refusals(steps.close_failed(GROUP, lost)) == [
        (0, "ParameterServerLost"),
        (1, "ParameterServerLost"),
    ]
    assert refusals(steps.push(0, 1)) == [(0, "ParameterServerLost")]
    assert steps.live(0) == []
    backup = Steps(2)
    backup.restore(steps.snapshot(), {GROUP: config(2)})
    assert refusals(backup.push(0, 1, number=3)) == [(0, "ParameterServerLost")]


def test_a_backup_takes_no_call_of_a_closure_that_has_ended_for_one_that_may_come_again() -> None:
    """Its step is still open: the closure was not to wait for that."""
    steps, backup = Steps(2), Steps(2)
    steps.push(0, 0, closure=5)
    for each in (steps, backup):  # the backup's ledger, from the snapshot
        each.ledger.final_below(6)
    backup.restore(steps.snapshot(), {GROUP: config(2)})
    assert backup.snapshot() == steps.snapshot()
    assert backup.ledger.counted() == steps.ledger.counted() == []


def test_defining_again_changes_nothing() -> None:
    steps = Steps(2)
    steps.push(0, 0)
    steps.define(GROUP, config(2), 9)
    assert (steps.present(GROUP), steps.present(GROUP + 1)) == (0, -1)


def test_calls_of_two_runs_are_compared_by_their_numbers_so_a_loop_may_count_twice() -> None:
    steps = Steps(1, 2)
    steps.push(1, 0)
    steps.closed(GROUP, 0)
    assert answers(steps.push(0, 0, closure=7)) == [(0, "stale", 1)]
    assert closes(steps.push(0, 1, closure=7, ordinal=1)) == [(1, [0], False)]
    steps.closed(GROUP, 1)
    # Its worker is lost. The next run's first call is the first one of this number that counts.
    assert closes(steps.push(1, 2, closure=7)) == [(2, [1], False)]
    steps.closed(GROUP, 2)
    assert answers(steps.push(1, 3, closure=7, ordinal=1)) == [(1, "duplicate", 3)]
    steps.push(1, 3, closure=7, ordinal=2, variable_set=b"u")
    steps.closed(GROUP, 3)
    (refuse,) = steps.push(0, 4, closure=7, ordinal=2)
    assert isinstance(refuse, Refuse)
    assert "updates other variables than in its first run" in str(refuse.error)


# --- who waits for others --------------------------------------------------------------------


def test_who_waits_for_others_is_said() -> None:
    steps = Steps(2, 2)
    assert steps.waiting == frozenset()
    steps.push(0, 0)
    assert steps.waiting == {replica(0)}
    steps.push(1, 0)  # the step is being applied: that will end
    assert steps.waiting == frozenset()
    steps.closed(GROUP, 0)
    assert steps.waiting == frozenset()


# What a snapshot keeps.


def test_what_was_counted_is_pending_until_every_ps_has_applied_it() -> None:
    steps = Steps(2)
    steps.push(0, 0, closure=5, ordinal=1)
    assert steps.pending() == {(5, 1)}
    assert steps.calls() == steps.closing() == []
    steps.push(1, 0, closure=7)
    assert [(close.group, close.step) for close in steps.closing()] == [(GROUP, 0)]
    assert steps.pending() == {(5, 1), (7, 0)}  # the step is being applied
    assert steps.calls() == []
    steps.closed(GROUP, 0)
    assert steps.pending() == set()
    assert [call[:3] for call in steps.calls()] == [(GROUP, 5, 1), (GROUP, 7, 0)]
    steps.push(0, 1, closure=8)
    steps.push(0, 1)  # of no closure
    assert steps.pending() == {(8, 0)}
    assert [call[:3] for call in steps.calls()] == [(GROUP, 5, 1), (GROUP, 7, 0)]


def test_calls_that_were_counted_before_are_duplicates() -> None:
    before = Steps(1)
    before.push(0, 0, closure=5)
    before.closed(GROUP, 0)
    other = (GROUP + 1, 6, 0, b"digest")  # of a group that is not defined yet
    final = (GROUP + 1, 3, 0, b"digest")
    after = Steps(1, noted=[*before.calls(), other, final], final_below=3)
    assert sorted(after.calls()) == sorted([other, final, *before.calls()])
    after.ledger.final_below(4)
    assert sorted(after.calls()) == sorted([other, *before.calls()])
    for closure in (5, 2):
        assert after.push(0, 0, closure=closure) == []
    assert after.pending() == set()
    assert closes(after.push(1, 0, closure=6, ordinal=1)) == [(0, [1], False)]
    assert [outcome for _, outcome, _ in answers(after.closed(GROUP, 0))] == ["duplicate"]


# What a backup is told.


def test_a_group_that_begins_while_too_few_live_waits_for_them() -> None:
    steps = SyncSteps(Ledger())
    steps.members({"/job:worker/task:0": 1000}, ["/job:worker/task:1"], 5.0)
    steps.define(GROUP, config(2, min_replicas=2, patience_s=3.0), 0)
    steps.contribute(GROUP, Contribution(replica(0, 1000), 1, 0, (7, 1), b"", 0, 1.0, []))
    assert steps.next_deadline() == 8.0
