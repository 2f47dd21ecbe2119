"""Whether a backup is what its primary is: checks in their log."""

from __future__ import annotations

from collections.abc import Callable

from psync.errors import PsyncError
from psync.store.commit_log import chained
from psync.store.ledger import Client
from psync.wire.messages import CheckState

CHECK_EVERY = 1024
"""Entries between two comparisons."""


class Diverged(PsyncError):
    """A backup is not what its primary is, though it has executed the same entries."""


class Comparison:
    """Comparison with one backup: of the entries that went over, and of what they made.

    Every ``CHECK_EVERY`` entries the primary logs a ``CheckState``. Executing it, both take a
    digest of the state that judging has made; the next one brings the primary's, and the checksum
    over all entries up to itself. A backup that differs is discarded, and made again
    (``backups.host``). A new comparison begins with each copy, on both sides.

    Args:
        task: Name of the ps.
        digest: Returns one of the state that judging has made, equal on both.
    """

    def __init__(self, task: str, digest: Callable[[], bytes]) -> None:
        self._task = task
        self._digest = digest
        self._number = 0  # of the last check in the log
        self._left = CHECK_EVERY  # entries until the next one
        self._digests: dict[int, bytes] = {}  # of the last two that were executed
        self._chain = 0  # over the entries that went over

    def shipped(self, client: Client, header: bytes, nbytes: int) -> None:
        """Note an entry that has its number."""
        self._chain = chained(self._chain, client, header, nbytes)

    def due(self) -> CheckState | None:
        """Return the check that comes before the next entry; None: it is not time yet."""
        self._left -= 1
        if self._left > 0 or self._number not in (0, *self._digests):
            return None
        self._left = CHECK_EVERY
        self._number += 1
        return CheckState(self._number, self._digests.get(self._number - 1, b""), self._chain)

    def execute(self, check: CheckState) -> None:
        """Take the digest of a check, and compare the one before.

        Raises:
            Diverged: They differ.
        """
        mine = self._digests.get(check.number - 1)
        self._digests = {check.number - 1: mine or b"", check.number: self._digest()}
        if mine is not None and check.last and mine != check.last:
            raise Diverged(
                f"{self._task}: its backup has diverged before check {check.number} of the log"
            )
