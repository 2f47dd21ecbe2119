"""Checkpoints of a running program: saved, and restored into another cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import psync
from local_training import at_once, strategy_of, training
from psync.errors import (
    CheckpointMismatch,
    ConfigurationError,
    UsageError,
)
from psync.serialization.functions import FunctionTable

pytestmark = pytest.mark.virtual_time


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
