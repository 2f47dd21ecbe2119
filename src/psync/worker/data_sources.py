"""Datasets that psync can shard among workers: arrays, files, iterables.

Each of them is a dataset function, called on a worker with an ``InputContext``, and yields all of
its batches. ``Sharded`` gives each worker its share: by file, worker i of n reads the files i,
i + n, …; by element, it loads everything and keeps the elements i, i + n, … (of arrays it does
not touch the others). All workers follow one order, which depends on seed and epoch alone. They are
captured by value when the per-worker dataset is created, and each worker gets the whole of what
they hold. The share of a lost worker is missing until it comes back.

An element is a nest of arrays: dicts, lists, tuples and named tuples of whatever has a shape and a
dtype, or is a number or text. Its spec is the same nest of ``TensorSpec``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from psync.errors import ConfigurationError, UsageError, check_fits
from psync.serialization.captures import name_of, type_name
from psync.specs import checked_integer, plain_array

# The worker for which a dataset function is called, the replica of a value function.

_REPLICAS = "num_replicas_in_sync: expected at least 1"


@dataclass(frozen=True, slots=True)
class InputContext:
    """Information for a dataset function about the worker that it runs on.

    Attributes:
        num_input_pipelines: Number of workers.
        input_pipeline_id: Index of this worker among them.
        num_replicas_in_sync: Number of replicas of a synchronous step.

    Source: ``tf.distribute.InputContext``. There every worker is pipeline 0 of 1 unless the dataset
        is distributed; here each worker gets its own index, so that it can take its share.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        last = self.num_input_pipelines - 1
        checked_integer(f"input_pipeline_id: expected 0 to {last}", self.input_pipeline_id, 0, last)
        checked_integer(_REPLICAS, self.num_replicas_in_sync, 1)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples of a global batch for each replica.

        Raises:
            ConfigurationError: The batch cannot be divided evenly; also a ValueError.
        """
        expected = "global_batch_size: expected an integer of at least 1"
        checked_integer(expected, global_batch_size, 1)
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ConfigurationError(
                f"global batch size {global_batch_size} is not divisible by "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        # TensorFlow's form: it stands in people's logs, and in what reads them.
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@dataclass(frozen=True, slots=True)
class ValueContext:
    """Information for a value function about the replica that its value is for.

    Attributes:
        replica_id_in_sync_group: Index of the replica.
        num_replicas_in_sync: Number of replicas of a synchronous step.

    Source: ``tf.distribute.experimental.ValueContext``.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        checked_integer(_REPLICAS, self.num_replicas_in_sync, 1)
        last = self.num_replicas_in_sync - 1
        expected = f"replica_id_in_sync_group: expected 0 to {last}"
        checked_integer(expected, self.replica_id_in_sync_group, 0, last)

    def __str__(self) -> str:  # as of InputContext
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


# Elements, and what they have in common.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one array of an element.

    Attributes:
        shape: A size is None if it differs between elements; the shape is None if the rank does.
        dtype: numpy's name of the dtype; "str", "bytes" or "object" for other values.

    Source: ``tf.TensorSpec``.
    """

    shape: tuple[int | None, ...] | None
    dtype: str


def map_nest(leaf: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Return ``nest`` with ``leaf(value, …)`` in the place of each value.

    Args:
        leaf: Called with a value of ``nest`` and those at its place in ``others``.
        nest: Dicts, lists, tuples and named tuples of values; None stays None.
        others: Nests of the same structure.

    Raises:
        UsageError: If the structures differ; says how.
    """
    for other in others:
        _check_alike(nest, other)
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {key: map_nest(leaf, nest[key], *[each[key] for each in others]) for key in nest}
    if isinstance(nest, tuple | list):
        parts = [map_nest(leaf, *parts) for parts in zip(nest, *others, strict=True)]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return leaf(nest, *others)


def leaves_of(nest: Any) -> list[Any]:
    """Return the values of a nest, in the order of ``map_nest``."""
    found: list[Any] = []
    map_nest(found.append, nest)
    return found


def spec_of(elements: Iterable[Any]) -> Any:
    """Return what the elements have in common; None if there are none.

    Raises:
        UsageError: If they differ in structure or in dtype.
    """
    spec: Any = None
    for number, element in enumerate(elements):
        one = map_nest(_leaf_spec, element)
        spec = map_nest(_common, spec, one) if number else one
    return spec


