"""Sets of shards over several ps tasks, for small pushes that come whole to ps 0.

A worker sends a small push whole to ps 0, which hands each other ps its *share* with ``CloseStep``.
ps 0 knows of a set which shards are its own, and under which number each other ps knows its share.
Only that ps can say whether a share fits; it is asked once for each connection and group
(``DescribeSet``), before the first push of the set counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from psync.errors import RemoteProtocolError, UsageError, ValueMismatchError
from psync.net.connection import Connection
from psync.ps.shard_sets import MAX_SETS, NO_BYTES, Body, ShardSet
from psync.store.store import Key, ShardStore
from psync.wire.frames import SMALL_BODY_BYTES

FOR_VALUES = -1
"""In place of a group: a set whose values are wanted."""

MAX_NUMBERED = 4096
"""Shares whose numbers are kept. A share that comes again after that gets a new number."""


@dataclass(frozen=True, slots=True)
class Share:
    """What another ps holds of a set."""

    ps: int
    number: int  # by which ps 0 calls these shards there
    members: list[tuple[int, int]]  # as they define the set there
    first: int  # place of the first one in the set
    end: int


Values = dict[int, list[memoryview]]
"""Values of other ps tasks, by the numbers of the shares; a ps that was busy has none."""


class Along(NamedTuple):
    """A share of a push, with its bytes."""

    share: Share
    body: memoryview


class ShareNumbers:
    """Numbers the shares of other ps tasks: the same shards have the same number.

    Args:
        num_ps: Number of ps tasks.
        task: Name of this ps, for messages.
    """

    def __init__(self, num_ps: int, task: str) -> None:
        self._num_ps = num_ps
        self._task = task
        self._known: dict[tuple[int, tuple[Key, ...]], int] = {}
        # Far above those of the sets that ps 0 pulls and assigns by itself.
        self._next = itertools.count(1 << 32)

    def number_of(self, ps: int, members: Sequence[tuple[int, int]]) -> int:
        """Return the number of these shards of another ps.

        Raises:
            RemoteProtocolError: There is no such ps.
        """
        if not 0 < ps < self._num_ps:
            raise RemoteProtocolError(
                f"{self._task}: a set with shards on ps {ps}, but there are only {self._num_ps} "
                "ps tasks"
            )
        key = (ps, tuple((variable, index) for variable, index in members))
        number = self._known.get(key)
        if number is None:
            if len(self._known) >= MAX_NUMBERED:
                self._known.clear()
            number = self._known[key] = next(self._next)
        return number


class WholeSet:
    """A set that a connection to ps 0 calls by one number. Those of a ps lie together in it.

    Args:
        members: (ps, variable, index) of each shard; those of a ps may be compressed, see
            ``numerics.compression``.
        numbers: Numbers the shares.

    Raises:
        RemoteProtocolError: Those of a ps do not lie together, or there is no such ps.
    """

    __slots__ = (
        "_checked", "_cuts", "_order", "_own_at", "_own_cut", "checked_for", "lengths", "members",
        "own", "shares", "size",
    )  # fmt: skip

    def __init__(self, members: Sequence[Sequence[int]], numbers: ShareNumbers) -> None:
        self.members = tuple((ps, variable, index) for ps, variable, index in members)
        self.own = ShardSet(())
        self._own_at = slice(0, 0)
        shares: list[Share] = []
        self._order: list[Share | None] = []  # None: what ps 0 has itself
        seen: set[int] = set()
        at = 0
        for ps, run in itertools.groupby(members, itemgetter(0)):
            own = [(variable, index) for _, variable, index in run]
            known = ShardSet.of(own)
            end = at + len(known.keys)
            if ps in seen:
                raise RemoteProtocolError(f"the shards of ps {ps} do not lie together in a set")
            seen.add(ps)
            if ps == 0:
                self.own = known
                self._own_at = slice(at, end)
                self._order.append(None)
            else:
                shares.append(Share(ps, numbers.number_of(ps, own), own, at, end))
                self._order.append(shares[-1])
            at = end
        self.shares = tuple(shares)
        self.size = at  # number of shards
        self.lengths: tuple[int, ...] = ()  # bytes of each shard, as they came with the first push
        self.checked_for: set[int] = set()  # groups for which each ps has said that they fit
        self._checked: ShardStore | None = None  # with whose shards the own ones were compared
        self._cuts: list[tuple[Share, tuple[int, int]]] = []  # where each share lies in a body
        self._own_cut = slice(0, 0)  # likewise

    def fit(
        self,
        store: ShardStore,
        lengths: tuple[int, ...],
        task: str,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Check the sizes of a push's segments, as far as that can be done on ps 0.

        Args:
            store: Of ps 0.
            lengths: In bytes.
            task: Name of ps 0.
            rows: As in the message: then all of it is ps 0's.

        Raises:
            ValueMismatchError: They are not those of the shards.
            UnknownVariableError: A shard is not there.
            RemoteProtocolError: It is too much to be handed on.
        """
        if rows is None and lengths == self.lengths and self._checked is store:
            return
        own = self.own.look_up(store)
        if rows is not None:
            if self.shares:
                raise RemoteProtocolError(f"{task}: rows of gradients are not handed on")
            own.check_lengths(lengths, task, rows)
            return
        if len(lengths) != self.size or (self.lengths and lengths != self.lengths):
            expected = f" of {self.lengths} bytes" if self.lengths else ""
            raise ValueMismatchError(
                f"{task}: {len(lengths)} arrays of {lengths} bytes for {self.size} shards{expected}"
            )
        own.check_lengths(lengths[self._own_at], task)
        if self.shares and sum(lengths) > SMALL_BODY_BYTES:
            raise RemoteProtocolError(
                f"{task}: a push of {sum(lengths)} bytes comes whole, at most {SMALL_BODY_BYTES} "
                "are handed on"
            )
        ends = [0, *itertools.accumulate(lengths)]
        self._cuts = [(share, (ends[share.first], ends[share.end])) for share in self.shares]
        self._own_cut = slice(ends[self._own_at.start], ends[self._own_at.stop])
        self.lengths, self._checked = lengths, store

    def check_share(self, share: Share, sizes: Sequence[int], task: str) -> None:
        """Compare what has come with what another ps says of its share.

        Raises:
            ValueMismatchError: It does not fit. The next push of the set is looked at anew.
        """
        came = self.lengths[share.first : share.end]
        if came and came != tuple(sizes):
            self.lengths = ()
            raise ValueMismatchError(
                f"{task}: shards of ps {share.ps}: expected {tuple(sizes)} bytes, got {came}"
            )

    def cut(self, body: Body) -> tuple[Body, list[Along]]:
        """Return the part of ps 0 in a push's body, and those of the others."""
        whole = body[0] if body else NO_BYTES
        along = [Along(share, whole[start:end]) for share, (start, end) in self._cuts]
        return (whole[self._own_cut],), along

    def joined(self, own: Sequence[list[memoryview]], others: Values) -> list[Any]:
        """Return the values of all shards, in order; none if some are missing."""
        values: list[Any] = []
        for share in self._order:
            values += own if share is None else others.get(share.number, ())
        return values if len(values) == self.size else []


def whole_set_of(
    peer: Connection,
    number: int,
    members: Sequence[Sequence[int]] | None,
    numbers: ShareNumbers,
    task: str,
) -> WholeSet:
    """Return a set, which the connection may be defining, or defining anew, just now.

    Raises:
        RemoteProtocolError: It is not defined, or makes no sense.
        UsageError: The connection has defined too many.
    """
    sets: dict[int, WholeSet] = peer.state.setdefault("whole_sets", {})
    known = sets.get(number)
    if members is not None:
        if known is None and len(sets) >= MAX_SETS:
            raise UsageError(f"{task}: {peer.task} has defined too many sets")
        known = sets[number] = WholeSet(members, numbers)
    elif known is None:
        raise RemoteProtocolError(f"{task}: set {number} is not defined")
    return known
