"""A ps that is killed without a copy: what a rollback undoes is done again, and none is missing.

The ps is killed at a moment that closures or callbacks reach, with real processes and real files.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync import blocking
from real_training import ONE_LOOP

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def batches() -> Any:
    while True:
        yield np.ones(1), np.ones(1)


@pytest.mark.promise("fit.makes-all-steps")
@pytest.mark.smoke
@pytest.mark.parametrize("num_ps", [1, 2])
@ONE_LOOP
async def test_a_fit_has_all_its_steps_although_a_ps_is_killed_in_an_epoch_and_another_in_a_save(
    num_ps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    steps, epochs = 200, 4
    caplog.set_level(logging.INFO, "psync")
    async with psync.LocalCluster(num_ps, 2) as cluster:
        strategy = psync.ParameterServerStrategy(
            cluster.resolver, psync.FixedShardsPartitioner(num_ps)
        )

        class Kill(psync.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any) -> None:
                if (self.epoch, batch) == (1, 99):
                    cluster.tasks["ps-0"].kill()

            def on_epoch_begin(self, epoch: int) -> None:
                self.epoch = epoch

            def on_epoch_end(self, epoch: int, logs: Any) -> None:
                if epoch == epochs - 1:  # the save of the last epoch finds it dead
                    cluster.tasks[f"ps-{num_ps - 1}"].kill()

        async with psync.ClusterCoordinator(strategy):
            with strategy.scope():
                count = psync.Variable(np.zeros(2), name="count")
            optimizer = psync.optimizers.SGD(1.0)
            trainer = psync.Trainer(
                strategy, count, lambda values, batch: (1.0, -np.ones(2)), optimizer,
                checkpoint_directory=tmp_path,
            )  # fmt: skip
            history = await trainer.fit(
                batches, epochs=epochs, steps_per_epoch=steps, callbacks=[Kill()],
                verbose="lines",
            )  # fmt: skip
            assert (await count.read()).tolist() == [steps * epochs] * 2
            assert history.epoch == [*range(epochs)]
            assert history.repeated[0] == history.repeated[2] == 0
            assert history.repeated[1] >= 100
            assert history.repeated[3] == steps
            assert trainer.manager is not None
            newest = trainer.manager.latest_checkpoint
            assert newest is not None
            saved = await trainer.checkpoint.read(newest)
            assert saved["model"].tolist() == [steps * epochs] * 2
            if num_ps == 1:
                assert await optimizer.iterations.read() == steps * epochs
    assert "undone by a rollback and trained again" in capsys.readouterr().out
    assert "lost: back to step" in caplog.text or "lost: from step" in caplog.text


def test_a_program_without_async_hears_of_it_and_schedules_again(tmp_path: Path) -> None:
    with blocking.LocalCluster(1, 1) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        with blocking.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                total = psync.Variable(0.0, name="total")

            async def step() -> None:
                await total.assign_add(1.0)

            manager = psync.CheckpointManager(psync.Checkpoint(total=total), tmp_path)
            blocking.wait(manager.save())
            coordinator.schedule_all(step, [()] * 10)
            coordinator.join()
            cluster._inner.tasks["ps-0"].kill()
            event = next(coordinator.events())
            assert isinstance(event, psync.RollbackEvent)
            assert event.updates == 10
            assert len(coordinator.reschedule(event)) == 10
            coordinator.join()
            assert blocking.wait(total.read()) == 10.0
            listening = threading.Thread(target=lambda: list(coordinator.events()))
            listening.start()
        listening.join()  # the end of the coordinator is that of its events
