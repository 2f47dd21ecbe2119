"""Pulling many variables at once, in whatever nesting they are kept.

Layer: L4. Imports: errors, variables.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from psync.errors import GradientError
from psync.variables import Handle, checked_target, runtime_of


async def pull(tree: Any, *, copy: bool = False, out: Any = None) -> Any:
    """Return the values of all variables in ``tree``, in one round trip to each ps.

    Args:
        tree: A variable, or any nesting of dicts, lists and tuples (named ones too) of
            variables. Anything else in it is returned as it is.
        copy: Whether the arrays may be changed by the caller. Otherwise they are read-only.
        out: A nesting like ``tree`` of writable C-contiguous arrays of the variables' shapes
            and dtypes, which are filled and returned.

    Returns:
        The same nesting with a numpy array for each variable, the same one wherever a variable
        stands. Each shard is one version of itself, never a torn one; different shards may be
        of different versions.

    Raises:
        UsageError: Neither in a step nor within a running coordinator, or variables of two
            strategies.
        ClosedError: The coordinator was closed.
        GradientError: An array in ``out`` does not fit, or stands for a variable that has another
            array already.
        ParameterServerLost: A ps is gone.
        ClosureCancelled: In a step that was cancelled.

    Cancellation: Safe; arrays in ``out`` then hold anything.

    Example:
        weights, bias = await psync.pull((w, b))
        params = await psync.pull({"dense": {"w": w, "b": b}})
    """
    variables = list(dict.fromkeys(_leaves(tree)))
    if not variables:
        return tree
    targets = None if out is None else _targets(tree, out)
    runtime = await runtime_of("pull", *variables)
    runtime.check_open("pull")
    plan = runtime.ps.plan(tuple(variable.spec for variable in variables))
    arrays = await runtime.ps.pull(
        plan,
        writable=copy,
        out=None if targets is None else [targets[variable] for variable in variables],
        seen=runtime.pulled,
    )
    values = dict(zip(variables, arrays, strict=True))
    return mapped(tree, values.__getitem__)


def _leaves(tree: Any) -> Iterator[Handle]:
    if isinstance(tree, Handle):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _leaves(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _leaves(item)


def mapped(tree: Any, value_of: Callable[[Handle], Any]) -> Any:
    """Return ``tree`` with its variables replaced; containers keep their type.

    Args:
        tree: As ``pull`` takes it.
        value_of: A variable → what stands in its place.
    """
    if isinstance(tree, Handle):
        return value_of(tree)
    if isinstance(tree, dict):
        made = copying.copy(tree)  # keeps what a subclass has, such as a default factory
        for key, item in tree.items():
            made[key] = mapped(item, value_of)
        return made
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(item, value_of) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(item, value_of) for item in tree)
    return tree


def _targets(tree: Any, out: Any) -> dict[Handle, np.ndarray]:
    """Return the array in ``out`` for each variable."""
    targets: dict[Handle, np.ndarray] = {}
    for variable, array in _pairs(tree, out):
        if targets.setdefault(variable, checked_target(array, variable.spec)) is not array:
            raise GradientError(f'out has two arrays for variable "{variable.name}"')
    return targets


def _pairs(tree: Any, out: Any) -> Iterator[tuple[Handle, Any]]:
    if isinstance(tree, Handle):
        yield tree, out
    elif isinstance(tree, dict):
        if not isinstance(out, dict) or out.keys() != tree.keys():
            raise GradientError("out: expected a dict with the keys of the variables to pull")
        for key, item in tree.items():
            yield from _pairs(item, out[key])
    elif isinstance(tree, list | tuple):
        if not isinstance(out, list | tuple) or len(out) != len(tree):
            raise GradientError(
                f"out: expected {len(tree)} items in a list or tuple, as the variables to pull"
            )
        for item, part in zip(tree, out, strict=True):
            yield from _pairs(item, part)
