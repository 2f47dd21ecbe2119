"""Data files of checkpoints, written at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from psync.checkpoints.files import DataFile, Writer
from psync.checkpoints.manifest import Slice
from psync.specs import dtype_name


def add_data(writer: Writer, name: str, *slices: tuple[str, int, Any]) -> None:
    """Write a data file with these slices, (tensor, first row, value); add it to a checkpoint."""
    values = [np.asarray(value) for *_, value in slices]
    planned = {
        f"{tensor}@{row}": (value.shape, dtype_name(value.dtype))
        for (tensor, row, _), value in zip(slices, values, strict=True)
    }
    with DataFile(writer.temporary / name, planned) as file:
        for value in values:
            file.write(iter([value[:1], value[1:]]) if value.ndim else value)
        written = file.close()
    rows = [value.shape[0] if value.ndim else 1 for value in values]
    made = [
        (tensor, Slice(row, count, name, *place))
        for (tensor, row, _), count, place in zip(slices, rows, written.places, strict=True)
    ]
    writer.add_file(name, written, made)
