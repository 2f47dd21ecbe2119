"""Data files of checkpoints, written at once."""

from __future__ import annotations

from typing import Any

from psync.checkpoints.files import DataFile, Writer
from psync.checkpoints.manifest import Planned


def add_data(writer: Writer, name: str, *slices: tuple[Planned, Any]) -> None:
    """Write a data file with these slices, and make it part of a checkpoint."""
    planned = {each.label: (each.shape, each.dtype) for each, _ in slices}
    with DataFile(writer.temporary / name, planned) as file:
        for _, values in slices:
            file.write(values)
        size, places = file.close()
    made = [each.slice_in(name, at) for (each, _), at in zip(slices, places, strict=True)]
    writer.add_file(name, size, made)
