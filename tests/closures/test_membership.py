"""Incarnations, fences, what a loss means for a worker and for a ps, and the back-off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.closures.membership import (
    MOVES,
    Fence,
    Membership,
    SessionEnd,
    TaskEvent,
    TaskState,
    backoff,
)
from psync.errors import LocalProtocolError

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"
P0, P1 = "/job:ps/task:0", "/job:ps/task:1"
ADDRESSES = {W0: "w0:1", W1: "w1:1", P0: "p0:1", P1: "p1:1"}


def cluster(*, alive: tuple[str, ...] = ()) -> Membership:
    """A membership of two workers and two ps, of which some connected under incarnation 0."""
    membership = Membership({W0: "w0:1", W1: "w1:1"}, {P0: "p0:1", P1: "p1:1"})
    for task in alive:
        membership.connected(task, 0)
    return membership


# --- incarnations ----------------------------------------------------------------------------


def test_first_connection_is_assigned_the_boot_incarnation() -> None:
    membership = cluster()
    assert membership.connected(W0, 7) == []
    assert membership.incarnation(W0) == 7
    assert membership.state(W0) is TaskState.ALIVE


def test_task_that_never_connected_has_no_incarnation() -> None:
    assert cluster().incarnation(W0) == -1


def test_same_life_that_connects_again_gets_a_higher_incarnation() -> None:
    membership = cluster(alive=(W0,))
    membership.disconnected(W0)
    assert membership.connected(W0, 0) == []
    assert membership.incarnation(W0) == 1
    membership.disconnected(W0)
    assert membership.connected(W0, 0) == []
    assert membership.incarnation(W0) == 2


def test_restarted_task_gets_its_boot_incarnation_if_that_is_higher() -> None:
    membership = cluster(alive=(W0,))
    membership.disconnected(W0)
    assert membership.connected(W0, 5) == []
    assert membership.incarnation(W0) == 5


def test_restarted_task_never_gets_an_incarnation_that_was_used() -> None:
    membership = cluster()
    membership.connected(W0, 5)
    membership.disconnected(W0)
    assert membership.connected(W0, 3) == []
    assert membership.incarnation(W0) == 6


# --- workers ---------------------------------------------------------------------------------


def test_lost_worker_is_fenced_at_every_living_ps_before_its_loss_is_acted_on() -> None:
    membership = cluster(alive=(P0, P1, W0))
    assert membership.disconnected(W0) == [
        Fence(P0, W0, below=1),
        Fence(P1, W0, below=1),
    ]
    assert membership.state(W0) is TaskState.LOST


def test_ps_that_was_not_there_hears_of_the_lost_workers_when_it_connects() -> None:
    membership = cluster(alive=(P0, W0, W1))
    assert membership.disconnected(W0) == [Fence(P0, W0, below=1)]
    assert membership.connected(P1, 0) == [Fence(P1, W0, below=1)]


def test_worker_that_returned_is_served_although_its_earlier_life_is_fenced() -> None:
    membership = cluster(alive=(W0,))
    membership.disconnected(W0)
    membership.connected(W0, 0)
    fences = membership.connected(P0, 0)
    assert fences == [Fence(P0, W0, below=1)]
    assert membership.incarnation(W0) >= fences[0].below


# --- workers that leave, and new ones -----------------------------------------------------------


def test_worker_that_leaves_is_fenced_and_not_waited_for() -> None:
    membership = cluster(alive=(P0, P1, W0))
    assert membership.left(W0) == [
        Fence(P0, W0, below=1),
        Fence(P1, W0, below=1),
    ]
    assert membership.state(W0) is TaskState.LEFT
    assert membership.missing() == [(W1, "w1:1")]
    assert membership.gone() == [W0]
    assert membership.alive_workers() == []


def test_worker_that_left_may_return_under_a_higher_incarnation() -> None:
    membership = cluster(alive=(W0,))
    membership.left(W0)
    assert membership.connected(W0, 0) == []
    assert membership.incarnation(W0) == 1
    assert membership.gone() == []


@pytest.mark.parametrize("lost", [False, True])
def test_worker_that_is_not_there_may_be_given_up_and_that_is_nobodys_loss(lost: bool) -> None:
    membership = cluster(alive=(P0, W0))
    if lost:
        membership.disconnected(W0)
    worker = W0 if lost else W1
    assert membership.left(worker) == []
    assert membership.left(worker) == [], "again"
    assert worker not in [task for task, _ in membership.missing()]


def test_worker_that_is_added_is_waited_for() -> None:
    membership = cluster(alive=(P0, P1, W0, W1))
    added = "/job:worker/task:2"
    membership.add_worker(added, "w2:1")
    assert membership.missing() == [(added, "w2:1")]
    membership.connected(added, 5)
    assert membership.alive_workers() == [W0, W1, added]
    with pytest.raises(LocalProtocolError, match=f"^{added} cannot be added: it is alive$"):
        membership.add_worker(added, "w3:1")


def test_name_of_a_worker_that_left_is_given_to_another_one_whose_incarnation_is_higher() -> None:
    membership = cluster(alive=(P0, W1))
    membership.left(W1)
    membership.add_worker(W1, "elsewhere:1")
    assert (W1, "elsewhere:1") in membership.missing()
    assert membership.connected(W1, 0) == []
    assert membership.incarnation(W1) == 1


def test_a_ps_cannot_leave() -> None:
    with pytest.raises(LocalProtocolError, match=f"^{P0} cannot leave: it holds variables$"):
        cluster(alive=(P0,)).left(P0)


# --- ps --------------------------------------------------------------------------------------


def test_ps_that_returns_hears_of_workers_lost_meanwhile() -> None:
    membership = cluster(alive=(P0, W0))
    assert membership.disconnected(P0) == []
    assert membership.state(P0) is TaskState.LOST
    assert membership.disconnected(W0) == []
    assert membership.connected(P0, 0) == [Fence(P0, W0, below=1)]
    assert membership.state(P0) is TaskState.ALIVE


# --- who is there ----------------------------------------------------------------------------


def test_cluster_is_ready_with_every_ps_and_enough_workers() -> None:
    membership = cluster(alive=(P0, W0))
    assert not membership.ready(0)  # a ps is missing
    membership.connected(P1, 0)
    assert membership.ready(1)
    assert not membership.ready(2)
    membership.connected(W1, 0)
    assert membership.ready(2)


def test_missing_names_the_tasks_awaited_with_their_addresses() -> None:
    membership = cluster(alive=(P0, W0))
    assert membership.missing() == [(P1, "p1:1"), (W1, "w1:1")]
    membership.disconnected(P0)
    assert membership.missing() == [(P0, "p0:1"), (P1, "p1:1"), (W1, "w1:1")]


def test_alive_workers_are_those_connected_now() -> None:
    membership = cluster(alive=(P0, W1, W0))
    assert membership.alive_workers() == [W0, W1]
    membership.disconnected(W0)
    assert membership.alive_workers() == [W1]


def test_repr_is_a_status_line() -> None:
    membership = Membership({W0: "w0:1"}, {P0: "p0:1"})
    membership.connected(P0, 0)
    assert repr(membership) == f"<Membership: {P0} alive, {W0} connecting>"


# --- illegal moves ---------------------------------------------------------------------------


def test_second_connection_of_a_task_that_is_alive_is_refused() -> None:
    membership = cluster(alive=(W0,))
    with pytest.raises(LocalProtocolError, match=f"^{W0} cannot connect: it is alive$"):
        membership.connected(W0, 3)
    assert membership.incarnation(W0) == 0


@pytest.mark.parametrize("task", [W0, P0])
def test_task_that_is_not_connected_cannot_disconnect(task: str) -> None:
    text = f"^{task} cannot lose its connection: it is connecting$"
    with pytest.raises(LocalProtocolError, match=text):
        cluster().disconnected(task)


def test_task_outside_the_cluster_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"^/job:worker/task:9 is not a task of the clu"):
        cluster().connected("/job:worker/task:9", 0)


def test_every_state_has_moves_and_a_way_back_to_alive() -> None:
    assert set(MOVES) == set(TaskState)
    for state, moves in MOVES.items():
        assert state is TaskState.ALIVE or moves[TaskEvent.CONNECT] is TaskState.ALIVE


# --- laws ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(sorted(ADDRESSES)), st.integers(0, 5)), max_size=40))
def test_incarnations_grow_and_each_ps_has_heard_of_every_loss(
    events: list[tuple[str, int]],
) -> None:
    """Whatever comes and goes: no incarnation is used twice, and a lost one is refused by every ps
    that is connected, while a living one is refused by none."""
    membership = cluster()
    fences: dict[tuple[str, str], int] = {}
    boots = dict.fromkeys(ADDRESSES, 0)
    for task, restarts in events:
        before = membership.incarnation(task)
        if membership.state(task) is TaskState.ALIVE:
            actions = membership.disconnected(task)
        else:
            boots[task] += restarts
            actions = membership.connected(task, boots[task])
            assert membership.incarnation(task) > before
        for fence in actions:
            assert membership.state(fence.ps) is TaskState.ALIVE
            fences[fence.ps, fence.task] = fence.below
        for worker in (W0, W1):
            for ps in (P0, P1):
                below = fences.get((ps, worker), 0)
                if membership.state(worker) is TaskState.ALIVE:
                    assert below <= membership.incarnation(worker)
                elif membership.state(ps) is TaskState.ALIVE:
                    assert below == membership.incarnation(worker) + 1


# --- the end of a worker's session -----------------------------------------------------------

LEFT = SessionEnd("w has left (preempted)", in_order=True)
ENDED = SessionEnd("the session of w was ended (e)")
TOO_SLOW = SessionEnd("w is lost (e)", blame=True)
GIVES_UP = SessionEnd("w cannot go on (no memory)", counts=True)
LOST = SessionEnd("w is lost (e)", blame=True, counts=True)


@pytest.mark.parametrize("misses_ps", [False, True])
@pytest.mark.parametrize(
    ("leaving", "sent_away", "reason", "end"),
    [
        (False, None, "", LOST),
        (False, False, "", ENDED),
        (False, True, "", TOO_SLOW),
        (False, False, "no memory", ENDED),
        (False, True, "no memory", TOO_SLOW),
        (True, None, "preempted", LEFT),
        (True, False, "preempted", LEFT),
        (True, True, "preempted", LEFT),
    ],
)
def test_the_end_of_a_session_means(
    leaving: bool, sent_away: bool | None, reason: str, end: SessionEnd, misses_ps: bool
) -> None:
    assert SessionEnd.of("w", leaving, sent_away, reason, "e", misses_ps=misses_ps) == end


@pytest.mark.parametrize("misses_ps", [False, True])
def test_a_worker_that_cannot_go_on_counts_as_lost_unless_a_ps_is_missing(misses_ps: bool) -> None:
    end = SessionEnd.of("w", False, None, "no memory", "e", misses_ps=misses_ps)
    assert end == (SessionEnd(GIVES_UP.text) if misses_ps else GIVES_UP)


# --- back-off --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "uniform", "seconds"),
    [(0, 0.0, 0.02), (0, 1.0, 0.04), (1, 0.0, 0.032), (2, 0.5, 0.0768), (100_000, 1.0, 5.0)],
)
def test_backoff_starts_at_20_ms_and_grows_by_its_factor(
    attempt: int, uniform: float, seconds: float
) -> None:
    assert backoff(attempt, uniform) == pytest.approx(seconds)


@given(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_backoff_never_leaves_its_limits(attempt: int, uniform: float) -> None:
    assert 0.02 <= backoff(attempt, uniform) <= 5.0


@given(st.integers(0, 1000), st.floats(0, 1))
def test_backoff_does_not_shrink_with_the_attempts(attempt: int, uniform: float) -> None:
    assert backoff(attempt, uniform) <= backoff(attempt + 1, uniform)


def test_fences_of_lost_workers_are_told_to_whoever_begins_anew() -> None:
    membership = cluster(alive=(W0, W1))
    assert membership.fences() == []
    membership.disconnected(W0)
    assert membership.fences() == [(W0, 1)]
    membership.connected(W0, 0)
    assert membership.fences() == [(W0, 1)]
