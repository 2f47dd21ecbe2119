"""Per-worker datasets: every worker reads its own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from psync.api.distributed_datasets import DistributedDataset, element_spec_of, refuse_variables
from psync.client.context import current_closure
from psync.client.runtime import IteratorHandle
from psync.errors import CaptureError, ConfigurationError, ContextError
from psync.net.platform import random_hex
from psync.net.process_state import PerProcess
from psync.serialization.captures import type_name
from psync.serialization.functions import Function, FunctionTable
from psync.serialization.payloads import pack
from psync.worker.data_sources import Dataset, IterableDataset, Sharded, dataset_of

_numbers = PerProcess(lambda: itertools.count(1))


class PerWorkerDataset:
    """A dataset that every worker reads for itself.

    Iterating over it makes iterators on all workers: ``iter(dataset)`` returns one handle,
    which steps take as an argument (or capture) and call ``next`` on. Each ``iter`` starts the
    data anew. Made by ``ClusterCoordinator.create_per_worker_dataset``.

    Source: ``tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset``.
    """

    __psync_capture_error__ = "pass iter(dataset), the iterator, to steps"

    def __init__(
        self,
        dataset_fn: Callable[..., Any],
        function: Function,
        num_workers: int,
        release: Callable[[str], None],
        ask: Callable[[PerWorkerIterator], Awaitable[dict[int, int]]],
    ) -> None:
        self._dataset_fn = dataset_fn
        self._function = function
        self._num_workers = num_workers
        self._release = release
        self._ask = ask

    def __iter__(self) -> PerWorkerIterator:
        return self.iterator()

    def iterator(self, position: int | Mapping[int, int] = 0) -> PerWorkerIterator:
        """Return a new iterator, as ``iter`` does, that need not begin at the beginning.

        What comes before is loaded and thrown away. A worker that is lost and comes back
        begins there again.

        Args:
            position: Batches that come before the first: one number for all workers, or what
                ``PerWorkerIterator.positions`` returned; a worker that is not in it begins at 0.

        Raises:
            ConfigurationError: It is none, or of a worker that is not in the cluster.
            ContextError: Inside a step.
        """
        if current_closure() is not None:
            raise ContextError(
                "iter() on a per-worker dataset inside a step",
                hint="call iter(dataset) on the coordinator and pass the iterator to the step",
            )
        uid = f"{random_hex(4)}-{next(_numbers())}"
        starts = _checked(position, self._num_workers)
        iterator = PerWorkerIterator(uid, self._function, self._num_workers, starts, self._ask)
        weakref.finalize(iterator, self._release, uid).atexit = False
        return iterator

    def build(self) -> DistributedDataset:
        """Return the dataset without iterators: a step that gets it iterates over it itself.

        Source: ``build`` of TensorFlow's per-worker datasets.
        """
        return DistributedDataset(self._dataset_fn, self._num_workers, None)

    @property
    def element_spec(self) -> Any:
        """What batches look like: a nest of ``TensorSpec``; None if there are none.

        The first two batches of the first worker are loaded in this process to find out.

        Source: ``tf.distribute.DistributedDataset.element_spec``.
        """
        return element_spec_of(self._dataset_fn, self._num_workers)


class PerWorkerIterator(IteratorHandle):
    """The coordinator's handle of an iterator on each worker; released when it is dropped.

    A closure or step function that carries it keeps it: see ``payloads``.
    """

    __psync_kept__ = True

    def __init__(
        self,
        uid: str,
        function: Function,
        num_workers: int,
        starts: Mapping[int, int],
        ask: Callable[[PerWorkerIterator], Awaitable[dict[int, int]]],
    ) -> None:
        super().__init__(uid, function.key, num_workers, starts)
        self._function = function  # workers may ask for it as long as this lives
        self._ask = ask

    def __next__(self) -> Any:
        """Return the next element of the worker that runs this step; see ``IteratorHandle``."""
        return super().__next__()

    async def positions(self) -> dict[int, int]:
        """Return how many batches steps have been handed, for each ``get_worker_index()``.

        What is loaded ahead does not count. A worker that is not there, or has not needed the
        iterator yet, is where it began. Call it when no step is running, as after ``join``:
        a worker answers between steps, and what it hands out afterwards is not in the answer.

        Raises:
            ClosedError: The coordinator is not running.

        Cancellation: Safe.
        """
        return await self._ask(self)


def _checked(position: Any, num_workers: int) -> dict[int, int]:
    """Return positions by worker index, without those that are 0."""
    if not isinstance(position, Mapping):
        position = dict.fromkeys(range(num_workers), position)
    found: dict[int, int] = {}
    for key, count in position.items():
        # In JSON, keys are text.
        worker = int(key) if isinstance(key, str) and key.isdecimal() else key
        if worker not in range(num_workers):
            raise ConfigurationError(
                f"position: expected workers 0 to {num_workers - 1}, got {key!r}",
                hint="shards of data depend on the number of workers; begin without a position",
            )
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise ConfigurationError(
                f"position: expected a number of batches of at least 0, got {count!r}"
            )
        if count:
            found[int(worker)] = int(count)
    return found


def capture_dataset(source: Any, functions: FunctionTable) -> tuple[Callable[..., Any], Function]:
    """Return the dataset function that ``source`` stands for, and how it is sent to workers.

    Raises:
        ConfigurationError: It is no dataset, or one that a worker cannot read by itself,
            or a function that makes a variable.
        CaptureError: It holds something that cannot be sent; names it.
    """
    if isinstance(source, PerWorkerDataset | IteratorHandle):
        raise ConfigurationError(
            f"dataset: expected a dataset function or an iterable of batches, got a "
            f"{type_name(source)}, which is per worker already"
        )
    fn = source.dataset_fn if isinstance(source, DistributedDataset) else dataset_of(source)
    if not isinstance(fn, Dataset | Sharded):
        refuse_variables(fn)
    try:
        return fn, functions.register_dataset(fn)
    except CaptureError:
        if isinstance(fn, IterableDataset):  # which the user never sees
            pack(fn.iterable, subject="the dataset")
        raise
