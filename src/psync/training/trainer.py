"""Trainer: a Keras-like training loop, ``fit`` and ``evaluate``, on a cluster.

Source: ``Model.fit`` of Keras under ``tf.distribute.ParameterServerStrategy``, including the
required ``steps_per_epoch``. Unlike there, callbacks may receive batches.

Steps are trained again after rollbacks:

    a closure of the fit ends        its updates may be undone until a checkpoint has them
    a rollback names it              its steps are owed
    the epoch's closures have ended  what is owed is trained again, and that until nothing is owed
    the epoch's callbacks, its save  the same, and saved again

The steps that are trained again are new: they take the batches that come next, and a rollback lets
each worker's data begin anew. Steps of earlier epochs (the checkpoint may be older than the epoch
that runs) are trained in the epoch that runs, whose values count them.

Where a worker's data end within a closure, the steps that it lacks are scheduled again as well, in
the same pass over the data: other workers have more. If it ran before on a worker that was lost,
that run may have trained some of them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from psync.api.cluster_coordinator import ClusterCoordinator
from psync.api.datasets import PerWorkerDataset
from psync.api.optimizers import Optimizer, parts_of
from psync.api.pulls import leaves, pairs, pull
from psync.api.strategy import ParameterServerStrategy
from psync.api.variables import get_or_create_global_step
from psync.callbacks import Callback
from psync.client.context import current_closure, forbid_in_step
from psync.closures.closure import State
from psync.errors import ConfigurationError, EndOfData, UsageError, ValueMismatchError
from psync.gradients import GradientFunction
from psync.metrics import Mean, Metric
from psync.serialization.payloads import text_of
from psync.serialization.remote_value import RemoteValue
from psync.specs import checked_integer, checked_kind
from psync.status.progress import Progress, kind_of
from psync.store.untrusted_json import Whole, read_json, to_json, wrong
from psync.training.checkpoint import Checkpoint, CheckpointManager, by_name
from psync.worker.data_sources import ArrayDataset

logger = logging.getLogger(__name__)


SHOW_EVERY_S = 0.1


async def awaited(made: Any) -> Any:
    """Return what a function of the user has returned, plain or asynchronous."""
    return await made if inspect.isawaitable(made) else made


async def call_back(
    trainer: Any, callbacks: Iterable[Callback], method: str, *arguments: Any
) -> None:
    """Call one method of each callback, which sees its trainer."""
    for callback in callbacks:
        callback.trainer = trainer
        await awaited(getattr(callback, method)(*arguments))


async def call_ends(
    trainer: Any,
    callbacks: Iterable[Callback],
    logs: Mapping[str, float],
    error: BaseException | None = None,
) -> None:
    """Tell every callback that training has ended, also if one before it raises.

    Raises:
        Exception: The first one of theirs, if ``error`` is None; others become notes of it, and all
            become notes of ``error``.
    """
    first: Exception | None = None
    for callback in callbacks:
        try:
            await call_back(trainer, (callback,), "on_train_end", logs)
        except Exception as exc:
            first = first or exc
            if (before := error or first) is not exc:
                name = f"{type(callback).__name__}.on_train_end"
                before.add_note(f"{name}: {type(exc).__name__}: {text_of(exc)}")
    if error is None and first is not None:
        raise first


@dataclass(slots=True)
class History:
    """The result of ``fit``.

    Attributes:
        epoch: Numbers of the completed epochs, from 0, including those before a resume.
        history: Values by name, one for each of these epochs.
        repeated: Number of steps in each of these epochs that were trained again after a rollback.
        stop_reason: Reason given to ``psync.request_stop`` by a step, or to
            ``trainer.request_stop`` by a callback, in the last fit; None if there was no request.
    """

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    stop_reason: str | None = None

    def _add(self, epoch: int, logs: Mapping[str, float], repeated: int = 0) -> None:
        """Add an epoch."""
        self.epoch.append(epoch)
        self.repeated.append(repeated)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def _add_repeated(self, steps: int) -> None:
        """Add steps that were trained again after the last epoch."""
        if self.repeated:
            self.repeated[-1] += steps


class FitState:
    """What a checkpoint holds of a trainer's fits: the history, and how many steps it lacks.

    Args:
        history: History of the trainer.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.before = 0  # steps owed when the last fit ended, or that the restored checkpoint lacks
        self.now: Callable[[], int] | None = None  # counts the steps owed by the running fit

    def close(self) -> None:
        """The fit has ended: keep the number alone, and not the coordinator and its closures."""
        self.before, self.now = self.owed, None

    @property
    def owed(self) -> int:
        """How many steps are owed just now."""
        return self.before if self.now is None else self.now()

    def clear(self) -> None:
        """Forget all epochs, and the steps that are owed."""
        self.restore_checkpoint_state({"epoch": [], "history": {}})

    def checkpoint_state(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self.history), "owed": self.owed}

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        history = self.history
        history.epoch, history.history = state["epoch"], state["history"]
        history.repeated = state.get("repeated", [0] * len(history.epoch))
        history.stop_reason = state.get("stop_reason")
        self.before = state.get("owed", 0)

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise CheckpointError unless this was saved."""
        saved = read_json(to_json(state), _Saved, "the history of a fit")
        if len(saved.repeated or saved.epoch) != len(saved.epoch):
            raise wrong("the history of a fit", "repeated", "one for each epoch", saved.repeated)


@dataclass
class _Saved:
    """A state, as JSON."""

    epoch: list[Whole]
    history: dict[str, list[float]]
    repeated: list[Whole] = field(default_factory=list)  # which older ones do not have
    owed: Whole = 0


Run = tuple[RemoteValue[Any], int]
"""A closure, and how many steps it has."""


@dataclass(eq=False)
class EpochRuns:
    """Runs the epochs of one fit: their steps, and again what rollbacks have undone.

    Attributes:
        ended: Whether data have ended in the present epoch, or before the first one.
    """

    trainer: Trainer
    coordinator: ClusterCoordinator
    run_steps: Callable[..., Any]  # the step function: of batches, a pass over data, and a count
    batches: Any
    steps_per_execution: int
    show: Progress
    told: Sequence[Callback]  # of batches
    ended: bool = False

    def __post_init__(self) -> None:
        self._coordinator = self.coordinator._running("fit")
        self._seen = len(self._coordinator.events.rollbacks)
        self._steps: dict[int, int] = {}  # by the id of a closure that may be undone
        self._owed = self.trainer.fit_state.before
        self._of_earlier = self._owed > 0  # whether some of these are of earlier epochs
        # Over the data: those that end in a later pass than they began in begin again.
        self._pass = 0
        # Those of the present epoch, without those that were undone, by id.
        self._closures: dict[int, RemoteValue[Any]] = {}
        self._scheduled = 0  # steps in the present epoch, without missing ones
        self.trainer.fit_state.now = self.owed_steps

    async def run(
        self, steps: int, validate: Callable[[], Awaitable[Mapping[str, float]]] | None
    ) -> tuple[dict[str, float], int]:
        """Run one epoch, until none of its steps is undone.

        Args:
            steps: Of all workers together.
            validate: Evaluates; None: this epoch has no validation.

        Returns:
            Its values, and how many steps were trained again.

        Raises:
            ConfigurationError: The data have no batch.
            Exception: What a step or a callback raised.

        Cancellation: Steps that were scheduled are cancelled.
        """
        trainer = self.trainer
        await trainer.reset_metrics()
        self.owed_steps()  # what is undone from now on and was trained before is of earlier epochs
        ended_closures = self._coordinator.recovery.ended
        self._steps = {n: count for n, count in self._steps.items() if n in ended_closures}
        self._closures = {}
        self._scheduled = 0
        self._pass += 1
        self.ended, again = False, 0
        await self._train(steps, self.told)
        while True:
            while undone := self.owed_steps():
                again += undone
                await self._train(None, self.told)
            logs = await trainer._values_of(list(self._closures.values()), self.ended)
            if validate is not None and logs:
                found = await validate()
                logs |= {f"val_{name}": value for name, value in found.items()}
            if self.owed_steps():  # the values may be of two timelines
                continue
            if not logs:
                raise ConfigurationError(
                    "fit: expected at least one batch, got none",
                    hint="the dataset of a worker is empty",
                )
            return logs, again

    async def settle(self, *, saved: bool = False) -> None:
        """Save between epochs, and train again what was undone there, before and meanwhile.

        Args:
            saved: Whether there is nothing to be saved, unless steps are trained again.

        Raises:
            CheckpointError: As ``Checkpoint.save``.
            Exception: What a step raised.

        Cancellation: As ``run``.
        """
        manager = self.trainer.manager
        while (undone := self.owed_steps()) or not (saved or manager is None):
            if undone:
                self.trainer.history._add_repeated(undone)
                await self._train(None)
                await self.trainer._values_of(list(self._closures.values()), self.ended)
                saved = False
            elif manager is not None:
                await self.trainer.save(manager)
                saved = True

    async def _train(self, steps: int | None, told: Sequence[Callback] = ()) -> None:
        """Train the steps of an epoch, or those that are owed; note whether data ended.

        They have ended when no worker has a batch for a step; of data that end with their first
        end, when one has none.
        """
        ended, missing = await self._train_once(steps, told)
        while missing and not ended and self.batches.end != "first":
            ended, missing = await self._train_once(missing, told)
        self.ended |= ended or missing > 0

    async def _train_once(self, steps: int | None, told: Sequence[Callback]) -> tuple[bool, int]:
        """Train steps; return whether data ended, and how many steps closures lacked data for."""
        trainer = self.trainer
        first = done = self._scheduled
        if steps is None:
            steps = self.owed_steps()
            logger.warning("fit: a rollback has undone %d steps, which are trained again", steps)
            done = max(0, first - steps)
            self._pass += self._of_earlier  # an epoch's data may be too few for these, too
            self._owed, self._of_earlier = 0, False
        runs: list[Run] = []
        needs = self.batches._needs(self._pass)
        for start in range(0, steps, self.steps_per_execution):
            count = min(self.steps_per_execution, steps - start)
            arguments = (self.batches, self._pass, count)
            value = self._coordinator.schedule(
                self.run_steps, arguments, {}, may_repeat=False, needs=needs
            )
            self._steps[value.closure_id] = count
            self._closures[value.closure_id] = value
            runs.append((value, count))
        self._scheduled += steps
        tasks: list[Any] = [asyncio.create_task(self._show_steps(runs, done))]
        if told:
            tasks.append(asyncio.create_task(self._tell(runs, first)))
        ended = False
        try:
            try:
                await self.coordinator.join()
            except EndOfData:
                ended = True
            for telling in tasks[1:]:
                await telling
        finally:
            for unfinished in (*(closure for closure, _ in runs), *tasks):
                unfinished.cancel()
            await asyncio.wait(tasks)
        reason = self.coordinator.stop_reason
        if reason is not None:
            trainer.request_stop(reason)
        if reason is not None or (told and trainer.stop_training):
            self.owed_steps()
            self._owed = 0  # training was stopped
            return ended, 0
        missing = 0
        for value, lacks in runs:  # all have ended
            if value._closure.state is State.FINISHED:  # else no worker had a batch for it
                result = value.get_nowait()
                lacks = 0 if result is None else result[0]
            if lacks and value.closure_id in self._steps:  # or it was undone: all of it is owed
                self._steps[value.closure_id] -= lacks
                self._scheduled -= lacks
                missing += lacks
        return ended, missing

    async def _tell(self, runs: Sequence[Run], steps: int) -> None:
        """Tell callbacks of each closure that has a result, in the order of the epoch.

        If that raises, or stops training, the closures that have not ended are cancelled. An error
        of a closure is left to ``join``.

        Args:
            runs: Closures of an epoch, which return (steps that are missing, sums).
            steps: Steps before them in the epoch.
        """
        trainer = self.trainer
        for place, (closure, count) in enumerate(runs):
            try:
                missing, sums = await closure
            except EndOfData:
                continue
            except Exception:
                return
            steps += count - missing
            is_over = True
            try:
                logs = await trainer._logs_of(sums)
                self.coordinator.report(logs)
                await call_back(trainer, self.told, "on_train_batch_end", steps - 1, logs)
                is_over = trainer.stop_training
            finally:
                for unfinished, _ in runs[place:] if is_over else ():
                    unfinished.cancel()
            if is_over:
                return

    async def _show_steps(self, runs: Sequence[Run], done: int) -> None:
        """Move the bar while closures run, from ``done`` steps; they end about in order."""
        left = deque(runs)
        while True:
            while left and left[0][0].done():
                done += left.popleft()[1]
            self.show.at(done)
            await asyncio.sleep(SHOW_EVERY_S)

    def owed_steps(self) -> int:
        """Return how many steps are owed just now."""
        rollbacks = self._coordinator.events.rollbacks
        for event in rollbacks[self._seen :]:
            for number in event.closures:
                if (steps := self._steps.pop(number, 0)) > 0:
                    self._owed += steps
                    self._of_earlier |= self._closures.pop(number, None) is None
        self._seen = len(rollbacks)
        return self._owed


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
            return ArrayDataset(data, batch_size).cut(num_shards)
        except UsageError as exc:
            raise ConfigurationError(f"validation data: {exc.message}", hint=exc.hint) from exc
    if isinstance(data, Sequence) and data and not isinstance(data, str | bytes):
        if any(map(_is_of_rows, data)):
            raise ConfigurationError(
                f"validation data: got a {type(data).__name__} of arrays, which is not a list of "
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


class Trainer:
    """Trains variables on the workers of a strategy, epoch by epoch.

    It may be created inside or outside ``strategy.scope()``. ``evaluate`` needs a running
    ``ClusterCoordinator``; ``fit`` starts one if none is running.

    Args:
        strategy: Strategy that declared the variables.
        variables: A variable, a list, a dict, or any nesting that ``psync.pull`` takes.
        value_and_grad: (values, batch) → (loss, gradients) or (loss, gradients, predictions), where
            values and gradients have the nesting of ``variables``. It runs on workers and may be a
            coroutine function. Gradients may be None or ``IndexedSlices``. It may also be a result
            of ``gradients.from_torch`` or ``from_jax``: then its loss function gets the values as
            in ``minimize``, followed by the items of the batch, and returns (loss, predictions) if
            there are metrics.
        optimizer: An optimizer of ``psync.optimizers``, or a ``SyncReplicasOptimizer``.
        metrics: Metrics of predictions, shown in logs by name. A batch is then (x, y) or
            (x, y, sample_weight), and each metric gets
            ``update_state(y, predictions, sample_weight=…)``.
        loss_and_predictions: (values, batch) → (loss, predictions), for evaluation. Default:
            ``value_and_grad``, whose gradients are ignored.
        checkpoint_directory: Directory where the state is saved after each epoch, and from which
            ``fit`` resumes; None: the state is not saved. Variables have the names of
            ``Checkpoint(model=variables)``; items of a list or tuple have their own names.
        max_to_keep: Number of checkpoints to keep there.

    Raises:
        ConfigurationError: An argument is invalid, or two metrics have the same name.
        UsageError: The call is inside a step.
    """

    __psync_capture_error__ = "the trainer lives in the program"
    __psync_capture_hint__ = (
        "give a name to what the step needs of it: variables = trainer.variables"
    )

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        variables: Any,
        value_and_grad: Callable[[Any, Any], Any],
        optimizer: Optimizer,
        metrics: Sequence[Metric] = (),
        *,
        loss_and_predictions: Callable[[Any, Any], Any] | None = None,
        checkpoint_directory: str | os.PathLike[str] | None = None,
        max_to_keep: int = 3,
    ) -> None:
        forbid_in_step("making a Trainer")
        hint = "Trainer(strategy, variables, value_and_grad, psync.optimizers.Adam())"
        checked_kind("trainer: expected an optimizer", optimizer, Optimizer, hint=hint)
        _check_all("trainer", "metrics", Metric, metrics)
        self.metrics = {metric.name: metric for metric in metrics}
        if len(self.metrics) < len(metrics) or "loss" in self.metrics:
            raise ConfigurationError(
                f"trainer: expected metrics of different names, and none called loss, got "
                f"{', '.join(metric.name for metric in metrics)}"
            )
        self.strategy = strategy
        self.variables = variables
        self.flat_variables = list(dict.fromkeys(leaves(variables)))
        if not self.flat_variables:
            raise ConfigurationError("trainer: expected variables to train, got none")
        self.optimizer = optimizer
        self.stop_training = False
        self.validation_skipped = False  # after this epoch: only each n-th has one
        self.unsaved = False  # whether a callback has changed what the last checkpoint holds
        self._value_and_grad = _of_batch(value_and_grad)
        self._evaluated = _of_batch(loss_and_predictions or value_and_grad)
        with strategy.scope():
            self._counted = self._counters()
            self._global_step = get_or_create_global_step() if optimizer._synchronous else None
        self.history = History()
        self.fit_state = FitState(self.history)
        self.checkpoint = Checkpoint(
            model=by_name(variables), optimizer=optimizer, history=self.fit_state
        )
        self.manager: CheckpointManager | None = None
        if checkpoint_directory is not None:
            self.manager = CheckpointManager(self.checkpoint, checkpoint_directory, max_to_keep)

    async def fit(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        steps_per_epoch: int,
        steps_per_execution: int = 1,
        validation_data: Any = None,
        validation_batch_size: int = 32,
        validation_freq: int = 1,
        callbacks: Sequence[Callback] = (),
        initial_epoch: int | None = None,
        verbose: bool | str = "auto",
    ) -> History:
        """Train, with the strategy's coordinator if it is running, otherwise with a temporary one.

        A temporary coordinator has the options of the ``ClusterCoordinator(strategy, …)`` that the
        program has created, or the defaults. It closes when ``fit`` ends, even with an error, and
        the values on the ps tasks are then lost. The history, the checkpoints, and anything that
        callbacks have read (``on_train_end`` can) remain. To read variables after ``fit`` or to
        continue, call it within ``async with psync.ClusterCoordinator(strategy):``.

        When a ps is lost and the cluster rolls back to a checkpoint, the undone steps are trained
        again with the next batches. This happens before the current epoch ends, or after its save.

        Args:
            dataset: Argument or result of ``ClusterCoordinator.create_per_worker_dataset``. Each
                epoch continues where the previous one stopped. When the data of a worker end, it
                starts them again. If it has already started them in the same epoch, the other
                workers train the rest. The data also start again for each ``fit``, including one
                that resumes, and for each worker after a rollback.
            epochs: Number of the last epoch, plus 1.
            steps_per_epoch: Steps of all workers together.
            steps_per_execution: Steps of one closure. Larger closures have less overhead, but all
                of their steps are lost together.
            validation_data: Data that ``evaluate`` takes.
            validation_batch_size: Batch size of validation data that are arrays.
            validation_freq: Number of epochs between validations.
            callbacks: Callbacks, called between epochs and, if they request it, after batches.
            initial_epoch: Number of the first epoch, from 0. Default: the epoch of the last
                checkpoint, otherwise 0. A lower number starts a new history.
            verbose: False, "lines", "bar"; "auto" or True: a bar on a terminal, otherwise lines.

        Returns:
            The values of each epoch, and the number of its steps that were trained again after a
            rollback. If the data of all workers began and ended in one epoch, training ended with
            it.

        Raises:
            ConfigurationError: A number is out of range, the validation data are invalid, or the
                dataset has no batch.
            ValueMismatchError: ``value_and_grad`` returned a wrong kind of value.
            ClosedError: The strategy's coordinator was closed earlier, and its variables are lost.
            Exception: A step or a callback raised, or a coordinator could not start. Later errors
                of callbacks in ``on_train_end`` are added as notes.

        Cancellation: ``on_train_end`` is called. Scheduled steps are cancelled; some of their
            pushes may have been applied.

        Example:
            trainer = psync.Trainer(strategy, {"w": w}, value_and_grad, psync.optimizers.Adam())
            history = await trainer.fit(batches, epochs=3, steps_per_epoch=100)  # opens one itself
        """
        for name, value in (
            ("epochs", epochs), ("steps_per_epoch", steps_per_epoch),
            ("steps_per_execution", steps_per_execution), ("validation_freq", validation_freq),
        ):  # fmt: skip
            checked_integer(f"fit: expected {name} above 0", value, 1)
        if initial_epoch is not None:
            checked_integer("fit: expected initial_epoch from 0, or None", initial_epoch, 0)
        _check_all("fit", "callbacks", Callback, callbacks)
        if validation_data is not None:  # what is wrong with it is said before anything is trained
            self._shards(validation_data, validation_batch_size)
        coordinator = ClusterCoordinator(self.strategy)
        async with coordinator if coordinator._coordinator is None else nullcontext():
            if not isinstance(dataset, PerWorkerDataset):
                dataset = coordinator.create_per_worker_dataset(dataset)
            history = self.history
            self.fit_state.clear()
            if self.manager is not None:
                await self.manager.restore_or_initialize()
            following = max(history.epoch, default=-1) + 1
            first = following if initial_epoch is None else initial_epoch
            if first < following:  # they are done again
                self.fit_state.clear()
            batches: Any = iter(dataset)
            told = [callback for callback in callbacks if callback.wants_batches]
            self.stop_training = self.unsaved = False
            self.history.stop_reason = None
            run_steps = self._steps(tells=bool(told))
            logs: dict[str, float] = {}
            show, validate = Progress(kind_of(verbose)), None
            if validation_data is not None:
                validate = functools.partial(
                    self.evaluate, validation_data, batch_size=validation_batch_size
                )
            with closing(self.fit_state):
                runs = EpochRuns(
                    self, coordinator, run_steps, batches, steps_per_execution, show, told
                )
                try:
                    await call_back(self, callbacks, "on_train_begin")
                    # A checkpoint may lack steps of earlier epochs.
                    await runs.settle(saved=True)
                    for epoch in range(first, epochs):
                        if runs.ended:
                            logger.warning(
                                "training ends with epoch %d of %d: the workers' data started and "
                                "ended in it; provide more data (num_epochs=None), or use fewer "
                                "steps_per_epoch", max(1, epoch), epochs,
                            )  # fmt: skip
                            break
                        await call_back(self, callbacks, "on_epoch_begin", epoch)
                        show.begin(f"epoch {epoch + 1}/{epochs}", steps_per_epoch)
                        is_due = (epoch + 1) % validation_freq == 0
                        self.validation_skipped = validate is not None and not is_due
                        logs, again = await runs.run(steps_per_epoch, validate if is_due else None)
                        note = f" ({again} undone by a rollback and trained again)" if again else ""
                        show.end(note, logs)
                        history._add(epoch, logs, again)
                        coordinator.report({"epoch": epoch, **logs})
                        await call_back(self, callbacks, "on_epoch_end", epoch, logs)
                        await runs.settle()
                        if self.stop_training and not runs.ended:
                            break
                except BaseException as exc:
                    show.close()
                    await call_ends(self, callbacks, logs, exc)
                    raise
                show.close()
                await call_ends(self, callbacks, logs)
                await runs.settle(saved=not self.unsaved)
                if self.manager is not None:
                    await self.manager.finish()
                return copy.deepcopy(history)

    def request_stop(self, reason: str) -> None:
        """End ``fit`` after the current epoch, from a callback; steps use ``psync.request_stop``.

        Args:
            reason: Text for the log and ``history.stop_reason``. The first reason is kept.
        """
        if self.history.stop_reason is None:
            self.history.stop_reason = reason
            logger.info("fit ends: %s", reason)
        self.stop_training = True

    async def evaluate(
        self, data: Any, *, batch_size: int = 32, num_shards: int | None = None
    ) -> dict[str, float]:
        """Return loss and metrics on data, with each example counted exactly once.

        Args:
            data: (x, y) or (x, y, sample_weight), arrays of one length; a function (shard, number
                of shards) → finite iterable of batches, called on workers; or a list of shards,
                each a finite iterable of batches.
            batch_size: Batch size of arrays.
            num_shards: Number of shards, for data other than a list. Default: five for each worker.

        Raises:
            ConfigurationError: The data are invalid, or a number is out of range.
            ClosedError: No coordinator is running.
            Exception: A step raised.

        Cancellation: Scheduled closures continue.
        """
        shards = self._shards(data, batch_size, num_shards)
        coordinator = ClusterCoordinator(self.strategy)
        variables, value_of, metrics = self.variables, self._evaluated, self._counted

        async def evaluate_shard(shard: Shard) -> list[Any]:
            values = await pull(variables)
            counts = Counts(metrics)
            for batch in shard() if isinstance(shard, functools.partial) else shard:
                first, *rest = parts_of(await awaited(value_of(values, batch)))
                counts.note(batch, first, rest[-1:])
            return counts.sums

        # A closure that is lost with its worker runs again, and only its last run has a result.
        results = [coordinator.schedule(evaluate_shard, args=(shard,)) for shard in shards]
        await coordinator.join()
        totals = [sum(parts) for parts in zip(*await coordinator.fetch(results), strict=True)]
        if not np.ndim(totals[0]):
            raise ConfigurationError("validation data: expected at least one batch, got none")
        return await self._logs_of(totals)

    def _shards(self, data: Any, batch_size: int, num_shards: int | None = None) -> Sequence[Shard]:
        """Cut data as ``evaluate`` does, or say what is wrong with them."""
        if num_shards is None:
            num_shards = SHARDS_PER_WORKER * self.strategy.cluster.num_tasks("worker")
        for name, value in (("batch_size", batch_size), ("num_shards", num_shards)):
            checked_integer(f"evaluate: expected {name} above 0", value, 1)
        return shards_of(data, num_shards, batch_size)

    # Integrations of libraries that have metrics of their own override these four, and evaluate.

    def _counters(self) -> dict[str, Metric]:
        """Return what counts on the ps tasks, by name; called in the strategy's scope."""
        return {"loss": Mean("loss"), **self.metrics}

    async def _logs_of(self, sums: Any) -> dict[str, float]:
        """Return the values of the counts of a step function."""
        counted = zip(self._counted.items(), sums, strict=True)
        return {name: metric.value_of(total) for (name, metric), total in counted}

    async def _values_of(
        self, closures: Sequence[RemoteValue[Any]], ended: bool
    ) -> dict[str, float]:
        """Return the values of an epoch, or raise the error of a step.

        There are none if no batch was trained, which can only be if data ``ended``.
        """
        if ended and not any(await self._counted["loss"].variables[0].read()):
            return {}
        return {name: await metric.result() for name, metric in self._counted.items()}

    def _steps(self, *, tells: bool) -> Callable[..., Any]:
        """Return the step function: some steps, then one message for each metric.

        It returns how many of them are missing, for its worker's data ended, and what the others
        have counted; None for a whole closure that tells nothing.

        Args:
            tells: Whether anybody wants to know what it has counted.
        """
        variables, value_and_grad = self.variables, self._value_and_grad
        optimizer, global_step = self.optimizer, self._global_step
        metrics = self._counted

        async def run_steps(
            batches: Any, turn: int, count: int
        ) -> tuple[int, list[Any] | None] | None:
            counts, missing = Counts(metrics), 0
            closure = current_closure()
            assert closure is not None, "steps run in closures"
            began = calls = 0
            values: Any = None  # of the next step, if they came with the push of the last one
            for step in range(count):
                try:
                    batch = await batches.next_in(turn)
                except EndOfData:
                    if step == 0:
                        raise  # nothing was updated: it runs where there are data
                    missing = count - step
                    # Where the closure runs again there may be more data, or less; what is added to
                    # the metrics must be the same call in each run.
                    for _ in range(missing * calls):
                        next(closure.ordinals)
                    break
                if step == 0:
                    began = next(closure.ordinals)
                    closure.dropped += 1  # no update bears this number
                values = await pull(variables) if values is None else values
                made = await awaited(value_and_grad(values, batch))
                loss, gradients, *predictions = parts_of(made)
                pushed = pairs(variables, gradients, "gradients")
                grads_and_vars = [(gradient, variable) for variable, gradient in pushed]
                if step + 1 < count:
                    _, values = await optimizer.push_pull(grads_and_vars, variables, global_step)
                else:
                    await optimizer.apply_gradients(grads_and_vars, global_step)
                if step == 0:
                    calls = next(closure.ordinals) - began - 1
                    closure.dropped += 1
                counts.note(batch, loss, predictions)
            for metric, total in zip(metrics.values(), counts.sums, strict=True):
                await metric.add(total)
            return (missing, counts.sums if tells else None) if tells or missing else None

        return run_steps

    async def reset_metrics(self) -> None:
        """Reset the metrics, as at the start of each epoch."""
        for metric in self._counted.values():
            await metric.reset_state()

    async def save(self, manager: CheckpointManager) -> None:
        """Save the state between epochs, as ``fit`` does after each epoch.

        The saved metrics are empty, so that after a rollback an epoch counts its own steps only.
        """
        counts = [count for metric in self._counted.values() for count in metric.variables]
        sums = await pull(counts, copy=True)
        if manager is self.manager:
            self.unsaved = False
        try:
            await self.reset_metrics()
            await manager.save()
        finally:
            for count, total in zip(counts, sums, strict=True):
                await count.assign(total)


def _of_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.of_batch if isinstance(function, GradientFunction) else function


def _check_all(where: str, what: str, kind: type, things: Sequence[Any]) -> None:
    for thing in things:
        hint = f"a class of your own is derived from psync.{what}.{kind.__name__}"
        checked_kind(f"{where}: expected psync.{what}", thing, kind, hint=hint)