def _leaf_spec(value: Any) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        value = np.asarray(value)
    return TensorSpec(tuple(int(size) for size in value.shape), _dtype_name(value.dtype))


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        return {"U": "str", "S": "bytes", "O": "object"}.get(dtype.kind, str(dtype.name))
    return str(dtype).rpartition(".")[2]  # as torch.float32


def _common(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    if one.dtype != other.dtype:
        raise UsageError(f"elements of one dataset differ in dtype: {one.dtype} and {other.dtype}")
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return TensorSpec(None, one.dtype)
    sizes = zip(one.shape, other.shape, strict=True)
    return TensorSpec(tuple(a if a == b else None for a, b in sizes), one.dtype)


def _check_alike(one: Any, other: Any) -> None:
    for a, b in zip(_described(one), _described(other), strict=True):
        if a != b:
            raise UsageError(
                f"elements of one dataset differ in structure: {a} and {b}",
                hint="give every batch the same nesting of dicts, lists and tuples",
            )


def _described(nest: Any) -> tuple[str, str]:
    """Say of which type a nest is, and with what in it."""
    if isinstance(nest, Mapping):
        return "of type dict", f"with keys {sorted(map(str, nest))}"
    if isinstance(nest, tuple | list):
        return f"of type {type(nest).__name__}", f"with {len(nest)} parts"
    return f"of type {'NoneType' if nest is None else 'array'}", ""


# Dataset functions, and what they return.


def takes_context(dataset_fn: Callable[..., Any]) -> bool:
    """Return whether a dataset function wants an InputContext.

    It does if it requires an argument, or its first one is called ``context`` or
    ``input_context``.

    Raises:
        UsageError: If it is no function, is asynchronous, or needs more than that one argument.
    """
    if not callable(dataset_fn):
        raise UsageError(f"dataset_fn: expected a function, got {type_name(dataset_fn)}")
    _check_plain(f"dataset_fn {name_of(dataset_fn)}", dataset_fn)
    try:
        parameters = inspect.signature(dataset_fn).parameters.values()
    except ValueError:  # some built-in types tell nothing; calling tells
        return False
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1 or any(each.kind is each.KEYWORD_ONLY for each in required):
        names = ", ".join(each.name for each in required)
        raise UsageError(
            f"dataset_fn {name_of(dataset_fn)} needs the arguments {names}; expected none, or "
            "one (an InputContext)",
            hint="bind the others with functools.partial",
        )
    first = next(iter(parameters), None)
    return bool(required) or (
        first is not None
        and first.name in ("context", "input_context")
        and first.kind is first.POSITIONAL_OR_KEYWORD
    )


def open_dataset(dataset_fn: Callable[..., Any], context: InputContext) -> Iterator[Any]:
    """Build the dataset and return an iterator over its batches.

    Raises:
        UsageError: If what ``dataset_fn`` returns cannot be a sequence of batches.
        Exception: Whatever ``dataset_fn`` raises.
    """
    dataset = dataset_fn(context) if takes_context(dataset_fn) else dataset_fn()
    return batches_of(dataset, dataset_fn)


def batches_of(returned: Any, fn: Callable[..., Any], role: str = "dataset_fn") -> Iterator[Any]:
    """Return an iterator over the batches that a function has returned.

    Args:
        returned: By ``fn``.
        fn: Named in messages.
        role: What messages call it.

    Raises:
        UsageError: If it cannot be a sequence of batches.
    """
    name = f"{role} {name_of(fn)}"
    _check_plain(name, returned)
    if isinstance(returned, tuple) and _arrays_in(returned):
        raise UsageError(
            f"{name} returned a tuple of {len(returned)} arrays, expected an iterable of batches",
            hint="a list of one batch is [(x, y)]",
        )
    if isinstance(returned, str | bytes | Mapping) or not _is_iterable(returned):
        raise UsageError(f"{name} returned {type_name(returned)}, expected an iterable of batches")
    return iter(returned)


def _check_plain(name: str, made: Any) -> None:
    """Refuse what runs on an event loop: a function of the user, or what it has returned."""
    if inspect.iscoroutine(made):
        made.close()  # one clear error, not also "was never awaited"
    elif not (
        inspect.iscoroutinefunction(made)
        or inspect.isasyncgenfunction(made)
        or hasattr(made, "__aiter__")
    ):
        return
    raise UsageError(
        f"{name} is asynchronous",
        hint="write a plain function or generator: it runs in a thread, ahead of the steps",
    )


POLICIES = ("auto", "file", "data", "off")


class Dataset(ABC):
    """Batches that a worker reads completely or in part."""

    def __call__(self, context: InputContext) -> Iterator[Any]:
        """Return an iterator over all batches, in an order specific to this pipeline."""
        return self.elements(0, 1, order=context.input_pipeline_id)

    def __iter__(self) -> Iterator[Any]:
        return self.elements(0, 1)

    @abstractmethod
    def elements(self, first: int, step: int, *, order: int = 0) -> Iterator[Any]:
        """Return an iterator over the elements ``first``, ``first + step``, ….

        Args:
            first: Index, from 0.
            step: Number of at least 1.
            order: Number of the order, which determines the order together with the seed if the
                dataset is shuffled.
        """

    @property
    def element_spec(self) -> Any:
        """The nest of ``TensorSpec`` that describes its elements."""
        return spec_of(itertools.islice(self, 2))


class _Shuffled(Dataset):
    """Parts that are read in each epoch, in an order of its own if there is a seed."""

    def __init__(self, shuffle_seed: int | None, num_epochs: int | None) -> None:
        self.shuffle_seed = integer("shuffle_seed", shuffle_seed, 0, ", or None")
        self.num_epochs = integer("num_epochs", num_epochs, 1)

    def _orders(self, size: int, order: int) -> Iterator[Any]:
        """Yield the indices of each epoch, a range or an array; ``order``: see ``elements``."""
        for epoch in itertools.count() if self.num_epochs is None else range(self.num_epochs):
            if self.shuffle_seed is None:
                yield range(size)
            else:
                yield np.random.default_rng((self.shuffle_seed, order, epoch)).permutation(size)


class ArrayDataset(_Shuffled):
    """Batches of rows of arrays; see ``psync.data.from_arrays``."""

    def __init__(
        self,
        arrays: Any,
        batch_size: int | None,
        *,
        shuffle_seed: int | None = None,
        drop_remainder: bool = False,
        num_epochs: int | None = 1,
    ) -> None:
        self._arrays = _stacked(arrays)
        self.num_rows = _common_length(leaves_of(self._arrays))
        self.batch_size = integer("batch_size", batch_size, 1)
        super().__init__(shuffle_seed, num_epochs)
        self.drop_remainder = drop_remainder
        fits = not drop_remainder or self.num_rows >= (self.batch_size or 1)
        rows = f"{self.num_rows}, the number of rows, because of drop_remainder"
        check_fits(fits, f"batch_size: expected at most {rows}", batch_size)

    def __repr__(self) -> str:
        return f"<dataset of {self.num_rows} rows in batches of {self.batch_size}>"

    def elements(self, first: int, step: int, *, order: int = 0) -> Iterator[Any]:
        for rows in itertools.islice(self._rows(order), first, None, step):
            yield map_nest(functools.partial(_taken, rows), self._arrays)

    def cut(self, count: int) -> list[ArrayDataset]:
        """Return datasets of consecutive rows: so many, or one for each row if there are fewer."""
        ends = np.linspace(0, self.num_rows, count + 1).astype(int)
        parts = [slice(start, end) for start, end in itertools.pairwise(ends) if start < end]
        arrays = [map_nest(operator.itemgetter(part), self._arrays) for part in parts]
        return [ArrayDataset(each, self.batch_size) for each in arrays]

    def _rows(self, order: int) -> Iterator[Any]:
        """Yield what indexes the rows of each batch, or of each single row."""
        size = self.batch_size or 1
        end = self.num_rows - self.num_rows % size if self.drop_remainder else self.num_rows
        for rows in self._orders(self.num_rows, order):
            for start in range(0, end, size):
                batch = start if self.batch_size is None else slice(start, start + size)
                yield batch if self.shuffle_seed is None else rows[batch]

    @property
    def element_spec(self) -> Any:
        """The ``TensorSpec`` of its batches; the last batch may be smaller than the others."""
        spec = spec_of(itertools.islice(self, 1))
        if self.drop_remainder or self.num_rows % (self.batch_size or 1) == 0:
            return spec
        return map_nest(lambda one: TensorSpec((None, *one.shape[1:]), one.dtype), spec)


class FileDataset(_Shuffled):
    """Batches that a reader yields from files; see ``psync.data.from_files``."""

    def __init__(
        self,
        files: Sequence[Any],
        reader: Callable[[Any], Any],
        *,
        shuffle_seed: int | None = None,
        num_epochs: int | None = 1,
    ) -> None:
        if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Sequence):
            raise UsageError(
                f"files: expected a list of file names, got {type_name(files)}",
                hint="sorted(glob.glob(pattern)) is the same on every start",
            )
        if not files:
            raise UsageError("files: expected at least one file name, got an empty list")
        if not callable(reader):
            raise UsageError(
                f"reader: expected a function that takes a file name and returns its batches, "
                f"got {type_name(reader)}"
            )
        _check_plain(f"reader {name_of(reader)}", reader)
        super().__init__(shuffle_seed, num_epochs)
        self.files = tuple(files)
        self.reader = reader

    def __repr__(self) -> str:
        return f"<dataset of {len(self.files)} files, read by {name_of(self.reader)}>"

    def elements(self, first: int, step: int, *, order: int = 0) -> Iterator[Any]:
        return itertools.islice(self._batches(self.files, order), first, None, step)

    def of_files(self, first: int, step: int) -> Iterator[Any]:
        """Return an iterator over the batches of the files ``first``, ``first + step``, …."""
        return self._batches(self.files[first::step], first)

    def _batches(self, files: Sequence[Any], order: int) -> Iterator[Any]:
        for indices in self._orders(len(files), order):
            empty = True
            for index in indices:
                for batch in batches_of(self.reader(files[index]), self.reader, "reader"):
                    empty = False
                    yield batch
            if empty:  # for ever, perhaps
                return


