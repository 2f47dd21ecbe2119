"""A chief that is killed in the middle of saves: `saving.py DIRECTORY LIVES RECOVERY`.

Workers push to variables on all ps tasks all the time. Each life says first what it has found, and
of how many updates some parts are missing. It dies while all ps tasks hold updates up for a save.
"""

import json
import os
import signal
import sys

import numpy as np

import psync

SIZE = 20_000


class Killer:
    """What a checkpoint asks for its state at the instant of which it is."""

    saves = 0

    def checkpoint_state(self) -> int:
        self.saves += 1
        if self.saves == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.saves

    def restore_checkpoint_state(self, state: int) -> None:
        """Nothing is restored."""


async def main() -> None:
    directory, lives, recovery = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    strategy = psync.ParameterServerStrategy(ps_recovery=recovery)
    with strategy.scope():
        weights = [psync.Variable(np.zeros(SIZE), name=f"w{number}") for number in range(6)]
    sgd = psync.optimizers.SGD(1.0)

    async def step() -> None:
        await sgd.apply_gradients([(np.full(SIZE, -1.0), each) for each in weights])

    async with psync.ClusterCoordinator(strategy, attach=True) as coordinator:
        found = [(await each.read())[0] for each in weights]
        print(json.dumps([found, coordinator.partial_updates]), flush=True)
        if int(os.environ["PSYNC_RESTART_COUNT"]) == lives:
            return
        for _ in range(10_000):
            coordinator.schedule(step)
        checkpoint = psync.Checkpoint(weights=weights, killer=Killer())
        manager = psync.CheckpointManager(checkpoint, directory, max_to_keep=1)
        while True:
            await manager.save()


psync.run(main)
