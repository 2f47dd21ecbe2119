"""Datasets of ray.data for workers, block by block; see ``psync.integrations.ray``.

A block stays in Ray's object store, and workers get a reference to it. It travels in psync's
messages, not in Ray's calls, so Ray is told to keep the block for as long as the process lives that
has made the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from psync.errors import ConfigurationError
from psync.specs import checked_integer
from psync.worker.data_sources import ArrayDataset, FileDataset


def dataset(
    data: Any,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    num_epochs: int | None = 1,
) -> FileDataset:
    """Return a Ray dataset's batches, block by block, for ``create_per_worker_dataset``.

    ``strategy.experimental_distribute_dataset`` gives each worker its own blocks; there should be
    some for each: ``data.repartition(4 * num_workers)``. The dataset is executed now. Its blocks
    stay in Ray's object store, spilled to disk if necessary, until this process ends. Ray computes
    a block again if it was lost with a node.

    Args:
        data: A ``ray.data.Dataset``.
        batch_size: Number of rows in a batch; the last one of a block may have fewer.
        shuffle_seed: Seed for shuffling the blocks in each epoch. None: in order. To shuffle rows,
            use Ray: ``data.random_shuffle()``.
        num_epochs: Number of passes over the rows; None: unlimited.

    Returns:
        A dataset whose batches are dicts of arrays by column, as of ``iter_batches``.

    Raises:
        UsageError: The dataset has no rows.
        ConfigurationError: A number is out of range, or ``data`` is not a Ray dataset.
        Exception: An error of Ray while it executed the dataset.

    Example:
        data = ray.data.read_parquet("s3://…").repartition(16)
        batches = strategy.experimental_distribute_dataset(dataset(data, 64, num_epochs=None))
        iterator = iter(coordinator.create_per_worker_dataset(batches))
    """
    if not hasattr(data, "to_numpy_refs"):
        raise ConfigurationError(f"data: expected a ray.data.Dataset, got {type(data).__name__}")
    blocks = [_Block(reference) for reference in data.to_numpy_refs()]
    reader = _Batches(
        checked_integer("batch_size: expected an integer of at least 1", batch_size, 1)
    )
    return FileDataset(blocks, reader, shuffle_seed=shuffle_seed, num_epochs=num_epochs)


class _Block:
    """A block of a dataset; it travels by reference, and outside of Ray's calls."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def load(self) -> Any:
        """Return the block: arrays by column. The arrays cannot be written."""
        # Not ray.get(), which warns that it blocks the actor's loop: it does not, in this thread.
        return self._reference.future().result()

    def __reduce__(self) -> tuple[Any, ...]:
        return _block, (ray.cloudpickle.dumps(self._reference),)


def _block(pickled: bytes) -> _Block:
    return _Block(ray.cloudpickle.loads(pickled))


@dataclass(frozen=True)
class _Batches:
    """Reads a block."""

    batch_size: int

    def __call__(self, block: _Block) -> Iterator[Any]:
        arrays = block.load()
        if not all(len(array) for array in arrays.values()):
            return iter(())
        return iter(ArrayDataset(arrays, self.batch_size))
