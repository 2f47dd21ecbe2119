"""Train a torch module with BatchNorm on digits: 2 ps, 2 workers, and one process beside them.

    pip install -e '.[examples,torch]'
    psync run examples/torch_digits.py --ps 2 --workers 2
    psync run examples/torch_digits.py --ps 2 --workers 2 -- --sync --steps 600

The module, the loss, the DataLoader and the training loop are torch's. Each worker has a module of
its own, which it fills with the present values and whose gradients it pushes; the optimizer runs on
the ps tasks, and the running statistics of BatchNorm are merged there. With --sync a step is the
mean of both workers' gradients. First the same module is trained in this process alone.
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psync
from psync.integrations.torch import PSModule

BATCH = 64
RATE = 3e-3
MIN_ACCURACY = 0.96
MAX_LOSS = 0.02  # of accuracy, compared with the single process
MAX_GAP = 0.01  # between evaluation and training mode


class Net(nn.Module):
    """Two convolutions and a matrix: 64 pixels to 10 classes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.classes = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        return self.classes(self.features(images).flatten(1))


def load(part):
    """Return images of 1×8×8 pixels from 0 to 1, and labels: 1437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[:360] if part == "test" else order[360:]
    pixels = (images[chosen] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return torch.from_numpy(pixels), torch.from_numpy(labels[chosen])


def batches(context=None):  # runs on each worker, in a thread of its own
    """Yield shuffled batches of the images, or of this worker's part of them, for ever."""
    images, labels = load("train")
    if context is not None:
        part = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        images, labels = images[part], labels[part]
    loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True, drop_last=True)
    while True:
        yield from loader


def loss_of(net, images, labels):
    return nn.functional.cross_entropy(net(images), labels)


def accuracy_of(net):
    images, labels = load("test")
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


def train_alone(steps):
    """Return the accuracy that the same number of steps reaches in this process."""
    torch.manual_seed(0)
    net, data = Net(), batches()
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, *next(data)).backward()
        optimizer.step()
    return accuracy_of(net.eval())


async def main():
    options = parse_options()
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy) as coordinator:
        began = time.perf_counter()
        alone = train_alone(options.steps)
        print(f"single process: accuracy {alone:.4f} in {time.perf_counter() - began:.1f} s")

        optimizer = psync.optimizers.Adam(RATE)
        if options.sync:
            optimizer = psync.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2)
        torch.manual_seed(0)
        with strategy.scope():
            served = PSModule(Net, optimizer, name="net")
        data = iter(coordinator.create_per_worker_dataset(batches))

        def step(data):  # runs on some worker, in a thread
            images, labels = next(data)
            net = psync.wait(served.pull())
            net.train()
            loss = loss_of(net, images, labels)
            loss.backward()
            result = psync.wait(served.push())
            return loss.item(), result.staleness

        # A synchronous step is made of two pushes: as many updates as above take twice the batches.
        pushes = options.steps * (2 if options.sync else 1)
        began = time.perf_counter()
        scheduled = [coordinator.schedule(step, args=(data,)) for _ in range(pushes)]
        await coordinator.join()
        seconds = time.perf_counter() - began
        losses, staleness = map(np.array, zip(*await coordinator.fetch(scheduled), strict=True))

        as_in_training = accuracy_of((await served.pull()).train())
        evaluated = accuracy_of((await served.pull()).eval())

    kind = "synchronous" if options.sync else "asynchronous"
    print(f"loss {losses[:20].mean():.4f} at first, {losses[-20:].mean():.4f} in the end")
    print(f"{pushes / seconds:.0f} pushes/s, staleness {staleness.mean():.2f}")
    print(f"2 workers, {kind}: accuracy {evaluated:.4f}, in training mode {as_in_training:.4f}")
    if evaluated < max(MIN_ACCURACY, alone - MAX_LOSS):
        return f"accuracy is {evaluated:.4f}, a single process has {alone:.4f}"
    if evaluated < as_in_training - MAX_GAP:
        return f"evaluation is worse than training mode by {as_in_training - evaluated:.4f}"


def parse_options():
    parser = argparse.ArgumentParser("torch_digits.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="updates of the module")
    parser.add_argument("--sync", action="store_true", help="mean of two gradients in each step")
    return parser.parse_args()


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"torch_digits: {failure}" if failure else 0)
