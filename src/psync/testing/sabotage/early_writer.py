"""A checkpoint that is marked as complete from its beginning, for a test of what that leads to.

It bears its name and a valid COMMIT at once, and the manifest says of what is not written yet that
it is zero, as formats do whose missing chunks have a fill value. Each file that comes takes its
place. So whoever dies meanwhile leaves a checkpoint that every check passes, and that lacks
something: see ``switches``. What reads it is what always reads.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psync.checkpoints.files import (
    COMMIT,
    MANIFEST,
    DataFile,
    Writer,
    disk_errors,
    write_synced,
)
from psync.checkpoints.manifest import (
    Manifest,
    Place,
    Slice,
    Snapshot,
    Tensor,
    WrittenFile,
    commit_line,
)
from psync.specs import dtype_of

BLANK = "blank.safetensors"
"""Zeros in the place of everything."""


class EarlyWriter(Writer):
    """A writer that completes a checkpoint before anything is in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._marking = threading.Lock()
        blank = DataFile(self.temporary / BLANK, self.tensors)
        for shape, dtype in self.tensors.values():
            blank.write(np.zeros(shape, dtype_of(dtype)))
        self._sizes[BLANK], places, _ = blank.close()
        self._blanks = {name: start for name, (start, *_) in zip(self.tensors, places, strict=True)}
        self._mark()

    @property
    def temporary(self) -> Path:
        """The directory in which files are written: no other one than in the end."""
        return self.directory / self.name

    def add_file(
        self, name: str, written: WrittenFile, slices: Sequence[tuple[str, Slice]]
    ) -> None:
        """Note a data file, and say so in the manifest."""
        super().add_file(name, written, slices)
        self._mark()

    def add_snapshot(
        self, ps: int, name: str, state: bytes, data: str, places: list[Place]
    ) -> None:
        """Write the state of what a ps holds, and say so in the manifest."""
        super().add_snapshot(ps, name, state, data, places)
        self._mark()

    def commit(self) -> Path:
        """Put the last manifest in the place of those before."""
        self.remove_nonce()
        self._look_at_files()
        with disk_errors(f"writing {self.temporary}"):
            (self.temporary / BLANK).unlink()
        del self._sizes[BLANK]
        self._put(self._manifest())
        return self.temporary

    def _mark(self) -> None:
        """Say that the checkpoint is complete, with what is there now."""
        with self._marking:
            snapshots: list[Snapshot] = [self._snapshots[ps] for ps in sorted(self._snapshots)]
            self._put(
                Manifest(
                    self.number,
                    {
                        name: Tensor(name, shape, dtype, self._with_blanks(name, shape, dtype))
                        for name, (shape, dtype) in self.tensors.items()
                    },
                    self.states,
                    dict(self._sizes),
                    tuple(snapshots),
                )
            )

    def _with_blanks(self, name: str, shape: tuple[int, ...], dtype: str) -> tuple[Slice, ...]:
        """Return the slices of a tensor that are there, and zeros between them."""
        whole = Tensor(name, shape, dtype, ())
        covered: list[Slice] = []
        row = 0
        for piece in sorted(self._slices[name]):
            covered += self._zeros(whole, row, piece.offset)
            covered.append(piece)
            row = piece.offset + piece.rows
        return (*covered, *self._zeros(whole, row, whole.rows))

    def _zeros(self, tensor: Tensor, start: int, stop: int) -> list[Slice]:
        nbytes = (stop - start) * tensor.row_bytes
        if start == stop:
            return []
        at = self._blanks[tensor.name] + start * tensor.row_bytes
        return [Slice(start, stop - start, BLANK, at, nbytes, zlib.crc32(bytes(nbytes)))]

    def _put(self, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        with disk_errors(f"writing {self.temporary}"):
            for name, text in ((MANIFEST, data), (COMMIT, commit_line(data))):
                made = self.temporary / f"{name}.new"
                write_synced(made, text)
                made.rename(self.temporary / name)
