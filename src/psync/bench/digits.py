"""The workload: handwritten digits, and a small network that learns to read them.

1797 real images of 8×8 pixels that come with scikit-learn; 64 inputs, 32 hidden units, 10
outputs. A gradient of a batch of 32 takes about 0.2 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from psync.errors import ConfigurationError

PIXELS, HIDDEN, CLASSES = 64, 32, 10
TEST_IMAGES = 360

Arrays = tuple[np.ndarray, ...]


@functools.cache
def load(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of a part of the data.

    Args:
        part: "train", 1437 images, or "test", 360.

    Returns:
        Images, shape (n, 64), float32, from 0 to 1; labels, shape (n,), int64.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as exc:
        raise ConfigurationError(
            "the benchmark trains on the digits of scikit-learn, which is not installed",
            hint="pip install 'psync[examples]'",
        ) from exc
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[:TEST_IMAGES] if part == "test" else order[TEST_IMAGES:]
    return (images[chosen] / 16).astype(np.float32), labels[chosen]


def initial_model(seed: int) -> list[np.ndarray]:
    """Return weights and biases of both layers, float32, drawn with ``seed``."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(0, PIXELS**-0.5, (PIXELS, HIDDEN)).astype(np.float32),
        np.zeros(HIDDEN, np.float32),
        rng.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)).astype(np.float32),
        np.zeros(CLASSES, np.float32),
    ]


def gradients(params: Sequence[np.ndarray], images: np.ndarray, labels: np.ndarray) -> Arrays:
    """Return the gradient of the mean cross entropy with respect to each parameter."""
    hidden = np.maximum(images @ params[0] + params[1], 0)
    errors = np.exp(_log_probabilities(hidden, params))
    errors[np.arange(len(labels)), labels] -= 1
    errors /= np.float32(len(labels))
    back = errors @ params[2].T * (hidden > 0)
    return images.T @ back, back.sum(0), hidden.T @ errors, errors.sum(0)


def loss_on_test(params: Sequence[np.ndarray]) -> float:
    """Return the mean cross entropy of the test images, in nats."""
    images, labels = load("test")
    hidden = np.maximum(images @ params[0] + params[1], 0)
    logs = _log_probabilities(hidden, params)
    return -float(logs[np.arange(len(labels)), labels].mean())


def _log_probabilities(hidden: np.ndarray, params: Sequence[np.ndarray]) -> np.ndarray:
    logits = hidden @ params[2] + params[3]
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
