"""The commit log of a ps: numbered entries, and how far its backup has them, if there is one.

    ALONE    --a copy begins-->  COPYING   what is submitted from then on is kept for the backup
    COPYING  --it is sent-->     PAIRED    from here on nothing is judged that the backup lacks
    COPYING, PAIRED --the backup is given up--> ALONE
    any      --a newer primary is known-->      DEPOSED, for ever

Entries are numbered from 1 without a gap. A primary judges them in that order, one after the
other, and so does its backup.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from psync.errors import FencedError, LocalProtocolError, PsyncError
from psync.wire.messages import CheckState

E = TypeVar("E")


class LogState(enum.Enum):
    """How a primary stands to its backup."""

    ALONE = "alone"
    COPYING = "copying"
    PAIRED = "paired"
    DEPOSED = "deposed"


class CommitLog(Generic[E]):
    """The log of one primary. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages.
        max_kept_bytes: Of entries that the backup does not have yet, while it is being made.
    """

    def __init__(self, task: str, max_kept_bytes: int) -> None:
        self.state = LogState.ALONE
        self.taken = 0  # the backup has all entries up to this number
        self._task = task
        self._max_kept = max_kept_bytes
        self.last = 0  # number of the last entry
        self.shipped = 0  # up to this number they are on their way
        # That the backup does not have, from the first after ``taken``, with what each counts.
        self._kept: deque[tuple[E, int]] = deque()
        self._kept_bytes = 0

    def append(self, entry: E, nbytes: int) -> int:
        """Give an entry its place, and return its number.

        Raises:
            FencedError: Another one is the primary now.
        """
        if self.state is LogState.DEPOSED:
            raise FencedError(f"{self._task} has been replaced by its backup")
        self.last += 1
        if self.state is not LogState.ALONE:
            self._kept.append((entry, nbytes))
            self._kept_bytes += nbytes
            if self.state is LogState.COPYING and self._kept_bytes > self._max_kept:
                self.give_up()
        return self.last

    def may_judge(self, number: int) -> bool:
        """Return whether an entry is where it has to be before it is applied.

        None is any more once another one is the primary.
        """
        if self.state is LogState.PAIRED:
            return number <= self.taken
        return self.state is not LogState.DEPOSED

    def begin_copy(self) -> int:
        """Keep all entries from now on for a backup; return the number of the last before.

        Raises:
            LocalProtocolError: There is a backup, or another one is the primary now.
        """
        self._check(LogState.ALONE)
        self.state = LogState.COPYING
        self.taken = self.shipped = self.last
        return self.last

    def pair(self) -> None:
        """The copy is there: from now on nothing is applied that the backup does not have.

        Raises:
            LocalProtocolError: No copy is being made.
        """
        self._check(LogState.COPYING)
        self.state = LogState.PAIRED

    def to_ship(self, max_entries: int, max_bytes: int) -> tuple[int, list[E]]:
        """Return the next entries that are not on their way, and the number of the first.

        They are on their way from now on.
        """
        first, batch, total = self.shipped + 1, list[E](), 0
        for entry, nbytes in itertools.islice(self._kept, self.shipped - self.taken, None):
            if batch and (len(batch) >= max_entries or total + nbytes > max_bytes):
                break
            batch.append(entry)
            total += nbytes
        self.shipped += len(batch)
        return first, batch

    def note_taken(self, number: int) -> None:
        """The backup has all entries up to this one, which was shipped."""
        while self._kept and self.taken < number:
            self._kept_bytes -= self._kept.popleft()[1]
            self.taken += 1

    def give_up(self) -> None:
        """There is no backup any more: go on alone. A deposed primary stays one."""
        if self.state is not LogState.DEPOSED:
            self.state = LogState.ALONE
        self._kept.clear()
        self._kept_bytes = 0

    def depose(self) -> None:
        """Another one is the primary from now on."""
        self.give_up()
        self.state = LogState.DEPOSED

    def _check(self, expected: LogState) -> None:
        if self.state is not expected:
            raise LocalProtocolError(f"{self._task} is {self.state.value}, not {expected.value}")


def chained(chain: int, client: tuple[str, int], header: bytes, nbytes: int) -> int:
    """Return the checksum over the entries of a log with one more; of its body, the length."""
    task, incarnation = client
    start = b"%d %d %b" % (incarnation, nbytes, task.encode())
    return zlib.crc32(header, zlib.crc32(start, chain))


# Whether a backup is what its primary is: checks in the log.

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

    Attributes:
        chain: Over the entries that went over, see ``chained``; whoever ships one goes on with it.
    """

    def __init__(self, task: str, digest: Callable[[], bytes]) -> None:
        self._task = task
        self._digest = digest
        self._number = 0  # of the last check in the log
        self._left = CHECK_EVERY  # entries until the next one
        self._digests: dict[int, bytes] = {}  # of the last two that were executed
        self.chain = 0

    def due(self) -> CheckState | None:
        """Return the check that comes before the next entry; None: it is not time yet."""
        self._left -= 1
        if self._left > 0 or self._number not in (0, *self._digests):
            return None
        self._left = CHECK_EVERY
        self._number += 1
        return CheckState(self._number, self._digests.get(self._number - 1, b""), self.chain)

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
