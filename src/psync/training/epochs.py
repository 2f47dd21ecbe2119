"""The epochs of a fit: history, steps trained again after rollbacks, calls of callbacks.

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
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psync.api.cluster_coordinator import ClusterCoordinator, coordinator_of
from psync.closures.closure import State
from psync.errors import ConfigurationError, EndOfData
from psync.serialization.failures import text_of
from psync.serialization.remote_value import RemoteValue
from psync.status.progress import Progress
from psync.store.untrusted_json import read_json, to_json, wrong

if TYPE_CHECKING:
    from psync.callbacks import Callback
    from psync.training.trainer import Trainer

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

    def _clear(self) -> None:
        """Remove all epochs."""
        self.epoch, self.history, self.repeated, self.stop_reason = [], {}, [], None

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the history as plain data."""
        return {
            "epoch": self.epoch,
            "history": self.history,
            "repeated": self.repeated,
            "stop_reason": self.stop_reason,
        }

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Restore a saved history."""
        self.epoch, self.history = state["epoch"], state["history"]
        self.repeated = state.get("repeated", [0] * len(self.epoch))
        self.stop_reason = state.get("stop_reason")

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise CheckpointError if the state is not a saved history."""
        saved = read_json(to_json(state), _Saved, "the history of a fit")
        if len(saved.repeated or saved.epoch) != len(saved.epoch):
            raise wrong("the history of a fit", "repeated", "one for each epoch", saved.repeated)


class FitState:
    """What a checkpoint holds of a trainer's fits: the history, and how many steps it lacks.

    Args:
        history: History of the trainer.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.before = 0  # steps owed when the last fit ended, or that the restored checkpoint lacks
        self._now: Callable[[], int] | None = None  # counts the steps owed by the running fit

    def begin(self, now: Callable[[], int]) -> None:
        """A fit begins, which counts the steps that it owes."""
        self._now = now

    def close(self) -> None:
        """The fit has ended: keep the number alone, and not the coordinator and its closures."""
        self.before, self._now = self.owed, None

    @property
    def owed(self) -> int:
        """How many steps are owed just now."""
        return self.before if self._now is None else self._now()

    def clear(self) -> None:
        """Forget all epochs, and the steps that are owed."""
        self.history._clear()
        self.before = 0

    def checkpoint_state(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**self.history.checkpoint_state(), "owed": self.owed}

    def restore_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.history.restore_checkpoint_state(state)
        self.before = state.get("owed", 0)

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise CheckpointError unless this was saved."""
        self.history.check_checkpoint_state(state)


@dataclass
class _Saved:
    """A state, as JSON."""

    epoch: list[int]
    history: dict[str, list[float]]
    repeated: list[int] = field(default_factory=list)  # which older ones do not have
    owed: int = 0


Run = tuple[RemoteValue[Any], int]
"""A closure, and how many steps it has."""


@dataclass(eq=False)
class EpochRuns:
    """Runs the epochs of one fit: their steps, and again what rollbacks have undone."""

    trainer: Trainer
    coordinator: ClusterCoordinator
    run_steps: Callable[..., Any]  # the step function: of batches, a pass over data, and a count
    batches: Any
    steps_per_execution: int
    show: Progress
    told: Sequence[Callback]  # of batches

    def __post_init__(self) -> None:
        inner = coordinator_of(self.trainer.strategy._origin)
        assert inner is not None, "it runs"
        self._coordinator = inner
        self._seen = len(inner.events.rollbacks)
        self._steps: dict[int, int] = {}  # by the id of a closure that may be undone
        self._owed = self.trainer.fit_state.before
        self._of_earlier = self._owed > 0  # whether some of these are of earlier epochs
        # Over the data: those that end in a later pass than they began in begin again.
        self._pass = 0
        # Those of the present epoch, without those that were undone, by id.
        self._closures: dict[int, RemoteValue[Any]] = {}
        self._scheduled = 0  # steps in the present epoch, without missing ones
        self.trainer.fit_state.begin(self.owed_steps)

    async def run(
        self, steps: int, validate: Callable[[], Awaitable[Mapping[str, float]]] | None
    ) -> tuple[dict[str, float], bool, int]:
        """Run one epoch, until none of its steps is undone.

        Args:
            steps: Of all workers together.
            validate: Evaluates; None: this epoch has no validation.

        Returns:
            Its values, whether the data ended, and how many steps were trained again.

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
        ended, again = await self._train(steps, self.told), 0
        while True:
            while undone := self.owed_steps():
                again += undone
                ended |= await self._train(None, self.told)
            logs, over = await trainer._values_of(list(self._closures.values()), ended)
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
            return logs, over, again

    async def settle(self, *, saved: bool = False) -> bool:
        """Save between epochs, and train again what was undone there, before and meanwhile.

        Args:
            saved: Whether there is nothing to be saved, unless steps are trained again.

        Returns:
            Whether the data ended.

        Raises:
            CheckpointError: As ``Checkpoint.save``.
            Exception: What a step raised.

        Cancellation: As ``run``.
        """
        manager, ended = self.trainer.manager, False
        while (undone := self.owed_steps()) or not (saved or manager is None):
            if undone:
                self.trainer.history._add_repeated(undone)
                ended |= await self._train(None)
                _, ended = await self.trainer._values_of(list(self._closures.values()), ended)
                saved = False
            elif manager is not None:
                await self.trainer.save(manager)
                saved = True
        return ended

    async def _train(self, steps: int | None, told: Sequence[Callback] = ()) -> bool:
        """Train the steps of an epoch, or those that are owed; return whether data ended.

        They have ended when no worker has a batch for a step; of data that end with their first
        end, when one has none.
        """
        ended, missing = await self._train_once(steps, told)
        while missing and not ended:
            if self.batches.end == "first":
                return True
            ended, missing = await self._train_once(missing, told)
        return ended

    async def _train_once(self, steps: int | None, told: Sequence[Callback]) -> tuple[bool, int]:
        """Train steps; return whether data ended, and how many steps closures lacked data for."""
        trainer = self.trainer
        first = done = self._scheduled
        runs = self._schedule(steps)
        if steps is None:
            undone = sum(count for _, count in runs)
            logger.warning("fit: a rollback has undone %d steps, which are trained again", undone)
            done = max(0, first - undone)
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
        return ended, self._missing(runs)

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

    def _missing(self, runs: Sequence[Run]) -> int:
        """Return how many steps closures lack that met the end of their worker's data.

        All have ended. Those that had no batch at all count as well: no worker had one for them.
        """
        found = 0
        for value, lacks in runs:
            if value._closure.state is State.FINISHED:
                result = value.get_nowait()
                lacks = 0 if result is None else result[0]
            if lacks and value.closure_id in self._steps:  # or it was undone: all of it is owed
                self._steps[value.closure_id] -= lacks
                self._scheduled -= lacks
                found += lacks
        return found

    def _schedule(self, steps: int | None) -> list[Run]:
        """Schedule steps; return the closures of these.

        Args:
            steps: Of the present epoch; None: those that are owed, which are not any more.
        """
        if steps is None:
            steps = self.owed_steps()
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
        return runs
