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

from psync.client.plan import numbered
from psync.errors import RemoteProtocolError, ValueMismatchError
from psync.ps.plans import NO_BYTES, Body, ShardSet
from psync.store.store import ShardStore
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import DefinePlan, DefineWhole

FOR_VALUES = -1
"""In place of a group: a set whose values are wanted."""


@dataclass(frozen=True, slots=True)
class Share:
    """What another ps holds of a set."""

    ps: int
    number: int  # by which ps 0 calls these shards there
    definition: DefinePlan  # of that number
    first: int  # place of the first one in the set
    end: int


Values = dict[int, list[memoryview]]
"""Values of other ps tasks, by the numbers of the shares; a ps that was busy has none."""


class Along(NamedTuple):
    """A share of a push, with its bytes."""

    share: Share
    body: memoryview


class WholeSet:
    """A plan of a push that comes whole to ps 0. The shards of a ps lie together in it.

    Args:
        message: Defines it. Its members may be compressed, see ``numerics.compression``.
        header: The definition, as it came.

    Raises:
        RemoteProtocolError: The shards of a ps do not lie together.
    """

    __slots__ = (
        "_checked", "_cuts", "_order", "_own_at", "_own_cut", "checked_for", "header", "keys",
        "lengths", "number", "own", "shares", "size",
    )  # fmt: skip

    def __init__(self, message: DefineWhole, header: bytes) -> None:
        members = message.members
        self.number, self.header = message.plan, header
        self.keys = members
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
                definition = numbered(DefinePlan(0, own))
                shares.append(Share(ps, definition.plan, definition, at, end))
                self._order.append(shares[-1])
            at = end
        self.shares = tuple(shares)
        self.size = at  # number of shards
        self.lengths = tuple(message.lengths)  # bytes of each shard
        self.checked_for: set[int] = set()  # groups for which each ps has said that they fit
        self._checked: ShardStore | None = None  # with whose shards the own ones were compared
        ends = [0, *itertools.accumulate(self.lengths)]
        if len(ends) <= at:
            raise RemoteProtocolError(f"{len(self.lengths)} lengths of {at} shards")
        # Where each share lies in a body.
        self._cuts = [(share, (ends[share.first], ends[share.end])) for share in shares]
        self._own_cut = slice(ends[self._own_at.start], ends[self._own_at.stop])

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
        if lengths != self.lengths:
            raise ValueMismatchError(
                f"{task}: {len(lengths)} arrays of {lengths} bytes for {self.size} shards of "
                f"{self.lengths} bytes"
            )
        own.check_lengths(lengths[self._own_at], task)
        if self.shares and sum(lengths) > SMALL_BODY_BYTES:
            raise RemoteProtocolError(
                f"{task}: a push of {sum(lengths)} bytes comes whole, at most {SMALL_BODY_BYTES} "
                "are handed on"
            )
        self._checked = store

    def check_share(self, share: Share, sizes: Sequence[int], task: str) -> None:
        """Compare what has come with what another ps says of its share.

        Raises:
            ValueMismatchError: It does not fit.
        """
        came = self.lengths[share.first : share.end]
        if came != tuple(sizes):
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
