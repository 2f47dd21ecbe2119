"""Dataset helpers: batches from arrays and from files, and shards that are visited exactly once.

    psync.data.from_arrays((x, y), batch_size=32, shuffle_seed=7, num_epochs=None)
    psync.data.from_files(sorted(glob.glob("*.npz")), read)

Both return a dataset. ``create_per_worker_dataset`` gives each worker the whole dataset, and
``strategy.experimental_distribute_dataset`` gives each worker a share. A program can also iterate
over it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psync.api.data_shards import Visits as Visits
from psync.closures.shard_epochs import EpochAccount as EpochAccount
from psync.worker.data_sources import ArrayDataset, FileDataset

__all__ = ["ArrayDataset", "EpochAccount", "FileDataset", "Visits", "from_arrays", "from_files"]


def from_arrays(
    arrays: Any,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    drop_remainder: bool = False,
    num_epochs: int | None = 1,
) -> ArrayDataset:
    """Return batches of arrays with the same number of rows.

    Args:
        arrays: An array, or a tuple, named tuple or dict of arrays, with the same number of rows
            (axis 0). A list is stacked into one array. Every worker that reads the dataset receives
            all arrays.
        batch_size: Rows in a batch.
        shuffle_seed: Seed of a new order of rows in each epoch; None: no shuffling. If each worker
            gets the whole dataset, each has a different order. If the dataset is distributed, all
            follow one order, so that no row is repeated.
        drop_remainder: Whether to omit the last batch if it is smaller than the others.
        num_epochs: Number of passes over the rows; None: endless.

    Returns:
        A dataset whose batches have the structure of ``arrays``. They are copies.

    Raises:
        UsageError: The arrays differ in length or have no rows.
        ConfigurationError: A number is out of range.

    Source: ``tf.data.Dataset.from_tensor_slices(…).shuffle(…).batch(…).repeat(…)``.
    """
    # A batch size of None, rows one by one, is for experimental_make_numpy_dataset.
    return ArrayDataset(
        arrays,
        0 if batch_size is None else batch_size,
        shuffle_seed=shuffle_seed,
        drop_remainder=drop_remainder,
        num_epochs=num_epochs,
    )


def from_files(
    files: Sequence[Any],
    reader: Callable[[Any], Any],
    *,
    shuffle_seed: int | None = None,
    num_epochs: int | None = 1,
) -> FileDataset:
    """Return the batches of all files, one file after the other.

    Args:
        files: Names of the files, in the same order on every start. They are opened on the workers.
        reader: Function from a name to an iterable of batches, such as a generator function. It
            runs on a worker in a thread and must not call psync.
        shuffle_seed: Seed of a new order of files in each epoch; None: the given order.
        num_epochs: Number of passes over the files; None: endless.

    Raises:
        UsageError: There are no files, or the reader is not a plain function.
        ConfigurationError: A number is out of range.

    Source: ``tf.data.Dataset.from_tensor_slices(files).interleave(reader)``.
    """
    return FileDataset(files, reader, shuffle_seed=shuffle_seed, num_epochs=num_epochs)