class IterableDataset(Dataset):
    """Any iterable that can be iterated over more than once: a list, a DataLoader, …."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __repr__(self) -> str:
        return f"<dataset of a {type_name(self.iterable)}>"

    def elements(self, first: int, step: int, *, order: int = 0) -> Iterator[Any]:
        return itertools.islice(iter(self.iterable), first, None, step)

    @property
    def element_spec(self) -> Any:
        """What its first two elements have in common; of a sequence, the first and the last."""
        elements = self.iterable
        if isinstance(elements, Sequence) and len(elements) > 1:
            return spec_of((elements[0], elements[-1]))
        return super().element_spec


@dataclass(frozen=True, slots=True)
class Sharded:
    """A dataset function that gives each pipeline its share of a dataset."""

    dataset: Dataset
    policy: str  # "file", "data" or "off"

    def __call__(self, context: InputContext) -> Iterator[Any]:
        """Return an iterator over what is that pipeline's."""
        index, count = context.input_pipeline_id, context.num_input_pipelines
        if self.policy == "off":
            return self.dataset(context)
        if self.policy == "file":
            assert isinstance(self.dataset, FileDataset), "checked by `policy_for`"
            return self.dataset.of_files(index, count)
        return self.dataset.elements(index, count)


def policy_for(dataset: Dataset, policy: str, num_workers: int) -> str:
    """Return how a dataset is cut into shards: "file", "data" or "off".

    Raises:
        ConfigurationError: If it is to be cut by file, and has none, or fewer than workers.
    """
    num_files = len(dataset.files) if isinstance(dataset, FileDataset) else 0
    if policy == "auto":
        return "file" if num_files >= num_workers else "data"
    if policy == "file" and num_files < num_workers:
        have = f"{num_files} files" if num_files else f"a dataset without files, {dataset!r}"
        raise ConfigurationError(
            f'shard_policy "file": expected at least one file for each of {num_workers} workers, '
            f"got {have}",
            hint='psync.data.from_files creates datasets of files; shard_policy="data" accepts any '
            "dataset",
        )
    return policy


