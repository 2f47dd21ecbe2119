"""Pulls of many variables at once, in any nest of containers, and arrays for their gradients.

``pulls.pyi`` has the types.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from psync.api.scopes import runtime_here, runtime_of, scope_of, values_of
from psync.api.variables import Handle, OnReadVariable
from psync.errors import ValueMismatchError
from psync.numerics.casting import checked_target
from psync.numerics.compression import Compression, checked_compression
from psync.specs import dtype_of


async def pull(
    tree: Any,
    *,
    copy: bool = False,
    out: Any = None,
    consistent: bool = False,
    compression: Compression | None = None,
) -> Any:
    """Return the values of all variables in ``tree``, in one round trip to each ps.

    Args:
        tree: A variable, or any nesting of dicts, lists and tuples (including named ones) of
            variables. Anything else is returned unchanged, including a ``psync.Module``: pass its
            ``trainable_variables``, or a nesting of them.
        copy: Whether the caller may change the arrays. Otherwise they are read-only, and arrays of
            a ps on this host may be the ps's own memory: they keep their values, and occupy that
            memory, for as long as they are referenced. numpy refuses to write to them; another
            library that writes (``torch.from_numpy(pulled)``, then in place) ends the process.
        out: A nesting like ``tree`` of writable C-contiguous arrays with the variables' shapes and
            dtypes; they are filled and returned.
        consistent: Whether all values, over all shards and ps tasks, are from one instant. A pull
            then sees all or nothing of an ``assign(…, atomic=True)``. Of other tasks' pushes and
            other assigns, it may see the parts of some ps tasks and not of others. It costs two
            more messages to each ps, and updates of these variables wait meanwhile.
        compression: "bf16" or "f16": if more than 64 KiB are pulled, float32 travels rounded to 16
            bits, and the result is the rounded float32. Not with ``consistent``, in
            ``cache_variable_reads``, or for variables that are synchronized on read: these values
            are exact, as are all values without compression. See docs/howto/compression.md.

    Returns:
        The same nesting with a numpy array for each variable; a variable that occurs repeatedly has
        the same array everywhere. Each shard is one version of itself, never a torn one; different
        shards may be of different versions. A variable that is synchronized on read is read
        separately, as by its ``read``. With a ``SyncReplicasOptimizer``, values may have come with
        the token: see its ``pull_ahead``.

    Raises:
        UsageError: Neither in a step nor within a running coordinator, or variables of two
            strategies.
        ClosedError: The coordinator was closed.
        ConfigurationError: The compression is unknown.
        ValueMismatchError: An array in ``out`` does not match, stands for two variables, or for one
            that already has another array.
        ParameterServerLost: A ps is lost.
        LockLost: ``consistent`` is True, and connections were lost repeatedly, or this task's loop
            was blocked for longer than 10 s.
        ClosureCancelled: The step was cancelled.

    Cancellation: Safe; the contents of arrays in ``out`` are then undefined.

    Example:
        weights, bias = await psync.pull((w, b))
        params = await psync.pull({"dense": {"w": w, "b": b}})
    """
    kind = None if compression is None else checked_compression("pull", compression)
    is_list = type(tree) is list and is_flat(tree)
    variables = (
        (tree,)
        if (is_one := isinstance(tree, Handle))
        else tuple(dict.fromkeys(tree if is_list else leaves(tree)))
    )
    if not variables:
        return tree
    targets = {} if out is None else _targets(tree, out)
    runtime = await runtime_of("pull", *variables)
    stored = variables
    if OnReadVariable in map(type, variables):
        stored = tuple([each for each in variables if not isinstance(each, OnReadVariable)])
    values = {}
    if stored:
        given = [targets[variable] for variable in stored] if targets else None
        arrays = await values_of(
            runtime, stored, copy=copy, out=given, consistent=consistent, compression=kind
        )
        if is_one:
            return arrays[0]
        if is_list and len(arrays) == len(tree):  # each stands there once
            return arrays
        values = dict(zip(stored, arrays, strict=True))
    for variable in variables if stored is not variables else ():
        if variable not in values:
            values[variable] = await variable.read(copy=copy, out=targets.get(variable))
    return mapped(tree, values.__getitem__)


_NESTINGS, _SEQUENCES = (dict, list, tuple), (list, tuple)  # a union is made at each call


def leaves(tree: Any, kind: Any = Handle) -> list[Any]:
    """Return each variable, or object of another kind, in ``tree``, once per occurrence."""
    if isinstance(tree, kind):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    if isinstance(tree, _NESTINGS):
        return [leaf for item in items for leaf in leaves(item, kind)]
    return []


def mapped(tree: Any, value_of: Callable[[Any], Any], kind: Any = Handle) -> Any:
    """Return ``tree`` with its variables replaced; containers keep their type.

    Args:
        tree: A nesting; see ``pull``.
        value_of: Function from a variable to its replacement.
        kind: Type of the objects to replace, if not variables.
    """
    if isinstance(tree, kind):
        return value_of(tree)
    if isinstance(tree, dict):
        made = copying.copy(tree)  # keeps what a subclass has, such as a default factory
        for key, item in tree.items():
            made[key] = mapped(item, value_of, kind)
        return made
    if isinstance(tree, _SEQUENCES):
        items = [mapped(item, value_of, kind) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def is_flat(tree: Any, kind: Any = Handle) -> bool:
    """Return whether ``tree`` is a list or tuple that holds only variables, or objects of one kind.

    A function of such values gets one argument for each; otherwise it gets the nesting.
    """
    if not isinstance(tree, _SEQUENCES):
        return False
    return all([issubclass(each, kind) for each in {*map(type, tree)}])


def _targets(tree: Any, out: Any) -> dict[Handle, np.ndarray]:
    """Return the array in ``out`` for each variable."""
    targets: dict[Handle, np.ndarray] = {}
    for variable, array in pairs(tree, out, "out"):
        if targets.setdefault(variable, checked_target(array, variable._value_spec)) is not array:
            raise ValueMismatchError(f'out has two arrays for variable "{variable.name}"')
    owners: dict[int, Handle] = {}
    for variable, array in targets.items():
        if (other := owners.setdefault(id(array), variable)) is not variable:
            raise ValueMismatchError(
                f'out has one array for variables "{other.name}" and "{variable.name}"'
            )
    return targets


def pairs(tree: Any, other: Any, what: str) -> Iterator[tuple[Any, Any]]:
    """Yield each variable in ``tree`` with what stands in its place in ``other``.

    Args:
        tree: As ``pull`` takes it.
        other: Nested alike.
        what: It is, for messages.

    Raises:
        ValueMismatchError: They are not nested alike.
    """
    if isinstance(tree, Handle):
        yield tree, other
    elif isinstance(tree, dict):
        if not isinstance(other, dict) or other.keys() != tree.keys():
            raise ValueMismatchError(f"{what}: expected a dict with the same keys as the variables")
        for key, item in tree.items():
            yield from pairs(item, other[key], what)
    elif isinstance(tree, list | tuple):
        if not isinstance(other, list | tuple) or len(other) != len(tree):
            raise ValueMismatchError(
                f"{what}: expected {len(tree)} items in a list or tuple, one for each variable"
            )
        for item, part in zip(tree, other, strict=True):
            yield from pairs(item, part, what)


def empty_like(tree: Any) -> Any:
    """Return uninitialized arrays for gradients, with the shapes and dtypes of variables.

    A ps task on this host reads such an array in place, so a push copies nothing. An array is in
    ordinary memory if it has at most 64 KiB, if no ps is on this host, or if there is no more
    memory to share.

    Make the arrays in each step: the memory of dropped arrays is reused. Views count as references,
    and so do objects of other libraries that share the memory.

    Args:
        tree: Any nesting of variables that ``psync.pull`` takes.

    Returns:
        The same nesting with a numpy array for each variable; a variable that occurs repeatedly has
        the same array everywhere.

    Raises:
        UsageError: Neither in a step nor within a running coordinator.
        ClosedError: The coordinator was closed.
        ClosureCancelled: The step was cancelled.

    Once a push has returned, its arrays may be written to again. **Do not reuse the arrays of a
    push that was cancelled, or that failed because a ps is lost or this task was replaced: they may
    still be read.** An asynchronous push reads them until it has ended in the background, a
    synchronous one until its step has ended. Make new arrays instead.

    Example:
        async def step(w):
            value = await psync.pull(w)
            gradient = psync.empty_like(w)
            np.subtract(value, 1, out=gradient)
            await optimizer.apply_gradients([(gradient, w)])
    """
    arrays: dict[Any, np.ndarray] = {}
    for variable in leaves(tree):
        if variable not in arrays:
            runtime = runtime_here("empty_like", scope_of(variable))
            spec = variable._value_spec
            arrays[variable] = runtime.ps.memory.empty(spec.shape, dtype_of(spec.dtype))
    return mapped(tree, arrays.__getitem__)
