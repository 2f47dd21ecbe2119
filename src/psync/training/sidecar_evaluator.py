"""SidecarEvaluator: evaluates checkpoints beside the training that writes them.

It reads files; of the cluster it only checks that a task accepts connections, and training neither
waits for it nor knows of it. If it is slower than training it skips checkpoints; if it dies nothing
is lost.

    it finds                                    it does
    a number above all before                   evaluates the newest once, skips those between
    a checkpoint that vanishes while it reads   looks again at once: a newer one has replaced it
    a damaged one                               logs that, and waits for the next
    one without what is declared                raises CheckpointMismatch: no later one would fit
    number ≥ ``max_evaluations``                evaluates it, and ends
    the file ``LAST`` in the newest             evaluates that one, and ends

Under ``psync run --evaluator`` a pipe that the launcher closes says the end instead of ``LAST``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from psync.callbacks import Callback, EarlyStopping, LearningRateScheduler, ModelCheckpoint
from psync.checkpoints.files import checkpoints_in, is_complete, is_last
from psync.client.context import forbid_in_step
from psync.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigurationError,
    UsageError,
    check_fits,
)
from psync.net.environment import note_training_began, run_over, training_presence
from psync.net.shielding import at_most
from psync.specs import checked_integer, checked_kind
from psync.training.checkpoint import Checkpoint
from psync.training.trainer import awaited, call_back
from psync.worker.session import StepThread

logger = logging.getLogger(__name__)

REPORT_AFTER_S = 10.0
"""A wait for so long is worth a line in the log, and again at doubling intervals."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of one checkpoint.

    Attributes:
        number: Number of the checkpoint.
        path: Path of the checkpoint, which may have been removed since.
        logs: Result of the evaluation function, as floats.
    """

    number: int
    path: Path
    logs: dict[str, float]


class SidecarEvaluator:
    """Evaluates each new checkpoint in a directory, independently of the training.

    It waits for a new checkpoint, reads it and calls ``eval_fn``. Each checkpoint is evaluated at
    most once, in increasing order of numbers; if several are new, all but the newest are skipped.
    If a checkpoint is removed while it is read, the evaluator takes its replacement. A damaged one
    is logged and skipped.

    It ends after the last checkpoint: the one that the program marks
    (``CheckpointManager.save(last=True)``, ``finish()``; ``Trainer.fit`` does it), or the first
    whose number is at least ``max_evaluations``. It also ends when all ps tasks and workers have
    been absent for a minute, which happens after their chief has failed or was killed. If none has
    appeared within the first hour, it raises TrainingEnded. ``PSYNC_CHIEF_TIMEOUT`` applies to it
    as to these tasks.

    Under ``psync run --evaluator`` it ends with the run instead, after the newest checkpoint. The
    mark is ignored there, because a program that continues an earlier run finds that run's mark.

    Moving averages are evaluated in place of the variables if they were saved with the same
    nesting: ``Checkpoint(model=model, averages=ema.averages(model))`` gives
    ``values["averages"]["w"]``.

    Args:
        checkpoint: Checkpoint of the same objects as in training, under the same names; objects
            that are not evaluated may be omitted. They are declared in ``strategy.scope()`` and
            exist on no ps: they only define which values are read and how they are nested.
        eval_fn: (values) → dict of numbers, where values are the result of ``Checkpoint.read``:
            ``values["model"]["w"]``. A coroutine function, or a plain one, which runs in a thread.
        directory: Directory of the checkpoints, which need not exist yet.
        max_evaluations: Number of the last checkpoint; None: the program marks it.
        poll_interval: Seconds between two looks into the directory.
        callbacks: Callbacks such as ``CSVLogger`` and ``TensorBoard``; an epoch is the number of a
            checkpoint. A callback that sets ``self.trainer.stop_training`` ends the evaluator;
            ``trainer`` has no other use.
        slots: Whether to read the slots of optimizers as well.

    Raises:
        ConfigurationError: An argument is out of range or of the wrong kind, or a callback needs a
            trainer.
        UsageError: The call is inside a step.

    Example:
        async def evaluate():
            strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
            with strategy.scope():
                model = make_model()
            evaluator = psync.SidecarEvaluator(
                psync.Checkpoint(model=model), accuracy, "run/checkpoints")
            async for result in evaluator:
                print(result.number, result.logs)

        psync.run(main, evaluator=evaluate)

    Source: ``tf.keras.utils.SidecarEvaluator``, where checkpoints need an optimizer's
        ``iterations`` as the step. Here a checkpoint has a number, so it may hold any objects.
    """

    __psync_capture_error__ = "an evaluator reads files of its own machine and is not for steps"

    validation_skipped = False
    """Always False; callbacks ask their trainer."""
    stop_training = False
    """Set by a callback: there is no further evaluation."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        eval_fn: Callable[[dict[str, Any]], Any],
        directory: str | os.PathLike[str],
        max_evaluations: int | None = None,
        *,
        poll_interval: float = 1.0,
        callbacks: Sequence[Callback] = (),
        slots: bool = False,
    ) -> None:
        forbid_in_step("making a SidecarEvaluator")
        hint = "SidecarEvaluator(psync.Checkpoint(model=model), eval_fn, directory)"
        checked_kind("evaluator: expected a Checkpoint", checkpoint, Checkpoint, hint=hint)
        expected = "evaluator: expected a function (values) -> dict of numbers"
        check_fits(callable(eval_fn), expected, eval_fn)
        if max_evaluations is not None:
            expected = "evaluator: expected max_evaluations above 0, or None"
            checked_integer(expected, max_evaluations, 1)
        fits = isinstance(poll_interval, int | float) and poll_interval > 0
        check_fits(fits, "evaluator: expected poll_interval in seconds above 0", poll_interval)
        for callback in callbacks:
            if isinstance(callback, EarlyStopping | LearningRateScheduler | ModelCheckpoint):
                raise ConfigurationError(
                    f"evaluator: {type(callback).__name__} needs a trainer, which an evaluator "
                    "does not have",
                    hint="pass it to Trainer.fit, with validation_data",
                )
        self._checkpoint = checkpoint
        self._eval_fn = eval_fn
        self._directory = Path(directory)
        self._max_evaluations = max_evaluations
        self._poll_interval_s = poll_interval
        self._callbacks = tuple(callbacks)
        self._slots = slots
        self._done = -1  # number of the last one that was evaluated, or passed over

    def __repr__(self) -> str:
        return f"<SidecarEvaluator of {self._checkpoint!r} in {str(self._directory)!r}>"

    async def run(self) -> list[Evaluation]:
        """Evaluate until the last checkpoint; return the evaluations in order.

        Raises:
            CheckpointMismatch: A checkpoint lacks a requested entry, or has it in another shape or
                dtype.
            CheckpointError: The directory cannot be read.
            TrainingEnded: No training task appeared in time.
            UsageError: ``eval_fn`` did not return a dict of numbers.
            Exception: ``eval_fn`` or a callback raised.

        Cancellation: Safe. A plain ``eval_fn`` continues in its thread, which ends with the
        process.
        """
        async with contextlib.aclosing(self.__aiter__()) as found:
            return [evaluation async for evaluation in found]

    async def __aiter__(self) -> AsyncGenerator[Evaluation]:
        """Yield the evaluation of each checkpoint until the last; raises the errors of ``run``.

        After a ``break``, another loop continues with the next checkpoint.
        """
        thread, logs = StepThread(), dict[str, float]()
        self.stop_training = False
        try:
            await call_back(self, self._callbacks, "on_train_begin")
            while not self.stop_training and (newest := await self._next()) is not None:
                note_training_began()
                number, path = newest
                values = await self._read(number, path)
                if values is None:
                    continue
                await call_back(self, self._callbacks, "on_epoch_begin", number)
                if inspect.iscoroutinefunction(self._eval_fn):
                    made = await self._eval_fn(values)
                else:
                    made = await awaited(await thread.call(partial(self._eval_fn, values)))
                del values  # as large as the model
                logs = _numbers(made)
                self._done = number
                shown = ", ".join(f"{name} {value:.6g}" for name, value in logs.items())
                logger.info("%s: %s", path.name, shown)
                await call_back(self, self._callbacks, "on_epoch_end", number, logs)
                yield Evaluation(number, path, dict(logs))
        finally:
            thread.close()
            await call_back(self, self._callbacks, "on_train_end", logs)

    async def _next(self) -> tuple[int, Path] | None:
        """Wait for a checkpoint that is new, the newest; None: there will be no other."""
        over, training = run_over.get(), training_presence.get()
        began = reported = asyncio.get_running_loop().time()
        while self._max_evaluations is None or self._done < self._max_evaluations:
            ends = over is not None and over.is_set()  # asked first: what was saved by then is seen
            if training is not None:
                await training.look()
            found = await asyncio.to_thread(checkpoints_in, self._directory)
            newest = found[-1] if found else None
            if newest is not None and newest[0] > self._done:
                if training is not None:
                    training.note_sign()
                return newest
            if over is None:
                ends = newest is not None and await asyncio.to_thread(is_last, newest[1])
            if training is not None and not ends and training.has_ended():
                logger.warning(
                    "the evaluator ends: %s, and no checkpoint was marked as the last",
                    training.describe(),
                )
                ends = True
            if ends:
                return None
            now = asyncio.get_running_loop().time()
            if now - reported >= max(REPORT_AFTER_S, reported - began):
                reported = now
                after = "" if newest is None else f" after {newest[1].name}"
                goes_on = "" if training is None else f"; {training.describe()}"
                logger.info("waiting for a checkpoint%s in %s%s", after, self._directory, goes_on)
            await at_most(self._poll_interval_s, (over or asyncio.Event()).wait())
        return None

    async def _read(self, number: int, path: Path) -> dict[str, Any] | None:
        """Return the values of a checkpoint; None if that cannot be."""
        try:
            return await self._checkpoint.read(path, slots=self._slots)
        except CheckpointMismatch:
            raise
        except CheckpointError as exc:
            if await asyncio.to_thread(is_complete, path):
                self._done = number
                logger.warning("%s is skipped: %s", path.name, exc)
            else:
                logger.debug("%s was removed while it was read", path.name)
            return None


def _numbers(made: Any) -> dict[str, float]:
    """Return what ``eval_fn`` returned, as floats.

    Raises:
        UsageError: It is something else than a dict of numbers.
    """
    expected, hint = "eval_fn: expected a dict of numbers", 'return {"accuracy": accuracy}'
    if not isinstance(made, Mapping):
        raise UsageError(f"{expected}, got {type(made).__name__}", hint=hint)
    logs = {}
    for name, value in made.items():
        try:
            if not isinstance(name, str) or isinstance(value, str) or np.ndim(value):
                raise TypeError("no name and number")
            logs[name] = float(value)
        except (TypeError, ValueError) as exc:
            raise UsageError(
                f"eval_fn: expected a dict of numbers, got {type(value).__name__} as {name!r}",
                hint="one number for each name: mean over the examples",
            ) from exc
    return logs
