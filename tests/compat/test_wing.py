"""Programs without training sessions do not load their package."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import asyncio, sys
import numpy as np
import psync
from memory_cluster import coordinating

async def main():
    async with coordinating(2, 2) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        plain = psync.optimizers.Adam(0.5)
        together = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)

        async def step(optimizer):
            gradients = [(await w.read() * 0 + 1, w)]
            await optimizer.apply_gradients(gradients, global_step)

        for _ in range(4):
            coordinator.schedule(step, args=(plain,))
        await coordinator.join()
        for _ in range(4):
            coordinator.schedule(step, args=(together,))
        await coordinator.join()
        await coordinator.strategy.run(step, args=(plain,))
        return int(await global_step.read())

print(asyncio.run(main()), [name for name in sys.modules if name.startswith("psync.compat")])
"""


def test_a_program_that_does_not_use_it_does_not_import_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.stdout, run.stderr) == ("7 []\n", "")