# What a user may give.


def dataset_of(source: Any) -> Callable[..., Any]:
    """Return the dataset function that ``source`` is or stands for.

    Args:
        source: A function with no argument or with an InputContext, or anything that can be
            iterated over more than once.

    Raises:
        ConfigurationError: If it is something else; says what to give instead.
        UsageError: If it is a function that is no dataset function.
    """
    if isinstance(source, Dataset | Sharded):
        return source
    is_function = isinstance(source, type | functools.partial) or inspect.isroutine(source)
    if not is_function and _is_iterable(source):
        return iterable_of(source)
    if callable(source):
        takes_context(source)  # what is no dataset function is refused here, not on a worker
        return cast(Callable[..., Any], source)
    asynchronous_too = inspect.iscoroutine(source) or hasattr(source, "__aiter__")
    if inspect.iscoroutine(source):
        source.close()  # one clear error, not also "was never awaited"
    raise ConfigurationError(
        f"dataset: expected a dataset function or an iterable of batches, got {type_name(source)}"
        + (", which is asynchronous" if asynchronous_too else ""),
        hint="batches are loaded by plain code, in a thread, ahead of the steps",
    )


def _is_iterable(source: Any) -> bool:
    return hasattr(source, "__iter__") or hasattr(source, "__getitem__")


