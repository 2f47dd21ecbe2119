"""Training of a served Keras model: its steps, its metrics and its callbacks in psync's Trainer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.utils.python_utils import is_default, pythonify_logs

import psync.callbacks
from psync.api.cluster_coordinator import ClusterCoordinator
from psync.client.context import wait
from psync.errors import ClosureCancelled, ConfigurationError, EndOfData
from psync.integrations.keras.metrics import BatchSpec, build_metrics, set_metrics, spec_of
from psync.integrations.keras.steps import weighted
from psync.integrations.served import in_thread
from psync.metrics import Metric
from psync.serialization.remote_value import RemoteValue
from psync.specs import checked_integer
from psync.training.trainer import SHARDS_PER_WORKER, Shard, Trainer

if TYPE_CHECKING:
    from psync.api.strategy import ParameterServerStrategy
    from psync.integrations.keras.served_model import PSModel

NO_SUMS = np.zeros(0)

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


_NOT_HERE = {
    "sample_weight": "let the dataset yield batches (x, y, sample_weight)",
    "batch_size": "the dataset makes the batches: psync.data.from_arrays((x, y), batch_size)",
    "shuffle": "the dataset does: psync.data.from_arrays((x, y), batch_size, shuffle_seed=1)",
    "validation_split": "cut the arrays, and give one part as validation_data=(x, y)",
    "validation_steps": "validation data are evaluated whole: give less of them",
    "use_multiprocessing": "a dataset runs in a thread of each worker's process",
    "workers": "a dataset runs in a thread of each worker's process",
}
"""Arguments of Keras's ``fit``, and what there is instead."""


class Counted:
    """What the metrics of a model have counted; a result of closures.

    Attributes:
        sums: What batches have added to their variables, as one vector; empty if there was none.
        spec: Of the first batch.
    """

    def __init__(self) -> None:
        self.sums: np.ndarray = NO_SUMS
        self.spec: BatchSpec = None

    def add(self, sums: np.ndarray, batch: Any) -> None:
        """Count a batch."""
        if self.spec is None:
            self.spec = spec_of(batch)
        self.sums = self.sums + sums if len(self.sums) else sums

    def add_all(self, other: Counted) -> None:
        """Count what another one has counted."""
        if other.spec is not None:
            self.sums = self.sums + other.sums if len(self.sums) else other.sums
            self.spec = self.spec or other.spec


