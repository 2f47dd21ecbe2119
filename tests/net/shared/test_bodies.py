"""Bodies that are lent: what is where, who holds it for how long, and what a wrong peer can do."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import threading
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest

from psync.errors import RemoteProtocolError
from psync.net.shared import bodies, regions
from psync.net.shared.bodies import MAX_REGIONS, BorrowedBody, Loan, Sharing, Waker
from psync.net.shared.regions import SLAB_BYTES, SharedMemory
from psync.numerics import memory as blocks
from psync.numerics.memory import Block, BlockPool
from psync.testing import memory_sharing
from psync.testing.memory_sharing import channels, make_heap
from psync.wire import frames
from psync.wire.frames import Buffer, Extent, Kind
from turns import Turns

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def every_region_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_sharing, "REFUSED", 0.0)
    monkeypatch.setattr(bodies, "PIECE_BYTES", 0)


class Side:
    """One of two tasks, and what it would say to the other one."""

    def __init__(self, memory: SharedMemory, channel: Any) -> None:
        self.memory = memory
        self.channel = channel
        self.woken = 0
        self.sharing = Sharing(memory, channel, self.wake)

    def wake(self) -> None:
        self.woken += 1

    def lend(self, *buffers: Buffer) -> list[Extent]:
        """Lend a body that can be lent, all of it copied."""
        loan = self.sharing.lend(buffers, sum(map(len, buffers)))
        assert loan is not None
        while not loan.copy_part():
            pass
        self.sharing.sent(loan)
        return loan.extents

    def tell(self, other: Side) -> None:
        """Let the other side know what there is to say."""
        for kind, number in self.sharing.due():
            (other.sharing.returned if kind == Kind.RETURN else other.sharing.forget)(number)

    @property
    def num_lent(self) -> int:
        return len(self.sharing._lent)


def sides(first: SharedMemory | None = None, second: SharedMemory | None = None) -> list[Side]:
    ends = channels(random.Random(0), Counter())
    memories = first or SharedMemory(), second or SharedMemory()
    return [Side(memory, end) for memory, end in zip(memories, ends, strict=True)]


def body(borrowed: BorrowedBody) -> bytes:
    return b"".join(borrowed.views)


def root(side: Side, nbytes: int, value: int = 7) -> np.ndarray:
    made = side.memory.take(nbytes)
    made[:] = value
    return made


# --- where a body lies -----------------------------------------------------------------------


def test_a_body_in_shared_memory_is_lent_where_it_lies() -> None:
    ours, theirs = sides()
    memory = root(ours, MIB)
    extents = ours.lend(memory.data[10:1000])
    assert extents == [Extent(1, 10, 990)]
    borrowed = theirs.sharing.borrow(extents)
    assert body(borrowed) == bytes([7]) * 990
    memory[10] = 9  # it is the same memory
    assert borrowed.views[0][0] == 9
    assert borrowed.views[0].readonly


def test_what_lies_elsewhere_is_copied_once_and_in_one_piece() -> None:
    ours, theirs = sides()
    private, memory = bytearray(b"p" * 100_000), root(ours, MIB)
    extents = ours.lend(private, memory.data, b"tail")
    assert [extent.nbytes for extent in extents] == [100_000, MIB, 4]
    assert extents[2].offset == extents[0].offset + 100_000  # both copies are of one root
    private[:] = b"x" * 100_000
    assert body(theirs.sharing.borrow(extents)) == b"p" * 100_000 + bytes([7]) * MIB + b"tail"


def test_neighbours_are_one_extent() -> None:
    ours, _ = sides()
    memory = root(ours, MIB)
    pieces = [memory.data[:100], memory.data[100:300], memory.data[301:400]]
    assert [extent.nbytes for extent in ours.lend(*pieces)] == [300, 99]
    assert len(ours.lend(b"a" * 70_000, b"b", b"c" * 3)) == 1


def test_small_pieces_are_lent_once_they_are_copied_and_named_where_they_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "PIECE_BYTES", 32 * KIB)
    ours, theirs = sides()
    gradients = [bytes([n]) * 16 * KIB for n in range(50)]
    extents = ours.lend(*gradients)
    assert len(extents) == 1
    assert body(theirs.sharing.borrow(extents)) == b"".join(gradients)
    memory = root(ours, MIB)
    small = [memory.data[n * 40 * KIB :][: 16 * KIB] for n in range(20)]
    assert ours.sharing.lend(small, 20 * 16 * KIB) is None
    assert ours.sharing.lend([*small, *gradients], 70 * 16 * KIB) is not None
    large = [memory.data[:40_000], memory.data[50_000:90_000]]
    assert len(ours.lend(*large)) == 2


def test_memory_of_another_task_of_this_process_is_copied() -> None:
    """Its regions have the same numbers."""
    ours, theirs = sides()
    foreign = root(theirs, MIB, 9)
    own = root(ours, MIB, 7)
    extents = ours.lend(foreign.data, own.data)
    assert body(theirs.sharing.borrow(extents)) == bytes([9]) * MIB + bytes([7]) * MIB
    # Also what was borrowed: its owner alone says when it changes.
    kept = theirs.sharing.borrow(ours.lend(own.data)).keep()
    extents = theirs.lend(*kept)
    own[:] = 8
    assert body(ours.sharing.borrow(extents)) == bytes([7]) * MIB


# --- when it cannot be lent ------------------------------------------------------------------


def test_what_cannot_be_lent_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sides()
    ours.lend(root(ours, MIB).data)
    monkeypatch.setattr(memory_sharing, "REFUSED", 1.0)
    assert ours.lend(b"x" * MIB)  # the region is known there
    assert ours.sharing.lend([root(ours, 2 * SLAB_BYTES).data], 2 * SLAB_BYTES) is None
    assert ours.sharing.lend([b"x" * SLAB_BYTES], SLAB_BYTES) is None  # nor can its copy
    theirs.memory.make = None
    assert theirs.sharing.lend([b"x" * MIB], MIB) is None  # there is no memory
    assert theirs.sharing._copied_bytes == 0


def test_memory_that_could_not_be_shared_once_is_not_in_the_way_later() -> None:
    ours, theirs = sides()
    make, ours.memory.make = ours.memory.make, None
    for _ in range(3):
        assert ours.sharing.lend([b"x" * MIB], MIB) is None
    ours.memory.make = make
    assert body(theirs.sharing.borrow(ours.lend(b"x" * MIB))) == b"x" * MIB


def test_only_so_much_is_copied_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sides()
    monkeypatch.setattr(bodies, "LENT_BYTES", 2 * MIB)
    extents = [ours.lend(b"x" * MIB) for _ in range(3)]
    assert ours.sharing.lend([b"x" * MIB], MIB) is None
    borrowed = [theirs.sharing.borrow(each) for each in extents]
    borrowed[1].give_back()
    theirs.tell(ours)
    loan = ours.sharing.lend([b"x" * MIB], MIB)
    assert loan is not None
    ours.sharing.withdrawn(loan)
    assert ours.sharing.lend([b"x" * MIB], MIB) is not None


def test_a_body_in_too_many_pieces_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = sides()
    monkeypatch.setattr(bodies, "MAX_EXTENTS", 3)
    memory = root(ours, MIB)
    pieces = [memory.data[at : at + 10] for at in range(0, 80, 20)]
    assert ours.sharing.lend(pieces[:3], 30) is not None
    assert ours.sharing.lend(pieces, 40) is None
    assert ours.sharing.lend([*pieces, b"x" * 100], 140) is None
    assert ours.sharing._copied_bytes == 0


def test_only_so_many_regions_are_known_to_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_GIVEN", 3)
    monkeypatch.setattr(bodies, "SPARE_GIVEN", 0)
    ours, theirs = sides()
    roots = [root(ours, SLAB_BYTES, number) for number in range(4)]
    extents = [ours.lend(each.data) for each in roots[:3]]
    assert ours.sharing.lend([roots[3].data], SLAB_BYTES) is None
    # One goes, another one comes; the peer has read of neither when it comes to the third.
    theirs.sharing.borrow(extents[0]).give_back()
    theirs.sharing.borrow(extents[1]).give_back()
    theirs.tell(ours)
    del roots[0]
    assert ours.sharing.due() == [(Kind.FORGET, 1)]
    last = ours.lend(roots[-1].data)
    assert theirs.sharing.borrow(extents[2]).views[0][0] == 2
    theirs.sharing.forget(1)
    assert theirs.sharing.borrow(last).views[0][0] == 3


def test_memory_that_can_not_be_given_any_more_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_GIVEN", 2)
    monkeypatch.setattr(bodies, "SPARE_GIVEN", 1)
    ours, _ = sides()
    first, second = (root(ours, SLAB_BYTES, number) for number in range(2))
    for each, copied in ((first, 0), (second, SLAB_BYTES)):
        loan = ours.sharing.lend([each.data], SLAB_BYTES)
        assert loan is not None
        assert loan.copied_bytes == copied


# --- until it is given back ------------------------------------------------------------------


def test_what_is_kept_is_given_back_when_the_last_view_of_it_goes() -> None:
    ours, theirs = sides()
    memory = root(ours, MIB)
    borrowed = theirs.sharing.borrow(ours.lend(memory.data[:10], memory.data[20:30]))
    assert not borrowed.is_kept
    kept = borrowed.keep()
    assert borrowed.is_kept
    assert [len(view) for view in kept] == [10, 10]
    array = np.frombuffer(kept[1], np.uint8)[3:]
    again = array.view(np.int8).reshape(1, -1)
    del array
    kept.clear()
    assert theirs.sharing.due() == []
    assert theirs.woken == 0
    del again
    assert theirs.woken == 1
    assert theirs.sharing.due() == [(Kind.RETURN, 1)]


def test_the_last_view_may_go_in_any_thread() -> None:
    ours, theirs = sides()
    kept = theirs.sharing.borrow(ours.lend(b"x" * MIB)).keep()
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    theirs.tell(ours)
    assert ours.num_lent == 0


# --- regions that are gone -------------------------------------------------------------------


def test_a_region_that_is_gone_is_forgotten_once() -> None:
    ours, theirs = sides()
    memory = root(ours, 2 * SLAB_BYTES)
    borrowed = theirs.sharing.borrow(ours.lend(memory.data))
    del memory
    assert not ours.sharing.has_to_say  # it is lent
    borrowed.give_back()
    del borrowed
    theirs.tell(ours)
    assert ours.woken == 1
    assert ours.sharing.due() == [(Kind.FORGET, 1)]
    assert ours.sharing.due() == []
    assert list(theirs.sharing._regions) == [1]
    theirs.sharing.forget(1)
    assert not theirs.sharing._regions


# --- a peer that is wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extents", "told"),
    [
        ([Extent(3, 0, 1)], "region 3 of shared memory was never given"),
        ([Extent(2**64 - 1, 0, 1)], "was never given"),
        ([Extent(0, 0, 0)], "region 0 of shared memory was never given"),
        ([Extent(1, 0, SLAB_BYTES + 1)], "16777217 bytes at 0 of a region .* that has 16777216"),
        ([Extent(1, SLAB_BYTES, 1)], "1 bytes at 16777216"),
        ([Extent(1, 2**64 - 1, 2)], "2 bytes at 18446744073709551615"),
        ([Extent(1, 2**64 - 1, 0)], "0 bytes at 18446744073709551615"),
        ([Extent(1, 1, 2**64 - 1)], "18446744073709551615 bytes at 1"),
        ([Extent(1, 0, 1), Extent(1, SLAB_BYTES - 1, 2)], "2 bytes at 16777215"),
    ],
)
def test_extents_that_lie_nowhere_are_refused(extents: list[Extent], told: str) -> None:
    ours, theirs = sides()
    theirs.sharing.borrow(ours.lend(b"x" * MIB))
    with pytest.raises(RemoteProtocolError, match=told):
        theirs.sharing.borrow(extents)


def test_the_edges_of_a_region_can_be_lent() -> None:
    ours, theirs = sides()
    theirs.sharing.borrow(ours.lend(b"x" * MIB))
    borrowed = theirs.sharing.borrow(
        [Extent(1, 0, SLAB_BYTES), Extent(1, SLAB_BYTES - 1, 1), Extent(1, SLAB_BYTES, 0)]
    )
    assert [len(view) for view in borrowed.views] == [SLAB_BYTES, 1, 0]
    assert [len(view) for view in borrowed.keep()] == [SLAB_BYTES, 1, 0]
    assert theirs.sharing.due() == [(Kind.RETURN, 2)]


def test_only_so_many_regions_are_taken() -> None:
    ours, theirs = sides()
    made = [make_heap(number, 10) for number in range(MAX_REGIONS + 1)]
    for each in made:
        ours.channel.give(each.region)
    theirs.sharing.borrow([Extent(MAX_REGIONS - 1, 0, 1)])
    with pytest.raises(RemoteProtocolError, match="more regions of shared memory than may be"):
        theirs.sharing.borrow([Extent(MAX_REGIONS, 0, 1)])


# --- the end ---------------------------------------------------------------------------------


def test_a_killed_reader_reads_nothing(turns: Turns) -> None:
    ours, theirs = sides()
    block = Block(root(ours, MIB), np.dtype(np.uint8))
    kept = theirs.sharing.borrow(ours.lend(block.export())).keep()
    ours.sharing.close()
    theirs.channel.end()  # as its kernel does
    turns.settle()
    assert not block.held()
    assert ours.sharing.is_over
    kept.clear()


def test_a_task_that_ends_holds_nothing_any_more(turns: Turns) -> None:
    ours, theirs = sides()
    kept = theirs.sharing.borrow(ours.lend(b"x" * MIB)).keep()
    ours.sharing.drop()
    ours.sharing.close()
    assert ours.sharing.is_over
    assert kept[0][0] == ord("x")
    kept.clear()
    theirs.sharing.due()
    theirs.sharing.close()
    turns.settle()
    assert theirs.sharing.is_over


def test_what_is_kept_when_its_reader_ends_stays_until_nobody_sees_it(turns: Turns) -> None:
    ours, theirs = sides()
    block = Block(root(ours, MIB), np.dtype(np.uint8))
    kept = theirs.sharing.borrow(ours.lend(block.export())).keep()
    theirs.sharing.close()
    theirs.sharing.drop()  # its endpoint is closed, and perhaps there is no loop any more
    ours.sharing.close()
    turns.settle()
    assert block.held()
    assert not theirs.sharing.is_over
    kept.clear()
    turns.settle()
    assert theirs.sharing.is_over
    assert not block.held()
    theirs.sharing.due()  # a turn that was asked for before
    theirs.sharing.drop()


def test_so_much_is_kept_and_a_receiver_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "KEPT_BYTES", 3 * MIB)
    ours, theirs = sides()

    def borrowed(mib: int) -> BorrowedBody:
        return theirs.sharing.borrow(ours.lend(root(ours, mib * MIB).data))

    kept = [borrowed(1).keep(), borrowed(2).keep()]
    assert theirs.sharing.bytes_kept_now == ours.sharing.bytes_lent_now == 3 * MIB
    assert not borrowed(1).may_keep
    assert borrowed(3).may_keep  # one version of it, and the next one
    del kept[1]
    assert theirs.sharing.bytes_kept_now == MIB
    theirs.tell(ours)
    assert borrowed(2).may_keep


def test_only_so_much_of_ones_own_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a peer that gives nothing back: it is stopped, or keeps more than it should."""
    monkeypatch.setattr(bodies, "KEPT_BYTES", MIB)
    ours, theirs = sides()
    memory = root(ours, MIB)
    lent = [ours.lend(memory.data) for _ in range(4)]
    assert ours.sharing.lend([memory.data], MIB) is None
    assert ours.lend(b"what is copied is bounded apart" * MIB)
    theirs.sharing.borrow(lent[0]).give_back()
    theirs.tell(ours)
    assert ours.sharing.lend([memory.data], MIB) is not None


