"""Data files of checkpoints, written at once."""

from __future__ import annotations

from typing import Any

from psync.checkpoints.files import DataFile, Writer
from psync.checkpoints.manifest import Planned


def add_data(writer: Writer, name: str, *slices: tuple[Planned, Any]) -> None:
    """Write a data file with these slices, and make it part of a checkpoint."""
    with DataFile(writer.temporary / name, [planned for planned, _ in slices]) as file:
        for _, values in slices:
            file.write(values)
        writer.add_file(name, file.close(), file.slices)