class KerasTrainer(Trainer):
    """The Trainer of one served model: batches are trained by Keras's own step.

    Metrics are Keras's. Each closure returns what its batches have added to their variables, and
    the results are those of the model here when it holds the sum: a batch counts once, on whichever
    worker it was, also if that was lost and the closure ran again.

    Args:
        strategy: Of the model.
        served: The model.
        checkpoint_directory: As of ``Trainer``.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        served: PSModel,
        checkpoint_directory: str | os.PathLike[str] | None,
    ) -> None:
        self._served = served
        self.keras_callbacks: KerasCallbacks | None = None  # while fit runs
        self.class_weight: Mapping[int, float] = {}  # of the last fit
        self._so_far = Counted()  # in this epoch, by closures that callbacks were told of
        super().__init__(
            strategy,
            dict(served._checkpoint_items()),
            lambda _, batch: served._train_batch(batch),
            served.optimizer,
            checkpoint_directory=checkpoint_directory,
        )

    def _counters(self) -> dict[str, Metric]:
        return {}

    def _steps(self, *, tells: bool) -> Callable[..., Any]:
        served, class_weight = self._served, self.class_weight

        # Plain: it computes in a thread.
        def run_steps(batches: Any, turn: int, count: int) -> tuple[int, Counted]:
            counted = Counted()
            for step in range(count):
                try:
                    batch = wait(batches.next_in(turn))
                except EndOfData:
                    if step == 0:
                        raise  # nothing was updated: it runs where there are data
                    return count - step, counted
                batch = weighted(batch, class_weight)
                counted.add(served._train_batch(batch), batch)
            return 0, counted

        return run_steps

    async def _logs_of(self, sums: Counted) -> dict[str, float]:
        self._so_far.add_all(sums)  # as Keras has it: of the epoch, and not of the batch
        if self._so_far.spec is None:
            return {}
        return await asyncio.to_thread(self._results, self._so_far)

    async def _values_of(
        self, closures: Sequence[RemoteValue[Any]], ended: bool
    ) -> dict[str, float]:
        results = [result async for result in _returned(closures)]
        self._so_far, counted = Counted(), _total(each for _, each in results)
        return {} if counted.spec is None else await asyncio.to_thread(self._results, counted)

    async def evaluate(
        self, data: Any, *, batch_size: int = 32, num_shards: int | None = None
    ) -> dict[str, float]:
        """Return loss and metrics on data, as ``Trainer.evaluate``, by the names Keras gives."""
        served, hooks = self._served, self.keras_callbacks
        coordinator = ClusterCoordinator(self.strategy)

        def evaluate_shard(shard: Shard) -> Counted:
            counted, steps = Counted(), served._steps()
            for batch in shard() if isinstance(shard, partial) else shard:
                counted.add(steps.test(batch), batch)
            return counted

        shards = self._shards(data, batch_size, num_shards)
        if hooks is not None:
            await hooks.call("on_test_begin")
        results = [coordinator.schedule(evaluate_shard, args=(shard,)) for shard in shards]
        await coordinator.join()
        counted = _total([result async for result in _returned(results)])
        if counted.spec is None:
            raise ConfigurationError("validation data: expected at least one batch, got none")
        logs = await asyncio.to_thread(self._results, counted)
        if hooks is not None:
            await hooks.call("on_test_end", logs)
        return logs

    async def predict(self, x: Any, *, batch_size: int) -> Any:
        """Return the outputs for x; see ``PSModel.predict``."""
        checked_integer("predict: expected batch_size above 0", batch_size, 1)
        lengths = {len(array) for array in keras.tree.flatten(x)}
        if len(lengths) != 1 or 0 in lengths:
            raise ConfigurationError(
                f"predict: expected arrays of one length, at least 1, got {sorted(lengths)}"
            )
        served, size = self._served, lengths.pop()
        closures = SHARDS_PER_WORKER * self.strategy.cluster.num_tasks("worker")
        rows = batch_size * math.ceil(size / batch_size / closures)  # of each, which pulls once

        def predict_part(part: Any) -> Any:
            steps, length = served._steps(), len(keras.tree.flatten(part)[0])
            starts = range(0, length, batch_size)
            return _joined([steps.predict(_cut(part, i, i + batch_size)) for i in starts])

        coordinator = ClusterCoordinator(self.strategy)
        parts = [_cut(x, start, start + rows) for start in range(0, size, rows)]
        results = [coordinator.schedule(predict_part, args=(part,)) for part in parts]
        await coordinator.join()
        return _joined(await coordinator.fetch(results))

    def _results(self, counted: Counted) -> dict[str, float]:
        """Return what the model's metrics say of counted batches."""
        model = self._served._chief_model()
        build_metrics(model, counted.spec)
        set_metrics(model, counted.sums)
        logs: dict[str, float] = pythonify_logs(model.get_metrics_result())
        return logs


