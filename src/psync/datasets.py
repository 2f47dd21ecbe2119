"""Per-worker datasets: every worker reads its own.

Layer: L4. Imports: errors, context, functions, runtime.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

from psync.context import current_closure
from psync.errors import UsageError
from psync.functions import Function
from psync.runtime import IteratorHandle

_numbers = itertools.count(1)
_PROCESS = os.urandom(4).hex()


class PerWorkerDataset:
    """A dataset function that every worker calls for itself.

    Iterating over it makes iterators on all workers: ``iter(dataset)`` returns one handle,
    which steps take as an argument (or capture) and call ``next`` on. Each ``iter`` starts the
    data anew. Made by ``ClusterCoordinator.create_per_worker_dataset``.

    Source: ``tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset``.
    """

    __psync_capture_error__ = "pass iter(dataset), the iterator, to steps"

    def __init__(
        self, function: Function, num_workers: int, release: Callable[[str], None]
    ) -> None:
        self._function = function
        self._num_workers = num_workers
        self._release = release

    def __iter__(self) -> PerWorkerIterator:
        if current_closure() is not None:
            raise UsageError(
                "iter() on a per-worker dataset inside a step",
                hint="call iter(dataset) on the coordinator and pass the iterator to the step",
            )
        uid = f"{_PROCESS}-{next(_numbers)}"
        iterator = PerWorkerIterator(uid, self._function, self._num_workers)
        weakref.finalize(iterator, self._release, uid).atexit = False
        return iterator


class PerWorkerIterator(IteratorHandle):
    """The coordinator's handle of an iterator on each worker; released when it is dropped.

    A closure or step function that carries it keeps it: see ``payloads``.
    """

    __psync_kept__ = True

    def __init__(self, uid: str, function: Function, num_workers: int) -> None:
        super().__init__(uid, function.key, num_workers)
        self._function = function  # workers may ask for it as long as this lives

    def __next__(self) -> Any:
        """Return the next element of the worker that runs this step; see ``IteratorHandle``."""
        return super().__next__()
