from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import FencedError, UsageError
from psync.store.ledger import STEP, AlreadyApplied, Duplicate, Fresh, Ledger, Verdict
from psync.store.ledger_snapshot import (
    GradientStates,
    LedgerState,
    SenderState,
    control_of,
    gradients_of,
    held_updates,
    note_gradients,
    restore_ledger,
    state_of,
)
from psync.wire.closure_numbers import numbered

W0, W1 = ("/job:worker/task:0", 21), ("/job:worker/task:1", 21)
FLOOR = 20
SET = -77


def pack(answer: object) -> bytes | None:
    return str(answer).encode() if isinstance(answer, str) else None


def unpack(data: bytes) -> object:
    return data.decode()


def bytes_of(answer: object) -> bytes:
    return str(answer).encode()


def again(ledger: Ledger) -> Ledger:
    made = Ledger(FLOOR)
    restore_ledger(made, state_of(ledger, pack), unpack)
    return made


def push(
    ledger: Ledger, client: tuple[str, int] = W0, sequence: int = 0, *,
    acked: int = 0, closure: int | None = 5, ordinal: int = 0, variable_set: Any = SET,
) -> Verdict:  # fmt: skip
    return ledger.judge(client, sequence, acked, closure, ordinal, variable_set, ("w", "b"))


def apply(ledger: Ledger, *args: Any, answer: object = "accepted", **kwargs: Any) -> None:
    verdict = push(ledger, *args, **kwargs)
    assert isinstance(verdict, Fresh | AlreadyApplied)
    ledger.record(verdict, answer)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(FLOOR)


def test_a_message_that_was_answered_gets_the_same_answer(ledger: Ledger) -> None:
    apply(ledger, answer="step 4")
    apply(ledger, sequence=1, closure=None, answer="step 5")
    copy = again(ledger)
    for _ in range(2):
        assert push(copy) == Duplicate("step 4")
        assert push(copy, sequence=1, closure=None) == Duplicate("step 5")


def test_another_run_of_a_closure_is_a_duplicate(ledger: Ledger) -> None:
    apply(ledger)
    copy = again(ledger)
    verdict = push(copy, W1)
    assert isinstance(verdict, AlreadyApplied)
    assert isinstance(push(copy, W1, 1, ordinal=1), Fresh)
    with pytest.raises(UsageError, match=r"other variables \(w, b\) than in its first run \(w, b"):
        push(copy, W1, 2, variable_set=SET + 1)


def test_what_is_final_and_who_is_fenced_stays_so(ledger: Ledger) -> None:
    apply(ledger, closure=3)
    ledger.final_below(4)
    ledger.fence(W1[0], 23)
    copy = again(ledger)
    assert isinstance(push(copy, ("/job:worker/task:2", 21), closure=3), AlreadyApplied)
    with pytest.raises(FencedError, match="replaced by 23"):
        push(copy, W1)
    with pytest.raises(FencedError, match=f"replaced by {FLOOR}"):
        push(copy, ("/job:worker/task:3", FLOOR - 1))
    assert copy.statistics()["calls"] == 0


def test_what_may_come_again_stays_so(ledger: Ledger) -> None:
    apply(ledger, closure=3)
    ledger.final_below(4, [(3, 1)])
    copy = again(ledger)
    assert isinstance(push(copy, W1, closure=3, ordinal=1), AlreadyApplied)
    assert isinstance(push(copy, W1, 1, closure=numbered(3, 1)), AlreadyApplied)
    assert isinstance(push(copy, W1, 2, closure=numbered(3, 1), ordinal=1), Fresh)
    assert copy.statistics()["calls"] == 1


def test_an_acknowledged_message_stays_acknowledged(ledger: Ledger) -> None:
    apply(ledger)
    ledger._acknowledge(W0, 1)
    with pytest.raises(UsageError, match="has acknowledged"):
        push(again(ledger))


def test_the_same_number_for_another_call_is_still_a_bug(ledger: Ledger) -> None:
    apply(ledger)
    with pytest.raises(UsageError, match="again for closure 6, call 0"):
        push(again(ledger), closure=6)


