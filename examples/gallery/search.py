"""Sixteen learning rates at once: a search on one cluster that spends its time on the good ones.

    python examples/gallery/search.py
    python examples/gallery/search.py --quick

Each trial is a model with variables, an optimizer and a learning rate of its own, and all of them
share the workers: a step of any trial goes to whichever worker is free. After each round the worse
half is given up (successive halving, Jamieson 2016), so those that are left get twice the steps.
The results come as they are ready; no worker is set aside for a trial, and none is ever idle.

The program starts its cluster itself, so it is run with plain python.
"""

import asyncio
import sys
import time

import common
import numpy as np

import psync

TRIALS, BATCH = 16, 32
MIN_ACCURACY = 0.95


class Trial:
    """A learning rate, and the model that is trained with it."""

    def __init__(self, number, rate, strategy, first):
        self.rate, self.curve, self.steps = rate, [], 0
        with strategy.scope():
            names = [f"trial{number}/{i}" for i in range(len(first))]
            self.model = [psync.Variable(a, name=n) for a, n in zip(first, names, strict=True)]
        self.optimizer = psync.optimizers.Momentum(rate, momentum=0.9)

    def schedule(self, coordinator, data, steps):
        """Give the workers some steps to do; return their results, which are not there yet."""
        model, optimizer = self.model, self.optimizer  # what the step needs, and no more

        async def step(data):  # runs on some worker
            x, labels = next(data)
            loss, gradients = common.loss_and_gradients(await psync.pull(model), x, labels)
            if np.isfinite(loss):  # else it has diverged, and there is no use in going on
                gradients = [np.clip(gradient, -1, 1) for gradient in gradients]
                await optimizer.apply_gradients(zip(gradients, model, strict=True))
            return psync.get_worker_index()

        return [coordinator.submit(step, data) for _ in range(steps)]


def dataset_of(x, labels):
    def batches(context):  # on each worker, shared by all trials
        rng = np.random.default_rng(context.input_pipeline_id)
        while True:
            rows = rng.integers(0, len(x), BATCH)
            yield x[rows], labels[rows]

    return batches


async def main():
    options = common.options(__doc__, steps=100, workers=3)
    steps = 40 if options.quick else options.steps  # of a trial in the first round
    training, test = common.digits()
    (x, labels), held_back = [array[:1100] for array in training], [a[1100:] for a in training]
    rng = np.random.default_rng(options.seed)
    first = common.new_net(rng)
    rates = 10.0 ** rng.permutation(np.linspace(-4, 1, TRIALS))
    async with psync.LocalCluster(2, options.workers) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            trials = [Trial(i, rate, strategy, first) for i, rate in enumerate(rates)]
            data = iter(coordinator.create_per_worker_dataset(dataset_of(x, labels)))
            alive, began, done_by = trials, time.perf_counter(), []
            while True:
                results = [trial.schedule(coordinator, data, steps) for trial in alive]
                for trial, ready in zip(alive, results, strict=True):
                    done_by += await coordinator.fetch(ready)  # while the others go on
                    trial.steps += steps
                    score = common.accuracy(await psync.pull(trial.model), *held_back)
                    trial.curve.append((trial.steps, score))
                alive.sort(key=lambda trial: -trial.curve[-1][1])
                best = alive[0]
                print(f"{len(alive):2} trials, {best.steps:4} steps each; best: rate "
                      f"{best.rate:8.5f}, accuracy {best.curve[-1][1]:.4f}")  # fmt: skip
                if len(alive) == 1:
                    break
                alive, steps = alive[: len(alive) // 2], steps * 2
            seconds = time.perf_counter() - began
            reached = common.accuracy(await psync.pull(best.model), *test)

    shares = np.bincount(done_by, minlength=options.workers) / len(done_by)
    exhaustive = TRIALS * best.steps
    print(f"{len(done_by)} steps in {seconds:.1f} s, instead of {exhaustive}; by worker:",
          *(f"{share:.0%}" for share in shares))  # fmt: skip
    print(f"accuracy of images that no choice has seen: {reached:.4f}")
    draw(trials, best, options.out)
    if reached < MIN_ACCURACY:
        return f"accuracy {reached:.4f}, expected at least {MIN_ACCURACY}"


def draw(trials, best, folder):
    """Draw each trial's accuracy as long as it went on, and the last one of each by its rate."""
    drawn, (left, right) = common.figure()
    for trial in trials:
        wins = {"color": "C1", "zorder": 3} if trial is best else {"color": "C0", "alpha": 0.5}
        left.plot(*zip(*trial.curve, strict=True), "o-", markersize=3, **wins)
        right.scatter(trial.rate, trial.curve[-1][1], s=4 * len(trial.curve) ** 2, **wins)
    right.scatter([], [], color="C1", label=f"the winner, {best.rate:.2g}")
    right.legend(frameon=False, loc="center right")
    left.set(title="each trial, until it was given up", xlabel="steps", xscale="log", ylim=(0, 1))
    right.set(title="accuracy by learning rate", xlabel="rate", xscale="log", ylim=(0, 1))
    common.save(drawn, folder, "search")


if __name__ == "__main__":
    failure = asyncio.run(main())
    sys.exit(f"search: {failure}" if failure else 0)
