"""Which closures a rollback undoes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psync.closures import rollback
from psync.closures.closure import Closure, Identities, Identity
from psync.closures.rollback import CutCalls, EndedClosures, KeptCalls, Undone
from psync.store.snapshot_state import NOTHING, SnapshotState
from psync.wire.closure_numbers import PART_BITS, numbered


def snapshot(*calls: tuple[int, int], final_below: int = 0) -> SnapshotState:
    """Of a ps whose ledger has these (closure, call)."""
    listed = tuple((closure, call << PART_BITS, 0) for closure, call in calls)
    return replace(NOTHING, calls=listed, final_below=final_below)


def test_a_closure_is_in_a_cut_if_any_ps_has_each_of_its_calls() -> None:
    cut = CutCalls([snapshot((5, 0)), snapshot((5, 1), (6, 0))])
    assert not cut.num_missing(5, 2)
    assert cut.num_missing(5, 3)
    assert not cut.num_missing(6, 1)
    assert cut.num_missing(7, 1)


def test_a_closure_that_waits_for_its_step_is_not_in_it_though_it_is_final() -> None:
    waits = replace(NOTHING, final_below=9, pending=(5,))
    assert CutCalls([waits]).num_missing(5, 1)
    assert not CutCalls([waits]).num_missing(6, 1)


def test_messages_of_one_call_count_once() -> None:
    both = snapshot((5, 0))
    part = replace(NOTHING, calls=((5, 1, 0),))
    assert CutCalls([both, part]).num_missing(5, 2)


def part(ps: int) -> SnapshotState:
    """Of a ps that has its part of a call that has two."""
    ordinal = 1 << PART_BITS | ps
    return replace(NOTHING, calls=((5, ordinal, 0),), parts=((5, ordinal, 2),))


def test_a_call_of_which_a_part_is_missing_is_not_in_it() -> None:
    whole, single = CutCalls([part(0), part(1), snapshot()]), snapshot((5, 0))
    assert not whole.num_missing(5, 1)
    assert not CutCalls([part(1), part(0), single]).num_missing(5, 2)
    assert CutCalls([part(0), single]).num_missing(5, 2)


def test_a_synchronous_push_is_a_call_too() -> None:
    steps = replace(NOTHING, counted=((1, 5, 1, b"d"),))
    cut = CutCalls([steps, snapshot((5, 0))])
    assert not cut.num_missing(5, 2)
    assert cut.num_missing(5, 3)


def test_what_was_final_is_in_it_though_its_calls_are_forgotten() -> None:
    cut = CutCalls([snapshot(final_below=3), snapshot(final_below=6)])
    assert not cut.num_missing(5, 9)
    assert cut.num_missing(6, 1)


def test_those_that_are_not_wholly_in_the_cut_are_undone_once() -> None:
    ended = EndedClosures()
    for closure, calls in ((9, 1), (4, 2), (3, 1)):
        ended.ended(closure, calls)
    cut = CutCalls([snapshot((3, 0), (4, 0))])
    assert ended.undone(cut) == Undone((4, 9), 2)  # of 4 one update is in it
    assert ended.undone(cut) == Undone()


@pytest.mark.promise("closures.reschedule")
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_what_all_checkpoints_of_a_rollback_have_is_forgotten(damaged: int) -> None:
    """The newest may be damaged: then a rollback goes to one before."""
    cuts = [CutCalls([snapshot(*((each, 0) for each in range(1, last)))]) for last in range(3, 7)]
    ended = EndedClosures()
    for closure in range(1, 7):
        ended.ended(closure, 1)
    for cut in cuts:
        ended.saved(cut, (), 3)
    assert [closure in ended for closure in range(1, 8)] == [False] * 3 + [True] * 3 + [False]
    assert ended.undone(cuts[3]) == Undone((6,), 1)
    left = tuple(range(6 - damaged, 6))
    assert ended.undone(cuts[3 - damaged]) == Undone(left, damaged)
    ended.saved(cuts[3], (), 1)
    assert not any(closure in ended for closure in range(7))


def shard(number: int, undone: list[Identity]) -> tuple[Identities, Identity]:
    """A data shard that was done in its second run, of closure 8; the first was ``number``."""
    identities, identity = Identities(), Identity("shard", undone)
    for closure in (Closure(number, identity=identity), Closure(8, identity=identity)):
        identities.begin(closure, identity)
        closure.worker = "w"
        closure.error = ValueError() if closure.id == number else None
        identities.end(closure, identity)
    return identities, identity


def test_a_shard_that_is_undone_is_named_by_its_last_closure_and_comes_again() -> None:
    undone: list[Identity] = []
    identities, identity = shard(3, undone)
    ended = EndedClosures(identities)
    ended.ended(numbered(3, 1), 2)
    ended.saved(CutCalls([snapshot((3, 0), final_below=5)]), (), 2)
    assert ended.undone(CutCalls([snapshot(final_below=5)])) == Undone(), "it is final there"
    ended.ended(numbered(3, 1), 2)
    cut = CutCalls([replace(NOTHING, calls=((3, 0, 0),), final_below=5, kept=((3, 1),))])
    ended.saved(cut, (), 2)
    assert ended.undone(cut).closures == (8,)
    assert undone == [identity]
    assert not identity.is_done


def test_a_run_that_an_error_made_vain_is_named_and_not_the_one_that_is_open() -> None:
    undone: list[Identity] = []
    identities, identity = Identities(), Identity("shard", undone)
    first = Closure(3, identity=identity)
    identities.begin(first, identity)
    first.worker, first.error = "w", ValueError("of another closure")
    identities.end(first, identity)
    ended = EndedClosures(identities)
    ended.ended(3, 1)  # the worker has not heard of the error
    identities.begin(Closure(8, identity=identity), identity)
    assert ended.undone(CutCalls([snapshot()])).closures == (3,)
    assert undone == [], "it is under way, and runs again"


def test_a_shard_whose_push_waits_for_its_step_in_the_first_cut_is_undone() -> None:
    undone: list[Identity] = []
    identities, identity = shard(3, undone)
    ended = EndedClosures(identities)
    cut = CutCalls([replace(NOTHING, final_below=9, pending=(3,))])
    identity.is_open = True
    ended.saved(cut, (), 2)
    assert ended.undone(cut) == Undone(), "it runs, and will run again"
    identity.is_open = False
    ended.saved(cut, (), 2)
    assert ended.undone(cut).closures == (8,)
    assert undone == [identity]


def test_one_that_ended_before_the_first_cut_and_waits_for_its_step_there_is_undone() -> None:
    ended = EndedClosures()
    cut = CutCalls([replace(NOTHING, final_below=9, pending=(5, 7))])
    ended.saved(cut, (7,), 2)
    assert ended.undone(cut) == Undone((5,), 1)
    ended.saved(cut, (7,), 2)
    for _ in range(2):
        ended.saved(CutCalls([snapshot((5, 0))]), (7,), 2)
    assert ended.undone(cut) == Undone()


def end_with_call(ended: EndedClosures, closure: int) -> None:
    ended.ended(closure, 1)
    ended.kept.keep(closure, f"call {closure}", [])


class TestKeptCalls:
    def test_calls_are_taken_once_in_order(self) -> None:
        kept = KeptCalls()
        for closure in (1, 2, 4):
            kept.keep(closure, f"call {closure}", [])
        assert kept.take((1, 3, 4)) == ["call 1", "call 4"]
        assert kept.take((1, 2)) == ["call 2"]
        assert not kept.nbytes

    def test_the_oldest_are_dropped_where_they_hold_too_much(self) -> None:
        kept = KeptCalls(most_bytes=4000)
        for closure in range(4):
            kept.keep(closure, "call", [(f"arguments of {closure}", 1000)])
        assert kept.dropped(range(4)) == [0, 1]
        kept.forget(range(4))
        assert kept.dropped(range(4)) == []
        assert not kept.nbytes

    def test_a_part_that_calls_share_counts_once(self) -> None:
        kept = KeptCalls(most_bytes=5000)
        for closure in range(4):
            kept.keep(closure, "call", [("shared", 2000)])
        assert kept.dropped(range(4)) == []
        kept.forget((0, 1, 2))
        assert kept.nbytes > 2000
        kept.forget((3,))
        assert not kept.nbytes

    def test_calls_of_closures_in_a_checkpoint_are_not_kept_and_those_undone_are(self) -> None:
        ended = EndedClosures()
        for closure in (3, 4):
            ended.ended(closure, 1)
            ended.kept.keep(closure, f"call {closure}", [])
        ended.saved(CutCalls([snapshot((3, 0))]), (), 2)
        assert ended.kept.nbytes > 0
        assert ended.undone(CutCalls([snapshot((3, 0))])) == Undone((4,), 1)
        assert ended.kept.take((4,)) == ["call 4"]

    @pytest.mark.parametrize(("later", "missing"), [(0, [5]), (rollback.NOTED_EARLY, [5, 6])])
    def test_one_that_ended_before_calls_were_kept_is_missing_if_it_may_be_repeated(
        self, later: int, missing: list[int]
    ) -> None:
        ended = EndedClosures()
        ended.ended_early(5)
        for closure in range(7, 7 + later):  # so many that 6 may have been forgotten
            ended.ended_early(closure)
        pending = (5, 6)
        cut = CutCalls([replace(NOTHING, final_below=9, pending=pending)])
        ended.saved(cut, (), 2)
        assert ended.undone(cut).closures == pending
        assert ended.kept.dropped(pending) == missing

    def test_undone_calls_are_dropped_with_the_second_checkpoint(self) -> None:
        ended = EndedClosures()
        end_with_call(ended, 3)
        ended.undone(CutCalls([snapshot()]))
        ended.saved(CutCalls([snapshot()]), (), 2)
        assert ended.kept.nbytes > 0
        ended.saved(CutCalls([snapshot()]), (), 2)
        assert ended.kept.nbytes == 0
        assert ended.kept.dropped((3,)) == [3]

    def test_undone_calls_are_dropped_with_the_next_rollback(self) -> None:
        ended = EndedClosures()
        for closure in (3, 4):
            end_with_call(ended, closure)
            assert ended.undone(CutCalls([snapshot()])).closures == (closure,)
        assert ended.kept.dropped((3, 4)) == [3]
        assert ended.kept.take((4,)) == ["call 4"]
