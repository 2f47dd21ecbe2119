"""One synchronous group: what is counted once, in which order, and what is told to whom."""

from __future__ import annotations

import pytest

from psync.errors import ConfigurationError, LocalProtocolError
from psync.sync.group import Group
from psync.sync.pushes import Answer, Contribution, Refuse
from psync.wire.closure_numbers import numbered
from sync_tools import GROUP, Steps, answers, closes, config, refusals, replica


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
    assert refusals(steps.push(1, 0, closure=5, variable_set=b"v")) == [(1, "UsageError")]


def test_a_final_closure_counts_no_more() -> None:
    steps = Steps(1)
    steps.push(0, 0, closure=5)
    steps.closed(GROUP, 0)
    steps.final_below(6)
    steps.final_below(3)
    assert steps.calls() == []
    assert steps.push(1, 1, closure=4) == []
    assert steps.counted() == 0
    assert closes(steps.push(0, 1, closure=7)) == [(1, [0], False)]
    assert answers(steps.closed(GROUP, 1)) == [(1, "duplicate", 2)]


def test_a_shard_that_comes_again_counts_once_and_its_run_before_no_more() -> None:
    steps = Steps(1)
    steps.push(0, 0, closure=5)
    steps.closed(GROUP, 0)
    steps.final_below(9, [(5, 1)])
    again = numbered(5, 1)
    assert [call[1] for call in steps.calls()] == [5]
    assert steps.push(1, 1, closure=again) == []
    assert steps.push(2, 1, closure=5, ordinal=1) == []
    assert steps.counted() == 0
    assert closes(steps.push(0, 1, closure=again, ordinal=1)) == [(1, [0], False)]
    assert steps.pending_closures() == [5]
    assert answers(steps.closed(GROUP, 1)) == [(1, "duplicate", 2)]
    steps.final_below(9)
    assert steps.calls() == []


def test_a_shard_that_pushes_other_variables_when_it_comes_again_is_told_what_to_do() -> None:
    steps = Steps(2)
    steps.push(0, 0, closure=5)
    (refused,) = steps.push(1, 0, closure=numbered(5, 1), variable_set=b"v")
    assert isinstance(refused, Refuse)
    assert "closure 5, call 0, pushes other variables" in str(refused.error)
    assert "what a data shard has updated before" in str(refused.error)


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
    statistics = steps.statistics()[f"opt/{GROUP}"]
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
    tokens = steps.statistics()[f"opt/{GROUP}"]["tokens"]
    assert tokens == {"published": 2, "taken": 1, "void": 0, "left": 1}


def test_too_few_initial_tokens_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="too few tokens"):
        Steps(3, 1).init_tokens(GROUP, 1)


# The order of calls, which ``SyncSteps`` keeps.


def one_push() -> Contribution:
    return Contribution(replica(0), 1, 1, None, 0, b"v", 0, 1.0)


def test_a_step_is_not_closed_twice_nor_without_a_push() -> None:
    group = Group(GROUP, config(1), 0, None)
    with pytest.raises(AssertionError, match="nothing to close at step 0"):
        group.close(partial=True)
    group.judge(one_push(), 0)
    group.close(partial=False)
    with pytest.raises(AssertionError, match="nothing to close at step 1"):
        group.close(partial=False)
    with pytest.raises(LocalProtocolError, match="step 1 is not being closed, but step 0"):
        group.closed(1, None)
    group.closed(0, None)
    with pytest.raises(LocalProtocolError, match="step 0 is not being closed, but none"):
        group.closed(0, None)