def test_a_restored_entry_can_be_acknowledged_and_made_final(ledger: Ledger) -> None:
    apply(ledger)
    copy = again(ledger)
    copy._acknowledge(W0, 1)
    copy.final_below(6)
    assert copy.statistics()["answers"] == copy.statistics()["calls"] == 0


def test_updates_of_accumulators_are_left_out(ledger: Ledger) -> None:
    apply(ledger, variable_set=b"ApplyGradient a", answer=7)
    apply(ledger, sequence=1, closure=None, variable_set=b"ApplyGradient a", answer=8)
    copy = again(ledger)
    assert isinstance(push(copy, variable_set=b"ApplyGradient a"), Fresh)
    assert isinstance(push(copy, sequence=1, closure=None), Fresh)


def test_updates_of_accumulators_are_had_apart_from_the_others(ledger: Ledger) -> None:
    what = b"ApplyGradient a"
    apply(ledger, answer="a push")
    apply(ledger, sequence=1, closure=6, variable_set=what, answer=7)
    apply(ledger, sequence=2, closure=None, variable_set=what, answer=8)
    states = gradients_of(ledger, lambda a: b"%d" % a if isinstance(a, int) else None)
    assert states == GradientStates(
        [(*W0, 1, 6, 0, b"7"), (*W0, 2, -1, 0, b"8")], [(6, 0, what, "w")]
    )
    copy = again(ledger)
    note_gradients(copy, states, int)
    assert push(copy) == Duplicate("a push")
    assert push(copy, sequence=1, closure=6, variable_set=what) == Duplicate(7)
    assert push(copy, sequence=2, closure=None, variable_set=what) == Duplicate(8)
    assert isinstance(push(copy, W1, closure=6, variable_set=what), AlreadyApplied)
    with pytest.raises(UsageError, match="updates other variables"):
        push(copy, W1, 1, closure=6)
    copy._acknowledge(W0, 3)
    copy.final_below(7)
    assert copy.statistics()["calls"] == 0


@pytest.mark.parametrize("closure", [5, None])
def test_what_is_judged_is_in_the_state_once_it_is_recorded(
    ledger: Ledger, closure: int | None
) -> None:
    verdict = push(ledger, closure=closure)
    assert state_of(ledger, pack).senders == (SenderState(W0[0], 21, 0, ()),)
    assert isinstance(verdict, Fresh)
    ledger.record(verdict, "accepted")
    assert state_of(ledger, pack) == LedgerState(
        (SenderState(W0[0], 21, 0, ((0, None if closure is None else (5, 0), b"accepted"),)),),
        () if closure is None else ((5, 0, SET, ("w", "b")),),
        coordinator=20,
    )


def test_it_is_known_of_how_many_parts_an_update_is(ledger: Ledger) -> None:
    apply(ledger, closure=4)
    verdict = ledger.judge(W0, 1, 0, 5, 0, SET, ("w",), spread=[(1, 3), (2, 9)])
    assert isinstance(verdict, Fresh)
    ledger.record(verdict, "accepted")
    assert state_of(ledger, pack).parts == ((5, 0, 3),)
    assert state_of(again(ledger), pack).parts == ((5, 0, 3),)


def test_what_was_refused_is_no_part_of_the_state(ledger: Ledger) -> None:
    push(ledger)
    ledger.refuse(W0, 0)
    assert state_of(ledger, pack).senders == (SenderState(W0[0], 21, 0, ()),)
    assert isinstance(push(again(ledger)), Fresh)


def test_what_is_compared_does_not_depend_on_the_order_in_which_it_was_learnt() -> None:
    one, other = Ledger(FLOOR), Ledger(FLOOR)
    pushes = [(W0, 0, 5), (W1, 0, 6), (W0, 1, None)]
    for ledger, order in ((one, pushes), (other, pushes[::-1])):
        for client, sequence, closure in order:
            apply(ledger, client, sequence, closure=closure)
    assert control_of(one, bytes_of) == control_of(other, bytes_of)
    msgpack.packb(control_of(one, bytes_of))  # plain data


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: apply(ledger, W0, 7, closure=None),
        lambda ledger: apply(ledger, W0, 7, closure=6, variable_set=b"ApplyGradient a"),
        lambda ledger: ledger._acknowledge(W0, 1),
        lambda ledger: ledger.fence(W1[0], 30),
        lambda ledger: ledger.final_below(3),
        lambda ledger: ledger.final_below(0, [(3, 1)]),
    ],
)
def test_whatever_it_learns_is_compared(ledger: Ledger, change: Callable[[Ledger], object]) -> None:
    apply(ledger)
    before = control_of(ledger, bytes_of)
    change(ledger)
    assert control_of(ledger, bytes_of) != before


