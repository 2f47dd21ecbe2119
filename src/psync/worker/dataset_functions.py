"""Dataset functions: their InputContext, and validation of the dataset that they return.

A dataset function runs on each worker and returns an iterable of batches. What cannot be one is
refused with its name: a function on the coordinator, where it is given; what it returns on the
worker, where it is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from psync.errors import ConfigurationError, UsageError
from psync.serialization.captures import name_of, type_name


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
        _check_id("input_pipeline_id", self.input_pipeline_id, self.num_input_pipelines)
        _check_replicas(self.num_replicas_in_sync)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples of a global batch for each replica.

        Raises:
            ConfigurationError: The batch cannot be divided evenly; also a ValueError.
        """
        if isinstance(global_batch_size, bool) or not (
            isinstance(global_batch_size, Integral) and global_batch_size >= 1
        ):
            raise ConfigurationError(
                f"global_batch_size: expected an integer of at least 1, got {global_batch_size!r}"
            )
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
        _check_replicas(self.num_replicas_in_sync)
        _check_id(
            "replica_id_in_sync_group", self.replica_id_in_sync_group, self.num_replicas_in_sync
        )

    def __str__(self) -> str:  # as of InputContext
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


def _check_id(name: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ConfigurationError(f"{name}: expected 0 to {count - 1}, got {number}")


def _check_replicas(count: int) -> None:
    if count < 1:
        raise ConfigurationError(f"num_replicas_in_sync: expected at least 1, got {count}")


# Datasets.


def takes_context(dataset_fn: Callable[..., Any]) -> bool:
    """Return whether a dataset function wants an InputContext.

    It does if it requires an argument, or its first one is called ``context`` or
    ``input_context``.

    Raises:
        UsageError: If it is no function, is asynchronous, or needs more than that one argument.
    """
    if not callable(dataset_fn):
        raise UsageError(f"dataset_fn: expected a function, got {type_name(dataset_fn)}")
    if inspect.iscoroutinefunction(dataset_fn) or inspect.isasyncgenfunction(dataset_fn):
        raise asynchronous(f"dataset_fn {name_of(dataset_fn)}")
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
    if inspect.iscoroutine(returned) or hasattr(returned, "__aiter__"):
        if inspect.iscoroutine(returned):
            returned.close()  # one clear error, not also "was never awaited"
        raise asynchronous(name)
    if (
        isinstance(returned, tuple)
        and returned
        and all(isinstance(x, np.ndarray) for x in returned)
    ):
        raise UsageError(
            f"{name} returned a tuple of {len(returned)} arrays, expected an iterable of batches",
            hint="a list of one batch is [(x, y)]",
        )
    if isinstance(returned, (str, bytes, Mapping)) or not (
        hasattr(returned, "__iter__") or hasattr(returned, "__getitem__")
    ):
        raise UsageError(f"{name} returned {type_name(returned)}, expected an iterable of batches")
    return iter(returned)


def asynchronous(name: str) -> UsageError:
    """Return the error for a function of the user that is asynchronous."""
    return UsageError(
        f"{name} is asynchronous",
        hint="write a plain function or generator: it runs in a thread, ahead of the steps",
    )
