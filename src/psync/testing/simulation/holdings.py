"""The oracle of what was pulled: it stays as it is for as long as somebody holds it.

Workers hold the arrays of their last pulls, over updates of their own and of others, lost
connections and sessions. Where memory is shared these arrays may lie in that of a ps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from psync.testing.simulation.processes import Process, current_process
from psync.testing.simulation.workload.tables import Fault
from psync.wire.tensors import to_bytes_view

PULLS = 3
"""That a worker holds; the oldest goes first."""

_Pulled = list[tuple[np.ndarray, np.ndarray]]
"""Of each array, what it was."""


class Holdings:
    """What each process holds."""

    def __init__(self) -> None:
        self._pulls: weakref.WeakKeyDictionary[Process, deque[_Pulled]] = (
            weakref.WeakKeyDictionary()
        )

    def hold(self, arrays: Iterable[np.ndarray]) -> None:
        """The present process has pulled these."""
        process = current_process.get()
        if process is not None:
            pulls = self._pulls.setdefault(process, deque(maxlen=PULLS))
            pulls.append([(array, array.copy()) for array in arrays])

    def any_leased(self) -> bool:
        """Return whether the present process holds something that is a ps's memory."""
        return any(_is_leased(array) for array, _ in self._here())

    def faults(self) -> Iterator[Fault]:
        """Look at what the present process holds."""
        for array, then in self._here():
            if to_bytes_view(array) != to_bytes_view(then):
                yield ("held", f"an array that was pulled as {then.ravel()} became {array.ravel()}")

    def _here(self) -> _Pulled:
        process = current_process.get()
        if process is None or process.is_dead:
            return []
        return [pair for pull in self._pulls.get(process, ()) for pair in pull]


def _is_leased(array: np.ndarray) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, memoryview) and owner.readonly
