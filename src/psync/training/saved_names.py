"""Name translation on restore: positions in lists, and checkpoints of earlier trainers.

Names are paths, and those through a list have a position in it, which says nothing of a variable
once the list has another order. So a ``Trainer`` calls what it finds below a list or tuple by the
variable's name, and ``Checkpoint(model=[w, b])`` finds it there. Earlier trainers called all
variables by their positions, "variables/0"; their names are told by what each ps held, which lies
in the same files, or by shapes that occur once. A guess could swap the values of two variables.

Slots and moving averages are called by the names of their variables. Those that the program did not
choose say only in which order variables were declared. So what belongs to a variable is looked for
under the name of the one that had its path.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from psync.api.pulls import leaves
from psync.api.variables import Handle
from psync.checkpoints.files import Reader, stored_snapshots
from psync.checkpoints.manifest import Manifest, Tensor
from psync.errors import CheckpointError, CheckpointMismatch
from psync.store.snapshot_state import SnapshotState
from psync.training.saved_objects import Contents

logger = logging.getLogger(__name__)

_REMEDY = (
    "or restore it once with psync.Checkpoint(variables=[…], optimizer=optimizer), the list in the "
    "order in which the trainer had it, and save trainer.checkpoint beside it"
)

_POSITION = re.compile(r"variables/\d+")
_STATES = frozenset({"optimizer/step", "history"})
"""Beside the variables, what only a trainer has saved under these names."""


def by_name(tree: Any) -> Any:
    """Return the variables in a nesting, as a checkpoint is to hold them: none by its position.

    Args:
        tree: As ``pull`` takes it.
    """
    if isinstance(tree, dict):
        return {key: by_name(item) for key, item in tree.items() if leaves(item)}
    if isinstance(tree, list | tuple):
        return {variable.name: variable for variable in leaves(tree)}
    return tree


def with_names_of(contents: Contents, reader: Reader) -> Manifest:
    """Return the manifest of a checkpoint, with tensors called as ``contents`` calls them.

    Raises:
        CheckpointMismatch: A trainer has saved variables by position, and nothing says which is
            which.
        CheckpointCorrupt: It is damaged.
        CheckpointError: It cannot be read.
    """
    tensors = reader.manifest.tensors
    missing = {path: each for path, each in contents.handles.items() if path not in tensors}
    found: dict[str, str] = {}  # names in the checkpoint → here
    for path, handle in missing.items():
        name = _below_list(path, handle.name)
        if name in tensors and name not in contents.arrays:
            found[name] = path
    if missing and not found and _STATES <= reader.manifest.states.keys():
        positions = [name for name in tensors if _POSITION.fullmatch(name)]
        found = _positions_of(positions, missing, reader)
    found |= _renamed(contents, {path: name for name, path in found.items()}, reader)
    if not found:
        return reader.manifest
    kept = {name: tensor for name, tensor in tensors.items() if name not in found}
    named = {name: replace(tensors[was], name=name) for was, name in found.items()}
    return replace(reader.manifest, tensors=kept | named)


def _renamed(contents: Contents, found: Mapping[str, str], reader: Reader) -> dict[str, str]:
    """Return the names here of what is called by a variable that has another name by now.

    Args:
        contents: What is declared here.
        found: Names in the checkpoint of what it calls otherwise than it is called here.
        reader: Of the checkpoint.
    """
    if not contents.by_variable:
        return {}
    try:
        names = _variable_names(reader)
    except CheckpointError as exc:  # what is asked for may be whole
        logger.warning("variable names in %s are unknown: %s", reader.path, exc.message)
        return {}
    now = {}
    for path, handle in contents.handles.items():
        was = names.get(found.get(path, path), handle.name)
        if was != handle.name:
            now[was] = handle.name
    return {
        f"{prefix}/{was}": f"{prefix}/{name}"
        for prefix in contents.by_variable
        for was, name in now.items()
        if f"{prefix}/{was}" in reader.manifest.tensors
    }


def _below_list(path: str, variable: str) -> str:
    """Return how a trainer calls a variable that is at a path through a list; else ""."""
    parts = path.split("/")
    at = next((at for at, part in enumerate(parts) if at and part.isdecimal()), None)
    return "" if at is None else "/".join((*parts[:at], variable))


def _positions_of(
    positions: Iterable[str], missing: Mapping[str, Handle], reader: Reader
) -> dict[str, str]:
    """Return the paths of the variables that a trainer has saved by position.

    Raises:
        CheckpointMismatch: Nothing says which is which.
    """
    tensors = reader.manifest.tensors
    names = _variable_names(reader)
    paths = {handle.name: path for path, handle in missing.items()}
    found = {
        position: paths[names[position]] for position in positions if names.get(position) in paths
    }
    kinds = Counter(_kind(tensors[each]) for each in positions if each not in names)
    rest = [path for path in missing if path not in found.values()]
    for position in positions:
        if position in names:
            continue
        kind = _kind(tensors[position])
        fitting = [path for path in rest if kind == (missing[path].shape, missing[path].spec.dtype)]
        if len(fitting) == kinds[kind] == 1:
            found[position] = fitting[0]
        elif fitting:
            raise CheckpointMismatch(
                f"{reader.path}: {position!r} may be the value of "
                + " or ".join(f'"{missing[path].name}"' for path in fitting)
                + ": a trainer of an earlier psync has saved it by its position alone",
                hint=_REMEDY.removeprefix("or "),
            )
    if wrong := {each: names[each] for each in positions if each in names and each not in found}:
        declared = ", ".join(f'"{missing[path].name}"' for path in rest) or "no other"
        saved = ", ".join(f'{position!r} of "{name}"' for position, name in wrong.items())
        raise CheckpointMismatch(
            f"{reader.path}: it has {saved}; declared here: {declared}",
            hint=f"give the variables the names that they had, {_REMEDY}",
        )
    return found


def _variable_names(reader: Reader) -> dict[str, str]:
    """Return of which variable each tensor is the value, as far as what each ps held says it."""
    values: dict[tuple[str, int], str] = {}  # (file, first byte) → variable
    for snapshot in stored_snapshots(reader.path) if reader.manifest.snapshots else ():
        state = SnapshotState.from_bytes(snapshot.state, str(snapshot.file))
        variables = {spec.key: spec.variable for spec in state.shards}
        for place in snapshot.places:
            item = state.items[place.item]
            if place.nbytes and not item.slot:
                values[snapshot.file.name, place.start] = variables[item.key]
    return {
        tensor.name: values[piece.file, piece.start]
        for tensor in reader.manifest.tensors.values()
        for piece in tensor.slices
        if piece.nbytes and (piece.file, piece.start) in values
    }


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype
