"""Who waits for the answer to a push: told once, with values if they are of a new step."""

from __future__ import annotations

from typing import Any

import numpy as np

from asked import Asked, Reply, peer_of
from ps_by_hand import PsByHand, group_config
from psync.errors import TrainingEnded
from psync.sync.cross_ps_sets import ShareNumbers, WholeSet
from psync.sync.pushes import Answer, Refuse
from psync.sync.token_waits import PushKey, TokenWaits
from psync.wire.messages import Contributed, Done
from sync_cluster import GROUP

CONFIG = group_config()
REPLICA = ("/job:worker/task:0", 5)
KEY: PushKey = (GROUP, REPLICA, 1)
CONTRIBUTED = Contributed("accepted", 0, 1, False, 2)


def answer(number: int = 1) -> Answer:
    return Answer(GROUP, REPLICA, number, "accepted", 0, 1, False, 2)


def waits() -> tuple[PsByHand, TokenWaits, list[PushKey]]:
    left: list[PushKey] = []
    ps = PsByHand()
    ps.sync.define(GROUP, CONFIG)
    return ps, TokenWaits(ps.sync, left.append), left


def added(waiting: TokenWaits, wanted: WholeSet | None, key: PushKey = KEY) -> Asked:
    """A request that waits."""
    asked = Asked(peer_of(("w", 1)), Done())
    waiting.add(asked, key, wanted)
    return asked


def test_all_who_wait_for_a_push_are_told() -> None:
    _, waiting, left = waits()
    both = [added(waiting, None) for _ in range(2)]
    other = added(waiting, None, (GROUP, REPLICA, 2))
    assert len(waiting) == 2
    waiting.answer(answer())
    assert [waiter.outcome for waiter in both] == [Reply(CONTRIBUTED)] * 2
    error = TrainingEnded("over")
    waiting.answer(Refuse(GROUP, REPLICA, 2, error))
    assert other.outcome is error
    waiting.answer(answer(3))  # nobody waits for it
    assert (len(waiting), left) == (0, [])


def test_a_push_is_left_when_the_last_one_who_waits_gives_up() -> None:
    _, waiting, left = waits()
    one, two = (added(waiting, None) for _ in range(2))
    one.give_up()
    assert left == []
    two.give_up()
    assert left == [KEY]
    assert len(waiting) == 0


def test_values_go_with_the_tokens_of_a_new_step_only() -> None:
    ps, waiting, _ = waits()
    w = ps.create("w", np.arange(3, dtype=np.float32))
    elsewhere = (1, 7, 0)
    numbers = ShareNumbers(2, "/job:ps/task:0")
    wanted = WholeSet([(0, *w), elsewhere], numbers)

    def values_with(known: WholeSet) -> Any:
        waiter = added(waiting, known)
        shares = waiting.wanted_shares()
        theirs = memoryview(b"theirs")
        waiting.bring({share.number: [theirs for _ in share.members] for share in shares})
        waiting.answer(answer())
        waiting.done()
        assert isinstance(waiter.outcome, Reply)
        return waiter.outcome.segments

    mine, theirs = values_with(wanted)
    assert np.frombuffer(b"".join(mine), np.float32).tolist() == [0, 1, 2]
    assert bytes(theirs) == b"theirs"
    busy = ps.store.assign(w, "add", np.zeros(3, np.float32))
    assert list(values_with(wanted)) == []
    for _ in busy:  # it is done
        pass
    waiter = added(waiting, wanted)
    waiting.answer(answer())  # a token that was left
    assert waiter.outcome == Reply(CONTRIBUTED, ())
    assert waiting.wanted_shares() == ()
    added(waiting, wanted)
    ps.sync.define(GROUP + 1, CONFIG)
    assert waiting.wanted_shares() == ()  # each pull says how far all groups are
