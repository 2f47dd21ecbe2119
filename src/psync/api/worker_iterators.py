"""What the program asks workers about the iterators of per-worker datasets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from psync.api.datasets import PerWorkerDataset, PerWorkerIterator, capture_dataset
from psync.api.distributed_datasets import DistributedDataset
from psync.coordinator import Coordinator
from psync.wire.worker_messages import AskPosition, IteratorPosition, ReleaseIterators


class WorkerIterators:
    """The way of per-worker datasets to the workers of a coordinator.

    Args:
        running: Returns the coordinator, for an operation that it names; raises if there is none.
        present: Returns the coordinator, or None if there is none; in any thread. It must not
            keep it: the interpreter itself holds this as long as there is an iterator.
    """

    def __init__(
        self, running: Callable[[str], Coordinator], present: Callable[[], Coordinator | None]
    ) -> None:
        self._running = running
        self._present = present

    def dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Return a dataset of which every worker reads its own.

        Raises:
            UsageError: It is made of nothing that can be one.
            CaptureError: It captures or holds something that cannot be sent.
            ClosedError: The coordinator is not running.
        """
        coordinator = self._running("create_per_worker_dataset")
        captured, function = capture_dataset(dataset_fn, coordinator.functions)
        num_workers = len(coordinator.links.workers.names())
        if isinstance(dataset_fn, DistributedDataset):
            num_workers = dataset_fn.num_workers
        release = functools.partial(_release, self._present)
        return PerWorkerDataset(captured, function, num_workers, release, self._positions)

    async def _positions(self, iterator: PerWorkerIterator) -> dict[int, int]:
        coordinator = self._running("positions")
        answers = await coordinator.ask_workers(AskPosition(iterator.uid))
        positions = {}
        workers = coordinator.links.workers.names()[: iterator.num_pipelines]
        for place, worker in enumerate(workers):
            positions[place] = iterator.starts.get(place, 0)
            answer = answers.get(worker)
            if isinstance(answer, IteratorPosition) and answer.position >= 0:
                positions[place] = answer.position
        return positions


def _release(present: Callable[[], Coordinator | None], uid: str) -> None:
    # The garbage collector may call this, in any thread and in the middle of anything.
    coordinator = present()
    if coordinator is not None:
        coordinator.call_soon(lambda: coordinator.broadcast(ReleaseIterators([uid])))
