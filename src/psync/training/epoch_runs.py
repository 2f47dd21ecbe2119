"""The epochs of one fit: trains their steps, and trains again what rollbacks have undone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psync.api.cluster_coordinator import ClusterCoordinator, coordinator_of
from psync.errors import EndOfData
from psync.status.progress import Progress
from psync.training.callback_calls import call_back, follow, show_steps
from psync.training.evaluation import no_batch
from psync.training.fit_state import OwedSteps

if TYPE_CHECKING:
    from psync.callbacks import Callback
    from psync.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EpochRuns:
    """Runs the epochs of one fit, one after the other."""

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
        self._owed = OwedSteps(inner, self.steps_per_execution, self.trainer.fit_state)

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
        trainer, owed = self.trainer, self._owed
        await trainer.reset_metrics()
        owed.begin_epoch()
        ended, again = await self._train(steps, self.told), 0
        while True:
            while undone := owed.steps():
                again += undone
                ended |= await self._train(None, self.told)
            logs, over = await trainer._values_of(list(owed.closures.values()), ended)
            if validate is not None and logs:
                found = await validate()
                logs |= {f"val_{name}": value for name, value in found.items()}
            if owed.steps():  # the values may be of two timelines
                continue
            if not logs:
                raise no_batch()
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
        while (undone := self._owed.steps()) or not (saved or manager is None):
            if undone:
                self.trainer.history._add_repeated(undone)
                ended |= await self._train(None)
                _, ended = await self.trainer._values_of(list(self._owed.closures.values()), ended)
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
        trainer, owed = self.trainer, self._owed

        async def tell(batch: int, sums: Any) -> None:
            logs = await trainer._logs_of(sums)
            self.coordinator.report(logs)
            await call_back(trainer, told, "on_train_batch_end", batch, logs)

        first = done = owed.scheduled
        closures, counts = owed.schedule(self.run_steps, self.batches, steps)
        if steps is None:
            logger.warning("fit: a rollback has undone %d steps: trained again", sum(counts))
            done = max(0, first - sum(counts))
        tasks: list[Any] = [asyncio.create_task(show_steps(closures, counts, self.show, done))]
        if told:
            batches_told = follow(closures, counts, tell, lambda: trainer.stop_training, first)
            tasks.append(asyncio.create_task(batches_told))
        ended = False
        try:
            try:
                await self.coordinator.join()
            except EndOfData:
                ended = True
            for telling in tasks[1:]:
                await telling
        finally:
            for unfinished in (*closures, *tasks):
                unfinished.cancel()
            await asyncio.wait(tasks)
        reason = self.coordinator.stop_reason
        if reason is not None:
            trainer.request_stop(reason)
        if reason is not None or (told and trainer.stop_training):
            owed.forget()
            return ended, 0
        return ended, owed.missing(closures, counts)