def iterable_of(source: Any) -> Dataset:
    """Return the dataset that an iterable is.

    Raises:
        ConfigurationError: If it is none, or can be iterated over only once, or is arrays and not
            batches.
    """
    if isinstance(source, Dataset):
        return source
    if reason := getattr(type(source), "__psync_capture_error__", None):
        raise ConfigurationError(f"dataset: a {type_name(source)} is not a dataset: {reason}")
    if isinstance(source, Iterator):
        raise ConfigurationError(
            f"dataset: a {type_name(source)} can be iterated over only once, but every worker "
            "iterates over it",
            hint="pass the function that creates it: create_per_worker_dataset(batches), not "
            "create_per_worker_dataset(batches())",
        )
    if what := _arrays_in(source):
        raise ConfigurationError(
            f"dataset: expected an iterable of batches, got {what}",
            hint="psync.data.from_arrays(arrays, batch_size=…) cuts arrays into batches",
        )
    if isinstance(source, str | bytes | Mapping) or not _is_iterable(source):
        raise ConfigurationError(
            f"dataset: expected an iterable of batches, got {type_name(source)}"
        )
    return IterableDataset(source)


def _arrays_in(source: Any) -> str:
    """Say what arrays ``source`` is; "" if it is something else."""
    if isinstance(source, np.ndarray):
        return "an array"
    if not isinstance(source, tuple | Mapping):
        return ""
    parts = list(source.values()) if isinstance(source, Mapping) else list(source)
    arrays = bool(parts) and all(isinstance(part, np.ndarray) for part in parts)
    return f"a {type(source).__name__} of arrays" if arrays else ""


# Checks.


def integer(name: str, value: Any, least: int, also: str = "") -> int | None:
    """Return ``value`` if it is an integer of at least ``least``, or None.

    Raises:
        ConfigurationError: If not.
    """
    expected = f"{name}: expected an integer of at least {least}{also}"
    return None if value is None else checked_integer(expected, value, least)


def _stacked(arrays: Any) -> Any:
    """Return a nest of arrays in which what is a list is stacked."""
    if isinstance(arrays, Mapping):
        return {key: _stacked(part) for key, part in arrays.items()}
    if isinstance(arrays, tuple):
        parts = [_stacked(part) for part in arrays]
        return type(arrays)(*parts) if hasattr(arrays, "_fields") else tuple(parts)
    if arrays is None:
        raise UsageError("arrays: expected arrays, got None")
    try:
        return plain_array(arrays)
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"arrays: a {type_name(arrays)} is stacked into one array, which failed: {exc}",
            hint="pass related arrays as a tuple or dict: from_arrays((x, y), …)",
        ) from exc


def _common_length(arrays: Sequence[NDArray[Any]]) -> int:
    lengths = {len(array) if array.ndim else None for array in arrays}
    got = f"got shapes {[array.shape for array in arrays]}"
    if not lengths or None in lengths or 0 in lengths:
        raise UsageError(f"arrays: expected arrays of at least one row each, {got}")
    if len(lengths) > 1:
        raise UsageError(f"arrays: expected the same number of rows in all, {got}")
    return int(lengths.pop() or 0)


def _taken(rows: Any, array: NDArray[Any]) -> Any:
    """Return a copy of these rows: a step may change its batch."""
    return array[rows] if isinstance(rows, np.ndarray) else array[rows].copy()
