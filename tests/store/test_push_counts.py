"""Counts of pushes: a search through all that may happen to a few pushes on two and three ps tasks.

The search runs the rule itself, ``PushCount``. Around it stands what the rest of a ps does for it:
a ledger that lets one run of each closure through, counts that are told until they are
acknowledged, fail-overs in which all messages are lost, and rollbacks of all ps tasks to a cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from psync.specs import STEP_BITS, count_of, marked_after
from psync.store.push_counts import EARLY, FIRST, FURTHER, HOME, CountState, PushCount, total_of


class Run(NamedTuple):
    """A closure that runs and pushes once."""

    closure: int
    number: int  # of the run
    parts: frozenset[int]  # that have not arrived
    known: tuple[int, ...]  # what its worker knew when it began: by ps, pushes elsewhere


class State(NamedTuple):
    counts: tuple[CountState, ...]  # of each ps
    seen: tuple[frozenset[int], ...]  # of each ps: closures of which it has applied a part
    acked: tuple[Any, ...]  # of each ps: what the others have acknowledged, (to, row)
    telling: frozenset[Any]  # on their way: (timeline, from, to, row)
    running: frozenset[Run]
    known: tuple[tuple[int, ...], ...]  # of each worker
    waiting: tuple[int, ...]  # closures that are not running
    returned: frozenset[int]  # closures whose push has returned
    cut: Any = None  # what all ps tasks held at the last cut
    timeline: int = 0
    failovers: int = 0
    deaths: int = 0
    runs: int = 0


class Search:
    """All that may happen to the pushes of some closures, each to a given set of ps tasks."""

    def __init__(
        self, pushes: list[set[int]], num_ps: int = 2, workers: int = 2, *, failovers: int = 0,
        deaths: int = 0, rollbacks: int = 0, broken: str = "",
    ) -> None:  # fmt: skip
        self.pushes = [frozenset(each) for each in pushes]
        self.num_ps, self.workers, self.rollbacks = num_ps, workers, rollbacks
        self.broken = broken
        none: tuple[Any, ...] = ((),) * num_ps
        empty: frozenset[Any] = frozenset()
        self.start = State(
            (PushCount().state,) * num_ps, (empty,) * num_ps, none, empty, empty,
            ((0,) * num_ps,) * workers, tuple(range(len(pushes))), empty,
            failovers=failovers, deaths=deaths,
        )  # fmt: skip

    def after(self, state: State) -> Iterator[State]:
        for worker in range(self.workers):
            if state.waiting and all(run.number % self.workers != worker for run in state.running):
                yield self.begun(state, worker)
        for run in state.running:
            for ps in run.parts:
                yield self.arrived(state, run, ps)
            if state.deaths:
                yield self.died(state, run)
        yield from self.told(state)
        for ps in range(self.num_ps) if state.failovers else ():
            yield self.failed_over(state, ps)
        if self.rollbacks > state.timeline:
            if self.is_cut(state):
                yield state._replace(cut=(state.counts, state.seen, state.returned))
            if state.cut is not None:
                yield self.rolled_back(state)

    def begun(self, state: State, worker: int) -> State:
        closure, *waiting = state.waiting
        number = state.runs * self.workers + worker
        run = Run(closure, number, self.pushes[closure], state.known[worker])
        return state._replace(
            running=state.running | {run}, waiting=tuple(waiting), runs=state.runs + 1
        )

    def arrived(self, state: State, run: Run, ps: int) -> State:
        """One part arrives; when all have, the push returns."""
        count, seen = PushCount.of(state.counts[ps]), state.seen[ps]
        parts = self.pushes[run.closure]
        home = min(parts)
        if self.broken == "home of the run" and run.number >= self.workers:
            home = max(parts)  # its rows lie on the last ps alone
        fresh = run.closure not in seen
        if fresh or (self.broken == "duplicates count" and home == ps):
            others = tuple(sorted(parts - {ps}))
            before = count.known
            step = count.push(run.known[ps], HOME if home == ps else FIRST, others)
            assert step >= before, "a step is given twice"
            assert count.known == step + 1
        worker = run.number % self.workers
        known = list(state.known[worker])
        known[ps] = max(known[ps], count.elsewhere)
        if fresh and home == ps:
            for other in set(range(self.num_ps)) - parts:
                known[other] = max(known[other], run.known[other] + 1)
        left = run._replace(parts=run.parts - {ps})
        return state._replace(
            counts=replaced(state.counts, ps, count.state),
            seen=replaced(state.seen, ps, seen | {run.closure}),
            known=replaced(state.known, worker, tuple(known)),
            running=state.running - {run} | ({left} if left.parts else set()),
            returned=state.returned if left.parts else state.returned | {run.closure},
        )

    def died(self, state: State, run: Run) -> State:
        """Its worker dies: what has not arrived is lost, and the closure runs again."""
        worker = run.number % self.workers
        return state._replace(
            running=state.running - {run}, waiting=(run.closure, *state.waiting),
            known=replaced(state.known, worker, (0,) * self.num_ps), deaths=state.deaths - 1,
        )  # fmt: skip

    def told(self, state: State) -> Iterator[State]:
        for ps in range(self.num_ps):
            for to in [0] if ps else range(1, self.num_ps):
                count = PushCount.of(state.counts[ps])
                about = [to] if to else [other for other in range(self.num_ps) if other != ps]
                row = tuple((each, number) for each in about if (number := count.count_for(each)))
                under_way = any(each[1:3] == (ps, to) for each in state.telling)
                if row != dict(state.acked[ps]).get(to, ()) and not under_way:
                    message = state.timeline, ps, to, row
                    yield state._replace(telling=state.telling | {message})
        for message in state.telling:
            timeline, ps, to, row = message
            after = state._replace(telling=state.telling - {message})
            if timeline == state.timeline or self.broken == "told over a rollback":
                heard = PushCount.of(state.counts[to])
                heard.hear(ps, 0, row, to)
                acked = dict(state.acked[ps]) | {to: row}
                after = after._replace(
                    counts=replaced(state.counts, to, heard.state),
                    acked=replaced(state.acked, ps, tuple(sorted(acked.items()))),
                )
            yield after

    def failed_over(self, state: State, ps: int) -> State:
        """Its backup serves: it has judged the same entries, and its connections are new."""
        counts = state.counts
        if self.broken == "told is no entry":
            base, seen, _, steps, own, _ = counts[ps]
            counts = replaced(counts, ps, (base, seen, 0, steps, own, ()))
        return state._replace(
            counts=counts, telling=frozenset(each for each in state.telling if ps not in each[1:3]),
            acked=replaced(state.acked, ps, ()), failovers=state.failovers - 1,
        )  # fmt: skip

    def is_cut(self, state: State) -> bool:
        """Whether no push is applied in part."""
        return all(
            len({closure in state.seen[ps] for ps in parts}) == 1
            for closure, parts in enumerate(self.pushes)
        )

    def rolled_back(self, state: State) -> State:
        counts, seen, returned = state.cut
        if self.broken == "kept over a rollback":
            counts = tuple(
                (base, seen, max(elsewhere, kept[2]), steps, own, kept[5])
                for (base, seen, elsewhere, steps, own, _), kept in zip(
                    counts, state.counts, strict=True
                )
            )
        undone = tuple(each for each in range(len(self.pushes)) if each not in returned)
        return state._replace(
            counts=counts, seen=seen, acked=((),) * self.num_ps, running=frozenset(),
            waiting=undone, returned=returned, timeline=state.timeline + 1,
            known=((0,) * self.num_ps,) * self.workers,
        )  # fmt: skip

    def check(self, state: State, *, is_end: bool) -> None:
        counts = [PushCount.of(each) for each in state.counts]
        counted = [
            parts for closure, parts in enumerate(self.pushes) if closure in state.seen[min(parts)]
        ]
        total = total_of(count.counts for count in counts)
        assert total == len(counted), "each push counts once"
        assert total >= len(state.returned), "below what has returned"
        for ps, count in enumerate(counts):
            elsewhere = sum(ps not in parts for parts in counted)
            assert count.elsewhere <= elsewhere, "more is known than there is"
            assert all(known[ps] <= elsewhere for known in state.known), "a client knows too much"
            if is_end:
                assert count.known == total, "not all is known in the end"

    def run(self) -> int:
        found, queue = {self.start}, deque([self.start])
        while queue:
            state = queue.popleft()
            following = list(self.after(state))
            self.check(state, is_end=not following)
            for each in following:
                if each not in found:
                    found.add(each)
                    queue.append(each)
        return len(found)


def replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


EPOCH = 1 << STEP_BITS
APART, MIXED = [{0}, {1}, {0}], [{0, 1}, {1}, {0, 1}]


@pytest.mark.parametrize(
    "search",
    [
        Search(APART, failovers=1, deaths=1),
        Search(MIXED, failovers=1, deaths=1),
        Search(MIXED[:2], failovers=1, deaths=1, rollbacks=1),
        Search([{0, 2}, {1}, {1, 2}], 3),
    ],
    ids=["apart", "mixed", "rolled back", "three ps"],
)
def test_counts_hold_whatever_happens(search: Search) -> None:
    assert search.run() > 1000


@pytest.mark.parametrize(
    ("broken", "options", "fault"),
    [
        ("home of the run", {"deaths": 1}, "each push counts once"),
        ("duplicates count", {"deaths": 1}, "each push counts once"),
        ("told is no entry", {"failovers": 1}, "not all is known in the end"),
        ("kept over a rollback", {"rollbacks": 1}, "more is known than there is"),
        ("told over a rollback", {"rollbacks": 1}, "more is known than there is"),
    ],
)
def test_the_search_finds_what_is_broken(broken: str, options: dict[str, int], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        Search([{0, 1}, {0}, {1}], broken=broken, **options).run()


def test_a_single_client_is_counted_exactly_on_every_ps() -> None:
    """Whatever is told meanwhile."""

    class Exactly(Search):
        def arrived(self, state: State, run: Run, ps: int) -> State:
            after = super().arrived(state, run, ps)
            assert PushCount.of(after.counts[ps]).known == run.closure + 1
            return after

    assert Exactly([{0, 1}, {1}, {0, 1}, {0}, {1}, {0, 1}], workers=1).run() > 100


def test_pushes_with_a_part_on_each_ps_need_not_be_told() -> None:
    """Each ps gives them the steps 0, 1, 2, …, in whatever order they come."""
    search = Search([{0, 1}] * 3, failovers=1, deaths=1)
    for state in [search.start, *search.after(search.start)]:
        assert not list(search.told(state))
    assert search.run() > 1000


def test_a_number_that_is_set_begins_again() -> None:
    first, second = PushCount(), PushCount()
    assert [first.push() for _ in range(3)] == [0, 1, 2]
    second.hear(0, first.base, [(1, first.count_for(1))], 1)
    assert second.push() == 3
    base = marked_after(first.marked, 100)
    first.set(base)
    assert (first.push(), first.marked) == (100, base + 1)
    # What was told, and carried, before it was set means nothing any more.
    first.hear(1, 0, [(0, 50)], 0)
    assert first.push(carried=50) == 101
    # What is told after it says that it was set. What is carried does not say to which number.
    assert second.push(carried=base + 7) == 4
    second.hear(0, base, [(1, 2)], 1)
    assert (second.push(), second.answer()) == (102, (base + 3, base - 100 + 2))
    assert count_of(total_of([first.counts, second.counts])) == 103
    # Two programs have set it at one time: the higher one holds.
    first.set(base + 20)
    first.set(base)
    assert first.push() == 122
    assert total_of([]) == 0


def test_further_messages_of_a_push_have_its_step() -> None:
    count = PushCount()
    assert [count.push(place=place) for place in (HOME, FURTHER, FIRST, FURTHER)] == [0, 0, 1, 1]
    assert count.counts == (0, 1, 0)
    assert [count.push(place=place) for place in (EARLY, HOME, FURTHER)] == [2, 2, 2]


def test_a_synchronous_step_is_what_its_group_counts() -> None:
    count = PushCount()
    assert [count.reach(step) for step in (0, 1, 4, 2)] == [0, 1, 4, 5]
    assert (count.known, total_of([count.counts, PushCount().counts])) == (6, 6)
    count.set(1 << STEP_BITS | 9)
    assert (count.reach(3), count.reach(4), count_of(total_of([count.counts]))) == (9, 10, 11)


def test_a_state_is_all_of_a_count() -> None:
    count = PushCount(5)
    count.push(others=(1,))
    count.push(carried=3, place=FIRST)
    count.hear(1, 5, [(0, 2), (2, 4)], 0)
    count.reach(9)
    assert PushCount.of(count.state) == count
    assert count.state == (5, 2, 3, 10, (((1,), 1),), ((1, ((0, 2), (2, 4))),))
    assert [count.count_for(ps) for ps in (1, 2)] == [0, 5]


def test_what_was_told_before_a_count_was_adopted_is_kept() -> None:
    held, told = PushCount(), PushCount()
    held.push(others=(1,))
    told.hear(1, 0, [(0, 5), (2, 7)], 0)
    held.absorb(told)
    assert (held.known, held.count_for(2), held.push()) == (6, 8, 6)
    held.set(EPOCH)
    held.absorb(told)
    assert held.known == 0
