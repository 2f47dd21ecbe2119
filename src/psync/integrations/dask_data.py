"""Dask collections as datasets, partition by partition; see ``psync.integrations.dask``.

What travels to a worker is the graph of each partition. The worker computes it on the Dask cluster,
through the client of the Dask worker whose process it runs in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dask
import distributed
import numpy as np

from psync.errors import ConfigurationError, UsageError
from psync.integrations.dask_tasks import here_by_token
from psync.specs import checked_integer, plain_array
from psync.worker.data_sources import ArrayDataset, FileDataset


def dataset(
    data: Any,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    num_epochs: int | None = 1,
) -> FileDataset:
    """Return the batches of Dask collections, partition by partition.

    Pass it to ``create_per_worker_dataset``, or to ``strategy.experimental_distribute_dataset``,
    which gives each worker its own partitions. A worker computes a partition on the Dask cluster
    when it reaches it, and holds two at a time. Each epoch computes the partitions again, unless
    the collections are persisted (``data.persist()``).

    Args:
        data: A Dask array, whose chunks along axis 0 are the partitions; a tuple or a dict of such
            arrays with equal chunks along axis 0; or a dataframe, whose batches are dicts of arrays
            by column. Chunks along other axes are joined.
        batch_size: Number of rows in a batch; the last one of a partition may have fewer.
        shuffle_seed: Seed for shuffling the partitions in each epoch; None: in order.
        num_epochs: Number of passes over the rows; None: unlimited.

    Returns:
        A dataset whose batches have the structure of ``data``.

    Raises:
        UsageError: Arrays have other chunks along axis 0 than the first one.
        ConfigurationError: ``data`` is not a collection, or a number is out of range.

    Example:
        rows = dataset((x.rechunk((10_000, -1)), y.rechunk(10_000)), batch_size=64)
        batches = strategy.experimental_distribute_dataset(rows)
    """
    names: list[Any] | None = None
    if isinstance(data, Mapping):
        names, collections = list(data), list(data.values())
    else:
        collections = list(data) if isinstance(data, tuple) else [data]
    columns = [_partitions(each) for each in collections]
    if len({len(column) for column in columns}) > 1 or len({_chunks(c) for c in collections}) > 1:
        raise UsageError(
            "data: expected the same chunks along axis 0 in all arrays, got "
            f"{[_chunks(each) for each in collections]}",
            hint="x.rechunk({0: 10_000})",
        )
    partitions = [_Partition(parts) for parts in zip(*columns, strict=True)]
    reader = _Batches(
        checked_integer("batch_size: expected an integer of at least 1", batch_size, 1),
        tuple(names) if names is not None else None,
        isinstance(data, tuple),
    )
    return FileDataset(partitions, reader, shuffle_seed=shuffle_seed, num_epochs=num_epochs)


def _partitions(collection: Any) -> list[Any]:
    """Return a delayed value for each partition."""
    if not dask.is_dask_collection(collection) or not hasattr(collection, "to_delayed"):
        raise ConfigurationError(
            f"data: expected Dask arrays or a dataframe, got {type(collection).__name__}"
        )
    if hasattr(collection, "chunks"):
        if not collection.ndim:
            raise ConfigurationError("data: expected arrays of rows, got one of shape ()")
        collection = collection.rechunk({axis: -1 for axis in range(1, collection.ndim)})
    return list(np.ravel(np.asarray(collection.to_delayed(), dtype=object)))


def _chunks(collection: Any) -> tuple[Any, ...]:
    chunks = getattr(collection, "chunks", None)
    # Of unknown length (nan) they are compared when they are loaded.
    return () if chunks is None else tuple(map(str, chunks[0]))


@dataclass(frozen=True)
class _Partition:
    """One partition of each collection."""

    parts: tuple[Any, ...]

    def load(self) -> list[Any]:
        """Compute it on the Dask cluster."""
        client = _client()
        futures = client.compute(list(self.parts), sync=False)
        try:
            return list(client.gather(futures))
        finally:
            for future in futures:
                future.release()


@dataclass(frozen=True)
class _Batches:
    """Reads a partition."""

    batch_size: int
    names: tuple[Any, ...] | None
    is_tuple: bool

    def __call__(self, partition: _Partition) -> Iterator[Any]:
        values = [_arrays(value) for value in partition.load()]
        arrays: Any = tuple(values) if self.is_tuple else values[0]
        if self.names is not None:
            arrays = dict(zip(self.names, values, strict=True))
        first = values[0]
        rows = len(next(iter(first.values())) if isinstance(first, dict) else first)
        return iter(ArrayDataset(arrays, self.batch_size)) if rows else iter(())


def _arrays(value: Any) -> Any:
    """Return an array, or those of a dataframe's columns."""
    if hasattr(value, "columns"):
        return {name: value[name].to_numpy() for name in value.columns}
    return value.to_numpy() if hasattr(value, "to_numpy") else plain_array(value)


def _client() -> distributed.Client:
    """Return a client of the cluster, here on a Dask worker, or on the chief."""
    for here in list(here_by_token.values()):
        if here.context is not None:
            return here.context.copy().run(distributed.get_client)
    return distributed.get_client()
