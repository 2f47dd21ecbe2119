"""Per-replica values: regroup, select, reduce and gather of nested structures.

What a function returned on several replicas becomes one structure (``regroup``), in which a value
that may differ stands as a ``PerReplica``. Passed to replicas again, each gets its own
(``select``). Sums and means of them are ``reducing_values``, or ``reducing_distributed`` for a
structure in which ordinary values stand beside those of replicas.

The same object from all replicas stays that object, but numbers always become a ``PerReplica``:
whether two equal ones are one object is an accident of the interpreter.
"""

from __future__ import annotations

import copy as copying
import enum
import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from psync.errors import ReplicaValueError, UsageError
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import PIECE_BYTES, Pieces, cuts, sum_dtype
from psync.specs import DTYPE_NAMES, plain_array


class ReduceOp(enum.Enum):
    """How the values of several replicas become one: as their sum or their mean."""

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: object) -> ReduceOp:
    """Return ``op``, which may be the name of one in any case: "sum".

    Raises:
        ReplicaValueError: It is neither. A ``VariableAggregation`` is none: NONE and
            ONLY_FIRST_REPLICA are no reductions.

    Source: the check in ``tf.distribute.StrategyExtended.reduce_to``.
    """
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    raise ReplicaValueError(
        f"expected a reduction, SUM or MEAN, got {op!r}",
        hint="psync.ReduceOp.SUM, psync.ReduceOp.MEAN, or their names",
    )


def as_axes(axis: Any) -> tuple[int, ...] | None:
    """Return an axis, or a list of them, as a tuple; None as it is.

    Raises:
        ReplicaValueError: It is no whole number, or one stands twice.
    """
    if axis is None:
        return None
    given = axis if isinstance(axis, list | tuple) else (axis,)
    try:
        if not any(isinstance(number, bool | np.bool_) for number in given):
            return tuple(operator.index(number) for number in given)
    except TypeError:
        pass
    raise ReplicaValueError(f"axis: expected a whole number, or a list of them, got {axis!r}")


def reducing_arrays(
    op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None
) -> Pieces[Any]:
    """Make the sum or mean of one number, array or ``IndexedSlices`` from each replica.

    None, a gradient that does not exist, stays None if all replicas have it.

    Dense arrays are worked on in pieces; rows, and sums along an axis, array by array.

    Args:
        op: SUM or MEAN.
        values: In the order of replica ids: that of the additions. Not to be changed meanwhile.
        axes: Along which each is reduced as well, or None.

    Raises:
        ReplicaValueError: They do not fit each other, or there is no such axis.
        ValueMismatchError: ``IndexedSlices`` of integers.
    """
    if all(value is None for value in values):
        return None
    if any(_is_slices(value) for value in values):
        return _reduce_slices(op, values, axes)
    arrays = [_as_array(value) for value in values]
    dtype = np.result_type(*(array.dtype for array in arrays))
    work = _work_dtype(dtype)
    count = len(arrays)
    if axes is not None:
        count = 0
        for position, array in enumerate(arrays):
            try:
                with np.errstate(all="ignore"):  # infinities and NaN are results
                    arrays[position] = np.asarray(array.sum(axes, work))
            except ValueError as exc:  # there is no such axis, or one stands twice
                text = f"reduce along axis {axes} of a value of shape {array.shape}: {exc}"
                raise ReplicaValueError(text) from exc
            count += math.prod(array.shape[axis] for axis in axes)
            if getattr(values[position], "nbytes", 0) > PIECE_BYTES:
                yield
    _check_shapes([array.shape for array in arrays], "reduce")
    divisor = np.asarray(count, np.float64 if work.kind in "iu" else work)
    counted = divisor.dtype if op is ReduceOp.MEAN else work  # the result of integers and bools
    result = np.empty(arrays[0].shape, counted if dtype.kind in "biu" else dtype)
    results, terms = result.reshape(-1), [array.reshape(-1) for array in arrays]
    for part in cuts(results.size, result.itemsize * len(terms)):
        with np.errstate(all="ignore"):
            total = terms[0][part].astype(work)
            for term in terms[1:]:
                np.add(total, term[part], out=total)
            results[part] = total / divisor if op is ReduceOp.MEAN else total
        if part.stop < results.size:
            yield
    return result[()]  # a number, not an array without axes


