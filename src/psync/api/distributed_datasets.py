"""Datasets of which each worker has its share."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from psync.api.variables import Variable
from psync.client.context import current_closure, enter_dataset
from psync.errors import ConfigurationError, ContextError
from psync.serialization.captures import name_of, refers_to, type_name
from psync.worker.data_sources import (
    POLICIES,
    ArrayDataset,
    Dataset,
    Sharded,
    iterable_of,
    policy_for,
)
from psync.worker.dataset_functions import InputContext, open_dataset, takes_context
from psync.worker.element_specs import spec_of


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How a dataset is distributed.

    ``shard_policy`` says what a worker's share is: "file": every n-th file, where there is one
    at least for each of n workers; "data": every n-th element, of which each worker loads all
    and throws away the others'; "off": everything; "auto": "file" where that is possible, else
    "data".

    Source: ``tf.distribute.InputOptions`` and ``tf.data.experimental.AutoShardPolicy``.
    """

    shard_policy: str = "auto"

    def __post_init__(self) -> None:
        if self.shard_policy not in POLICIES:
            raise ConfigurationError(
                f"shard_policy: expected one of {', '.join(POLICIES)}, got {self.shard_policy!r}"
            )


class DistributedDataset:
    """A dataset of which each worker has its share. It is iterated over on workers only.

    On the coordinator it is given to ``ClusterCoordinator.create_per_worker_dataset``. A step that
    gets it as an argument may iterate over its worker's share, from the beginning and without
    loading ahead; so may a worker's program that trains without a coordinator. Made by
    ``ParameterServerStrategy.experimental_distribute_dataset`` and
    ``distribute_datasets_from_function``.

    Args:
        dataset_fn: What each worker calls, with its InputContext if it takes one.
        num_workers: How many there are.
        worker_index: Of this process among them; None where it is no worker.

    Source: ``tf.distribute.DistributedDataset``.
    """

    def __init__(
        self, dataset_fn: Callable[..., Any], num_workers: int, worker_index: int | None
    ) -> None:
        self.dataset_fn = dataset_fn
        self.num_workers = num_workers
        self._worker_index = worker_index

    def __repr__(self) -> str:
        return f"<distributed dataset of {self.dataset_fn!r} for {self.num_workers} workers>"

    def __iter__(self) -> Iterator[Any]:
        closure = current_closure()
        index = closure.worker_index if closure is not None else self._worker_index
        if index is None:
            raise ContextError(
                "iter() on a distributed dataset on the coordinator: its elements are for workers",
                hint="pass iter(coordinator.create_per_worker_dataset(dataset)) to steps",
            )
        # A worker that was added later reads the share of another one.
        share = index % self.num_workers
        return _elements(self.dataset_fn, InputContext(self.num_workers, share))

    @property
    def element_spec(self) -> Any:
        """What elements look like: a nest of ``TensorSpec``; None if there are none.

        A size that differs between elements, as that of the last batch does, is None. Arrays
        tell it themselves; of other datasets, the first two elements are loaded in this process,
        as often as this is asked.

        Source: ``tf.distribute.DistributedDataset.element_spec``.
        """
        return element_spec_of(self.dataset_fn, self.num_workers)


def _elements(dataset_fn: Callable[..., Any], context: InputContext) -> Generator[Any, None, None]:
    """Yield what a dataset has for one worker; its code runs as dataset code."""
    with enter_dataset(context.input_pipeline_id):
        source = open_dataset(dataset_fn, context)
    while True:
        with enter_dataset(context.input_pipeline_id):
            try:
                element = next(source)
            except StopIteration:
                return
        yield element


def element_spec_of(dataset_fn: Callable[..., Any], num_workers: int) -> Any:
    """Return what the elements of a dataset look like; of a function, on the first worker."""
    dataset = dataset_fn.dataset if isinstance(dataset_fn, Sharded) else dataset_fn
    if isinstance(dataset, Dataset):
        return dataset.element_spec
    elements = _elements(dataset_fn, InputContext(num_workers, 0))
    with closing(elements):
        return spec_of(itertools.islice(elements, 2))


# What the strategy offers.


def distribute_dataset(
    dataset: Any, options: InputOptions | None, num_workers: int, worker_index: int | None
) -> DistributedDataset:
    """Return the dataset cut into shards; see
    ``ParameterServerStrategy.experimental_distribute_dataset``."""
    policy = _options("experimental_distribute_dataset", options).shard_policy
    if isinstance(dataset, DistributedDataset):
        raise ConfigurationError("dataset: expected a dataset, got one that is distributed already")
    if not isinstance(dataset, Dataset) and (
        inspect.isroutine(dataset) or isinstance(dataset, type)
    ):
        raise ConfigurationError(
            f"dataset: expected an iterable of batches, got a {type_name(dataset)}",
            hint="distribute_datasets_from_function takes a function, which is told its shard",
        )
    whole = iterable_of(dataset)
    sharded = Sharded(whole, policy_for(whole, policy, num_workers))
    return DistributedDataset(sharded, num_workers, worker_index)


def distribute_function(
    dataset_fn: Any, options: InputOptions | None, num_workers: int, worker_index: int | None
) -> DistributedDataset:
    """Return what each worker's call of a function returns; see
    ``ParameterServerStrategy.distribute_datasets_from_function``."""
    policy = _options("distribute_datasets_from_function", options).shard_policy
    if policy not in ("auto", "off"):
        raise ConfigurationError(
            f'shard_policy: expected "auto" or "off" for a dataset function, got "{policy}"',
            hint="the function cuts its shard itself: context.input_pipeline_id says which",
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
            f"dataset_fn {name_of(dataset_fn)} names psync.Variable: dataset code cannot make a "
            "variable, it runs on each worker, ahead of the steps",
            hint="declare it in `with strategy.scope():`, and use it in the step that gets the "
            "batch",
        )


def numpy_dataset(numpy_input: Any) -> ArrayDataset:
    """Return a dataset of the rows of arrays; see
    ``ParameterServerStrategy.experimental_make_numpy_dataset``."""
    return ArrayDataset(numpy_input, None)


def _options(operation: str, options: Any) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise ConfigurationError(
            f"{operation}: options: expected InputOptions, got {type_name(options)}"
        )
    return options
