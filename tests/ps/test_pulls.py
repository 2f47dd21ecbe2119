"""Pulls on a ps: with a lock and without, of values and of slots."""

from __future__ import annotations

import numpy as np
import pytest

from ps_by_hand import A, PsByHand, joined
from ps_cluster import CONFIG
from psync.errors import LockLost, UsageError
from psync.numerics.compression import marker
from psync.wire.messages import Pull, PullLocked, Push


def test_values_and_slots_are_pulled_and_counted() -> None:
    ps = PsByHand()
    v = ps.create("v", [1.0, 2.0])
    assert ps.value(v).tolist() == [1, 2]
    config = {**CONFIG, "momentum": 0.9}
    ps.ask(A, Push(1, 0, -1, 0, 9, [v], 1, config, 0), np.ones(2).tobytes())
    (slot,) = ps.call(A, Pull(9, None, 1, "momentum")).segments
    assert np.frombuffer(joined([slot])).tolist() == [-0.5, -0.5]
    with pytest.raises(UsageError, match="has no slot 'm'"):
        ps.ask(A, Pull(9, None, 1, "m"))
    assert ps.services.pulls.pulls >= 2


def test_a_pull_under_a_lock_that_is_not_held_is_refused() -> None:
    ps = PsByHand()
    v = ps.create("v", np.zeros(2))
    with pytest.raises(LockLost, match="lock 7 has ended"):
        ps.ask(A, PullLocked(9, [v], -1, "", 7))


def test_values_that_are_to_be_rounded_do_not_come_with_the_answer_to_a_push() -> None:
    ps = PsByHand()
    v = ps.create("v", np.zeros(2, np.float32))
    for members, brought in (([v], 1), ([marker("bf16"), v], 0)):
        push = Push(
            1 + (not brought), 0, -1, 0, 9, [v], 1, CONFIG, 0,
            pull=7 + brought, pull_members=members,
        )  # fmt: skip
        reply = ps.call(A, push, np.ones(2, np.float32).tobytes())
        assert len(reply.segments) == brought
