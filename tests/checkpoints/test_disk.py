"""What is done to files of checkpoints goes through one object, which a simulation replaces."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from psync.checkpoints.disk import Disk, current_disk, regular
from psync.checkpoints.files import checkpoints_in, remove
from psync.checkpoints.manifest import Planned
from psync.checkpoints.writer import Writer


class Recorder(Disk):
    """Notes what is done, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def create(self, path: Path) -> BinaryIO:
        self.done.append(("create", path.name))
        return super().create(path)

    def sync(self, file: BinaryIO) -> None:
        self.done.append(("sync", Path(file.name).name))
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self.done.append(("sync_directory", path.name))
        super().sync_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        self.done.append(("rename", new.name))
        super().rename(old, new)

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            self.done.append(("remove_tree", path.name))
        super().remove_tree(path)


@pytest.fixture
def disk() -> Recorder:
    return Recorder()


def save(directory: Path) -> Path:
    writer = Writer(directory, "ckpt-00000001", 1, {"a": ((2,), "float32")})
    file = writer.data_file("data.safetensors", [Planned("a", (2,), "float32", 0)])
    file.write(np.zeros(2, np.float32))
    return writer.commit()


def test_all_that_is_in_a_checkpoint_is_synced_before_it_gets_its_name(
    tmp_path: Path, disk: Recorder
) -> None:
    token = current_disk.set(disk)
    try:
        save(tmp_path)
    finally:
        current_disk.reset(token)
    named = disk.done.index(("rename", "ckpt-00000001"))
    before = disk.done[:named]
    made = {name for what, name in before if what == "create"}
    assert made == {"data.safetensors", "manifest.json", "COMMIT"}
    assert {name for what, name in before if what == "sync"} == made
    assert before[-1] == ("sync_directory", "ckpt-00000001.tmp")
    assert disk.done[named + 1 :] == [("sync_directory", tmp_path.name)]


def test_one_that_is_removed_cannot_come_back_without_its_files(
    tmp_path: Path, disk: Recorder
) -> None:
    path = save(tmp_path)
    token = current_disk.set(disk)
    try:
        remove(path)
    finally:
        current_disk.reset(token)
    doomed = f"{path.name}.tmp"
    assert disk.done == [
        ("rename", doomed), ("sync_directory", tmp_path.name), ("remove_tree", doomed)
    ]  # fmt: skip
    assert checkpoints_in(tmp_path, "ckpt") == []


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="expected a regular file, got something else"):
            open(path, "rb", opener=regular)
    with open(tmp_path / "new", "wb", opener=regular) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
