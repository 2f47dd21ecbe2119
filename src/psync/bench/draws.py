"""A model of stragglers in a large cluster: how many gradients of a step are late, and which.

Of the gradients of one step, beta-binomially many are slow: each is slow with the same small
probability, and that probability differs from step to step (beta), because what makes
machines slow hits several at once. With the parameters below 30 % of the steps of 100 workers
have no slow gradient, and 98 % have five at most.
"""

from __future__ import annotations

import math

import numpy as np

WORKERS = 100
ALPHA, BETA = 3.1, 209.7
NORMAL_S = 1.0  # virtual seconds that a gradient takes
SLOW_S = (3.0, 6.0)  # a slow one: uniform between these


def beta_binomial(trials: int, alpha: float, beta: float) -> np.ndarray:
    """Return the probabilities of 0, 1, …, ``trials`` successes. Shape (trials + 1,), float64."""

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    logs = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + log_beta(k + alpha, trials - k + beta) - log_beta(alpha, beta)
        for k in range(trials + 1)
    ]  # fmt: skip
    return np.exp(logs)


def share_without_slow(backups: int) -> float:
    """Return the expected share of steps in which at most ``backups`` gradients are slow.

    So many steps need not wait for a slow gradient if so many are dispensable.
    """
    return float(beta_binomial(WORKERS, ALPHA, BETA)[: backups + 1].sum())


def compute_seconds(steps: int, workers: int, seed: int) -> np.ndarray:
    """Draw how long each gradient takes.

    The numbers of slow gradients are a stratified sample: one from each of ``steps`` equally
    likely ranges, in random order. So few steps show what many would.

    Args:
        steps: Number of steps.
        workers: Number of workers; those that are slow in a step are drawn without replacement.
        seed: The same seed gives the same table.

    Returns:
        Seconds, shape (steps, workers), float64.
    """
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(beta_binomial(workers, ALPHA, BETA))
    levels = (np.arange(steps) + rng.random(steps)) / steps
    counts = np.minimum(np.searchsorted(cumulative, levels, side="right"), workers)
    rng.shuffle(counts)
    seconds = np.full((steps, workers), NORMAL_S)
    for row, count in zip(seconds, counts, strict=True):
        slow = rng.choice(workers, count, replace=False)
        row[slow] = rng.uniform(*SLOW_S, count)
    return seconds
