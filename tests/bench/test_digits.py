"""The work: a network whose gradient is right, and which learns."""

from __future__ import annotations

import numpy as np
import pytest

from psync.bench import digits

pytest.importorskip("sklearn")


def test_gradients_are_the_slope_of_the_loss() -> None:
    images, labels = digits.load("test")
    model = [param.astype(np.float64) for param in digits.initial_model(0)]
    found = digits.gradients(model, images, labels)
    rng = np.random.default_rng(0)
    for number, gradient in enumerate(found):
        assert gradient.shape == model[number].shape
        direction = rng.normal(size=gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [*model]
            moved[number] = model[number] + sign * 1e-5 * direction
            ends.append(digits.loss_on_test(moved))
        slope = (ends[0] - ends[1]) / 2e-5
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-3)


def test_the_network_learns() -> None:
    images, labels = digits.load("train")
    model = digits.initial_model(0)
    for _ in range(60):
        for param, gradient in zip(model, digits.gradients(model, images, labels), strict=True):
            param -= 0.5 * gradient
    assert digits.loss_on_test(model) < 0.5
