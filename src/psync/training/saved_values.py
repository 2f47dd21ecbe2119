"""Checkpoint values without a cluster: read from files and nested like the saved objects."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from psync.api.modules import Module
from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.optimizers.handles import Optimizer
from psync.api.variables import Handle
from psync.checkpoints.files import Reader
from psync.metrics import Metric
from psync.training.saved_objects import Contents, Stateful, held


async def read_arrays(
    reader: Reader, contents: Contents, *, slots: bool = False
) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by name, each one whole.

    Args:
        reader: Of the checkpoint.
        contents: What is asked for.
        slots: Whether all slots of its optimizers are, too.

    Raises:
        CheckpointMismatch: The checkpoint lacks something, or has it in another shape or dtype.
        CheckpointCorrupt: It is damaged.
        CheckpointError: It cannot be read.

    Cancellation: Safe.
    """
    hint = "declare what the program declares that has saved it, and give it the same names"
    contents.compared(reader.manifest, reader.path, hint)
    prefixes = tuple(_slots_of(path) for path in contents.optimizers) if slots else ()
    return {
        name: await asyncio.to_thread(reader.read, tensor, 0, tensor.rows)
        for name, tensor in reader.manifest.tensors.items()
        if name in contents.arrays or name.startswith(prefixes)
    }


def nested(
    thing: Any, contents: Contents, arrays: Mapping[str, np.ndarray], states: Mapping[str, Any]
) -> Any:
    """Return what a checkpoint has of an object, nested alike.

    Args:
        thing: One of the objects of ``contents``, or a dict, list or tuple of such.
        contents: Says under which names it was saved.
        arrays: By name, as ``read_arrays`` returns them.
        states: By name.
    """

    def values_of(thing: Any) -> Any:
        if isinstance(thing, Handle):
            return arrays[contents.path_of(thing)]
        if isinstance(thing, Optimizer):
            return _optimizer_values(contents.path_of(thing), arrays, states)
        if isinstance(thing, ExponentialMovingAverage):
            return {variable.name: values_of(average) for variable, average in thing.items()}
        if isinstance(thing, Metric):
            return thing.value_of(values_of(thing.variables[0]))
        if isinstance(thing, Module):
            return {name: values_of(value) for name, value in held(thing)}
        if isinstance(thing, Stateful):
            return states[contents.path_of(thing)]
        if isinstance(thing, dict):
            return {key: values_of(item) for key, item in thing.items()}
        made = [values_of(item) for item in thing]
        if isinstance(thing, list):
            return made
        return type(thing)(*made) if hasattr(thing, "_fields") else tuple(made)

    return values_of(thing)


def _optimizer_values(
    path: str, arrays: Mapping[str, np.ndarray], states: Mapping[str, Any]
) -> dict[str, Any]:
    values: dict[str, Any] = {"step": states[f"{path}/step"]}
    for name, array in arrays.items():
        if name.startswith(f"{path}/"):
            slot, _, variable = name.removeprefix(f"{path}/").partition("/")
            values.setdefault(slot, {})[variable] = array
    return values


def _slots_of(step: str) -> str:
    """Return what the names of an optimizer's slots begin with; ``step`` is that of its step."""
    return step.removesuffix("step")
