"""Reports about checkpoints, for people and for programs: lists, differences, exports.

Everything here blocks, and needs no cluster.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psync.checkpoints.files import DataFile, Reader, check_places, disk_errors
from psync.checkpoints.manifest import Tensor
from psync.errors import CheckpointError, CheckpointNotFound
from psync.status.units import bytes_text

CHUNK_BYTES = 32 << 20
"""Of a tensor that is compared or exported, in memory at once."""

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor or a state differs between two checkpoints."""

    name: str
    what: str  # "only in the first", "only in the second", "shape", "dtype", "values" or "state"
    largest: float = (
        0.0  # absolute difference of elements, if values differ; NaN: no number has one
    )
    changed: int = 0  # elements that differ

    def __str__(self) -> str:
        sizes = f": {self.changed} elements, by {self.largest:.4g} at most" if self.changed else ""
        return f"{self.name}  {self.what}{sizes}"


def summary(path: Path) -> str:
    """Return a line about a checkpoint: name, number, tensors, bytes, date."""
    manifest = Reader(path).manifest
    nbytes = sum(manifest.files.values())
    with disk_errors(f"looking at {path}"):
        saved = np.datetime64(int(path.stat().st_mtime), "s")
    return (
        f"{path.name}  {len(manifest.tensors)} tensors  {len(manifest.states)} states  "
        f"{bytes_text(nbytes)}  {saved}"
    )


def inspection(path: Path) -> list[str]:
    """Return a line for each tensor, state and snapshot of a checkpoint; check every byte of it.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    reader = Reader(path)
    lines = []
    for tensor in reader.manifest.tensors.values():
        reader.check(tensor)
        shards = f"  {len(tensor.slices)} slices" if len(tensor.slices) > 1 else ""
        nbytes = tensor.rows * tensor.row_bytes
        lines.append(
            f"{tensor.name}  {tensor.dtype}{list(tensor.shape)}  {bytes_text(nbytes)}{shards}"
        )
    for name, state in reader.manifest.states.items():
        text = json.dumps(state)
        lines.append(f"{name}  {text if len(text) <= 100 else text[:97] + '...'}")
    for stored in reader.snapshots():
        check_places(stored)
        nbytes = sum(place.nbytes for place in stored.places)
        lines.append(f"{stored.file.name}  all that a ps held, to recover it  {bytes_text(nbytes)}")
    unknown = reader.manifest.files.keys() - reader.manifest.headers.keys()
    return lines + [
        f"{name}  saved by an earlier psync, without a checksum of its header"
        for name in sorted(unknown)
        if name.endswith(".safetensors")
    ]


def differences(first: Path, second: Path) -> list[Difference]:
    """Return what differs between two checkpoints: tensors by name, then states by name.

    NaN equals NaN.

    Raises:
        CheckpointError: One of them is none, or is damaged.
    """
    one, other = Reader(first), Reader(second)
    tensors, others = one.manifest.tensors, other.manifest.tensors
    found = _only_in_one(tensors, others)
    for name in tensors.keys() & others.keys():
        here, there = tensors[name], others[name]
        if here.shape != there.shape:
            found.append(Difference(name, "shape"))
        elif here.dtype != there.dtype:
            found.append(Difference(name, "dtype"))
        else:
            found += _compared(one, here, other, there)
    states, their_states = one.manifest.states, other.manifest.states
    changed = _only_in_one(states, their_states)
    for name in states.keys() & their_states.keys():
        # As texts NaN equals NaN, and the order of keys is nothing that was saved.
        texts = [json.dumps(each[name], sort_keys=True) for each in (states, their_states)]
        if texts[0] != texts[1]:
            changed.append(Difference(name, "state"))
    return [each for part in (found, changed) for each in sorted(part, key=lambda d: d.name)]


def _only_in_one(first: Collection[str], second: Collection[str]) -> list[Difference]:
    return [
        *(Difference(name, "only in the first") for name in first if name not in second),
        *(Difference(name, "only in the second") for name in second if name not in first),
    ]


def _compared(one: Reader, here: Tensor, other: Reader, there: Tensor) -> list[Difference]:
    largest, changed = math.nan, 0
    for a, b in zip(_chunks(one, here), _chunks(other, there), strict=True):
        if not np.array_equal(a, b):
            gaps = _gaps(a, b)
            changed += len(gaps)
            largest = float(np.fmax.reduce(gaps, initial=largest))
    return [Difference(here.name, "values", largest, changed)] if changed else []


def _gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the absolute differences, as float64, of the elements that differ."""
    if a.dtype.kind in "biu":  # float64 does not tell all of them apart
        differs = a != b
        # Those of int64 are right modulo 2**64, in which they have room.
        low, high = (f(a, b)[differs].astype(np.uint64) for f in (np.minimum, np.maximum))
        gaps: np.ndarray = (high - low).astype(np.float64)
        return gaps
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        gaps = np.abs(x - y)[differs]
    return gaps


def export(
    path: Path, directory: Path, *, prefixes: Sequence[str] = (), max_file_bytes: int = 5 << 30
) -> list[Path]:
    """Write tensors of a checkpoint as plain safetensors, each one whole in one file.

    "/" in names becomes ".", as other programs expect. More than one file comes with an index that
    Hugging Face tools read.

    Args:
        path: Of the checkpoint.
        directory: Which is made, and must not have been there.
        prefixes: Names or beginnings of names, up to a "/", of what is exported, such as "model";
            they are left out of the names. Default: everything, under its whole name.
        max_file_bytes: A file that has as much is followed by another.

    Returns:
        What was written.

    Raises:
        CheckpointNotFound: There is no checkpoint, or nothing in it that is wanted.
        CheckpointError: It is damaged, two tensors get one name, or the disk is full.
    """
    reader = Reader(path)
    wanted = _renamed(reader, prefixes)
    place = Path(os.path.abspath(directory))  # "." and "/" have no name
    with disk_errors(f"export to {directory}"):
        if place.exists():
            raise CheckpointError(f"export: {directory} exists already")
        if not place.parent.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".psync-export-", dir=place.parent) as temporary:
            made = Path(temporary, place.name)
            made.mkdir()  # with the permissions of any other; the one around it is private
            names = _write_files(reader, wanted, made, max_file_bytes)
            os.rename(made, place)
    return [directory / name for name in names]


def _renamed(reader: Reader, prefixes: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors to export, by their new names."""
    wanted: dict[str, Tensor] = {}
    for name, tensor in reader.manifest.tensors.items():
        for prefix in prefixes or ("",):
            stem = prefix.strip("/")
            if stem == name:
                short = name.rpartition("/")[2]
            elif not stem or name.startswith(f"{stem}/"):
                short = name.removeprefix(f"{stem}/").replace("/", ".")
            else:
                continue
            if wanted.setdefault(short, tensor) is not tensor:
                raise CheckpointError(
                    f"export: two tensors would be called {short!r}",
                    hint="export fewer prefixes at once",
                )
    if not wanted:
        raise CheckpointNotFound(
            f"{reader.path}: no tensor begins with {', '.join(prefixes) or 'anything'}",
            hint=f"there are {', '.join(list(reader.manifest.tensors)[:10])}",
        )
    return wanted


def _write_files(
    reader: Reader, wanted: dict[str, Tensor], directory: Path, max_file_bytes: int
) -> list[str]:
    groups: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in wanted.items():
        nbytes = tensor.rows * tensor.row_bytes
        if not groups or nbytes > room:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = tensor
        room -= nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        one = len(groups) == 1
        file = (
            "model.safetensors" if one else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        planned = {name: (tensor.shape, tensor.dtype) for name, tensor in group.items()}
        with DataFile(directory / file, planned) as data_file:
            for tensor in group.values():
                data_file.write(_chunks(reader, tensor))
            data_file.close()
        weight_map.update(dict.fromkeys(group, file))
    names = sorted(set(weight_map.values()))
    if len(groups) > 1:
        total = sum(tensor.rows * tensor.row_bytes for tensor in wanted.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
        names.append(INDEX)
    return names


def _chunks(reader: Reader, tensor: Tensor) -> Iterator[np.ndarray]:
    """Yield a tensor in pieces of whole rows."""
    step = max(1, CHUNK_BYTES // max(1, tensor.row_bytes))
    for start in range(0, tensor.rows, step):
        yield reader.read(tensor, start, min(start + step, tensor.rows))