class KerasCallbacks(psync.callbacks.Callback):
    """Callbacks of Keras in psync's fit: they see the model of the chief, with present values.

    What they change in it goes to the ps tasks: weights, the learning rate, ``stop_training``.

    Args:
        served: The model.
        callbacks: Of Keras.
        params: What they see as ``params``.

    Raises:
        ConfigurationError: One of them cannot work here.
    """

    def __init__(
        self,
        served: PSModel,
        callbacks: Sequence[keras.callbacks.Callback],
        params: Mapping[str, Any],
    ) -> None:
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise ConfigurationError(
                    "fit: BackupAndRestore would save the program's model without the optimizer's "
                    "slots on the ps tasks",
                    hint="PSModel(…, checkpoint_directory=…) saves and resumes all of it",
                )
        self._has_batches = any(_has_batches(callback) for callback in callbacks)
        self._served = served
        self._model = served._chief_model()
        self._seen = bool(callbacks)  # whether anybody looks at the model
        self._list = keras.callbacks.CallbackList(
            list(callbacks), add_history=True, model=self._model, **params
        )
        self.history: keras.callbacks.History = self._model.history

    @property
    def wants_batches(self) -> bool:
        """Whether one of them does."""
        return self._has_batches

    async def on_train_begin(self) -> None:
        """Hand on, with the values that were restored."""
        self._model.stop_training = False
        await self._refresh()
        await self.call("on_train_begin")

    async def on_epoch_begin(self, epoch: int) -> None:
        """Hand on."""
        await self.call("on_epoch_begin", epoch)

    async def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """Hand on, with present values: both hooks of the last batch of a closure."""
        await self._refresh()
        await self.call("on_train_batch_begin", batch)
        await self.call("on_train_batch_end", batch, dict(logs))

    async def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Hand on, with the values after the epoch."""
        await self._refresh()
        await self.call("on_epoch_end", epoch, dict(logs))

    async def on_train_end(self, logs: Mapping[str, float]) -> None:
        """Hand on."""
        await self.call("on_train_end", dict(logs))

    async def call(self, method: str, *arguments: Any) -> None:
        """Call one method of all callbacks, in a thread; then send what they have changed."""
        changed, rate = await in_thread(partial(self._call, method, *arguments))
        if self._model.stop_training:
            self.trainer.stop_training = True
        if changed:
            await self._served._load_values(changed)
        if changed or rate is not None:
            self.trainer.unsaved = True
        if rate is not None:
            await self._served.optimizer.set_learning_rate(rate)

    def _call(self, method: str, *arguments: Any) -> tuple[dict[str, np.ndarray], float | None]:
        """Call it; return the values that it has changed, and the learning rate if it has."""
        before, rate = self._values(), self._rate()
        getattr(self._list, method)(*arguments)
        if self._seen:
            self._served._check_unchanged()
        changed = {
            name: value for name, value in self._values().items()
            if not np.array_equal(value, before[name], equal_nan="float" in value.dtype.name)
        }  # fmt: skip
        now = self._rate()
        return changed, None if now == rate else now

    async def _refresh(self) -> None:
        """Bring present values into the model, and into its optimizer rate and count of updates."""
        if not self._seen:
            return
        await self._served.pull()
        optimizer, rate = self._model.optimizer, self._served.optimizer.learning_rate
        if self._rate() not in (None, rate) and isinstance(rate, float):  # as after a resume
            optimizer.learning_rate = rate
        if not optimizer.gradient_accumulation_steps:
            optimizer.iterations.assign(await self._served.optimizer.iterations.read())

    def _values(self) -> dict[str, np.ndarray]:
        return self._served._chief_values() if self._seen else {}

    def _rate(self) -> float | None:
        """Return the learning rate of the model's optimizer; None: it is a schedule's."""
        rate = self._model.optimizer.get_config()["learning_rate"]
        return None if isinstance(rate, dict) else float(rate)


def check_arguments(others: Mapping[str, object]) -> None:
    """Refuse arguments of ``fit`` that it does not have.

    Raises:
        ConfigurationError: There is one.
    """
    for name in others:
        raise ConfigurationError(
            f"fit: argument {name} is not supported here",
            hint=_NOT_HERE.get(name, "see the docstring of PSModel.fit"),
        )


def _cut(arrays: Any, start: int, stop: int) -> Any:
    return keras.tree.map_structure(lambda array: array[start:stop], arrays)


def _joined(parts: Sequence[Any]) -> Any:
    return keras.tree.map_structure(lambda *each: np.concatenate(each), *parts)


async def _returned(closures: Sequence[RemoteValue[Any]]) -> AsyncIterator[Any]:
    """Yield what closures return, without those that a callback has stopped or that had no data."""
    for closure in closures:
        with contextlib.suppress(ClosureCancelled, EndOfData):
            yield await closure.fetch()


def _total(counted: Iterable[Counted]) -> Counted:
    """Return the sum of what closures have counted, in their order."""
    total = Counted()
    for each in counted:
        total.add_all(each)
    return total


def _has_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback has hooks of batches that do something."""
    if "epoch" in (getattr(callback, "save_freq", None), getattr(callback, "update_freq", None)):
        return False  # Keras's own, which have hooks of batches for other settings
    return not all(is_default(getattr(callback, hook)) for hook in _BATCH_HOOKS)
