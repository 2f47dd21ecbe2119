"""The rule of a ps's gate: which updates may begin while a cut is taken.

While the gate is shut no update begins that no ps has begun: what comes waits, unjudged. Parts of
an update that has begun on another ps are *admitted*: the cut is to have all of them. A message
that has arrived whole is applied in the end, even if its client is replaced while it waits. One
outside of closures is the exception: it is refused then (``Ledger.judge``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from psync.store.ledger import Client, Ledger


class UpdateGate:
    """The gate of one ps. Single owner; never blocks.

    Args:
        ledger: Knows what has begun here.
        exempt: A task whose updates always pass: that of ps 0, which the coordinator lets finish
            its steps before anything is frozen.

    Attributes:
        waiting: Messages (client, sequence) that have arrived whole and wait, at this gate or for a
            lock; some more than once, since they were sent again.
    """

    def __init__(self, ledger: Ledger, exempt: str) -> None:
        self.cut = 0  # for which it is shut; 0: it is open
        self.waiting: Counter[tuple[Client, int]] = Counter()
        self._over = 0  # the highest cut for which it was opened
        self._ledger = ledger
        self._exempt = exempt
        self._admitted: set[tuple[Client, int]] = set()

    def shut(self, cut: int) -> bool:
        """Hold updates back for a cut; a later one takes the place of an earlier one.

        Returns:
            Whether they are held back for this one; not if it is over, for then nobody opens.
        """
        if cut > max(self.cut, self._over):
            self.cut = cut
            self._admitted.clear()
        return self.cut == cut

    def open(self, cut: int) -> bool:
        """Let all updates through; return whether it was shut for this cut."""
        self._over = max(self._over, cut)
        if cut != self.cut or not cut:
            return False
        self.cut = 0
        self._admitted.clear()
        return True

    def admit(self, cut: int, updates: Iterable[tuple[Client, int]]) -> bool:
        """Let these messages (client, sequence) through; False: it is not shut for this cut."""
        if cut != self.cut:
            return False
        self._admitted.update(updates)
        return True

    def holds(self, client: Client, sequence: int) -> bool:
        """Return whether a message has to wait. What has begun here goes on."""
        return (
            self.cut > 0
            and client[0] != self._exempt
            and (client, sequence) not in self._admitted
            and not self._ledger.knows(client, sequence)
        )

    def unsettled(self, updates: Iterable[tuple[Client, int]]) -> list[tuple[Client, int]]:
        """Return those messages that may still change something here."""
        return [
            (client, sequence)
            for client, sequence in updates
            if (client, sequence) in self.waiting or not self._ledger.is_settled(client, sequence)
        ]
