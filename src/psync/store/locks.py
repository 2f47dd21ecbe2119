"""The lock table of a ps: exclusive locks and shared claims on shards, first come, first served.

A claim on shards is exclusive (a lock) or shared (an update): updates go on side by side, a lock
waits for those that are under way, and later claims wait for a lock. A waiting claim blocks later
ones for the same shards, so none starves. A claim gets all its shards at once or none, so claims
cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psync.store.shards import Key


@dataclass(slots=True, eq=False)
class Claim:
    """Some shards, wanted or held."""

    keys: frozenset[Key]
    exclusive: bool
    held: bool = False


class LockTable:
    """The claims on shards of one ps. Single owner; never blocks."""

    def __init__(self) -> None:
        self._held: dict[Claim, None] = {}
        self._waiting: dict[Claim, None] = {}  # in order
        self.num_exclusive = 0  # of both

    def blocks(self, keys: Iterable[Key]) -> bool:
        """Return whether an update of these shards must wait."""
        return bool(self.num_exclusive) and self._in_the_way(frozenset(keys), exclusive=False)

    def claim(self, keys: Iterable[Key], *, exclusive: bool) -> Claim:
        """Claim shards; it is held at once if nothing is in its way."""
        claim = Claim(frozenset(keys), exclusive)
        claim.held = not self._in_the_way(claim.keys, exclusive)
        (self._held if claim.held else self._waiting)[claim] = None
        self.num_exclusive += exclusive
        return claim

    def begin(self, keys: Iterable[Key]) -> Claim:
        """Note an update that begins now: nothing blocks it, or it belongs to a claim held."""
        claim = Claim(frozenset(keys), exclusive=False, held=True)
        self._held[claim] = None
        return claim

    def end(self, claim: Claim) -> list[Claim]:
        """Give up a claim, held or not; a second time changes nothing.

        Returns:
            Those that are held from now on, in the order in which they came.
        """
        if claim not in self._held and claim not in self._waiting:
            return []
        self._held.pop(claim, None)
        self._waiting.pop(claim, None)
        claim.held = False
        self.num_exclusive -= claim.exclusive
        return self._grant()

    def _in_the_way(self, keys: frozenset[Key], exclusive: bool) -> bool:
        """Return whether one who comes now must wait, be it for others who wait."""
        claims = (claim for claims in (self._held, self._waiting) for claim in claims)
        return any(
            (exclusive or claim.exclusive) and not keys.isdisjoint(claim.keys) for claim in claims
        )

    def _grant(self) -> list[Claim]:
        """Let those who wait have their shards, unless someone before them is in the way."""
        if not self._waiting:
            return []
        locked: set[Key] = set()
        used: set[Key] = set()
        for claim in self._held:
            (locked if claim.exclusive else used).update(claim.keys)
        granted = []
        for claim in list(self._waiting):
            if locked.isdisjoint(claim.keys) and not (
                claim.exclusive and not used.isdisjoint(claim.keys)
            ):
                del self._waiting[claim]
                self._held[claim] = None
                claim.held = True
                granted.append(claim)
            (locked if claim.exclusive else used).update(claim.keys)
        return granted
