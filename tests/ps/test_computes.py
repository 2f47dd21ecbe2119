"""Work on arrays is done in the order of entries for each shard, and shards do not wait for others.

Without an event loop: a test does the pieces of large work in an order of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asked import Reply
from psync.errors import BusyError, PsyncError
from psync.numerics.memory import BlockPool
from psync.ps.computes import Compute, Computes, Place
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.specs import ShardSpec
from psync.store.store import Key, ShardStore
from psync.wire.messages import Done

PS = "/job:ps/task:0"
KEYS: list[Key] = [(number, 0) for number in range(4)]
T = TypeVar("T")


class Pause:
    """Where large work lets the loop run."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class PiecesByHand(LongWork):
    """Work of which a test does each piece; ``stopped``: the task is to end."""

    def __init__(self) -> None:
        super().__init__(PS, self._stop)
        self.stopped = False
        self.under_way: list[Coroutine[Any, Any, Any]] = []

    def _stop(self) -> None:
        self.stopped = True

    def to_the_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        self.under_way.append(work)
        return work

    def piece(self, which: int = 0) -> None:
        work = self.under_way[which]
        try:
            work.send(None)
        except StopIteration:
            self.under_way.remove(work)


class Bench:
    """Computes of four shards: what each shard has seen, and who was answered, in order."""

    def __init__(self) -> None:
        store = ShardStore(PS, BlockPool())
        for key in KEYS:
            store.create(ShardSpec(f"v{key[0]}", *key, 0, (1,), "float32", 0), fill=np.float32(0))
        self.work = PiecesByHand()
        self.computes = Computes(store, self.work)
        self.seen: dict[Place, list[int]] = {key: [] for key in KEYS}
        self.answered: list[int] = []
        self.failed: dict[int, Exception] = {}
        self.open: dict[int, set[Place]] = {}  # computes that are not done
        self._last = 0

    def entry(self, *places: int | str, pieces: int = 0, error: Exception | None = None) -> int:
        """An entry whose compute touches these places: little, or in so many pieces."""
        self._last += 1
        number, keys = self._last, [KEYS[at] if isinstance(at, int) else at for at in places]

        def apply() -> None:
            for key in keys:
                self.seen.setdefault(key, []).append(number)

        async def in_pieces() -> None:
            for _ in range(pieces):
                await Pause()
            if error is not None:
                raise error
            apply()

        nbytes = INLINE_BYTES + 1 if pieces else 4
        return self._do(number, Compute(keys, lambda: Reply(Done()), nbytes, apply, in_pieces))

    def repetition(self, *shards: int) -> int:
        """An entry that changes nothing, and is answered when all before it have."""
        self._last += 1
        keys = [KEYS[shard] for shard in shards]
        return self._do(self._last, Compute(keys, lambda: Reply(Done())))

    def _do(self, number: int, compute: Compute) -> int:
        self.open[number] = set(compute.keys)

        def done(failed: Exception | None) -> None:
            del self.open[number]
            if failed is None:
                self.answered.append(number)
            else:
                self.failed[number] = failed

        if self.computes.done_now(compute):
            done(None)
        else:
            self.computes.add(compute, done)
        return number

    def free(self) -> list[int]:
        """Entries that are not done, before which nothing of their shards is left."""
        return [
            number
            for number, keys in self.open.items()
            if all(keys.isdisjoint(self.open[other]) for other in self.open if other < number)
        ]

    def pieces(self, count: int = 1) -> None:
        """Do so many pieces of all that is under way."""
        for _ in range(count):
            for work in list(self.work.under_way):
                self.work.piece(self.work.under_way.index(work))


@pytest.mark.usefixtures("turns")
def test_it_is_settled_when_all_are_done() -> None:
    bench = Bench()
    bench.entry(0, pieces=1)
    assert bench.computes.waiting == 1
    with pytest.raises(BusyError, match="updates of 1 shards wait"):
        bench.computes.check_idle()
    settled = bench.computes.settled()
    turn = settled.send(None)
    bench.pieces()
    assert not turn.done()
    bench.pieces()
    assert turn.done()
    with pytest.raises(StopIteration):
        settled.send(None)
    bench.computes.check_idle()


def test_an_accumulator_is_a_place_of_its_own_and_no_shard() -> None:
    bench = Bench()
    large = bench.entry("a", pieces=2)
    small, other = bench.entry("a"), bench.entry("b", 0)
    assert bench.answered == [other]
    bench.computes.check_idle()  # of shards: a cut does not wait for accumulators
    assert not bench.computes.is_idle
    bench.pieces(4)
    assert bench.answered == [other, large, small]
    assert bench.computes.is_idle


def test_one_that_fails_ends_the_task_and_its_sender_hears_of_it() -> None:
    bench = Bench()
    error = MemoryError("no memory")
    bench.entry(0, pieces=1, error=error)
    bench.pieces(2)
    assert bench.failed == {1: error}
    assert bench.work.stopped
    with pytest.raises(PsyncError, match="an update failed partway"):
        bench.work.next_turn().send(None)


def test_a_small_one_that_fails_ends_the_task_too() -> None:
    def fails() -> None:
        raise MemoryError("no memory")

    bench = Bench()
    with pytest.raises(MemoryError):
        bench.computes.done_now(Compute(KEYS[:1], lambda: Reply(Done()), 4, fails))
    assert bench.work.stopped


SHARDS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
DONE = st.one_of(
    st.tuples(st.just("entry"), SHARDS, st.integers(0, 3)),
    st.tuples(st.just("repetition"), SHARDS, st.just(0)),
    st.tuples(st.just("piece"), st.just([]), st.integers(0, 99)),
)


@given(st.lists(DONE, max_size=40))
def test_each_shard_sees_entries_in_their_order_and_no_one_waits_for_another_shard(
    steps: list[tuple[str, list[int], int]],
) -> None:
    bench, touching = Bench(), {key: [] for key in KEYS}  # type: dict[Key, list[int]]
    for step, shards, number in steps:
        if step == "piece":
            if bench.work.under_way:
                bench.work.piece(number % len(bench.work.under_way))
        else:
            shards = list(dict.fromkeys(shards))
            entry = bench.entry(*shards, pieces=number) if step == "entry" else 0
            entry = entry or bench.repetition(*shards)
            for shard in shards if step == "entry" else ():
                touching[KEYS[shard]].append(entry)
        # All that may run do, and nothing else.
        assert len(bench.work.under_way) == len(bench.free())
    while bench.work.under_way:
        bench.pieces()
    assert not bench.open
    assert bench.seen == touching
    bench.computes.check_idle()
