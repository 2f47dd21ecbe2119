"""Synchronous training with a backup replica: every worker runs its own loop.

    psync run examples/sync_replicas.py --ps 2 --workers 3

The usage example of TensorFlow's SyncReplicasOptimizer, in psync. The same program runs on the
chief and on each of the three workers. Each step takes the gradients of the first two workers,
averages them, and applies the mean once; what the third one brings too late is dropped, and it is
told. So no step waits for the slowest worker, and none is computed from old values.

The problem is a linear regression whose answer is known: y = x·TRUTH + noise, of which each worker
has a part of its own. It needs no package but numpy.
"""

import sys
from collections import Counter

import numpy as np

import psync

STEPS = 300
BATCH = 32
NOISE = 0.1  # standard deviation: no model has a smaller mean square error than its square
TRUTH = np.linspace(-1, 1, 20, dtype=np.float32)


def batch(rng, size=BATCH):
    x = rng.normal(size=(size, len(TRUTH))).astype(np.float32)
    return x, x @ TRUTH + rng.normal(0, NOISE, size).astype(np.float32)


def loss_and_gradient(w, x, y):
    """Return the mean square error, and its gradient with respect to ``w``."""
    error = x @ w - y
    return np.mean(error**2), 2 / len(y) * x.T @ error


async def main():
    resolver = psync.resolve_cluster()  # says which task this process is
    workers = resolver.cluster_spec().num_tasks("worker")
    is_chief = resolver.task_type == "chief"  # it creates the variables, and computes no gradients
    strategy = psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(2))

    # Every task declares the same, in the same order; the chief's values count.
    with strategy.scope():
        w = psync.Variable(np.zeros_like(TRUTH), name="w")
        global_step = psync.get_or_create_global_step()
    optimizer = psync.SyncReplicasOptimizer(
        psync.optimizers.SGD(0.05),
        replicas_to_aggregate=max(1, workers - 1),
        total_num_replicas=workers,
    )
    hook = optimizer.make_session_run_hook(is_chief)
    rng = np.random.default_rng(resolver.task_id)
    pushes = Counter[str]()

    async def step():
        x, y = batch(rng)
        value = await psync.pull(w)
        _, gradient = loss_and_gradient(value, x, y)
        push = await optimizer.apply_gradients([(gradient, w)], global_step)
        pushes[push.outcome.value] += 1

    async with psync.MonitoredTrainingSession(
        strategy, is_chief=is_chief, trains=not is_chief, hooks=[hook], stop_at_step=STEPS
    ) as session:
        if is_chief:
            await session.wait_until_stopped()
            return report(*await psync.pull((w, global_step)))
        while not session.should_stop():
            await session.run(step)

    accepted, stale = pushes["accepted"], pushes["stale"]
    print(f"worker {resolver.task_id}: {accepted} gradients accepted, {stale} dropped")


def report(value, steps):
    """Say what came of it, on the chief; return what is wrong with it."""
    loss, _ = loss_and_gradient(value, *batch(np.random.default_rng(99), 10_000))
    distance = np.abs(value - TRUTH).max()
    print(f"step {steps}: loss {loss:.4f} (noise alone: {NOISE**2:.4f}), "
          f"largest error of a weight {distance:.4f}")  # fmt: skip
    if steps < STEPS or loss > 2 * NOISE**2:
        return f"expected {STEPS} steps and a loss below {2 * NOISE**2:.4f}"


if __name__ == "__main__":
    failure = psync.run(main, on_workers=True)
    sys.exit(f"sync_replicas: {failure}" if failure else 0)
