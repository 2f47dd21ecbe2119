"""What a program was told before it scheduled a closure: the closure's pulls must have it.

Values may come with the answer to a push, long before they are pulled. Nobody may be able to tell:
so they must not be older than what the program knew when it scheduled the closure that pulls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from psync.testing.simulation.workload.tables import COUNTED, Fault


@dataclass(frozen=True)
class _Missing:
    """An update that a run did not see.

    A rollback may have undone it of which the program has not heard yet.

    Attributes:
        at_s: When the run pulled.
    """

    at_s: float
    message: str


class Told:
    """Of one life of a program: which calls surely count, in the order in which it was told."""

    def __init__(self) -> None:
        self._columns: dict[str, list[int]] = {}  # by table
        self._missing: list[_Missing] = []

    def so_far(self) -> Mapping[str, int]:
        """Return of how many calls it was told, by table."""
        return {table: len(columns) for table, columns in self._columns.items()}

    def hear(self, table: str, column: int, outcome: str) -> None:
        """A call of a closure that is done had this outcome."""
        if outcome in COUNTED:
            self._columns.setdefault(table, []).append(column)

    def look(self, table: str, marks: np.ndarray, known: int, closure: int) -> None:
        """A closure has pulled these marks.

        Args:
            table: Of the marks.
            marks: A column for each call.
            known: Of how many calls the program was told when it scheduled the closure.
            closure: Its number.
        """
        columns = self._columns[table][:known]
        if not (marks[:, columns] > 0).all():
            unseen = [column for column in columns if not (marks[:, column] > 0).all()]
            said = f"{table}: closure {closure} was scheduled after calls {unseen} had counted"
            now = asyncio.get_running_loop().time()
            self._missing.append(_Missing(now, f"{said}, and did not see them"))

    def faults(self, before_s: float) -> Iterator[Fault]:
        """Return what runs that pulled before this time did not see: nothing was rolled back."""
        for each in self._missing:
            if each.at_s < before_s:
                yield "old", each.message
