"""Exact evaluation: every example of the validation data counts once, also when workers die.

The data are cut into shards. A shard is evaluated by one closure, which returns what it counted;
the program adds that up. A closure that is lost with its worker runs again elsewhere, and only its
last run returns a result, so nothing is counted twice and nothing is missing.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from psync.api.cluster_coordinator import ClusterCoordinator
from psync.api.pulls import pull
from psync.errors import ConfigurationError, ValueMismatchError
from psync.metrics import Metric
from psync.specs import plain_array
from psync.worker.data_sources import ArrayDataset
from psync.worker.element_specs import leaves_of, map_nest

logger = logging.getLogger(__name__)

Shard = Iterable[Any] | functools.partial[Any]
"""Batches, or what makes them on the worker."""

SHARDS_PER_WORKER = 5
"""As in Keras: fewer leave workers idle at the end, more cost a pull each."""


def shards_of(data: Any, num_shards: int, batch_size: int) -> Sequence[Shard]:
    """Cut validation data into shards.

    Args:
        data: (x, y) or (x, y, sample_weight), arrays of one length, or dicts of them; a function
            (shard, number of shards) → finite iterable of batches, called on workers; or a list
            of shards, each a finite iterable of batches.
        num_shards: How many; a list has its own number.
        batch_size: Of arrays.

    Raises:
        ConfigurationError: It is nothing of this kind, or empty.
    """
    if callable(data):
        if inspect.iscoroutinefunction(data) or inspect.isasyncgenfunction(data):
            raise ConfigurationError("validation data: expected a plain function, got a coroutine")
        return [functools.partial(data, number, num_shards) for number in range(num_shards)]
    if isinstance(data, tuple) and any(map(_is_of_rows, data)):
        try:
            arrays = map_nest(plain_array, data)
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(f"validation data: expected arrays, got {exc}") from exc
        found = leaves_of(arrays)
        lengths = {len(array) if array.ndim else -1 for array in found}
        if len(lengths) != 1 or min(lengths) < 1:
            raise ConfigurationError(
                "validation data: expected arrays of one length, at least 1, got shapes "
                f"{[array.shape for array in found]}"
            )
        cuts = np.linspace(0, lengths.pop(), num_shards + 1).astype(int)
        return [
            ArrayDataset(map_nest(operator.itemgetter(slice(start, stop)), arrays), batch_size)
            for start, stop in itertools.pairwise(cuts)
            if start < stop
        ]
    if isinstance(data, Sequence) and data and not isinstance(data, str | bytes):
        if any(map(_is_of_rows, data)):
            raise ConfigurationError(
                f"validation data: got a {type(data).__name__} of arrays, which is no list of "
                "shards",
                hint="a tuple of arrays: (x, y)",
            )
        return list(data)
    raise ConfigurationError(
        f"validation data: got {type(data).__name__}",
        hint="expected a tuple of arrays (x, y), a function (shard, num_shards) -> batches, or a "
        "list of shards",
    )


def _is_of_rows(part: object) -> bool:
    """Return whether a part of validation data is an array, or a dict of them."""
    return hasattr(part, "__array__") or isinstance(part, Mapping)


def batch_size_of(batch: Any) -> int:
    """Return how many examples a batch has: the length of its first array; 1 if it has none."""
    while isinstance(batch, tuple | list | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = np.shape(batch)
    return int(shape[0]) if shape else 1


async def awaited(made: Any) -> Any:
    """Return what a function of the user has returned, plain or asynchronous."""
    return await made if inspect.isawaitable(made) else made


def parts_of(made: Any) -> Sequence[Any]:
    """Return (loss, …) of what a function of the user has made of a batch.

    Raises:
        ValueMismatchError: It is none.
    """
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise ValueMismatchError(
            "value_and_grad: expected (loss, gradients) or (loss, gradients, predictions), "
            f"got {got}",
            hint="for evaluation alone, loss_and_predictions returns (loss, predictions)",
        )
    return made


def no_batch() -> ConfigurationError:
    """Return the error of an epoch without a batch."""
    return ConfigurationError(
        "fit: expected at least one batch, got none", hint="the dataset of a worker is empty"
    )


def say_over(epoch: int, epochs: int) -> None:
    """Say in the log why training ends before its last epoch."""
    logger.warning(
        "training ends with epoch %d of %d: the workers' data began and ended in it; give them "
        "more (num_epochs=None), or fewer steps_per_epoch", epoch + 1, epochs,
    )  # fmt: skip


class Counts:
    """Sums of batches for the loss and the metrics, not yet added to these.

    Args:
        metrics: First "loss", the mean of the losses, weighted by batch size; then the others, of
            predictions.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = dict(metrics)
        self._loss = self._metrics.pop("loss")
        self.sums: list[Any] = [0.0] * len(metrics)
        self.batches = 0

    def note(self, batch: Any, loss: Any, predictions: Sequence[Any]) -> None:
        """Count a batch.

        Args:
            batch: (x, y) or (x, y, sample_weight), if there are metrics.
            loss: Its mean loss.
            predictions: Empty, or (predictions,).

        Raises:
            ValueMismatchError: The loss is no number; there are metrics and no predictions, or they
                do not fit.
        """
        if math.prod(np.shape(loss)) != 1:
            raise ValueMismatchError(
                f"loss: expected a number, got shape {np.shape(loss)}", hint="the mean of the batch"
            )
        self.batches += 1
        self.sums[0] += self._loss.contribution(
            np.reshape(loss, (1,)), sample_weight=[batch_size_of(batch)]
        )
        if not self._metrics:
            return
        if not predictions:
            raise ValueMismatchError(
                f"metrics {', '.join(self._metrics)} need predictions",
                hint="let value_and_grad return (loss, gradients, predictions)",
            )
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise ValueMismatchError(
                "a batch for metrics: expected (x, y) or (x, y, sample_weight), got "
                f"{type(batch).__name__}"
            )
        _, y, *weights = batch
        weight = weights[0] if weights else None
        for position, metric in enumerate(self._metrics.values(), 1):
            self.sums[position] += metric.contribution(y, predictions[0], sample_weight=weight)


async def evaluate(
    coordinator: ClusterCoordinator,
    variables: Any,
    value_of: Callable[[Any, Any], Any],
    metrics: Mapping[str, Metric],
    shards: Sequence[Shard],
) -> dict[str, float]:
    """Evaluate the present values of variables on shards of data.

    Args:
        coordinator: That runs.
        variables: A nesting of them.
        value_of: (values, batch) → (loss, …, predictions): the first and the last are used.
        metrics: By name, for their formulas; first the loss. Nothing is counted in them.
        shards: As ``shards_of`` returns them.

    Returns:
        The metrics, by name.

    Raises:
        ConfigurationError: There is no example.
        Exception: What a step raised.

    Cancellation: What was scheduled goes on.
    """

    async def evaluate_shard(shard: Shard) -> list[Any]:
        values = await pull(variables)
        counts = Counts(metrics)
        for batch in shard() if isinstance(shard, functools.partial) else shard:
            first, *rest = parts_of(await awaited(value_of(values, batch)))
            counts.note(batch, first, rest[-1:])
        return counts.sums

    results = [coordinator.schedule(evaluate_shard, args=(shard,)) for shard in shards]
    await coordinator.join()
    totals = [sum(parts) for parts in zip(*await coordinator.fetch(results), strict=True)]
    if not np.ndim(totals[0]):
        raise ConfigurationError("validation data: expected at least one batch, got none")
    counted = zip(metrics.items(), totals, strict=True)
    return {name: metric.value_of(total) for (name, metric), total in counted}
