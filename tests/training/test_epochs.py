"""The epochs of a fit: history, steps that are trained again, what callbacks are told."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from memory_cluster import MemoryCluster, coordinating
from psync.callbacks import Callback
from psync.chief.consistent_cut import Cut
from psync.training.trainer import FitState, History


def test_steps_that_were_trained_again_belong_to_the_last_epoch() -> None:
    history = History()
    history._add_repeated(3)  # there is none
    history._add(0, {"loss": 2.0})
    history._add(1, {"loss": 1.0}, repeated=4)
    history._add_repeated(3)
    assert history == History([0, 1], {"loss": [2.0, 1.0]}, [0, 7])


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_them() -> None:
    history = History()
    FitState(history).restore_checkpoint_state({"epoch": [0, 1], "history": {"loss": [2.0, 1.0]}})
    assert history == History([0, 1], {"loss": [2.0, 1.0]}, [0, 0])


def test_a_checkpoint_has_the_steps_that_are_owed_and_nothing_is_kept_alive_after_the_fit() -> None:
    class Counts:
        def owed(self) -> int:
            return 7

    counts, state = Counts(), FitState(History([0], {"loss": [2.0]}, [5]))
    assert state.checkpoint_state()["owed"] == 0
    state.now = counts.owed
    saved = state.checkpoint_state()
    assert saved == {**dataclasses.asdict(state.history), "owed": 7}
    state.close()
    known = weakref.ref(counts)
    del counts
    gc.collect()
    assert known() is None
    assert state.checkpoint_state() == saved
    restored = FitState(History())
    restored.restore_checkpoint_state(saved)
    assert (restored.history, restored.before) == (state.history, 7)
    restored.clear()
    assert (restored.history, restored.before) == (History(), 0)


pytestmark = pytest.mark.virtual_time

STEPS, EPOCHS, EXAMPLES = 20, 3, 4


async def lose(cluster: MemoryCluster, name: str = "ps-0") -> None:
    """As kill -9 and a launcher that starts it again."""
    await cluster.stop(name)
    await cluster.start(name)


def endless(context: psync.InputContext) -> Any:
    while True:
        yield np.ones((EXAMPLES, 1)), np.ones((EXAMPLES, 1))


def minus_one(values: Any, batch: Any) -> Any:
    """The variable counts the steps."""
    return 1.0, -np.ones(1), batch[1]


class Told(psync.callbacks.Callback):
    """Says what was told, and does something at one of these moments."""

    def __init__(self, at: tuple[str, int, int], act: Callable[[], Any]) -> None:
        self.batches: list[list[int]] = []
        self.epochs: list[int] = []
        self._at, self._act = at, act

    async def _reach(self, *moment: Any) -> None:
        if moment == self._at:
            self._at = ("never", 0, 0)
            await self._act()

    def on_epoch_begin(self, epoch: int) -> None:
        self.batches.append([])

    async def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.batches[-1].append(batch)
        await self._reach("batch", len(self.batches) - 1, batch)

    async def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.epochs.append(epoch)
        await self._reach("epoch", epoch, 0)


class World:
    """A cluster with one ps, a trainer that counts steps in its variable, and what became of it."""

    def __init__(self, cluster: MemoryCluster, coordinator: psync.ClusterCoordinator) -> None:
        self.cluster, self.coordinator = cluster, coordinator

    def make(self, directory: Path | None, **options: Any) -> psync.Trainer:
        options = {"compute": minus_one, "optimizer": psync.optimizers.SGD(1.0)} | options
        with self.coordinator.strategy.scope():
            self.count = psync.Variable(np.zeros(1), name="count")
            self.mae = psync.metrics.MeanAbsoluteError("mae")
        return psync.Trainer(
            self.coordinator.strategy, self.count, options["compute"], options["optimizer"],
            [self.mae], checkpoint_directory=directory,
        )  # fmt: skip

    async def fit(
        self, trainer: psync.Trainer, *callbacks: psync.callbacks.Callback, **options: Any
    ) -> psync.Trainer:
        known = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": "lines"} | options
        data = known.pop("data", endless)
        self.history = await trainer.fit(data, callbacks=callbacks, **known)
        return trainer

    async def rollbacks(self) -> list[Any]:
        events = self.coordinator.events()
        return [await anext(events) for _ in range(self.events_so_far())]

    def events_so_far(self) -> int:
        return len(self.coordinator._running("a test").events.rollbacks)


@asynccontextmanager
async def world(num_workers: int = 2) -> AsyncIterator[World]:
    async with coordinating(1, num_workers) as (cluster, coordinator):
        yield World(cluster, coordinator)


@pytest.mark.promise("fit.makes-all-steps")
@pytest.mark.parametrize("per_execution", [1, 3])
async def test_steps_that_a_rollback_undoes_in_an_epoch_are_trained_again_in_it(
    per_execution: int, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as here:
        told = Told(("batch", 1, 11), lambda: lose(here.cluster))
        trainer = await here.fit(here.make(tmp_path), told, steps_per_execution=per_execution)
        assert await here.count.read() == EPOCHS * STEPS
        assert await trainer.optimizer.iterations.read() == EPOCHS * STEPS
        (rollback,) = await here.rollbacks()
        again = here.history.repeated[1]
        assert here.history.repeated == [0, again, 0]
        assert again >= 12
        assert len(rollback.closures) * per_execution >= again
        assert rollback.updates == len(rollback.closures) * (per_execution + 2)  # and two metrics
        assert told.epochs == [0, 1, 2]
        assert max(told.batches[1]) == STEPS + again - 1  # their numbers go on
        assert told.batches[1] == sorted(set(told.batches[1]))
        assert here.history.history["loss"] == [1.0] * EPOCHS
        assert (await here.mae.variables[0].read())[1] == STEPS * EXAMPLES  # of the last epoch
    out = capsys.readouterr().out
    assert f"epoch 2/3: 20 steps ({again} undone by a rollback and trained again) in" in out
    assert f"a rollback has undone {again} steps, which are trained again" in caplog.text


async def test_metrics_of_an_epoch_count_each_of_its_steps_once(tmp_path: Path) -> None:
    async with world() as here:
        told = Told(("batch", 0, 7), lambda: lose(here.cluster))
        trainer = here.make(tmp_path)
        await trainer.save(trainer.manager)  # type: ignore[arg-type]
        await here.fit(trainer, told, epochs=1)
        assert here.history.repeated[0] > 0
        assert (await here.mae.variables[0].read())[1] == STEPS * EXAMPLES


@pytest.mark.parametrize("moment", [("epoch", 1, 0), ("epoch", EPOCHS - 1, 0)])
async def test_so_are_those_that_it_undoes_between_epochs(
    moment: tuple[str, int, int], tmp_path: Path
) -> None:
    async with world() as here:
        told = Told(moment, lambda: lose(here.cluster))
        trainer = await here.fit(here.make(tmp_path), told)
        assert await here.count.read() == EPOCHS * STEPS
        assert here.history.repeated[moment[1]] == STEPS
        assert told.epochs == [0, 1, 2]  # callbacks are told once
        assert trainer.manager is not None
        newest = trainer.manager.latest_checkpoint
        assert newest is not None
        assert (await trainer.checkpoint.read(newest))["model"] == EPOCHS * STEPS


async def test_so_are_steps_of_earlier_epochs_where_the_checkpoint_is_older(tmp_path: Path) -> None:
    async with world() as here:
        saves = psync.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=3, max_to_keep=None)
        told = Told(("batch", 5, 4), lambda: lose(here.cluster))
        trainer = here.make(None)
        # Workers' data are enough for one epoch, and have to begin again for more in it.
        few = [(np.ones((EXAMPLES, 1)), np.ones((EXAMPLES, 1)))] * STEPS
        await here.fit(trainer, saves, told, epochs=7, data=few)
        assert await here.count.read() == 7 * STEPS
        assert here.history.epoch == [*range(7)]
        assert here.history.repeated[5] >= 2 * STEPS + 5
        assert sum(here.history.repeated) == here.history.repeated[5]


def lose_a_ps_before_write(number: int, here: World, monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    """Let a ps die, and training roll back, before a write of a checkpoint; return all writes."""
    write, writes = Cut.write, list[Cut]()

    async def lose_it_first(self: Cut, *arguments: Any) -> Any:
        writes.append(self)
        if len(writes) == number:
            await lose(here.cluster)
            await anext(here.coordinator.events())
        return await write(self, *arguments)

    monkeypatch.setattr(Cut, "write", lose_it_first)
    return writes


async def test_so_are_those_that_it_undoes_during_the_save_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as here:
        lose_a_ps_before_write(3, here, monkeypatch)
        trainer = await here.fit(here.make(tmp_path))
        assert await here.count.read() == EPOCHS * STEPS
        assert here.history.repeated == [0, 0, STEPS]
        assert trainer.manager is not None
        newest = trainer.manager.latest_checkpoint
        assert newest is not None
        assert (await trainer.checkpoint.read(newest))["model"] == EPOCHS * STEPS


async def test_a_checkpoint_that_lacks_steps_says_so_to_the_fit_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as here:
        writes = lose_a_ps_before_write(2, here, monkeypatch)
        trainer = here.make(tmp_path)
        saved = trainer.save

        async def save_and_die(manager: Any) -> None:
            await saved(manager)
            if len(writes) > 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(trainer, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            await here.fit(trainer, epochs=2)
        monkeypatch.undo()
        assert await here.count.read() == STEPS  # and the history has two epochs
        await here.fit(trainer, epochs=2)
        assert here.history.epoch == [0, 1]
        assert await here.count.read() == 2 * STEPS
        await here.fit(trainer, epochs=3)
        assert await here.count.read() == 3 * STEPS


async def test_a_rollback_while_steps_are_trained_again_is_made_up_for_too(tmp_path: Path) -> None:
    async with world() as here:
        told = Told(("batch", 1, 11), lambda: lose(here.cluster))
        again = Told(("batch", 1, STEPS + 5), lambda: lose(here.cluster))
        await here.fit(here.make(tmp_path), told, again)
        assert len(await here.rollbacks()) == 2
        assert await here.count.read() == EPOCHS * STEPS
        assert here.history.repeated[1] > STEPS  # all of the epoch, and some twice


async def test_a_validation_that_a_rollback_meets_is_of_the_values_that_stay(
    tmp_path: Path,
) -> None:
    evaluations = 0

    async with world() as here:
        trainer = here.make(tmp_path)
        evaluate = trainer.evaluate

        async def evaluate_and_lose(*arguments: Any, **options: Any) -> Any:
            nonlocal evaluations
            evaluations += 1
            if evaluations == 2:
                await lose(here.cluster)
                await anext(here.coordinator.events())
            return await evaluate(*arguments, **options)

        trainer.evaluate = evaluate_and_lose  # type: ignore[method-assign]
        await here.fit(trainer, validation_data=(np.ones((8, 1)), np.ones((8, 1))))
        assert evaluations == EPOCHS + 1
        assert here.history.repeated == [0, STEPS, 0]
        assert len(here.history.history["val_loss"]) == EPOCHS
        assert await here.count.read() == EPOCHS * STEPS


async def test_synchronous_steps_are_trained_again_too(tmp_path: Path) -> None:
    async with world(num_workers=1) as here:  # of several, some pushes would be stale
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)
        told = Told(("batch", 1, 11), lambda: lose(here.cluster))
        await here.fit(here.make(tmp_path, optimizer=optimizer), told)
        assert here.history.repeated[1] >= 12
        assert await optimizer.iterations.read() == EPOCHS * STEPS
        assert await here.count.read() == EPOCHS * STEPS


async def test_what_a_checkpoint_of_the_midst_of_an_epoch_has_is_not_trained_again(
    tmp_path: Path,
) -> None:
    async with world() as here:
        trainer = here.make(None)
        manager = psync.CheckpointManager(trainer.checkpoint, tmp_path)

        async def save_between() -> None:
            await manager.save()
            told._at, told._act = ("batch", 0, STEPS - 5), lambda: lose(here.cluster)

        told = Told(("batch", 0, 7), save_between)
        await here.fit(trainer, told, epochs=1)
        # Of a closure that ran at that instant the checkpoint may have a part; it runs as a whole.
        assert STEPS <= await here.count.read() <= STEPS + 2
        assert here.history.repeated[0] <= STEPS - 8


async def test_training_that_was_stopped_makes_up_for_nothing(tmp_path: Path) -> None:
    async with world() as here:

        async def lose_and_stop() -> None:
            await lose(here.cluster)
            await anext(here.coordinator.events())
            trainer.stop_training = True

        told = Told(("batch", 1, 11), lose_and_stop)
        trainer = here.make(tmp_path)
        await here.fit(trainer, told)
        assert here.history.epoch == [0, 1]
        assert await here.count.read() < 2 * STEPS


async def test_data_that_end_between_epochs_end_training_as_they_do_within_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two epochs are undone, and the worker's data are enough for one."""
    few = [(np.ones((EXAMPLES, 1)), np.ones((EXAMPLES, 1)))] * STEPS
    async with world(1) as here:

        async def lose_and_hear() -> None:
            await lose(here.cluster)
            await anext(here.coordinator.events())

        saves = psync.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=3, max_to_keep=None)
        told = Told(("epoch", 4, 0), lose_and_hear)
        await here.fit(here.make(None), saves, told, epochs=7, data=few)
        assert here.history.epoch == [*range(5)]
        assert await here.count.read() == 4 * STEPS
    assert (
        "training ends with epoch 5 of 7: the workers' data started and ended in it" in caplog.text
    )


