"""Compressed training on real processes, whose ps tasks back one another up."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from real_training import ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120), ONE_LOOP]

TINY = 2.0**-9


async def test_pushes_and_pulls_of_several_processes() -> None:
    async with training(2, 1, ps_recovery="backup") as (_, strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros((100, 400), np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        made = psync.optimizers.SGD(1.0, compression="bf16")
        synchronous = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0, compression="bf16"), 1)

        async def step() -> float:
            gradient = np.full(v.shape, 1 + TINY, np.float32)
            await made.apply_gradients([(gradient, v)])
            await synchronous.apply_gradients([(gradient, v)], global_step)
            return float((await psync.pull(v, compression="bf16"))[0, 0])

        await coordinator.backed_up()
        # Two remainders are half of the last bit, which goes to even; three are above that.
        seen = [await coordinator.schedule(step) for _ in range(3)]
        assert seen == [-2, -4, -6]
        assert (await v.read() == -6 - 8 * TINY).all()
        for ps in await coordinator.ps_statistics():
            assert (ps["backup"]["state"], ps["backup"]["unequal"]) == ("paired", 0)
