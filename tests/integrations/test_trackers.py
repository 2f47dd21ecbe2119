"""The examples of docs/seeing.md for Weights & Biases and MLflow run as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync

PAGE = Path(__file__).parents[2] / "docs" / "seeing.md"

pytestmark = pytest.mark.filterwarnings("default")  # those of the trackers


def example(name: str) -> psync.callbacks.Callback:
    """An instance of the class that a block of the page defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if f"class {name}(" in block]
    names: dict[str, Any] = {"psync": psync}
    exec(code, names)
    callback = names[name]()
    assert isinstance(callback, psync.callbacks.Callback)
    return callback


async def fit(callback: psync.callbacks.Callback) -> None:
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):
            with strategy.scope():
                w = psync.Variable(np.ones(1, np.float32), name="w")
            trainer = psync.Trainer(
                strategy, w, lambda value, batch: (float(value[0]), np.ones(1, np.float32)),
                psync.optimizers.SGD(0.5),
            )  # fmt: skip
            await trainer.fit(
                lambda context: [np.zeros(1)] * 4, epochs=2, steps_per_epoch=2,
                callbacks=[callback], verbose=False,
            )  # fmt: skip


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    asyncio.run(fit(example("MLflow")))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(0, 0.75), (1, -0.25)]
    assert run.info.status == "FINISHED"


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    callback: Any = example("WandB")
    assert callback.wants_batches
    asyncio.run(fit(callback))
    assert callback.run.summary["loss"] == -0.25
    assert callback.run.summary["batch/loss"] == -0.5
    assert list(tmp_path.rglob("*.wandb"))
