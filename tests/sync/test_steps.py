"""When ps 0 closes a synchronous step, with whom, and who may go on."""

from __future__ import annotations

import pytest

from psync.errors import (
    ConfigurationError,
    NotEnoughReplicas,
    ParameterServerLost,
)
from psync.sync.pushes import Answer, Close, Contribution, Refuse
from psync.sync.steps import SyncSteps
from sync_tools import GROUP, Steps, answers, closes, config, refusals, replica


def accepted(index: int, token: int) -> tuple[int, str, int]:
    return (index, "accepted", token)


# The sequence of a step.


def test_tokens_come_only_when_the_step_has_been_applied() -> None:
    steps = Steps(1)
    (close,) = steps.push(0, 0)
    assert isinstance(close, Close)
    # What is pulled while it is being applied is stale already.
    assert steps.present_and_first(GROUP)[0] == 1
    assert answers(steps.closed(GROUP, 0)) == [accepted(0, 1)]


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
    assert steps.present_and_first(GROUP) == (40, 40)
    assert closes(steps.push(0, -1)) == [(40, [0], False)]
    steps.closed(GROUP, 40)
    (answer,) = steps.push(1, -1)
    assert isinstance(answer, Answer)
    assert (answer.outcome, answer.staleness) == ("stale", 1)


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
    steps.contribute(8, Contribution(replica(1), 1, 1, 2, 0, b"w", 0, 1.0))
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
    assert steps.present_and_first(GROUP)[0] == 0


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


def test_defining_again_changes_nothing_and_must_be_the_same() -> None:
    steps = Steps(2)
    steps.push(0, 0)
    steps.define(GROUP, config(2), 9)
    assert steps.present_and_first(GROUP)[0] == 0
    with pytest.raises(ConfigurationError, match="a different configuration"):
        steps.define(GROUP, config(3), 0)


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
    assert "pushes other variables than in its first run" in str(refuse.error)


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
    assert steps.pending_closures() == [5]
    assert steps.calls() == []
    steps.push(1, 0, closure=7)
    assert steps.pending_closures() == [5, 7]  # the step is being applied
    assert steps.calls() == []
    steps.closed(GROUP, 0)
    assert steps.pending_closures() == []
    assert [call[:3] for call in steps.calls()] == [(GROUP, 5, 1), (GROUP, 7, 0)]
    steps.push(0, 1, closure=8)
    steps.push(0, 1)  # of no closure
    assert steps.pending_closures() == [8]
    assert [call[:3] for call in steps.calls()] == [(GROUP, 5, 1), (GROUP, 7, 0)]


def test_calls_that_were_counted_before_are_duplicates() -> None:
    before = Steps(1)
    before.push(0, 0, closure=5)
    before.closed(GROUP, 0)
    other = (GROUP + 1, 6, 0, b"digest")  # of a group that is not defined yet
    final = (GROUP + 1, 3, 0, b"digest")
    after = Steps(1, noted=[*before.calls(), other, final], final_below=3)
    assert after.calls() == [other, final, *before.calls()]
    after.final_below(4)
    assert after.calls() == [other, *before.calls()]
    for closure in (5, 2):
        assert after.push(0, 0, closure=closure) == []
    assert after.pending_closures() == []
    assert closes(after.push(1, 0, closure=6)) == [(0, [1], False)]
    assert [outcome for _, outcome, _ in answers(after.closed(GROUP, 0))] == ["duplicate"]


# What a backup is told.


def test_a_group_that_begins_while_too_few_live_waits_for_them() -> None:
    steps = SyncSteps()
    steps.members({"/job:worker/task:0": 1000}, ["/job:worker/task:1"], 5.0)
    steps.define(GROUP, config(2, min_replicas=2, patience_s=3.0), 0)
    steps.contribute(GROUP, Contribution(replica(0), 1, 0, 7, 1, b"", 0, 1.0))
    assert steps.next_deadline() == 8.0
