"""The examples of docs/howto/seeing.md for Weights & Biases and MLflow run as they stand there.

Each in a process of its own: trackers leave threads and processes behind until theirs ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "seeing.md"

PROGRAM = """
import asyncio
import numpy as np
import psync

{example}

async def main():
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):
            with strategy.scope():
                w = psync.Variable(np.ones(1, np.float32), name="w")
            trainer = psync.Trainer(
                strategy, w, lambda value, batch: (float(value[0]), np.ones(1, np.float32)),
                psync.optimizers.SGD(0.5),
            )
            await trainer.fit(
                lambda context: [np.zeros(1)] * 4, epochs=2, steps_per_epoch=2,
                callbacks=[{name}()], verbose=False,
            )

asyncio.run(main())
"""

pytestmark = pytest.mark.processes


def output_of(name: str, folder: Path, after: str = "", **environ: str) -> str:
    """What a program prints that trains with the callback of an example, and does more after."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if f"class {name}(" in block]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(example=example, name=name) + after],
        env={**os.environ, **environ}, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    after = """
client = mlflow.MlflowClient()
(run,) = client.search_runs(["0"])
print([(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")])
print(run.info.status)
"""
    uri = f"file://{tmp_path}/runs"
    text = output_of(
        "MLflow", tmp_path, after, MLFLOW_TRACKING_URI=uri, MLFLOW_REGISTRY_URI=uri,
        MLFLOW_ALLOW_FILE_STORE="true",
    )  # fmt: skip
    assert "[(0, 0.75), (1, -0.25)]\nFINISHED\n" in text
