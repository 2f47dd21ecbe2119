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
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from psync.errors import FencedError, LocalProtocolError

E = TypeVar("E")


class LogState(enum.Enum):
    """How a primary stands to its backup."""

    ALONE = "alone"
    COPYING = "copying"
    PAIRED = "paired"
    DEPOSED = "deposed"


@dataclass(frozen=True, slots=True)
class Numbered(Generic[E]):
    """An entry in its place."""

    number: int
    entry: E
    nbytes: int


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
        self._kept: deque[Numbered[E]] = deque()  # that the backup does not have
        self._kept_bytes = 0
        self._shipped = 0  # up to this number they are on their way

    def append(self, entry: E, nbytes: int) -> int:
        """Give an entry its place, and return its number.

        Raises:
            FencedError: Another one is the primary now.
        """
        if self.state is LogState.DEPOSED:
            raise FencedError(f"{self._task} has been replaced by its backup")
        self.last += 1
        if self.state is not LogState.ALONE:
            self._kept.append(Numbered(self.last, entry, nbytes))
            self._kept_bytes += nbytes
            if self.state is LogState.COPYING and self._kept_bytes > self._max_kept:
                self.give_up()
        return self.last

    def may_judge(self, number: int) -> bool:
        """Return whether an entry is where it has to be before it is applied.

        Raises:
            FencedError: Another one is the primary now: it must not be applied here.
        """
        if self.state is LogState.DEPOSED:
            raise FencedError(f"{self._task} has been replaced by its backup")
        return self.state is not LogState.PAIRED or number <= self.taken

    def begin_copy(self) -> int:
        """Keep all entries from now on for a backup; return the number of the last before.

        Raises:
            LocalProtocolError: There is a backup, or another one is the primary now.
        """
        self._check(LogState.ALONE)
        self.state = LogState.COPYING
        self.taken = self._shipped = self.last
        return self.last

    def pair(self) -> None:
        """The copy is there: from now on nothing is applied that the backup does not have.

        Raises:
            LocalProtocolError: No copy is being made.
        """
        self._check(LogState.COPYING)
        self.state = LogState.PAIRED

    def to_ship(self, max_entries: int, max_bytes: int) -> list[Numbered[E]]:
        """Return the next entries that are not on their way; they are from now on."""
        batch: list[Numbered[E]] = []
        nbytes = 0
        for kept in self._kept:
            if kept.number <= self._shipped:
                continue
            if batch and (len(batch) >= max_entries or nbytes + kept.nbytes > max_bytes):
                break
            batch.append(kept)
            nbytes += kept.nbytes
        if batch:
            self._shipped = batch[-1].number
        return batch

    def note_taken(self, number: int) -> None:
        """The backup has all entries up to this one.

        Raises:
            LocalProtocolError: It cannot have them.
        """
        if number > self.last:
            raise LocalProtocolError(
                f"{self._task}: its backup has entry {number}, but there are only {self.last}"
            )
        self._shipped = max(self._shipped, number)  # it came over a connection that was lost
        self.taken = max(self.taken, number)
        while self._kept and self._kept[0].number <= number:
            self._kept_bytes -= self._kept.popleft().nbytes

    def ship_again(self) -> None:
        """What was on its way may be lost: ship all that the backup does not have."""
        self._shipped = self.taken

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
