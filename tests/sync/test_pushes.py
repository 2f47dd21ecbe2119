"""What is known of a push, as plain data and back."""

from __future__ import annotations

import msgpack
import pytest

from psync.sync.pushes import Answer, Contribution, Push

GROUP = 7
CONTRIBUTION = Contribution(("/job:worker/task:0", 5), 3, 2, None, 1, b"set", -1, 0.5)


@pytest.mark.parametrize("closure", [None, 9])
@pytest.mark.parametrize("is_answered", [True, False])
def test_a_push_comes_back_from_its_snapshot(closure: int | None, *, is_answered: bool) -> None:
    one = CONTRIBUTION
    contribution = Contribution(
        one.replica, 3, 2, closure, 1, one.variable_set, one.local_step, one.weight
    )
    push = Push(contribution, "accepted", 0, partial=True, count=2)
    if is_answered:
        push.answer = Answer(GROUP, one.replica, 3, "accepted", 0, 4, True, 2)
    back = Push.restored(GROUP, msgpack.unpackb(msgpack.packb(push.snapshot())))
    assert back.contribution == contribution
    assert (back.outcome, back.staleness, back.partial, back.count) == ("accepted", 0, True, 2)
    assert back.answer == push.answer
