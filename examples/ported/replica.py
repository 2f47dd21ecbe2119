"""A port of a TensorFlow 1 program, where each task runs the whole program in a session.

    psync run examples/ported/replica.py --ps 2 --workers 2
    psync run examples/ported/replica.py --ps 2 --workers 2 -- --synchronous

docs/howto/tensorflow.md compares it with its original. Checkpoints are in train_logs.
"""

import sys
import time

import numpy as np

import psync


class CheckpointHook(psync.SessionHook):
    """Saves and restores on the chief, as checkpoint_dir and save_checkpoint_secs do."""

    def __init__(self, checkpoint, checkpoint_dir, save_checkpoint_secs):
        self.manager = psync.CheckpointManager(checkpoint, checkpoint_dir)
        self.secs = save_checkpoint_secs

    async def after_create_session(self, session):  # no other task is in the session yet
        path = await self.manager.restore_or_initialize()
        print("begins with", path.name if path else "new variables", flush=True)
        self.saved_at = time.monotonic()

    async def after_run(self, session, result):
        if time.monotonic() - self.saved_at >= self.secs:
            await self.manager.save()
            self.saved_at = time.monotonic()

    async def end(self, session):
        await self.manager.save()


async def main():
    resolver = psync.resolve_cluster()
    is_chief = resolver.task_type == "chief"
    strategy = psync.ParameterServerStrategy(resolver)
    with strategy.scope():
        w = psync.Variable(np.zeros(10, np.float32), name="w")
        global_step = psync.get_or_create_global_step()
    optimizer = psync.optimizers.Adagrad(0.5)
    synchronous = "--synchronous" in sys.argv
    if synchronous:  # average the first two of three gradients, and drop the third
        optimizer = psync.SyncReplicasOptimizer(
            optimizer, replicas_to_aggregate=2, total_num_replicas=3
        )
    rng = np.random.default_rng()

    async def train_op():
        x = rng.normal(size=(64, 10)).astype(np.float32)
        error = x @ await w.read() - x @ np.arange(1, 11, dtype=np.float32)
        await optimizer.apply_gradients([(2 / len(x) * x.T @ error, w)], global_step)

    checkpoint = psync.Checkpoint(w=w, optimizer=optimizer, global_step=global_step)
    hooks = []
    if is_chief:
        hooks.append(CheckpointHook(checkpoint, "train_logs", save_checkpoint_secs=600))
    if synchronous:
        hooks.append(optimizer.make_session_run_hook(is_chief))
    async with psync.MonitoredTrainingSession(
        strategy, is_chief=is_chief, hooks=hooks, stop_at_step=1000
    ) as mon_sess:
        while not mon_sess.should_stop():
            await mon_sess.run(train_op)
        if is_chief:
            print("w", np.round(await w.read(), 1))


if __name__ == "__main__":
    psync.run(main, on_workers=True)
