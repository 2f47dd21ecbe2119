"""Checkpoints of a running program: saved, and restored into another cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import psync
from local_training import at_once, in_step, strategy_of, training
from psync.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointNotFound,
    ClosedError,
    ConfigurationError,
    UsageError,
)
from psync.serialization.functions import FunctionTable

pytestmark = pytest.mark.virtual_time

TABLE = np.arange(26, dtype=np.float32).reshape(13, 2)


class Model(psync.Module):
    """Variables of several kinds."""

    def __init__(self, start: float = 0.0) -> None:
        self.table = psync.Variable(TABLE + start, name="table")
        self.layers = [
            psync.Variable(np.full(3, start, ml_dtypes.bfloat16), name="layer"),
            {"bias": psync.Variable(np.float64(start), name="bias")},
        ]
        self.settings = {"rate": 0.5, "names": ["a"]}


def shards(count: int) -> psync.FixedShardsPartitioner:
    return psync.FixedShardsPartitioner(count)


async def train(coordinator: Any, model: Model, optimizer: Any) -> None:
    async def step() -> None:
        values = await psync.pull(model.table)
        await optimizer.apply_gradients([(values + 1, model.table)])

    for _ in range(3):
        coordinator.schedule(step)
    await coordinator.join()


@pytest.mark.promise("checkpoints.any-cluster-size")
@pytest.mark.parametrize(("num_ps", "num_shards"), [(3, 5), (1, 1), (2, 3)])
async def test_it_is_restored_into_any_number_of_ps_tasks_and_shards(
    tmp_path: Path, num_ps: int, num_shards: int
) -> None:
    async with training(2, 1, shards(3)) as (strategy, coordinator):
        with strategy.scope():
            model = Model(1.0)
        adam = psync.optimizers.Adam(0.1)
        await train(coordinator, model, adam)
        path = await psync.Checkpoint(model=model, optimizer=adam).save(tmp_path)
        await train(coordinator, model, adam)
        expected = await psync.pull((model.table, model.layers))
    async with training(num_ps, 1, shards(num_shards)) as (strategy, coordinator):
        with strategy.scope():
            model = Model()
        adam = psync.optimizers.Adam(0.1)
        restored = await psync.Checkpoint(model=model, optimizer=adam).restore(path)
        assert (restored.number, restored.extra, restored.missing) == (1, (), ())
        assert await adam.iterations.read() == 3
        await train(coordinator, model, adam)
        got = await psync.pull((model.table, model.layers))
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1][0], expected[1][0])
    assert got[1][1]["bias"] == expected[1][1]["bias"] == 1.0


async def test_metrics_averages_and_states_come_along(tmp_path: Path) -> None:
    async def save_or_restore(start: float, path: Path | None) -> Any:
        async with training() as (strategy, coordinator):
            with strategy.scope():
                w = psync.Variable(np.full(4, start, np.float32), name="w")
                loss = psync.metrics.Mean("loss")
                ema = psync.ExponentialMovingAverage(0.5)
                ema.apply([w])
            progress = psync.SavedState(epoch=int(start), notes=["a"])
            checkpoint = psync.Checkpoint(w=w, loss=loss, ema=ema, progress=progress)
            if path is None:

                async def step() -> None:
                    await loss.update_state([1.0, 4.0])
                    await w.assign_add(np.full(4, 2, np.float32))
                    await ema.update()

                await in_step(coordinator, step)
                path = await checkpoint.save(tmp_path)
            else:
                await checkpoint.restore(path)
            average = await psync.pull(ema.averages(w))
            return path, await loss.result(), average.tolist(), progress.epoch, progress.notes

    saved = await save_or_restore(5.0, None)
    assert saved[1:] == (2.5, [6.0] * 4, 5, ["a"])
    assert await save_or_restore(0.0, saved[0]) == saved


async def test_half_precision_has_slots_in_single(tmp_path: Path) -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(3, np.float16), name="w")
        momentum = psync.optimizers.SGD(0.5, momentum=0.5)

        async def step() -> None:
            await momentum.apply_gradients([(np.full(3, 2, np.float16), w)])

        await in_step(coordinator, step)
        checkpoint = psync.Checkpoint(w=w, optimizer=momentum)
        path = await checkpoint.save(tmp_path)
        slot = momentum.get_slot(w, "momentum")
        assert slot is not None
        assert slot.dtype == "float32"
        await slot.assign(np.zeros(3))
        await checkpoint.restore(path)
        np.testing.assert_array_equal(await slot.read(), np.full(3, -1, np.float32))


class TestMismatch:
    @pytest.mark.promise("checkpoints.mismatch-named")
    async def test_everything_that_does_not_fit_is_named_and_nothing_is_restored(
        self, tmp_path: Path
    ) -> None:
        async with training() as (strategy, _):
            with strategy.scope():
                a = psync.Variable(np.ones(4), name="a")
                b = psync.Variable(np.ones(4), name="b")
                c = psync.Variable(np.zeros(4), name="c")
                other = psync.Variable(np.zeros(5), name="other")
            path = await psync.Checkpoint(a=a, b=b, gone=c).save(tmp_path)
            checkpoint = psync.Checkpoint(a=c, b=other, new=a, state=psync.SavedState())
            with pytest.raises(CheckpointMismatch) as caught:
                await checkpoint.restore(path)
            text = str(caught.value)
            assert "missing in it: new, state" in text
            assert "of another shape or dtype: b: saved as (4,) float64, declared as (5,)" in text
            assert "not asked for: gone" in text
            assert not (await c.read()).any()

    async def test_parts_may_be_restored_on_request(self, tmp_path: Path) -> None:
        async with training() as (strategy, _):
            with strategy.scope():
                a = psync.Variable(np.ones(4), name="a")
                c = psync.Variable(np.zeros(4), name="c")
            progress = psync.SavedState(epoch=7)
            optimizer = psync.optimizers.SGD()
            path = await psync.Checkpoint(a=a, extra=c).save(tmp_path)
            restored = await psync.Checkpoint(a=c, progress=progress, optimizer=optimizer).restore(
                path, partial=True
            )
            assert restored.missing == ("optimizer/step", "progress")
            assert restored.extra == ("extra",)
            assert (await c.read()).all()
            assert progress.epoch == 7


class TestMistakes:
    def test_what_cannot_be_saved_is_named(self) -> None:
        with pytest.raises(UsageError, match="'lr' is float, which cannot be saved"):
            psync.Checkpoint(lr=0.1)
        with pytest.raises(UsageError, match="'model/1' is int"):
            psync.Checkpoint(model=[psync.SavedState(), 3])
        with pytest.raises(ConfigurationError, match="expected objects to save"):
            psync.Checkpoint()
        with pytest.raises(ConfigurationError, match="'~' cannot be a name"):
            psync.Checkpoint(**{"~": psync.SavedState()})

    async def test_the_loss_of_a_training_that_failed_can_be_saved(self, tmp_path: Path) -> None:
        state = psync.SavedState(losses=[1.5, float("inf"), float("nan")], best=None)
        async with training():
            checkpoint = psync.Checkpoint(state=state)
            path = await checkpoint.save(tmp_path)
            state.losses = []
            await checkpoint.restore(path)
        np.testing.assert_array_equal(state.losses, [1.5, np.inf, np.nan])

    def test_two_things_of_one_name_are_refused(self) -> None:
        with strategy_of().scope():
            one, other = (psync.Variable(np.zeros(2), name=name) for name in "vw")
        sgd, state = psync.optimizers.SGD(), psync.SavedState()
        for model in (
            {"a/b": one, "a": {"b": other}},
            {1: one, "1": other},
            {"sgd": sgd, "sgd/step": state},
            {"sgd/learning_rate": state, "sgd": sgd},
            {"sgd": sgd, "sgd/learning_rate": state},
        ):
            with pytest.raises(UsageError, match=r"two objects are called 'model/(a/b|1|sgd/\w+)'"):
                psync.Checkpoint(model=model)

    def test_without_a_coordinator_nothing_is_left_behind(self, tmp_path: Path) -> None:
        with strategy_of().scope():
            w = psync.Variable(np.zeros(3), name="w")
        with pytest.raises(UsageError, match="no connection to the ps tasks"):
            at_once(psync.Checkpoint(w=w).save(tmp_path))
        assert list(tmp_path.iterdir()) == []

    def test_steps_cannot_save(self, tmp_path: Path) -> None:
        with strategy_of().scope():
            checkpoint = psync.Checkpoint(w=psync.Variable(np.zeros(3), name="w"))

        async def step() -> None:
            await checkpoint.save(tmp_path)

        with pytest.raises(psync.SerializationError, match="saved by the program"):
            FunctionTable().register(step)

    def test_values_of_saved_states_have_names(self) -> None:
        with pytest.raises(AttributeError, match="no value 'epoch'"):
            _ = psync.SavedState().epoch
        assert repr(psync.SavedState(epoch=3)) == "SavedState(epoch=3)"


async def test_no_checkpoint_and_damaged_ones_are_told_apart(tmp_path: Path) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros(1), name="w")
        checkpoint = psync.Checkpoint(w=w, progress=psync.SavedState(epoch=1))
        with pytest.raises(CheckpointNotFound, match="no checkpoint here"):
            await checkpoint.restore(tmp_path / "ckpt-00000001")
        path = await checkpoint.save(tmp_path)
        manifest = json.loads((path / "manifest.json").read_bytes())
        manifest["states"]["progress"]["epoch"] = 2
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointCorrupt, match="not the one that was committed"):
            await checkpoint.restore(path)


def test_after_the_end_nothing_can_be_saved(tmp_path: Path) -> None:
    strategy = strategy_of()
    with strategy.scope():
        w = psync.Variable(np.zeros(1), name="w")
    strategy._created = True  # as a coordinator leaves it
    with pytest.raises(ClosedError):
        at_once(psync.Checkpoint(w=w).save(tmp_path))
