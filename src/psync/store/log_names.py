"""Numbers that the entries of a log use, as whoever reads that log knows them.

A connection calls sets of shards by numbers of its own. The reader of a log has none of these
connections: an entry names a set, or a group, in full when it is the first that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

MAX_SETS = 32_768
"""Numbers of sets in one log; then they begin anew. A connection may define twice as many."""

OwnMember = tuple[int, int]
"""(variable, index) of a shard."""

Member = tuple[int, int, int]
"""(ps, variable, index) of a shard."""

M = TypeVar("M", OwnMember, Member)


class LogNames:
    """What the reader of one log knows. Single owner."""

    def __init__(self) -> None:
        self._own: dict[tuple[OwnMember, ...], int] = {}
        self._whole: dict[tuple[Member, ...], int] = {}
        self._groups: set[int] = set()

    def begin(self, groups: Iterable[int] = ()) -> None:
        """There is a new reader, that knows these synchronous groups and no sets."""
        self._own.clear()
        self._whole.clear()
        self._groups = set(groups)

    def of_set(self, keys: tuple[OwnMember, ...]) -> tuple[int, list[OwnMember] | None]:
        """Return the number of a set of shards of this ps, and its members if it is new."""
        return _number(self._own, keys)

    def of_whole(self, members: tuple[Member, ...]) -> tuple[int, list[Member] | None]:
        """Return the number of a set of shards of several ps tasks, likewise."""
        return _number(self._whole, members)

    def is_new(self, group: int) -> bool:
        """Return whether a group is named for the first time; from now on it is known."""
        if group in self._groups:
            return False
        self._groups.add(group)
        return True


def _number(sets: dict[tuple[M, ...], int], members: tuple[M, ...]) -> tuple[int, list[M] | None]:
    number = sets.get(members)
    if number is not None:
        return number, None
    if len(sets) >= MAX_SETS:
        sets.clear()
    number = sets[members] = len(sets)
    return number, list(members)


class NamesInFull(LogNames):
    """Names everything in full, for entries that come before all others of a log.

    Args:
        names: Of the others: what was named is known to them.
    """

    def __init__(self, names: LogNames) -> None:
        super().__init__()
        self._names = names

    def of_set(self, keys: tuple[OwnMember, ...]) -> tuple[int, list[OwnMember] | None]:
        """Return the number of a set of shards of this ps, and its members."""
        return self._names.of_set(keys)[0], list(keys)

    def of_whole(self, members: tuple[Member, ...]) -> tuple[int, list[Member] | None]:
        """Return the number of a set of shards of several ps tasks, likewise."""
        return self._names.of_whole(members)[0], list(members)

    def is_new(self, group: int) -> bool:
        """Return True; from now on the group is known."""
        self._names.is_new(group)
        return True
