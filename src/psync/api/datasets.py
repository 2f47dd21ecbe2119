"""Per-worker datasets and distributed (sharded) datasets, and the positions of their iterators.

All that may be given (a dataset function, an iterable, arrays, files) becomes a dataset function,
pickled once and fetched by each worker when it first needs an iterator. What cannot be one is
refused where it is given: a generator, arrays that are not cut into batches, asynchronous code,
code that names ``psync.Variable``. A dataset function may not call psync.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from psync.api.variables import Variable
from psync.client.context import DatasetContext, current_closure, inside
from psync.closures.closure import NO_DATA, Needs
from psync.errors import ConfigurationError, ContextError, SerializationError, check_fits
from psync.net.platform import random_hex
from psync.serialization.captures import name_of, refers_to, type_name
from psync.serialization.functions import Function, FunctionTable
from psync.serialization.payloads import pack
from psync.specs import checked_integer, checked_kind
from psync.wire.messages import AskPosition, Number
from psync.worker.data_sources import (
    POLICIES,
    Dataset,
    InputContext,
    IterableDataset,
    Sharded,
    dataset_of,
    iterable_of,
    open_dataset,
    policy_for,
    spec_of,
    takes_context,
)
from psync.worker.iterators import IteratorHandle

if TYPE_CHECKING:
    from psync.api.cluster_coordinator import ClusterCoordinator

T = TypeVar("T")

DatasetFunction: TypeAlias = Callable[[InputContext], Iterable[T]] | Callable[[], Iterable[T]]


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options for distributing a dataset.

    Attributes:
        shard_policy: A worker's share of n workers. "file": every n-th file, of at least n files.
            "data": every n-th element; each worker loads all elements and drops the others. "off":
            everything. "auto": "file" if possible, otherwise "data".

    Source: ``tf.distribute.InputOptions`` and ``tf.data.experimental.AutoShardPolicy``.
    """

    shard_policy: str = "auto"

    def __post_init__(self) -> None:
        policy, expected = self.shard_policy, f"shard_policy: expected one of {', '.join(POLICIES)}"
        check_fits(policy in POLICIES, expected, policy)