def gather_arrays(values: Sequence[Any], axis: object) -> np.ndarray:
    """Return one array from each replica, one after the other along ``axis``.

    Raises:
        ReplicaValueError: They do not fit each other, or there is no such axis.
    """
    axes = as_axes(axis)
    if axes is None or len(axes) != 1:
        raise ReplicaValueError(f"gather: expected one axis, a whole number, got {axis!r}")
    if any(_is_slices(value) for value in values):
        raise ReplicaValueError(
            "gather of IndexedSlices is not possible",
            hint="gather their values and their indices: gather((s.values, s.indices), axis=0)",
        )
    arrays = [_as_array(value) for value in values]
    try:
        return np.concatenate(arrays, axes[0])
    except ValueError as exc:  # where there is no such axis, too
        shapes, hint = [array.shape for array in arrays], None
        if () in shapes:
            hint = "give numbers an axis, and so rank 1: np.reshape(value, (1,))"
        text = f"gather along axis {axes[0]} of values of shape {', '.join(map(str, shapes))}"
        raise ReplicaValueError(f"{text}: {exc}", hint=hint) from exc


def _reduce_slices(
    op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None
) -> IndexedSlices:
    given = [value for value in values if _is_slices(value)]
    shapes = [getattr(each, "dense_shape", None) for each in given]
    slices = [IndexedSlices(s.values, s.indices, of) for s, of in zip(given, shapes, strict=True)]
    if len(slices) != len(values):
        raise ReplicaValueError("reduce: IndexedSlices on some replicas, something else on others")
    if axes is not None:
        raise ReplicaValueError(
            "reduce of IndexedSlices along an axis is not possible",
            hint="reduce them over the replicas, without axis",
        )
    _check_shapes([part.values.shape[1:] for part in slices], "reduce of IndexedSlices")
    dense = {part.dense_shape for part in slices} - {None}
    if len(dense) > 1:
        raise ReplicaValueError(
            f"reduce of IndexedSlices: expected one dense_shape, got {sorted(map(str, dense))}"
        )
    dtype = np.result_type(*(part.values.dtype for part in slices))
    rows = np.concatenate([part.values for part in slices]).astype(sum_dtype(dtype), copy=False)
    indices = np.concatenate([part.indices.astype(np.int64, copy=False) for part in slices])
    merged, sums = IndexedSlices(rows, indices).merged()
    if op is ReduceOp.MEAN:
        with np.errstate(all="ignore"):
            sums = sums / np.asarray(len(slices), sums.dtype)
    return IndexedSlices(sums.astype(dtype, copy=False), merged, dense.pop() if dense else None)


def _is_slices(value: Any) -> bool:
    """Whether these are rows: ours, or those of another library, such as ``tf.IndexedSlices``."""
    return isinstance(value, IndexedSlices) or (
        hasattr(value, "values") and hasattr(value, "indices") and not callable(value.indices)
    )


def _as_array(value: Any) -> np.ndarray:
    try:
        array = plain_array(value)
    except (TypeError, ValueError) as exc:
        raise ReplicaValueError(f"expected numbers or arrays from replicas: {exc}") from exc
    if not _are_numbers(array.dtype):
        got = type(value).__name__ if array.dtype.kind == "O" else str(array.dtype)
        raise ReplicaValueError(f"expected numbers or arrays from replicas, got {got}")
    return array


@functools.cache  # dtype.name costs microseconds
def _are_numbers(dtype: np.dtype) -> bool:
    return dtype.name in DTYPE_NAMES or dtype.kind == "c"


def _work_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    if dtype.kind == "b":
        return np.dtype(np.int64)
    return dtype if dtype.kind in "iuc" else sum_dtype(dtype)


def _check_shapes(shapes: list[tuple[int, ...]], operation: str) -> None:
    if any(shape != shapes[0] for shape in shapes):
        raise ReplicaValueError(
            f"{operation}: expected one shape on all replicas, got {', '.join(map(str, shapes))}"
        )


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
            raise ReplicaValueError(f"{type(self).__name__}: expected at least one value, got none")

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
                f"replica {replica_id}: only values of {len(self.values)} replicas exist here",
                hint="it was created for other replicas; pass one with a value for each replica",
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
    return (yield from map_in_pieces(lambda *leaves: reducing_arrays(op, leaves, axes), values))


def reducing_distributed(
    op: ReduceOp | str, value: Any, num_replicas: int, axis: Any = None
) -> Pieces[Any]:
    """Return the sum or the mean over replicas of a value that need not be distributed, in pieces.

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
        return leaf if axes is None else (yield from reducing_arrays(op, (leaf,), axes))

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