def test_what_was_refused_or_asked_again_is_not_compared(ledger: Ledger) -> None:
    apply(ledger)
    before = control_of(ledger, bytes_of)
    push(ledger)
    ledger.refuse(W0, 3)
    assert control_of(ledger, bytes_of) == before


@given(
    st.lists(
        st.tuples(
            st.sampled_from([W0, W1]), st.integers(0, 5),
            st.none() | st.integers(0, 3), st.integers(0, 1),
        )
    ),
    st.integers(0, 3),
)  # fmt: skip
def test_a_copy_judges_as_the_original(
    updates: list[tuple[tuple[str, int], int, int | None, int]], final_below: int
) -> None:
    original = Ledger(FLOOR)
    for client, sequence, closure, ordinal in updates:
        try:
            verdict = push(original, client, sequence, closure=closure, ordinal=ordinal)
        except UsageError:
            continue
        if isinstance(verdict, Fresh | AlreadyApplied):
            original.record(verdict, f"{type(verdict)} {sequence}")
    original.final_below(final_below)
    copy = again(original)
    assert state_of(copy, pack) == state_of(original, pack)
    assert control_of(copy, bytes_of) == control_of(original, bytes_of)
    for client, sequence, closure, ordinal in updates:
        one, other = (
            push(ledger, client, sequence, closure=closure, ordinal=ordinal)
            if is_known(original, client, sequence, closure, ordinal)
            else None
            for ledger in (original, copy)
        )
        assert one == other


def is_known(ledger: Ledger, client: Any, sequence: int, closure: Any, ordinal: int) -> bool:
    call = None if closure is None else (closure, ordinal)
    return ledger._senders[client[0]].messages[sequence].call == call


def test_what_failed_while_it_was_computed_is_remembered_and_is_in_no_digest(
    ledger: Ledger,
) -> None:
    apply(ledger)
    before = control_of(ledger, bytes_of)
    ledger.note_failure(W0, 0, (5, 0), b"failed")
    ledger.note_failure((STEP, 3), 7, None, b"too")
    assert control_of(ledger, bytes_of) == before
    copy = again(ledger)
    assert copy.failure_of(W0, 0, None) == copy.failure_of(W1, 4, (5, 0)) == b"failed"
    assert copy.failure_of((STEP, 3), 7, None) == b"too"
    copy.final_below(6)
    assert copy.failure_of(W1, 4, (5, 0)) is None


def test_updates_over_several_ps_tasks_and_those_of_no_closure_are_held(ledger: Ledger) -> None:
    for sequence, closure, spread in ((1, 5, [(1, 4)]), (2, 6, []), (3, None, [(2, 6)])):
        verdict = ledger.judge(W0, sequence, 1, closure, 0, SET, ("w",), spread)
        assert isinstance(verdict, Fresh)
        ledger.record(verdict, "accepted")
    held = held_updates(ledger, 5)
    assert (held.coordinator, held.final_below, held.calls) == (5, 0, ((5, 0, 2),))
    assert held.acked == ((*W0, 1),)
    assert held.messages == ((*W0, 3, ((2, 6),)),)
    assert not held.kept


def test_calls_of_shards_that_may_come_again_are_held(ledger: Ledger) -> None:
    for sequence, closure in enumerate((5, 6)):
        verdict = ledger.judge(W0, sequence, 0, closure, 0, SET, ("w",), [(1, 4)])
        assert isinstance(verdict, Fresh)
        ledger.record(verdict, "accepted")
    ledger.final_below(7, [(5, 1)])
    held = held_updates(ledger, 3)
    assert (held.final_below, held.kept, held.calls) == (7, ((5, 1),), ((5, 0, 2),))
