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
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from psync.errors import FencedError, LocalProtocolError, PsyncError
from psync.wire.messages import CheckState

HEADER_WEIGHT = 8
"""What a byte of an entry's message counts, beside one of its body: a frame has room for few."""

CHECK_EVERY = 1024
"""Entries between two comparisons of a backup with its primary."""

Logged = tuple[str, int, bytes, int]
"""An entry, as ``LogEntries`` has it: whose it is, the message, how many segments its body has."""


class LogState(enum.Enum):
    """How a primary stands to its backup."""

    ALONE = "alone"
    COPYING = "copying"
    PAIRED = "paired"
    DEPOSED = "deposed"


class Diverged(PsyncError):
    """A backup is not what its primary is, though it has executed the same entries."""


class CommitLog:
    """The log of one primary. Single owner; never blocks.

    A backup is compared with its primary: of the entries that went over, and of what they made.
    Every ``CHECK_EVERY`` entries the primary logs a ``CheckState``. Executing it, both take a
    digest of the state that judging has made; the next one brings the primary's, and the checksum
    over all entries up to itself. A backup that differs is discarded, and made again
    (``backups.host``). A new comparison begins with each copy, on both sides.

    Args:
        task: Name of the ps, for messages.
        max_kept_bytes: Of entries that the backup does not have yet, while it is being made.

    Attributes:
        last: Number of the last entry.
        taken: The backup has all entries up to this number.
        shipped: Up to this number they are on their way.
        released: Up to this number they may be judged: those that the backup has once the two are
            paired, none once another one is the primary, else all.
        check_at: Before the entry with this number ``due`` may be.
        digest: Returns one of the state that judging has made, equal on both.
    """

    def __init__(self, task: str, max_kept_bytes: int) -> None:
        self.state = LogState.ALONE
        self.last = self.taken = self.shipped = self.check_at = 0
        self.released = sys.maxsize
        self.digest: Callable[[], bytes] = bytes
        self._task = task
        self._max_kept = max_kept_bytes
        # That the backup does not have, from the first after ``taken``, with what each counts.
        self._kept: deque[tuple[Logged, Sequence[memoryview], int]] = deque()
        self._kept_bytes = 0
        self._chain = 0  # over the entries that went over, see ``chained``
        self._check = 0  # number of the last check in the log
        self._digests: dict[int, bytes] = {}  # of the last two checks that were executed

    def append(self, client: tuple[str, int], header: bytes, body: Sequence[memoryview]) -> int:
        """Keep an entry for the backup that there is, or that is being made; return its number.

        Raises:
            FencedError: Another one is the primary now.
        """
        if self.state is LogState.DEPOSED:
            raise FencedError(f"{self._task} has been replaced by its backup")
        self.last += 1
        nbytes = sum(map(len, body))
        self._chain = chained(self._chain, client, header, nbytes)
        # Headers count more, as those of all entries of a message are one header.
        weight = nbytes + HEADER_WEIGHT * len(header)
        self._kept.append(((*client, header, len(body)), body, weight))
        self._kept_bytes += weight
        if self._kept_bytes > self._max_kept and self.state is LogState.COPYING:
            self.give_up()
        return self.last

    def begin_copy(self) -> int:
        """Keep all entries from now on for a backup; return the number of the last before.

        Raises:
            LocalProtocolError: There is a backup, or another one is the primary now.
        """
        self._move(LogState.ALONE, LogState.COPYING)
        self.taken = self.shipped = self.last
        self._chain, self._check, self._digests = 0, 0, {}
        self.check_at = self.last + CHECK_EVERY
        return self.last

    def pair(self) -> None:
        """The copy is there: from now on nothing is applied that the backup does not have.

        Raises:
            LocalProtocolError: No copy is being made.
        """
        self._move(LogState.COPYING, LogState.PAIRED)
        self.released = self.taken

    def to_ship(self, max_entries: int, max_bytes: int) -> tuple[list[Logged], list[memoryview]]:
        """Return the next entries that are not on their way, and the segments of all of them.

        They are on their way from now on.
        """
        entries, segments, total = list[Logged](), list[memoryview](), 0
        for entry, body, weight in itertools.islice(self._kept, self.shipped - self.taken, None):
            total += weight
            if entries and (len(entries) >= max_entries or total > max_bytes):
                break
            entries.append(entry)
            segments += body
        self.shipped += len(entries)
        return entries, segments

    def note_taken(self, number: int) -> None:
        """The backup has all entries up to this one, which was shipped."""
        while self._kept and self.taken < number:
            self._kept_bytes -= self._kept.popleft()[2]
            self.taken += 1
        if self.state is LogState.PAIRED:
            self.released = self.taken

    def give_up(self) -> None:
        """There is no backup any more: go on alone. A deposed primary stays one."""
        if self.state is not LogState.DEPOSED:
            self.state, self.released = LogState.ALONE, sys.maxsize
        self._kept.clear()
        self._kept_bytes = 0

    def depose(self) -> None:
        """Another one is the primary from now on."""
        self.give_up()
        self.state, self.released = LogState.DEPOSED, 0

    def _move(self, expected: LogState, to: LogState) -> None:
        if self.state is not expected:
            raise LocalProtocolError(f"{self._task} is {self.state.value}, not {expected.value}")
        self.state = to

    # Whether a backup is what its primary is: checks in the log.

    def due(self) -> CheckState | None:
        """Return the check that comes before the next entry; None: it is not time yet."""
        if self.last + 1 < self.check_at or self._check not in (0, *self._digests):
            return None
        self.check_at = self.last + 1 + CHECK_EVERY
        self._check += 1
        return CheckState(self._check, self._digests.get(self._check - 1, b""), self._chain)

    def execute(self, check: CheckState) -> None:
        """Take the digest of a check, and compare the one before.

        Raises:
            Diverged: They differ.
        """
        mine = self._digests.get(check.number - 1)
        self._digests = {check.number - 1: mine or b"", check.number: self.digest()}
        if mine is not None and check.last and mine != check.last:
            raise Diverged(
                f"{self._task}: its backup has diverged before check {check.number} of the log"
            )


def chained(chain: int, client: tuple[str, int], header: bytes, nbytes: int) -> int:
    """Return the checksum over the entries of a log with one more; of its body, the length."""
    task, incarnation = client
    start = b"%d %d %b" % (incarnation, nbytes, task.encode())
    return zlib.crc32(header, zlib.crc32(start, chain))