@dataclass(eq=False, repr=False)
class DistributedDataset(Generic[T]):
    """A dataset split into shares, one for each worker. Only workers can iterate over it.

    On the coordinator, pass it to ``ClusterCoordinator.create_per_worker_dataset``. A step that
    gets it as an argument may iterate over its worker's share, from the beginning and without
    loading ahead. So may a worker's program that trains without a coordinator. Made by
    ``ParameterServerStrategy.experimental_distribute_dataset`` and
    ``distribute_datasets_from_function``.

    Args:
        dataset_fn: Function that each worker calls, with its InputContext if it takes one.
        num_workers: Number of workers.
        worker_index: Index of this process among them; None if it is not a worker.

    Source: ``tf.distribute.DistributedDataset``.
    """

    dataset_fn: Callable[..., Any]
    num_workers: int
    worker_index: int | None

    def __repr__(self) -> str:
        return f"<distributed dataset of {self.dataset_fn!r} for {self.num_workers} workers>"

    def __iter__(self) -> Iterator[T]:
        closure = current_closure()
        index = closure.worker_index if closure is not None else self.worker_index
        if index is None:
            raise ContextError(
                "iter() on a distributed dataset on the coordinator: only workers read its "
                "elements",
                hint="pass iter(coordinator.create_per_worker_dataset(dataset)) to steps",
            )
        # A worker that was added later reads the share of another one.
        share = index % self.num_workers
        return _elements(self.dataset_fn, InputContext(self.num_workers, share))

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of elements: a nest of ``TensorSpec``; None if there are no elements.

        A size that differs between elements, such as that of the last batch, is None. Arrays have a
        spec; for other datasets, each access loads the first two elements in this process.

        Source: ``tf.distribute.DistributedDataset.element_spec``.
        """
        fn = self.dataset_fn
        dataset = fn.dataset if isinstance(fn, Sharded) else fn
        if isinstance(dataset, Dataset):
            return dataset.element_spec
        with closing(_elements(fn, InputContext(self.num_workers, 0))) as elements:
            return spec_of(itertools.islice(elements, 2))


def _elements(dataset_fn: Callable[..., Any], context: InputContext) -> Generator[Any, None, None]:
    """Yield what a dataset has for one worker; its code runs as dataset code."""
    with inside(DatasetContext(context.input_pipeline_id)):
        source = open_dataset(dataset_fn, context)
    while True:
        with inside(DatasetContext(context.input_pipeline_id)):
            try:
                element = next(source)
            except StopIteration:
                return
        yield element


# What the strategy offers.


def distribute_dataset(
    dataset: Any, options: InputOptions | None, num_workers: int, worker_index: int | None
) -> DistributedDataset[Any]:
    """Return the dataset cut into shards; see
    ``ParameterServerStrategy.experimental_distribute_dataset``."""
    policy = _options("experimental_distribute_dataset", options).shard_policy
    if isinstance(dataset, DistributedDataset):
        raise ConfigurationError("dataset: expected a dataset, got one that is already distributed")
    if not isinstance(dataset, Dataset) and (
        inspect.isroutine(dataset) or isinstance(dataset, type)
    ):
        raise ConfigurationError(
            f"dataset: expected an iterable of batches, got a {type_name(dataset)}",
            hint="for a function use distribute_datasets_from_function, which passes it its shard",
        )
    whole = iterable_of(dataset)
    sharded = Sharded(whole, policy_for(whole, policy, num_workers))
    return DistributedDataset(sharded, num_workers, worker_index)


def distribute_function(
    dataset_fn: Any, options: InputOptions | None, num_workers: int, worker_index: int | None
) -> DistributedDataset[Any]:
    """Return what each worker's call of a function returns; see
    ``ParameterServerStrategy.distribute_datasets_from_function``."""
    policy = _options("distribute_datasets_from_function", options).shard_policy
    if policy not in ("auto", "off"):
        raise ConfigurationError(
            f'shard_policy: expected "auto" or "off" for a dataset function, got "{policy}"',
            hint="let the function select its shard by context.input_pipeline_id",
        )
    takes_context(dataset_fn)
    refuse_variables(dataset_fn)
    return DistributedDataset(dataset_fn, num_workers, worker_index)


def refuse_variables(dataset_fn: Any) -> None:
    """Refuse a dataset function that makes variables, before any worker runs it.

    Raises:
        ConfigurationError: Its code names ``psync.Variable``.
    """
    if refers_to(dataset_fn, Variable):
        raise ConfigurationError(
            f"dataset_fn {name_of(dataset_fn)} names psync.Variable: dataset code cannot create "
            "variables, because it runs on each worker, ahead of the steps",
            hint="declare it in `with strategy.scope():`, and use it in the step that gets the "
            "batch",
        )


def _options(operation: str, options: Any) -> InputOptions:
    if options is None:
        return InputOptions()
    return checked_kind(f"{operation}: options: expected InputOptions", options, InputOptions)


class PerWorkerIterator(IteratorHandle[T]):
    """The coordinator's handle to an iterator on each worker; dropping it releases them.

    Type checkers see an ``Iterator[T]`` of batches, as the step does.

    A closure or step function that carries the handle keeps it: see ``payloads``.
    """

    __psync_kept__ = True

    def __init__(self, dataset: PerWorkerDataset[T], starts: Mapping[int, int]) -> None:
        function, num_workers = dataset._function, dataset._dataset.num_workers
        super().__init__(random_hex(8), function.key, num_workers, starts)
        self.end = dataset._end  # as for ``create_per_worker_dataset``
        self._function = function  # workers may ask for it as long as this lives
        self._coordinator = dataset._coordinator

    def _needs(self, epoch: int = 0) -> Needs:
        """Return the data that a closure needs: batches of ``next``, or of ``next_in(epoch)``."""
        return frozenset({(self.uid, epoch)}) if self.end == "all" else NO_DATA

    async def positions(self) -> dict[int, int]:
        """Return how many batches steps have received, by ``get_worker_index()``.

        Batches that are only loaded ahead do not count. A worker that is not there, or has not
        needed the iterator yet, is at its start position. Call it while no step is running, such as
        after ``join``: a worker answers between steps, and batches that it hands out later are not
        included.

        Raises:
            ClosedError: The coordinator is not running.

        Cancellation: Safe.
        """
        coordinator = self._coordinator._running("positions")
        answers = await coordinator.workers.ask(AskPosition(self.uid))
        positions = {}
        for place, worker in enumerate(coordinator.workers.names()[: self.num_pipelines]):
            positions[place] = self.starts.get(place, 0)
            answer = answers.get(worker)
            if isinstance(answer, Number) and answer.value >= 0:
                positions[place] = answer.value
        return positions


@dataclass(eq=False, repr=False)
class PerWorkerDataset(Generic[T]):
    """A dataset that every worker reads separately.

    ``iter(dataset)`` makes an iterator on every worker and returns one handle, which steps take as
    an argument (or capture) and call ``next`` on. Each ``iter`` starts the data from the beginning.
    Made by ``ClusterCoordinator.create_per_worker_dataset``.

    Source: ``tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset``.
    """

    __psync_capture_error__ = "each worker reads it through an iterator"
    __psync_capture_hint__ = (
        "iterator = iter(dataset) in the program, and next(iterator) in the step"
    )

    _dataset: DistributedDataset[T]
    _function: Function
    _coordinator: ClusterCoordinator
    _end: str = "all"
    _iterator_class: ClassVar[type[PerWorkerIterator[Any]]] = PerWorkerIterator

    def __iter__(self) -> PerWorkerIterator[T]:
        return self.iterator()

    def iterator(self, position: int | Mapping[int, int] = 0) -> PerWorkerIterator[T]:
        """Return a new iterator, as ``iter`` does, that may begin at a later position.

        The batches before it are loaded and dropped. A worker that is lost and restarts begins
        there again.

        Args:
            position: Number of batches to skip: one number for all workers, or the result of
                ``PerWorkerIterator.positions``; a worker that is missing in it begins at 0.

        Raises:
            ConfigurationError: It is not a position, or names a worker outside the cluster.
            ContextError: Inside a step.
        """
        if current_closure() is not None:
            raise ContextError(
                "iter() on a per-worker dataset inside a step",
                hint="call iter(dataset) on the coordinator and pass the iterator to the step",
            )
        iterator = self._iterator_class(self, _checked(position, self._dataset.num_workers))
        # Weakly: the coordinator itself may hold the iterator, in a closure that is queued.
        owner = weakref.ref(self._coordinator)
        weakref.finalize(iterator, _release, owner, iterator.uid).atexit = False
        return iterator

    def build(self) -> DistributedDataset[T]:
        """Return the dataset without iterators: a step that gets it iterates over it directly.

        Source: ``build`` of TensorFlow's per-worker datasets.
        """
        return self._dataset

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of batches: a nest of ``TensorSpec``; None if there are no batches.

        To find out, this process loads the first two batches of the first worker.

        Source: ``tf.distribute.DistributedDataset.element_spec``.
        """
        return self._dataset.element_spec