# --- Waker -----------------------------------------------------------------------------------

WHO = contextvars.ContextVar("WHO", default="nobody")


def test_it_is_called_once_a_turn_however_often_it_is_asked_for(turns: Turns) -> None:
    called: list[str] = []
    WHO.set("the one who made it")
    waker = Waker(lambda: called.append(WHO.get()), 0.0)
    WHO.set("another one")
    waker()
    waker()
    assert called == []
    turns.settle()
    assert called == ["the one who made it"]
    waker()
    turns.settle()
    assert len(called) == 2


async def test_another_thread_wakes_the_loop() -> None:
    called = asyncio.Event()
    thread = threading.Thread(target=Waker(called.set, 0.0))
    thread.start()
    await called.wait()
    thread.join()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_closed_loop_is_not_called(elsewhere: bool) -> None:
    called: list[str] = []

    async def make() -> Waker:
        return Waker(lambda: called.append("called"), 0.0)

    loop = asyncio.new_event_loop()
    waker = loop.run_until_complete(make())
    loop.close()
    if elsewhere:
        thread = threading.Thread(target=waker)
        thread.start()
        thread.join()
    else:
        waker()
    assert called == []


# --- any order of it all ---------------------------------------------------------------------

STEPS = 4000


class Walk:
    """Two tasks lend, read, keep, give back and lose each other, in an order that a seed makes.

    What is seen of each message is compared with what was sent, for as long as it is seen. What
    would be wrong: memory that is written while somebody reads it, or is never free again.
    """

    def __init__(self, seed: int, turns: Turns) -> None:
        self.draw = random.Random(seed)
        self.turns = turns
        self.values = itertools.cycle(range(1, 256))
        self.memories = [SharedMemory(), SharedMemory()]
        self.sharings: list[Sharing] = []  # of all connections so far
        for memory in self.memories:
            memory.arena = BlockPool(2000, memory.take)
        self.owned: list[list[Block]] = [[], []]  # what each task updates
        # Read by each task: views, and what they must show for as long as they are there.
        self.seen: list[list[tuple[list[memoryview], bytes]]] = [[], []]
        self.done: Counter[str] = Counter()
        self.connect()

    def connect(self) -> None:
        ends = channels(self.draw, self.done)
        self.sides = [Side(*each) for each in zip(self.memories, ends, strict=True)]
        self.sharings += [side.sharing for side in self.sides]
        self.waiting: list[list[tuple[Loan, Any, bytes]]] = [[], []]  # to be sent
        self.coming: list[deque[tuple[str, Any, bytes]]] = [deque(), deque()]  # to be read
        self.copied: list[list[tuple[BorrowedBody, bytes]]] = [[], []]  # and given back then
        self.lost = [False, False]

    def step(self) -> None:
        actions = [self.lend] * 8 + [self.send] * 16 + [self.receive] * 20 + [self.say] * 8
        actions += [self.copy] * 8 + [self.drop] * 10 + [self.make] * 2 + [self.update] * 8
        actions += [self.turn] * 6 + [self.retire, self.withdraw, self.lose]
        action = self.draw.choice(actions)
        action(self.draw.randrange(2))
        if any(self.lost) and self.draw.random() < 0.1:  # soon the other side learns of it, too
            if all(self.lost):
                self.connect()
            else:
                self.end(self.lost.index(False))
        for who in (0, 1):
            for views, expected in self.seen[who]:
                assert b"".join(views) == expected, (action, who)
            for borrowed, expected in self.copied[who]:
                assert b"".join(borrowed.views) == expected, (action, who)

    # A task and its memory.

    def make(self, who: int) -> None:
        if len(self.owned[who]) < 8:
            made = self.memories[who].take(self.draw.randint(1, 600))
            made[:] = next(self.values)
            self.owned[who].append(Block(made, np.dtype(np.uint8)))

    def update(self, who: int) -> None:
        """In place unless somebody sees it; else in other memory."""
        if not self.owned[who]:
            return
        at, arena = self.draw.randrange(len(self.owned[who])), self.memories[who].arena
        block = self.owned[who][at]
        if block.held():
            self.done["updated elsewhere"] += 1
            fresh = Block(arena.take(len(block.array)), np.dtype(np.uint8))
            block.retire(arena)
            self.owned[who][at] = block = fresh
        block.array[:] = next(self.values)

    def retire(self, who: int) -> None:
        if self.owned[who]:
            block = self.owned[who].pop(self.draw.randrange(len(self.owned[who])))
            block.retire(self.memories[who].arena)

    # Lending.

    def lend(self, who: int) -> None:
        buffers: list[Buffer] = []
        for _ in range(self.draw.randint(1, 4)):
            nbytes, start = self.draw.randint(1, 300), self.draw.randint(0, 50)
            of = self.draw.choice((self.owned[who], self.owned[who], self.owned[1 - who], []))
            seen = self.draw.choice(of).export(start, start + nbytes) if of else b""
            buffers.append(seen or bytes([next(self.values)]) * nbytes)
        expected = b"".join(buffers)
        loan = self.sides[who].sharing.lend(buffers, len(expected))
        self.done["not lent" if loan is None else "lent"] += 1
        if loan is not None:
            assert not self.lost[who]
            assert sum(extent.nbytes for extent in loan.extents) == len(expected)
            self.waiting[who].append((loan, expected))

    def send(self, who: int) -> None:
        """Copy a part of what waits, and send it if that was the last."""
        if self.waiting[who] and self.waiting[who][0][0].copy_part():
            loan, expected = self.waiting[who].pop(0)
            self.sides[who].sharing.sent(loan)
            self.coming[1 - who].append(("lent", loan.extents, expected))

    def withdraw(self, who: int) -> None:
        if self.waiting[who]:
            at = self.draw.randrange(len(self.waiting[who]))
            self.sides[who].sharing.withdrawn(self.waiting[who].pop(at)[0])
            self.done["withdrawn"] += 1

    def say(self, who: int) -> None:
        due = self.sides[who].sharing.due()
        if not self.lost[who]:
            self.coming[1 - who] += [(kind.name.lower(), number, b"") for kind, number in due]

    # Borrowing.

    def receive(self, who: int) -> None:
        if not self.coming[who] or self.lost[who]:
            return
        kind, what, expected = self.coming[who].popleft()
        sharing = self.sides[who].sharing
        self.done[kind] += 1
        if kind != "lent":
            (sharing.returned if kind == "return" else sharing.forget)(what)
            return
        borrowed = sharing.borrow(what)
        if self.draw.random() < 0.5:
            self.seen[who].append((borrowed.keep(), expected))
        else:
            self.copied[who].append((borrowed, expected))

    def copy(self, who: int) -> None:
        if self.copied[who]:
            self.copied[who].pop(0)[0].give_back()

    def drop(self, who: int) -> None:
        if self.seen[who]:
            views, expected = self.seen[who].pop(self.draw.randrange(len(self.seen[who])))
            first = views.pop(0)
            if views and self.draw.random() < 0.5:  # the others another time
                self.seen[who].append((views, expected[len(first) :]))

    # The end of a connection, as each side sees it, and the next one.

    def lose(self, who: int) -> None:
        if self.draw.random() < 0.2:
            self.end(who)

    def end(self, who: int) -> None:
        if not self.lost[who]:
            self.lost[who] = True
            self.coming[who].clear()
            self.waiting[who].clear()
            self.copied[who].clear()  # a copy ends with its connection
            self.sides[who].sharing.close()
            self.done["lost"] += 1

    def turn(self, _: int) -> None:
        self.turns.settle()

    def all_is_free_at_last(self) -> None:
        for who in (0, 1):
            self.seen[who].clear()
            self.end(who)
        for sharing in self.sharings:
            sharing.due()
        self.turns.settle()
        assert all(sharing.is_over for sharing in self.sharings)
        for who in (0, 1):
            assert not any(block.held() for block in self.owned[who])
            assert self.sides[who].num_lent == 0


@pytest.mark.promise("memory.stable-while-read")
@pytest.mark.parametrize("seed", range(12))
def test_memory_is_never_written_while_it_is_read_and_free_at_last(
    seed: int, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, name, value in (
        (regions, "LENT_ABOVE_BYTES", 16),
        (regions, "SLAB_BYTES", 1000),
        (bodies, "LENT_BYTES", 3000),
        (bodies, "MAX_GIVEN", 8),
        (frames, "COPY_BYTES", 60),
        (blocks, "_MIN_POOLED_BYTES", 1),
        (memory_sharing, "REFUSED", 0.1),
    ):
        monkeypatch.setattr(where, name, value)
    walk = Walk(seed, turns)
    for _ in range(STEPS):
        walk.step()
    walk.all_is_free_at_last()
    for kind in ("lent", "not lent", "return", "forget", "withdrawn", "lost", "updated elsewhere"):
        assert walk.done[kind], kind
