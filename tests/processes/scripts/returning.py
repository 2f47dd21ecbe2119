"""A chief that is killed and started again: `returning.py JOURNAL COUNT [RECOVERY]`.

Each closure marks two places of its own, one on each ps. What the chief knows to be done it writes
into its journal, a line each. RECOVERY is that of the strategy; with "backup" it begins when every
ps has a backup.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

import psync

PLACES = 4096


async def main() -> None:
    journal, count = Path(sys.argv[1]), int(sys.argv[2])
    lives = Path(f"{journal}.lives")
    life = len(lives.read_text()) if lives.exists() else 0
    lives.write_text("x" * (life + 1))
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(),
        psync.FixedShardsPartitioner(2),
        ps_recovery=(*sys.argv, "checkpoint")[3],
    )
    with strategy.scope():
        marks = psync.Variable(np.zeros(2 * PLACES, np.int64), name="marks")
        weights = psync.Variable(np.zeros(2, np.float32), name="weights")
    sgd = psync.optimizers.SGD(1.0)

    async def step(place: int) -> int:
        mark = np.zeros(2 * PLACES, np.int64)
        mark[place] = mark[PLACES + place] = 1
        await marks.assign_add(mark)
        await sgd.apply_gradients([(np.full(2, -1, np.float32), weights)])
        return place

    async with psync.ClusterCoordinator(strategy, attach=True) as coordinator:
        print(json.dumps([(await marks.read()).tolist(), await sgd.iterations.read()]), flush=True)
        await coordinator.backed_up()
        first = 1024 * life

        async def note(value: psync.RemoteValue) -> None:
            place = await value
            with journal.open("a") as file:
                file.write(f"{place}\n")

        for begin in range(first, first + count, 8):
            values = [coordinator.schedule(step, (place,)) for place in range(begin, begin + 8)]
            await asyncio.gather(*map(note, values))
        await coordinator.join()
        print(json.dumps([(await marks.read()).tolist(), (await weights.read()).tolist()]))


psync.run(main)
