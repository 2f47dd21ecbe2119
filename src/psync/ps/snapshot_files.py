"""Snapshot arrays in files: written with checksums, read back and checked.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from pathlib import Path

from psync.checkpoints.files import DataFile, current_disk, disk_errors
from psync.checkpoints.manifest import Place, Planned
from psync.errors import CheckpointCorrupt, CheckpointError
from psync.store.snapshot import Frozen, Loaded


def write_items(
    path: Path, frozen: Frozen, items: Sequence[tuple[int, str]]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Write items to a new file, and let go of each block once it is written.

    Args:
        path: Of a safetensors file.
        frozen: Holds them.
        items: (place in the state, name in the file) of each, in the order that they get there.

    Returns:
        The size of the file, which is on the disk then, and of each item the first byte, bytes
        and crc32.

    Raises:
        CheckpointError: The file is there already, the disk is full, or fails; or an item is not
            held any more. Then there is no such file.
    """
    known = frozen.state.items
    unknown = [place for place, _ in items if not 0 <= place < len(known)]
    if unknown:
        raise CheckpointError(f"{path}: there is no item {unknown[0]} in the snapshot")
    planned = [
        Planned(name, known[place].shape, known[place].dtype, 0, name) for place, name in items
    ]
    file = DataFile(path, planned)
    try:
        for place, _ in items:
            file.write(frozen.letting_go(place))
        size = file.close()
    except BaseException:
        file.abandon()
        with contextlib.suppress(OSError):
            current_disk.get().unlink(path)
        raise
    return size, [(piece.start, piece.nbytes, piece.crc32) for _, piece in file.slices]


def read_items(path: Path, loaded: Loaded, places: Sequence[Place]) -> None:
    """Fill the items that are wanted from a file.

    Args:
        path: Of the file.
        loaded: Is filled.
        places: Where items lie in the file; those that are constant, and need no bytes, are
            passed over.

    Raises:
        CheckpointCorrupt: A checksum or a size is wrong, or an item is not in the file; names it.
        CheckpointError: The file cannot be read, or another snapshot is to be loaded instead.
    """
    wanted = set(loaded.wanted())
    with disk_errors(f"reading {path}"), open(path, "rb") as file:
        for place, start, nbytes, crc32 in places:
            if place not in wanted:
                continue
            item, crc = loaded.state.items[place], 0
            if nbytes != item.nbytes:
                raise CheckpointCorrupt(
                    f"{path}: {item}: expected {item.nbytes} bytes, got {nbytes}"
                )
            file.seek(start)
            for memory in loaded.memory(place):
                file.readinto(memory)
                crc = zlib.crc32(memory, crc)
            if crc != crc32:  # also where the file has ended before
                raise CheckpointCorrupt(
                    f"{path}: {item}: expected checksum {crc32:08x}, got {crc:08x}",
                    hint="use an older checkpoint; this one was changed or damaged after saving",
                )
    for place in loaded.wanted():
        raise CheckpointCorrupt(f"{path}: {loaded.state.items[place]} is not in the file")


def has_text(path: Path, text: str) -> bool:
    """Return whether there is a file that holds this text and no more."""
    expected = text.encode()
    try:
        if not path.is_file() or path.stat().st_size != len(expected):
            return False
        with open(path, "rb") as file:
            return file.read(len(expected)) == expected
    except OSError:
        return False