async def test_data_that_end_in_what_a_checkpoint_lacks_end_training_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = [(np.ones((EXAMPLES, 1)), np.ones((EXAMPLES, 1)))] * STEPS
    async with world(1) as here:
        trainer = here.make(tmp_path)
        trainer.history._add(0, {"loss": 1.0})
        trainer.fit_state.before = 2 * STEPS
        assert trainer.manager is not None
        await trainer.save(trainer.manager)
        await here.fit(trainer, data=few)
        assert here.history.epoch == [0]
        assert await here.count.read() == STEPS
    assert f"training ends with epoch 1 of {EPOCHS}: the workers' data started" in caplog.text


X = np.arange(8, dtype=np.float32)


def batches(context: psync.InputContext) -> Any:
    while True:
        yield X, X


def value_and_grad(values: Any, batch: Any) -> Any:
    return float(values.sum()), np.full(1, 1.0, np.float32), batch[1]


def make(strategy: Any, compute: Any = value_and_grad) -> psync.Trainer:
    with strategy.scope():
        w = psync.Variable(np.zeros(1, np.float32), name="w")
        metric = psync.metrics.MeanSquaredError("mse")
    return psync.Trainer(strategy, w, compute, psync.optimizers.SGD(1.0), [metric])


class Notes(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []

    async def on_train_batch_end(self, batch: int, logs: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append((batch, dict(logs)))

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.ended.append(len(self.seen))


async def fitted(callback: Callback, compute: Any = value_and_grad, **options: Any) -> None:
    async with training(num_workers=1) as (strategy, _):
        known: dict[str, Any] = {"epochs": 2, "steps_per_epoch": 5, **options}
        trainer = make(strategy, compute)
        await trainer.fit(batches, callbacks=[callback], verbose=False, **known)


async def test_each_execution_is_told_once_in_order_with_its_means() -> None:
    notes = Notes()
    await fitted(notes, steps_per_execution=2)
    assert [batch for batch, _ in notes.seen] == [1, 3, 4] * 2
    # The variable falls by 1 with each step, and the loss is its value.
    assert [logs["loss"] for _, logs in notes.seen] == [-0.5, -2.5, -4.0, -5.5, -7.5, -9.0]
    assert all(logs["mse"] == 0.0 for _, logs in notes.seen)
    assert notes.ended == [3, 6]


async def test_training_that_is_stopped_ends_with_the_epoch_unfinished() -> None:
    class Stops(Notes):
        async def on_train_batch_end(self, batch: int, logs: Any) -> None:
            await super().on_train_batch_end(batch, logs)
            self.trainer.stop_training = batch == 2

    stops = Stops()
    await fitted(stops, steps_per_epoch=1000)
    assert [batch for batch, _ in stops.seen] == [0, 1, 2]
    assert stops.ended == [3]


async def test_an_error_of_a_callback_ends_training() -> None:
    class Fails(Notes):
        async def on_train_batch_end(self, batch: int, logs: Any) -> None:
            await super().on_train_batch_end(batch, logs)
            raise ValueError("no")

    fails = Fails()
    with pytest.raises(ValueError, match="no"):
        await fitted(fails, steps_per_epoch=1000)
    assert (len(fails.seen), fails.ended) == (1, [])


async def test_an_error_of_a_step_is_that_of_fit() -> None:
    def broken(values: Any, batch: Any) -> Any:
        if values[0] <= -3:
            raise ZeroDivisionError("a bug")
        return value_and_grad(values, batch)

    notes = Notes()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await fitted(notes, broken)
    assert notes.ended == []


async def test_of_an_execution_that_met_the_end_of_data_its_steps_are_told() -> None:
    def few(context: psync.InputContext) -> Any:
        return [(X, X)] * 3

    notes = Notes()
    async with training(num_workers=1) as (strategy, _):
        await make(strategy).fit(
            few, epochs=1, steps_per_epoch=6, steps_per_execution=2, callbacks=[notes],
            verbose=False,
        )  # fmt: skip
    assert [batch for batch, _ in notes.seen] == [1, 2]
    assert notes.ended == [2]


async def test_without_such_a_callback_workers_send_nothing_back() -> None:
    async with training(num_workers=1) as (strategy, coordinator):
        trainer = make(strategy)
        step = trainer._steps(tells=False)
        data = iter(coordinator.create_per_worker_dataset(batches))
        assert await coordinator.schedule(step, args=(data, 0, 1)) is None


async def test_executions_that_run_when_a_step_asks_for_the_end_come_to_their_own() -> None:
    """Each has two steps, so the number of updates is even."""

    def data(context: psync.InputContext) -> Iterator[Any]:
        for number in itertools.count(1):
            yield np.array([context.input_pipeline_id, number]), np.zeros(2, np.float32)

    async def compute(values: Any, batch: Any) -> Any:
        place = tuple(map(int, batch[0]))
        await asyncio.sleep({(0, 1): 1.0, (1, 11): 0.4, (2, 12): 2.0}.get(place, 0.0))
        if place == (1, 11):
            psync.request_stop("enough")
        return 0.0, np.ones(1, np.float32), batch[1]

    async with training(num_workers=3) as (strategy, _):
        trainer = make(strategy, compute)
        await trainer.fit(
            data, epochs=1, steps_per_epoch=4000, steps_per_execution=2, callbacks=[Notes()],
            verbose=False,
        )  # fmt: skip
        updates = -await trainer.variables.read()
        assert updates > 20
        assert not updates % 2
