"""Workers that are killed in the middle of data shards, and steps that raise: each is done once.

Everything here is a real process. A worker kills itself, with SIGKILL, between two batches.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import psync
from real_training import ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

NUM_SHARDS = 6
BATCHES = 4
FATAL = 3  # the shard that takes a worker with it


@pytest.mark.promise("data.shard-once")
async def test_every_shard_is_done_once_and_the_one_of_the_killed_worker_is_named(
    tmp_path: Path,
) -> None:
    files = [str(tmp_path / f"{index}.npy") for index in range(NUM_SHARDS)]
    for index, file in enumerate(files):
        np.save(file, np.full((BATCHES, 2), index))
    killed = tmp_path / "killed"
    async with training(2, 2) as (_, strategy, coordinator):
        with strategy.scope():
            applied = psync.Variable(np.zeros(NUM_SHARDS, np.int64))

        async def step(file: str, fatal: bool) -> str:
            for number, batch in enumerate(np.load(file)):
                shard = int(batch[0])
                if fatal and shard == FATAL and number == 2 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                await applied.assign_add(np.eye(NUM_SHARDS, dtype=np.int64)[shard])
            return file

        visits = coordinator.distribute_once(files, num_epochs=2, shuffle_seed=5)
        for epoch in visits:
            values = visits.schedule(step, args=(epoch == 0,))
            await coordinator.join()
            assert sorted(await coordinator.fetch(values)) == files
            # Batches were seen again, but none of their updates was applied again.
            assert (await applied.read()).tolist() == [BATCHES * (epoch + 1)] * NUM_SHARDS
        assert killed.exists()
        first, second = visits.account()
        assert first.is_complete
        assert second.is_complete
        assert first.restarted[FATAL] == 2
        assert second.restarted == {}
        json.dumps(visits.state())


@pytest.mark.promise("data.shard-once", "data.shard-updates-once")
async def test_what_shards_had_done_when_one_raised_counts_once_though_a_worker_dies_then(
    tmp_path: Path,
) -> None:
    num_shards, killed = 60, tmp_path / "killed"
    async with training(2, 4) as (_, strategy, coordinator):
        with strategy.scope():
            applied = psync.Variable(np.zeros((2, num_shards), np.int64))

        async def step(shard: int, bad: int, fatal: int) -> None:
            one = np.zeros((2, num_shards), np.int64)
            one[:, shard] = 1
            await applied.assign_add(one)
            await asyncio.sleep(0.02)  # others have counted, too, when one raises
            if shard == bad:
                raise ValueError("a bad record")
            if shard == fatal and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            await applied.assign_add(one)

        visits = coordinator.distribute_once(list(range(num_shards)), num_epochs=2)
        for bad, fatal in ((20, -1), (20, -1), (45, 20)):
            with pytest.raises(ValueError, match="a bad record"):
                await visits.run(step, (bad, fatal))
        await visits.run(step, (-1, -1))
        assert killed.exists()
        assert set((await applied.read()).ravel().tolist()) == {4}
        first, second = visits.account()
        assert first.restarted[20] >= 4
        assert second.is_complete
