"""The token channel: first in, first out; free or bound; void once a new step has begun."""

from __future__ import annotations

from psync.sync.tokens import Replica, Taker, TokenChannel

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
