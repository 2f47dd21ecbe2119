"""What is read of a checkpoint without a cluster, and how it is nested."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import psync
from local_training import in_step, strategy_of, training
from psync.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointNotFound

TABLE = np.arange(26, dtype=np.float32).reshape(13, 2)


class Pair(NamedTuple):
    w: Any
    b: Any


class Model(psync.Module):
    """Variables of several kinds, and settings that are none."""

    def __init__(self) -> None:
        self.table = psync.Variable(TABLE, name="table")
        self.layers = [
            psync.Variable(np.full(3, 2, ml_dtypes.bfloat16), name="layer"),
            {"bias": psync.Variable(np.float64(7), name="bias")},
        ]
        count = psync.Variable(np.int32(4), name="count", trainable=False)
        self.tied = Pair(self.table, count)
        self.rate = 0.5


class Objects:
    """What both the program and the evaluator declare."""

    def __init__(self, strategy: psync.ParameterServerStrategy) -> None:
        with strategy.scope():
            self.model = Model()
            self.loss = psync.metrics.Mean("loss")
            self.ema = psync.ExponentialMovingAverage(0.5)
            self.ema.apply([self.model.table])
        self.adam = psync.optimizers.Adam(0.1)
        self.progress = psync.SavedState(epoch=3)
        self.checkpoint = psync.Checkpoint(
            model=self.model,
            loss=self.loss,
            ema=self.ema,
            averaged={"t": self.ema.averages(self.model.table)},
            optimizer=self.adam,
            progress=self.progress,
        )


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    async with training(2, 1, psync.FixedShardsPartitioner(3)) as (strategy, coordinator):
        objects = Objects(strategy)
        loss, table, adam, ema = objects.loss, objects.model.table, objects.adam, objects.ema

        async def step() -> None:
            await loss.update_state([1.0, 4.0])
            await adam.apply_gradients([(np.ones((13, 2), np.float32), table)])
            await ema.update()

        await in_step(coordinator, step)
        return await objects.checkpoint.save(tmp_path)


async def test_values_are_nested_as_the_objects_are(saved: Path) -> None:
    checkpoint = Objects(strategy_of(1)).checkpoint
    values = await checkpoint.read(saved)
    model = values["model"]
    assert list(values) == ["model", "loss", "ema", "averaged", "optimizer", "progress"]
    assert list(model) == ["layers", "table", "tied"]
    np.testing.assert_allclose(model["table"], TABLE - 0.1, atol=1e-5)
    assert model["tied"].w is model["table"]
    assert model["tied"].b == 4
    assert model["layers"][0].dtype == ml_dtypes.bfloat16
    assert model["layers"][0].tolist() == [2, 2, 2]
    assert model["layers"][1]["bias"] == 7.0
    assert values["loss"] == 2.5
    assert values["progress"] == {"epoch": 3}
    assert values["optimizer"] == {"step": 1}
    # Moving averages are there by name, and where the variables are.
    np.testing.assert_allclose(values["ema"]["table"], TABLE - 0.05, atol=1e-5)
    assert values["averaged"]["t"] is values["ema"]["table"]
    # The values are the caller's own.
    model["table"][:] = 0
    assert (await checkpoint.read(saved))["model"]["table"].any()


async def test_slots_are_read_only_if_somebody_asks(saved: Path) -> None:
    values = await Objects(strategy_of(1)).checkpoint.read(saved, slots=True)
    slots = values["optimizer"]
    assert slots["step"] == 1
    assert slots["m"]["table"].shape == (13, 2)
    np.testing.assert_allclose(slots["m"]["table"], 0.1, atol=1e-6)
    assert set(slots) == {"step", "m", "v"}


async def test_only_what_is_asked_for_is_read_and_what_does_not_fit_is_named(saved: Path) -> None:
    with strategy_of(1).scope():
        other = psync.Variable(np.zeros((13, 2), np.float32), name="other")
        table = psync.Variable(np.zeros((13, 3), np.float32), name="table")
        more = psync.Variable(np.zeros(3), name="more")
    values = await psync.Checkpoint(model={"table": other}).read(saved)
    assert list(values) == ["model"]
    assert values["model"]["table"].shape == (13, 2)
    with pytest.raises(CheckpointMismatch) as caught:
        await psync.Checkpoint(model={"table": table, "more": more}).read(saved)
    text = str(caught.value)
    assert "missing in it: model/more" in text
    assert "model/table: saved as (13, 2) float32, declared as (13, 3) float32" in text
    assert "hint: declare what the program declares" in text


async def test_damage_is_found_where_it_is_read(saved: Path) -> None:
    data = saved / "data-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    checkpoint = Objects(strategy_of(1)).checkpoint
    with pytest.raises(CheckpointCorrupt, match="expected checksum"):
        await checkpoint.read(saved, slots=True)
    with pytest.raises(CheckpointNotFound):
        await checkpoint.read(saved.parent / "ckpt-00000009")
