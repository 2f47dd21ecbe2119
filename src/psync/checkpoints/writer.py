"""The writer of one checkpoint: files by ps tasks or program, then manifest, COMMIT, rename.

The program makes a directory that ends in ``.tmp``. ps tasks that see it write their files there
themselves; the program writes the others. Then come the manifest, ``COMMIT`` and the rename, from
which on the checkpoint exists.

    dies while a checkpoint is written    left behind
    the program, before the rename        earlier checkpoints; a ``.tmp`` that the next save removes
    the program, after it                 the new one, complete
    a ps, or the connection to it         nothing; another cut is taken when the ps is there again
    the disk is full                      nothing; ``save`` raises, the ps goes on

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psync.checkpoints.disk import current_disk
from psync.checkpoints.files import (
    COMMIT,
    MANIFEST,
    DataFile,
    disk_errors,
    write_synced,
)
from psync.checkpoints.manifest import (
    Manifest,
    Place,
    Planned,
    Slice,
    Snapshot,
    Tensor,
    commit_line,
)
from psync.errors import CheckpointError, ConfigurationError

NONCE = "nonce"
"""A file that is there until the checkpoint is complete: who can read it shares the directory."""

STREAM_VARIABLE = "PSYNC_CHECKPOINT_STREAM"


def streamed_by_environ(environ: Mapping[str, str]) -> bool:
    """Return whether ps tasks are to write nothing: ``PSYNC_CHECKPOINT_STREAM`` is 1.

    Raises:
        ConfigurationError: It is anything but 0 or 1.
    """
    value = environ.get(STREAM_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{STREAM_VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1"


@dataclass(slots=True)
class Writer:
    """A checkpoint that is being written.

    Args:
        directory: Of all checkpoints; made if it is not there.
        name: Of this one: "ckpt-00000012".
        number: Of the save.
        tensors: Whole shape and dtype of each tensor.
        states: Of objects without tensors.
        nonce: What to put into a file by which ps tasks see whether they share the directory; "":
            they are not asked to write.

    Raises:
        CheckpointError: There is one of this name; or the disk is full, or fails.
    """

    directory: Path
    name: str
    number: int
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""
    _files: list[DataFile] = field(default_factory=list)
    _sizes: dict[str, int] = field(default_factory=dict)  # of complete files
    _slices: list[tuple[str, Slice]] = field(default_factory=list)  # in them, by tensor
    _snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by ps

    def __post_init__(self) -> None:
        with disk_errors(f"making {self.temporary}"):
            with contextlib.suppress(
                FileNotFoundError, NotADirectoryError
            ):  # not Path.exists, which
                (self.directory / self.name).stat()  # takes what cannot be read for absent
                raise CheckpointError(f"{self.directory / self.name}: already exists")
            self._throw_away()  # what a save has left that was interrupted
            current_disk.get().make_directory(self.temporary)
            if self.nonce:
                self._put_nonce()

    @property
    def temporary(self) -> Path:
        """The directory in which files are written."""
        return self.directory / f"{self.name}.tmp"

    def _put_nonce(self) -> None:
        try:
            write_synced(self.temporary / NONCE, self.nonce.encode())
        except BaseException:  # nobody has this writer yet, who could abandon it
            self.abandon()
            raise

    def remove_nonce(self) -> None:
        """Remove that file."""
        with contextlib.suppress(OSError):
            current_disk.get().unlink(self.temporary / NONCE)

    def data_file(self, name: str, planned: Sequence[Planned]) -> DataFile:
        """Begin a data file.

        Raises:
            CheckpointError: It cannot be written.
        """
        made = DataFile(self.temporary / name, planned)
        self._files.append(made)
        return made

    def add_file(self, name: str, size: int, slices: Sequence[tuple[str, Slice]]) -> None:
        """Note a data file that somebody else has completed; ``commit`` looks whether it is there.

        Args:
            name: In the directory.
            size: In bytes, as its writer says.
            slices: What lies in it of tensors, with their names.
        """
        self._sizes[name] = size
        self._slices += slices

    def add_snapshot(
        self, ps: int, name: str, state: bytes, data: str, places: list[Place]
    ) -> None:
        """Write the state of what a ps holds.

        Args:
            ps: Its index.
            name: Of the file that is made.
            state: What is in it.
            data: Name of the file with its arrays.
            places: Of these.

        Raises:
            CheckpointError: The disk is full, or fails.
        """
        with disk_errors(f"writing {self.temporary / name}"):
            write_synced(self.temporary / name, state)
        self._sizes[name] = len(state)
        self._snapshots[ps] = Snapshot(name, zlib.crc32(state), data, tuple(places))

    def commit(self) -> Path:
        """Complete the checkpoint and return its path; from here on it exists.

        Raises:
            CheckpointError: The disk is full, or fails; nothing that was there before has changed.
        """
        data = self._manifest().to_bytes()
        final = self.directory / self.name
        self.remove_nonce()
        with disk_errors(f"writing {final}"):
            write_synced(self.temporary / MANIFEST, data)
            self._mark_complete(data)
            self._look_at_files()  # only now: a machine that dies no longer takes a name with it
            self._rename_to(final)
        return final

    def _mark_complete(self, manifest: bytes) -> None:
        write_synced(self.temporary / COMMIT, commit_line(manifest))
        current_disk.get().sync_directory(self.temporary)

    def _rename_to(self, final: Path) -> None:
        disk = current_disk.get()
        disk.rename(self.temporary, final)
        disk.sync_directory(self.directory)

    def _look_at_files(self) -> None:
        """Refuse a checkpoint of which somebody else's file is not what it was said to be."""
        for name, size in self._sizes.items():
            path = self.temporary / name
            with disk_errors(f"looking at {path}"):
                found = path.stat().st_size
            if found != size:
                raise CheckpointError(
                    f"{path}: {size} bytes were written by the ps, {found} are visible here"
                )

    def _manifest(self) -> Manifest:
        sizes = {**self._sizes, **{file.path.name: file.close() for file in self._files}}
        slices: dict[str, list[Slice]] = {name: [] for name in self.tensors}
        for tensor, piece in itertools.chain(self._slices, *(file.slices for file in self._files)):
            if tensor in slices:  # others are parts of snapshots
                slices[tensor].append(piece)
        return Manifest(
            self.number,
            {
                name: Tensor(name, shape, dtype, tuple(sorted(slices[name])))  # by their offsets
                for name, (shape, dtype) in self.tensors.items()
            },
            self.states,
            sizes,
            tuple(self._snapshots[ps] for ps in sorted(self._snapshots)),
        )

    def abandon(self) -> None:
        """Throw away what was written."""
        for data_file in self._files:
            data_file.abandon()
        with contextlib.suppress(OSError):
            self._throw_away()

    def _throw_away(self) -> None:
        """Remove the directory; a ps that is about to make a file in it cannot any more.

        Raises:
            OSError: It is still there.
        """
        doomed = self.directory / f"{self.name}.abandoned.tmp"
        disk = current_disk.get()
        disk.remove_tree(doomed)
        with contextlib.suppress(FileNotFoundError):
            disk.rename(self.temporary, doomed)
        disk.remove_tree(doomed)