def _release(owner: weakref.ref[ClusterCoordinator], uid: str) -> None:
    # The garbage collector may call this, in any thread and in the middle of anything.
    known = owner()
    coordinator = None if known is None else known._coordinator
    if coordinator is not None:
        coordinator.call_soon(lambda: coordinator.release_iterators(uid))


def _checked(position: Any, num_workers: int) -> dict[int, int]:
    """Return positions by worker index, without those that are 0."""
    if not isinstance(position, Mapping):
        position = dict.fromkeys(range(num_workers), position)
    found: dict[int, int] = {}
    for key, count in position.items():
        # In JSON, keys are text.
        worker = int(key) if isinstance(key, str) and key.isdecimal() else key
        hint = "shards of data depend on the number of workers; start without a position"
        expected = f"position: expected workers 0 to {num_workers - 1}"
        check_fits(worker in range(num_workers), expected, key, hint)
        position = checked_integer("position: expected a number of batches of at least 0", count, 0)
        if position:
            found[int(worker)] = position
    return found


def capture_dataset(source: Any, functions: FunctionTable) -> tuple[Callable[..., Any], Function]:
    """Return the dataset function that ``source`` stands for, and how it is sent to workers.

    Raises:
        ConfigurationError: It is no dataset, or one that a worker cannot read by itself,
            or a function that makes a variable.
        SerializationError: It holds something that cannot be sent; names it.
    """
    if isinstance(source, PerWorkerDataset | IteratorHandle):
        raise ConfigurationError(
            "dataset: expected a dataset function or an iterable of batches, got a "
            f"{type_name(source)}, which is already per worker"
        )
    fn = source.dataset_fn if isinstance(source, DistributedDataset) else dataset_of(source)
    if not isinstance(fn, Dataset | Sharded):
        refuse_variables(fn)
    try:
        return fn, functions.register_dataset(fn)
    except SerializationError:
        if isinstance(fn, IterableDataset):  # which the user never sees
            pack(fn.iterable, subject="the dataset")
        raise
