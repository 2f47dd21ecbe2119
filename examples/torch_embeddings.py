"""Who will click on what: sparse torch embeddings and an MLP, on 2 ps and 2 workers.

    pip install -e '.[torch]'
    psync run examples/torch_embeddings.py --ps 2 --workers 2
    psync run examples/torch_embeddings.py --ps 2 --workers 2 -- --steps 3000

Clicks are drawn from a model that is known: how much a user likes an item is the product of hidden
factors, and popular items are seen far more often than others. So the best possible AUC is known,
too. ``nn.Embedding(…, sparse=True)`` makes gradients of the rows that a batch has used, and these
rows are all that is pushed and changed; each table is cut into shards over both ps tasks. First the
same module is trained in this process alone, with torch's own optimizers.
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import nn

import psync
from psync.integrations.torch import PSModule

USERS, ITEMS, FACTORS, WIDTH = 500, 5000, 4, 8
BATCH = 512
RATE = 0.03
MAX_LOSS = 0.04  # of AUC, compared with the single process, whose gradients are never late
MIN_GAIN = 0.3  # of AUC, above guessing


def clicks(seed, count):
    """Return users, items, whether each clicked, and the probability of that."""
    rng = np.random.default_rng(seed)
    hidden = np.random.default_rng(0)  # the same world for all
    likes = hidden.normal(0, 1.2, (USERS, FACTORS))
    kinds = hidden.normal(0, 1.2, (ITEMS, FACTORS))
    users = rng.integers(USERS, size=count)
    popularity = 1 / np.arange(1, ITEMS + 1) ** 1.05
    items = rng.choice(ITEMS, size=count, p=popularity / popularity.sum())
    probability = 1 / (1 + np.exp(1 - (likes[users] * kinds[items]).sum(1)))
    return users, items, (rng.random(count) < probability).astype(np.float32), probability


class Model(nn.Module):
    """Tables of users and items, and an MLP of both rows and their product."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users, items):
        user, item = self.users(users), self.items(items)
        return self.mlp(torch.cat([user, item, user * item], 1)).squeeze(1)


def batches(context=None):  # runs on each worker, in a thread of its own
    """Yield batches for ever, each worker other ones."""
    seed = 1 if context is None else 100 + context.input_pipeline_id
    while True:
        users, items, clicked, _ = clicks(seed, BATCH * 20)
        seed += 1000
        for start in range(0, len(users), BATCH):
            part = slice(start, start + BATCH)
            yield tuple(torch.from_numpy(array[part]) for array in (users, items, clicked))


def loss_of(model, users, items, clicked):
    return nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)


def auc(scores, clicked):
    """Return how often somebody who clicked has a higher score than somebody who did not."""
    ranks = np.argsort(np.argsort(scores)) + 1
    positive = int(clicked.sum())
    above = ranks[clicked > 0].sum() - positive * (positive + 1) / 2
    return above / (positive * (len(clicked) - positive))


def evaluate(model):
    """Return the AUC of a model on clicks that it has not seen, and the best that is possible."""
    users, items, clicked, probability = clicks(7, 20000)
    with torch.no_grad():
        scores = model(torch.from_numpy(users), torch.from_numpy(items)).numpy()
    return auc(scores, clicked), auc(probability, clicked)


def train_alone(steps):
    """Return the model that the same number of steps makes in this process."""
    torch.manual_seed(0)
    model, data = Model(), batches()
    tables = [model.users.weight, model.items.weight]
    optimizers = (
        torch.optim.SparseAdam(tables, RATE),
        torch.optim.Adam(model.mlp.parameters(), RATE),
    )
    for _ in range(steps):
        model.zero_grad()
        loss_of(model, *next(data)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


async def main():
    options = parse_options()
    strategy = psync.ParameterServerStrategy(
        variable_partitioner=psync.MinSizePartitioner(1 << 13, max_shards=2)
    )
    async with psync.ClusterCoordinator(strategy) as coordinator:
        began = time.perf_counter()
        alone, best = evaluate(train_alone(options.steps))
        print(f"single process: AUC {alone:.4f} in {time.perf_counter() - began:.1f} s")

        torch.manual_seed(0)
        with strategy.scope():
            served = PSModule(Model, psync.optimizers.Adam(RATE), name="clicks")
        data = iter(coordinator.create_per_worker_dataset(batches))

        def step(data):  # runs on some worker, in a thread
            users, items, clicked = next(data)
            model = psync.wait(served.pull())
            loss = loss_of(model, users, items, clicked)
            loss.backward()
            psync.wait(served.push())
            return loss.item()

        began = time.perf_counter()
        scheduled = [coordinator.schedule(step, args=(data,)) for _ in range(options.steps)]
        await coordinator.join()
        rate = options.steps / (time.perf_counter() - began)
        losses = await coordinator.fetch(scheduled)
        reached, _ = evaluate(await served.pull())
        stores = [counters["store"] for counters in await coordinator.ps_statistics()]

    rows = sum(store["rows"] for store in stores) / options.steps
    print(f"loss {np.mean(losses[:20]):.4f} at first, {np.mean(losses[-20:]):.4f} in the end")
    print(f"{rate:.0f} pushes/s, each of {rows:.0f} of {USERS + ITEMS} rows")
    for index, store in enumerate(stores):
        print(f"ps {index}: {store['shards']} shards, {store['bytes']} bytes")
    print(f"2 workers: AUC {reached:.4f}, the best that is possible: {best:.4f}")
    if reached < max(alone - MAX_LOSS, 0.5 + MIN_GAIN):
        return f"AUC is {reached:.4f}, a single process has {alone:.4f}"
    if rows > (USERS + ITEMS) / 2:
        return f"{rows:.0f} rows were pushed by each step, expected those of the batch alone"


def parse_options():
    parser = argparse.ArgumentParser("torch_embeddings.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    return parser.parse_args()


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"torch_embeddings: {failure}" if failure else 0)
