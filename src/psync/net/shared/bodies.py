"""Bodies that are lent over one connection, in both directions.

    sender                                receiver
    finds or copies the body in regions   —
    gives regions that are new            (side channel)
    frame with extents          →         copies the body, or keeps it and reads it there
                                ←         RETURN, when nobody sees it any more
    uses the memory again                 —

What is lent is held by references to its roots, so that nothing writes where somebody reads: a
shard that is being updated goes on in other blocks, the memory of a copied gradient is not handed
out. A connection that is lost changes nothing in that: its receiver may still read, and says by the
end of the side channel that it does not (``doors``). Bodies are numbered by both sides, in the
order in which they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from psync.errors import RemoteProtocolError
from psync.net.shared.doors import SideChannel
from psync.net.shared.regions import Region, SharedMemory, offset_of, root_of
from psync.wire.frames import MAX_EXTENTS, Buffer, Extent, Kind, copies
from psync.wire.tensors import to_bytes_view

LENT_BYTES = 256 << 20
"""Of copies, at one time and over one connection; what is more goes through the socket."""

KEPT_BYTES = 256 << 20
"""That are kept for as long as a program likes, over one connection, or twice what is kept last if
that is more. Then what is lent is copied out."""

PIECE_BYTES = 32 << 10
"""Of a body in smaller pieces, on average, the kernel copies more in the same time."""

MAX_GIVEN = 64
"""Regions of ours that a peer has mapped at one time: each costs it a descriptor."""

SPARE_GIVEN = 8
"""Of them, for what is copied: where no more of our own memory can be mapped, copies still are."""

MAX_REGIONS = 256
"""That a peer may let us map."""


@dataclass(slots=True, eq=False)
class Loan:
    """A body that is lent, or will be when all of it has been copied.

    Attributes:
        extents: Where it is.
        holds: All that must stay as it is until it is returned.
        nbytes: Its size.
    """

    extents: list[Extent]
    holds: list[memoryview]
    nbytes: int
    copied_bytes: int = 0
    targets: list[memoryview] = field(default_factory=list)
    sources: list[memoryview] = field(default_factory=list)
    _rest: Iterator[int] | None = None  # of the copy, once it has begun

    def add(self, extent: Extent) -> None:
        """Let the next part of it be there."""
        last = self.extents[-1] if self.extents else None
        if last is not None and (last.region, last.offset + last.nbytes) == extent[:2]:
            self.extents[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
        else:
            self.extents.append(extent)

    def copy_part(self) -> bool:
        """Copy a part of what has to be; return whether that was the last."""
        if self._rest is None:
            self._rest = copies(self.targets, self.sources)
        return next(self._rest, None) is None


class Sharing:
    """What the two tasks at the ends of a connection lend each other.

    Args:
        memory: Of this task.
        channel: To the other one.
        wake: Called, in any thread, when there is something for ``due``.
    """

    def __init__(
        self, memory: SharedMemory, channel: SideChannel, wake: Callable[[], None]
    ) -> None:
        self.bytes_lent = self.bytes_borrowed = 0  # so far
        self.has_to_say = False  # whether ``due`` returns something
        self._memory = memory
        self._channel = channel
        self._wake = wake
        self._closed = False
        self.is_over = False  # nobody at either end reads any more
        # Of ours.
        self._given: set[int] = set()  # regions
        self._lent: dict[int, Loan] = {}
        self._num_sent = 0
        self._copied_bytes = 0  # of them
        self._own_bytes = 0  # of them: memory that its owner would write to otherwise
        self._gone: deque[int] = deque()  # regions that are to be forgotten there
        # Of theirs.
        self._regions: dict[int, memoryview] = {}
        self._num_received = 0
        self._kept: dict[int, int] = {}  # by number, bytes of bodies that are read where they are
        self._returns: deque[int] = deque()  # numbers of bodies that are not needed any more
        if memory.make is None:
            memory.make = channel.make
        memory.lenders[self] = None

    # Lending.

    def lend(self, buffers: Sequence[Buffer], nbytes: int, *, copied: bool = False) -> Loan | None:
        """Return how a body can be lent; None: it cannot.

        Args:
            buffers: The body; none is empty.
            nbytes: Its size.
            copied: Whether all of it is copied, also what lies in own regions.
        """
        if self._closed or self._copied_bytes > LENT_BYTES:
            return None
        if self._own_bytes + nbytes > 2 * _bound(nbytes):  # who gets it does not copy it out
            return None
        loan = Loan([], [], nbytes)
        each: list[tuple[memoryview, Region | None]] = []
        for buffer in buffers:
            view = memoryview(buffer)
            region = None if copied else self._own_region_of(view)
            (loan.sources if region is None else loan.holds).append(view)
            each.append((view, region))
        # What is copied is in one piece afterwards.
        if nbytes < PIECE_BYTES * (len(loan.holds) + bool(loan.sources)):
            return None
        if not loan.holds:
            each.clear()
        loan.copied_bytes = sum(map(len, loan.sources))
        room = self._make_room(loan) if loan.sources else Extent(0, 0, 0)
        if room is None:
            return None
        if not each:
            loan.add(room)
        at = room.offset
        for view, region in each:
            if region is not None:
                loan.add(Extent(region.number, offset_of(view, region), len(view)))
            else:
                loan.add(Extent(room.region, at, len(view)))
                at += len(view)
        if len(loan.extents) > MAX_EXTENTS:
            return None
        self._copied_bytes += loan.copied_bytes
        self._own_bytes += nbytes - loan.copied_bytes
        return loan

    def _own_region_of(self, view: memoryview) -> Region | None:
        """Return the region of ours that a view can be lent in; None: it has to be copied."""
        region = self._memory.own_region_of(view)
        return region if region is not None and self._knows(region, SPARE_GIVEN) else None

    def _make_room(self, loan: Loan) -> Extent | None:
        """Return where what has to be copied will be, in one piece; None: there is no room."""
        nbytes = loan.copied_bytes
        root = self._memory.lendable(nbytes)
        if root is None:
            return None
        memory = to_bytes_view(root)[:nbytes]
        region = self._memory.own_region_of(memory)
        if region is None or not self._knows(region):
            return None
        loan.targets.append(memory)
        loan.holds.append(memory)
        return Extent(region.number, offset_of(memory, region), nbytes)

    def sent(self, loan: Loan) -> None:
        """It is on its way."""
        self._num_sent += 1
        self._lent[self._num_sent] = loan
        self.bytes_lent += loan.nbytes
        loan.targets.clear()
        loan.sources.clear()

    def withdrawn(self, loan: Loan) -> None:
        """It was not sent, or is not needed any more."""
        self._copied_bytes -= loan.copied_bytes
        self._own_bytes -= loan.nbytes - loan.copied_bytes

    def returned(self, number: int) -> None:
        """The peer does not need a body any more.

        Raises:
            RemoteProtocolError: It has none of that number.
        """
        loan = self._lent.pop(number, None)
        if loan is None:
            raise RemoteProtocolError(f"body {number} was given back, which is not lent")
        self.withdrawn(loan)
        self._memory.note_returned()
        self._memory.shrink_soon()

    def lends(self, owners: Collection[int]) -> bool:
        """Whether memory of some of these arrays, given by their ids, is lent."""
        return any(id(held.obj) in owners for loan in self._lent.values() for held in loan.holds)

    def region_gone(self, number: int) -> None:
        """A region of ours is gone; the peer may forget it. Called in any thread."""
        self._gone.append(number)
        self.has_to_say = True
        self._wake()

    def _knows(self, region: Region, spare: int = 0) -> bool:
        if region.number in self._given:
            return True
        if len(self._given) >= MAX_GIVEN - spare or not self._channel.give(region):
            return False
        self._given.add(region.number)
        region.on_gone[self] = None
        return True

    # Borrowing.

    def borrow(self, extents: Sequence[tuple[int, int, int]]) -> BorrowedBody:
        """Return a body that the peer has lent.

        Raises:
            RemoteProtocolError: Its extents lie nowhere.
        """
        self._num_received += 1
        views = []
        for region, offset, nbytes in extents:
            memory = self._regions.get(region)
            if memory is None:
                memory = self._take(region)
            if offset + nbytes > len(memory):
                raise RemoteProtocolError(
                    f"{nbytes} bytes at {offset} of a region of shared memory that has "
                    f"{len(memory)}"
                )
            views.append(memory[offset : offset + nbytes])
            self.bytes_borrowed += nbytes
        return BorrowedBody(self, self._num_received, views)

    def forget(self, number: int) -> None:
        """The peer will not name a region of its own any more.

        Raises:
            RemoteProtocolError: It has given none of that number.
        """
        if number not in self._regions:
            self._take(number)
        del self._regions[number]

    def _take(self, wanted: int) -> memoryview:
        for number, memory in self._channel.take():
            if len(self._regions) >= MAX_REGIONS or number in self._regions:
                raise RemoteProtocolError("got more regions of shared memory than may be")
            self._regions[number] = memory
            if number == wanted:  # before the next one comes others may have to be forgotten
                return memory
        raise RemoteProtocolError(f"region {wanted} of shared memory was never given")

    @property
    def bytes_lent_now(self) -> int:
        """What was not given back."""
        return sum(loan.nbytes for loan in self._lent.values())

    @property
    def bytes_kept_now(self) -> int:
        """What is read where it is."""
        returned = set(self._returns)
        return sum(nbytes for number, nbytes in self._kept.items() if number not in returned)

    # To be said to the peer.

    def due(self) -> list[tuple[Kind, int]]:
        """Return bodies to be given back, and regions to be forgotten; once."""
        self.has_to_say = False  # first: other threads may add to what there is
        said = []
        while self._returns:
            number = self._returns.popleft()
            self._kept.pop(number, None)
            said.append((Kind.RETURN, number))
        while self._gone:
            number = self._gone.popleft()
            if number in self._given:
                self._given.discard(number)
                said.append((Kind.FORGET, number))
        if self._closed:
            self._settle()
        return said

    def give_back(self, number: int) -> None:
        """A body of the peer's is not needed any more; called in any thread."""
        self._returns.append(number)
        self.has_to_say = True
        self._wake()

    def may_keep(self, nbytes: int) -> bool:
        """Whether a body of the peer's may be kept for as long as somebody likes."""
        return sum(self._kept.values()) + nbytes <= _bound(nbytes)

    def kept(self, number: int, nbytes: int) -> None:
        """A body of the peer's is read where it is."""
        self._kept[number] = nbytes

    # The end.

    def close(self) -> None:
        """The connection is gone; who reads goes on, and what is read stays as it is."""
        if self._closed:
            return
        self._closed = True
        self._regions.clear()  # who reads in one holds it; nothing else is in them any more
        if self._lent:
            self._channel.when_ended(self._end_lent)
        self._settle()

    def drop(self) -> None:
        """This task ends, or nobody at either end reads any more: lend nothing.

        The channel is closed when nothing is kept any more: what a program has read stays as it is
        for as long as it likes, and also when there is no loop.
        """
        self._closed = True
        self._regions.clear()
        self._lent.clear()
        self._memory.note_returned()
        self._channel.look_no_more()  # here: a loop's readers are its own thread's
        self._wake = self._end_kept  # instead of a connection that is gone
        self._end_kept()

    def _end_kept(self) -> None:
        """Close the channel if nothing is kept any more; in any thread."""
        kept = set(self._kept)  # read first: what ``due`` takes meanwhile then counts as kept
        if kept.issubset(list(self._returns)):
            self.is_over = True
            self._channel.close()

    def _settle(self) -> None:
        """Say that this side reads no more, once that is so; with nothing lent either, end it."""
        if self._kept or self.is_over:
            return
        self._channel.end()
        if not self._lent:
            self.drop()

    def _end_lent(self) -> None:
        self._lent.clear()
        self._memory.note_returned()
        self._settle()


