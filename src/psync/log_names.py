"""Numbers that the entries of a log use, as whoever reads that log knows them.

Layer: L1. Imports: nothing of psync.

A connection calls sets of shards by numbers of its own. The reader of a log has none of these
connections: an entry names a set, or a group, in full when it is the first that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_SETS = 32_768
"""Numbers of sets in one log; then they begin anew. A connection may define twice as many."""

Members = tuple[tuple[int, ...], ...]


class LogNames:
    """What the reader of one log knows. Single owner."""

    def __init__(self) -> None:
        self._sets: dict[tuple[str, Members], int] = {}
        self._groups: set[int] = set()

    def begin(self, groups: Iterable[int] = ()) -> None:
        """There is a new reader, that knows these synchronous groups and no sets."""
        self._sets.clear()
        self._groups = set(groups)

    def of_set(self, keys: Members) -> tuple[int, list[tuple[int, ...]] | None]:
        """Return the number of a set of shards of this ps, and its members if it is new."""
        return self._number("own", keys)

    def of_whole(self, members: Members) -> tuple[int, list[tuple[int, ...]] | None]:
        """Return the number of a set of shards of several ps tasks, likewise."""
        return self._number("whole", members)

    def _number(self, kind: str, members: Members) -> tuple[int, list[tuple[int, ...]] | None]:
        number = self._sets.get((kind, members))
        if number is not None:
            return number, None
        if len(self._sets) >= MAX_SETS:
            self._sets.clear()
        number = self._sets[kind, members] = len(self._sets)
        return number, list(members)

    def is_new(self, group: int) -> bool:
        """Return whether a group is named for the first time; from now on it is known."""
        if group in self._groups:
            return False
        self._groups.add(group)
        return True


class NamesInFull(LogNames):
    """Names everything in full, for entries that come before all others of a log.

    Args:
        names: Of the others: what was named is known to them.
    """

    def __init__(self, names: LogNames) -> None:
        super().__init__()
        self._names = names

    def of_set(self, keys: Members) -> tuple[int, list[tuple[int, ...]] | None]:
        """Return the number of a set of shards of this ps, and its members."""
        return self._names.of_set(keys)[0], list(keys)

    def of_whole(self, members: Members) -> tuple[int, list[tuple[int, ...]] | None]:
        """Return the number of a set of shards of several ps tasks, likewise."""
        return self._names.of_whole(members)[0], list(members)

    def is_new(self, group: int) -> bool:
        """Return True; from now on the group is known."""
        self._names.is_new(group)
        return True
