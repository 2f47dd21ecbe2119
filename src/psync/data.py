"""Dataset helpers: batches from arrays and from files, shards that are visited once.

    psync.data.from_arrays((x, y), batch_size=32, shuffle_seed=7, num_epochs=None)
    psync.data.from_files(sorted(glob.glob("*.npz")), read)

What they return is a dataset: ``create_per_worker_dataset`` gives the whole of it to each worker,
``strategy.experimental_distribute_dataset`` a share. It can be iterated over anywhere, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psync.api.data_shards import Visits as Visits
from psync.closures.shard_epochs import EpochAccount as EpochAccount
from psync.worker.data_sources import ArrayDataset as ArrayDataset
from psync.worker.data_sources import FileDataset as FileDataset

__all__ = ["ArrayDataset", "EpochAccount", "FileDataset", "Visits", "from_arrays", "from_files"]


def from_arrays(
    arrays: Any,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    drop_remainder: bool = False,
    num_epochs: int | None = 1,
) -> ArrayDataset:
    """Return the batches of arrays that belong together, row by row.

    Args:
        arrays: An array, or a tuple, named tuple or dict of them, with the same number of rows
            (axis 0). A list is one array: it is stacked. Every worker that reads the dataset
            gets them all.
        batch_size: Rows in a batch.
        shuffle_seed: Shuffles the rows in each epoch, and in another order on each worker where the
            whole is given to all. Where it is distributed, all follow one order, so that no row
            is given twice. None: no shuffling.
        drop_remainder: Whether the last batch is left out if it is smaller than the others.
        num_epochs: How often the rows come; None: for ever.

    Returns:
        A dataset whose batches have the structure of ``arrays``. They are copies.

    Raises:
        UsageError: The arrays differ in length, or have no rows.
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
        files: Their names, in the same order on every start. They are opened on the workers.
        reader: Called with a name, on a worker, in a thread; returns an iterable of batches, as a
            generator function does. It must not call psync.
        shuffle_seed: Shuffles the files in each epoch; None: in the order given.
        num_epochs: How often every file is read; None: for ever.

    Raises:
        UsageError: There is no file, or the reader is no plain function.
        ConfigurationError: A number is out of range.

    Source: ``tf.data.Dataset.from_tensor_slices(files).interleave(reader)``.
    """
    return FileDataset(files, reader, shuffle_seed=shuffle_seed, num_epochs=num_epochs)