class BorrowedBody:
    """See ``wire.frames.Borrowed``."""

    __slots__ = ("_gone", "_nbytes", "_number", "_sharing", "is_kept", "views")

    def __init__(self, sharing: Sharing, number: int, views: Sequence[memoryview]) -> None:
        self.views = views
        self.is_kept = False
        self._nbytes = sum(map(len, views))
        self._sharing = sharing
        self._number = number
        self._gone = itertools.count(1)  # counts in one step, whatever threads there are

    @property
    def may_keep(self) -> bool:
        """See ``Borrowed``."""
        return self._sharing.may_keep(self._nbytes)

    def keep(self) -> list[memoryview]:
        """See ``Borrowed``."""
        self.is_kept = True
        self._sharing.kept(self._number, self._nbytes)
        views, self.views = self.views, ()
        kept = []
        for view in views:
            root = root_of(view)
            weakref.finalize(root, self._one_gone, len(views)).atexit = False
            kept.append(root.data)
        return kept

    def give_back(self) -> None:
        """See ``Borrowed``."""
        self.views = ()
        self._sharing.give_back(self._number)

    def _one_gone(self, of: int) -> None:
        if next(self._gone) == of:
            self._sharing.give_back(self._number)


def _bound(nbytes: int) -> int:
    """Return how much may be kept where a body of this size is."""
    return max(KEPT_BYTES, 2 * nbytes)


class Waker:
    """Calls back in a loop soon, whatever thread asks for it, and in whatever it is busy with.

    Args:
        then: What to call, once however often it is asked for meanwhile.
        within_s: Seconds after which it is called.
    """

    def __init__(self, then: Callable[[], None], within_s: float) -> None:
        self._then = then
        self._within_s = within_s
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._context = contextvars.copy_context()

    def __call__(self) -> None:
        """See to it that it is called."""
        if self._is_due:
            return
        self._is_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wait)

    def _wait(self) -> None:
        self._loop.call_later(self._within_s, self._run, context=self._context)

    def _run(self) -> None:
        self._is_due = False
        self._then()
