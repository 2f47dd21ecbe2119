"""Per-replica values: regroup, select, reduce and gather of nested structures.

What a function returned on several replicas becomes one structure (``regroup``), in which a value
that may differ stands as a ``PerReplica``. Passed to replicas again, each gets its own
(``select``). Sums and means of them are ``reducing_values``, or ``reduce_distributed`` for a
structure in which ordinary values stand beside those of replicas.

The same object from all replicas stays that object, but numbers always become a ``PerReplica``:
whether two equal ones are one object is an accident of the interpreter.
"""

from __future__ import annotations

import copy as copying
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from psync.errors import ReplicaValueError, UsageError
from psync.numerics.replica_sums import ReduceOp as ReduceOp
from psync.numerics.replica_sums import as_axes, gather_arrays, reducing_arrays
from psync.numerics.replica_sums import as_reduce_op as as_reduce_op
from psync.numerics.sums import Pieces, at_once


class DistributedValues:
    """One value for each replica, in the order of replica ids; immutable.

    Made by ``strategy.run`` and by reductions. When it is passed to ``run``, each replica gets its
    own value.

    Args:
        values: The values; at least one.

    Attributes:
        values: The values as a tuple.

    Raises:
        ReplicaValueError: There are no values.

    Source: ``tf.distribute.DistributedValues``.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)
        if not self.values:
            raise ReplicaValueError(f"{type(self).__name__}: expected a value at least, got none")

    def __repr__(self) -> str:
        shown = ", ".join(f"{index}: {value!r}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}({shown})"

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, replica_id: int) -> Any:
        """Return the value of one replica.

        Raises:
            ReplicaValueError: There is no such replica.
        """
        if not 0 <= replica_id < len(self.values):
            raise ReplicaValueError(
                f"replica {replica_id}: there are values of {len(self.values)} replicas here",
                hint="it was made when there were others; pass one with a value for each replica",
            )
        return self.values[replica_id]


class PerReplica(DistributedValues):
    """One value for each replica; the values may differ."""

    __slots__ = ()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        raise UsageError(
            f"a PerReplica is not an array: it holds the values of {len(self)} replicas",
            hint="reduce it, strategy.reduce(psync.ReduceOp.SUM, value), or take it apart, "
            "strategy.experimental_local_results(value)",
        )


class Mirrored(DistributedValues):
    """A value that all replicas share, or that has the locality of a variable.

    It can be used as an array.

    Args:
        values: The values; at least one. One is enough for any number of replicas.
        destination: The variable or device whose locality it has, or None.
    """

    __slots__ = ("destination",)

    def __init__(self, values: Sequence[Any], destination: Any = None) -> None:
        super().__init__(values)
        self.destination = destination

    @property
    def value(self) -> Any:
        """The value that all replicas share."""
        return self.values[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)


# --- structures ----------------------------------------------------------------------------------


def regroup(values: Sequence[Any]) -> Any:
    """Return one value for what each replica returned.

    The same object from every replica, a variable for instance, is that object. Lists, tuples and
    dicts are regrouped item by item, and what each calls ``Mirrored`` is. All else becomes a
    ``PerReplica``, unless there is one replica only: then it is what that one returned.

    Numbers and texts are never taken for the same object: whether two of equal value are one is an
    accident.

    Args:
        values: In the order of replica ids; at least one.

    Raises:
        ReplicaValueError: The replicas returned containers of other types, lengths or keys.

    Source: ``regroup`` of TensorFlow's ``distribute/distribute_utils.py``. There, small integers
        that are equal are the same object.
    """
    values = _replicas(values, "regroup")
    return values[0] if len(values) == 1 else map_structures(_regrouped, values)


def select(replica_id: int, structure: Any) -> Any:
    """Return ``structure`` with what the replica has in place of each distributed value.

    Raises:
        ReplicaValueError: A ``PerReplica`` has no value for that replica.
    """

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Mirrored) and replica_id >= len(leaf):
            return leaf.value
        return leaf[replica_id] if isinstance(leaf, DistributedValues) else leaf

    return map_structures(own, (structure,))


def local_results(value: Any) -> tuple[Any, ...]:
    """Return the value of each replica, in the order of their ids.

    Args:
        value: A distributed value, or a structure with such in it: each result then is a structure
            of one replica's values. Anything else is the only result.

    Raises:
        ReplicaValueError: Values of different numbers of replicas stand in the structure.

    Source: ``tf.distribute.Strategy.experimental_local_results``.
    """
    counts: set[int] = set()

    def note(leaf: Any) -> None:
        if isinstance(leaf, PerReplica) or (leaf is value and isinstance(leaf, Mirrored)):
            counts.add(len(leaf))

    map_structures(note, (value,))
    if len(counts) > 1:
        raise ReplicaValueError(
            f"local results: values of {' and of '.join(map(str, sorted(counts)))} replicas in "
            "one structure"
        )
    return tuple(select(replica_id, value) for replica_id in range(counts.pop() if counts else 1))


# --- reductions ----------------------------------------------------------------------------------


def reducing_values(op: ReduceOp | str, values: Sequence[Any], axis: Any = None) -> Pieces[Any]:
    """Return the sum or the mean of the values of replicas, in pieces, for event loops.

    Structures are reduced item by item. Terms are added in the order of replica ids, in the
    values' dtype: half precision in float32 and rounded once, bools as int64. The mean of integers
    is float64. With an axis, each replica's value is summed along it first, and the mean is that of
    all elements: 4 rows and 2 rows are divided by 6.

    ``IndexedSlices``: the rows of all replicas, those of one index summed; the mean divides by the
    number of replicas, also rows that only some of them have.

    Args:
        op: SUM or MEAN.
        values: One for each replica: numbers, arrays, ``IndexedSlices``, or structures of these.
            None everywhere stays None.
        axis: Along which each value is reduced as well: a number, or several. None: none is.

    Raises:
        ReplicaValueError: Shapes or structures differ, something is no number, or there is no such
            axis.
        ValueMismatchError: ``IndexedSlices`` of integers.

    Source: ``tf.distribute.Strategy.reduce``.
    """
    op, axes = as_reduce_op(op), as_axes(axis)
    values = _replicas(values, "reduce")
    return (yield from map_in_pieces(lambda *leaves: _reducing(op, leaves, axes), values))


def reduce_distributed(op: ReduceOp | str, value: Any, num_replicas: int, axis: Any = None) -> Any:
    """Return the sum or the mean over replicas of a value that need not be distributed.

    An ordinary value is what every replica has: its mean is itself, 0 is 0, and its sum is
    refused if there is more than one replica, since n times the value is seldom what is meant.

    Args:
        op: SUM or MEAN.
        value: Distributed or not, or a structure of such.
        num_replicas: How many have an ordinary value.
        axis: As of ``reducing_values``.

    Raises:
        ReplicaValueError: As by ``reducing_values``, and for the sum of an ordinary value.
        ValueMismatchError: ``IndexedSlices`` of integers.
    """
    return at_once(reducing_distributed(op, value, num_replicas, axis))


def reducing_distributed(
    op: ReduceOp | str, value: Any, num_replicas: int, axis: Any = None
) -> Pieces[Any]:
    """Do ``reduce_distributed`` in pieces, for event loops."""
    op, axes = as_reduce_op(op), as_axes(axis)

    def reducing(leaf: Any) -> Pieces[Any]:
        if isinstance(leaf, PerReplica):
            return (yield from reducing_values(op, leaf.values, axis))
        if isinstance(leaf, Mirrored):
            leaf = leaf.value
        if axes is None and isinstance(leaf, int | float | np.number) and leaf == 0:
            return leaf
        if op is ReduceOp.SUM and num_replicas > 1 and leaf is not None:
            raise ReplicaValueError(
                f"SUM over {num_replicas} replicas of a value that is not per replica: "
                f"{type(leaf).__name__}",
                hint="reduce what strategy.run returned; or use MEAN, which is the value itself",
            )
        return leaf if axes is None else (yield from _reducing(op, (leaf,), axes))

    return (yield from map_in_pieces(reducing, (value,)))


def gather_values(values: Sequence[Any], axis: int) -> Any:
    """Return the values of all replicas one after the other along an axis.

    Structures are gathered item by item.

    Args:
        values: One for each replica, of rank 1 at least.
        axis: A number; negative ones count from the end.

    Raises:
        ReplicaValueError: Shapes differ elsewhere than along the axis, a value is a number, there
            is no such axis, or it is an ``IndexedSlices``.

    Source: ``tf.distribute.Strategy.gather``.
    """
    return map_structures(lambda *leaves: gather_arrays(leaves, axis), _replicas(values, "gather"))


def gather_distributed(value: Any, axis: int) -> Any:
    """Return what ``gather_values`` does of each distributed value; ordinary ones stay as they are.

    Raises:
        ReplicaValueError: As by ``gather_values``, for ordinary values too.
    """

    def gathered(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return gather_values(leaf.values, axis)
        return gather_arrays((leaf.value if isinstance(leaf, Mirrored) else leaf,), axis)

    return map_structures(gathered, (value,))


def _reducing(op: ReduceOp, leaves: tuple[Any, ...], axes: tuple[int, ...] | None) -> Pieces[Any]:
    if all(leaf is None for leaf in leaves):  # a gradient that does not exist
        return None
    return (yield from reducing_arrays(op, leaves, axes))


def map_in_pieces(fn: Callable[..., Pieces[Any]], trees: Sequence[Any]) -> Pieces[Any]:
    """Do ``map_structures`` with a function that works in pieces."""
    places: list[tuple[Any, ...]] = []
    map_structures(lambda *leaves: places.append(leaves), trees)
    results = []
    for leaves in places:
        result = yield from fn(*leaves)
        results.append(result)
    following = iter(results)
    return map_structures(lambda *_: next(following), trees)


def _regrouped(*leaves: Any) -> Any:
    first = leaves[0]
    if all(isinstance(leaf, Mirrored) for leaf in leaves):
        return Mirrored([leaf.value for leaf in leaves], first.destination)
    plain = isinstance(first, numbers.Number | str | bytes)
    same = all(leaf is first for leaf in leaves) and not plain
    return first if same else PerReplica(leaves)


def _replicas(values: Sequence[Any], operation: str) -> tuple[Any, ...]:
    values = tuple(values)
    if not values:
        raise ReplicaValueError(f"{operation}: expected a value for each replica, got none")
    return values


def map_structures(fn: Callable[..., Any], trees: Sequence[Any]) -> Any:
    """Return ``fn`` of what stands at each place of all trees; containers are of the first's type.

    Args:
        fn: Called with an item of each tree.
        trees: Nestings of dicts, lists and tuples (named ones too); one at least.

    Raises:
        ReplicaValueError: The containers do not match.
    """
    first = trees[0]
    if not isinstance(first, dict | list | tuple):
        if any(isinstance(tree, dict | list | tuple) for tree in trees):
            raise _mismatch(trees)
        return fn(*trees)
    if any(type(tree) is not type(first) or len(tree) != len(first) for tree in trees):
        raise _mismatch(trees)
    if isinstance(first, dict):
        if any(tree.keys() != first.keys() for tree in trees):
            raise _mismatch(trees)
        made = copying.copy(first)  # keeps what a subclass has, such as a default factory
        for key in first:
            made[key] = map_structures(fn, tuple(tree[key] for tree in trees))
        return made
    items = (map_structures(fn, parts) for parts in zip(*trees, strict=True))
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def _mismatch(trees: Sequence[Any]) -> ReplicaValueError:
    def shown(tree: Any) -> str:
        if isinstance(tree, dict):
            return f"{type(tree).__name__} with keys {sorted(map(str, tree))}"
        size = f" of {len(tree)}" if isinstance(tree, list | tuple) else ""
        return f"{type(tree).__name__}{size}"

    return ReplicaValueError(
        f"replicas do not agree on a structure: {'; '.join(dict.fromkeys(map(shown, trees)))}",
        hint="return containers of the same types, lengths and keys on every replica",
    )
