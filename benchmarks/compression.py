"""What compression does to the loss: the digits of scikit-learn, trained with it and without.

    python benchmarks/compression.py
    python benchmarks/compression.py --seeds 1 --steps 200 --small-gradients

Synchronous SGD on 2 ps tasks and 2 workers of this process; of each seed every run has the same
batches. "no feedback" rounds gradients in the step, and keeps nothing of what that takes.
"distance" is that of all weights from those of the run in full precision.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import psync
from psync.bench.digits import load

HIDDEN = 512  # 300 KB of weights: more than what is always pulled as it is
BATCH = 32
RATE = 0.1
SMALL = 1e-7
"""What small gradients are multiplied by; the learning rate is divided by it."""


class Mode(NamedTuple):
    """How gradients and values travel."""

    name: str
    push: str | None = None
    pull: str | None = None
    has_feedback: bool = True


MODES = (
    Mode("float32"),
    Mode("bf16", "bf16"),
    Mode("f16", "f16"),
    Mode("bf16, no feedback", "bf16", has_feedback=False),
    Mode("f16, no feedback", "f16", has_feedback=False),
    Mode("bf16, pulls too", "bf16", "bf16"),
    Mode("f16, pulls too", "f16", "f16"),
)

Arrays = Sequence[np.ndarray]


def initial(seed: int) -> list[np.ndarray]:
    """Return the weights and biases of two layers."""
    rng = np.random.default_rng(seed)
    layers = [
        rng.normal(0, 64**-0.5, (64, HIDDEN)), np.zeros(HIDDEN),
        rng.normal(0, HIDDEN**-0.5, (HIDDEN, 10)), np.zeros(10),
    ]  # fmt: skip
    return [layer.astype(np.float32) for layer in layers]


def forward(params: Arrays, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the hidden units say, and the logarithms of the probabilities."""
    hidden = np.maximum(images @ params[0] + params[1], 0)
    scores = hidden @ params[2] + params[3]
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def gradients(params: Arrays, images: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return the gradient of the mean cross entropy with respect to each parameter."""
    hidden, logs = forward(params, images)
    errors = np.exp(logs)
    errors[np.arange(len(labels)), labels] -= 1
    errors /= len(labels)
    below = errors @ params[2].T * (hidden > 0)
    return [images.T @ below, below.sum(axis=0), hidden.T @ errors, errors.sum(axis=0)]


async def trained(mode: Mode, seed: int, steps: int, scale: float) -> list[np.ndarray]:
    """Return the parameters after so many steps."""
    images, labels = load("train")
    kept = mode.push if mode.has_feedback else None
    rounded = None
    if mode.push is not None and not mode.has_feedback:
        rounded = psync.specs.dtype_of({"bf16": "bfloat16", "f16": "float16"}[mode.push])
    async with psync.LocalCluster(2, 2, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver, psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model = [psync.Variable(a, name=f"p{n}") for n, a in enumerate(initial(seed))]
                global_step = psync.get_or_create_global_step()
            optimizer = psync.SyncReplicasOptimizer(
                psync.optimizers.SGD(RATE / scale, compression=kept), 2, deterministic=True
            )

            async def step(number: int) -> None:
                params = await psync.pull(model, compression=mode.pull)
                rng = np.random.default_rng((seed, number))
                chosen = rng.choice(len(labels), BATCH, replace=False)
                grads = [
                    gradient * np.float32(scale)
                    for gradient in gradients(params, images[chosen], labels[chosen])
                ]
                if rounded is not None:
                    grads = [gradient.astype(rounded).astype(np.float32) for gradient in grads]
                await optimizer.apply_gradients(zip(grads, model, strict=True), global_step)

            for number in range(2 * steps):
                coordinator.schedule(step, args=(number,))
            await coordinator.join()
            return await psync.pull(model)


def told(params: Arrays, exact: Arrays) -> tuple[float, float, float]:
    """Return the loss of the training images, the share of test images read right, the distance."""
    images, labels = load("train")
    loss = -forward(params, images)[1][np.arange(len(labels)), labels].mean()
    images, labels = load("test")
    right = (forward(params, images)[1].argmax(axis=1) == labels).mean()
    squares = sum(float(((a - b) ** 2).sum()) for a, b in zip(params, exact, strict=True))
    return float(loss), float(right), squares**0.5


async def main() -> None:
    """Train in each mode, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--small-gradients", action="store_true", help="multiplied by 1e-7")
    options = parser.parse_args()
    scale = SMALL if options.small_gradients else 1.0
    found: dict[str, list[tuple[float, float, float]]] = {mode.name: [] for mode in MODES}
    for seed in range(options.seeds):
        exact: list[np.ndarray] = []
        for mode in MODES:
            params = await trained(mode, seed, options.steps, scale)
            exact = exact or params
            found[mode.name].append(told(params, exact))
    print(f"{'':20} {'loss':>9} {'right':>7} {'distance':>9}")
    for name, each in found.items():
        loss, right, distance = np.mean(each, axis=0)
        print(f"{name:20} {loss:9.5f} {right:7.2%} {distance:9.4f}")


if __name__ == "__main__":
    asyncio.run(main())
