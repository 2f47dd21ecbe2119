"""Update rules and schedules as users write them, and a registry that forgets them afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import psync
from psync import rules, schedules
from psync.numerics.memory import Scratch
from psync.numerics.rules import RULES, RuleOptions

TOO_LARGE = 100.0
"""A gradient with such an element makes ``Momentum`` raise."""


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Whatever is registered meanwhile is not known afterwards."""
    known = RULES, schedules._SCHEDULES
    before = [dict(each) for each in known]
    try:
        yield
    finally:
        for each, as_before in zip(known, before, strict=True):
            each.clear()
            each.update(as_before)


class Momentum(rules.UpdateRule):
    """Nesterov's momentum as ``SGD`` has it, in plain numpy; refuses large gradients."""

    name = "tests.momentum"
    slots = ("momentum",)
    momentum: float = rules.within(0.9, 0, 1)
    most: float = TOO_LARGE

    def update(
        self,
        value: np.ndarray,
        slots: Mapping[str, np.ndarray],
        gradient: np.ndarray,
        step: rules.Step,
    ) -> Any:
        if (np.abs(gradient) > self.most).any():
            raise ValueError(f"a gradient above {self.most:g}")
        scaled = gradient * step.learning_rate
        velocity = slots["momentum"] * self.momentum - scaled
        return value + (velocity * self.momentum - scaled), {"momentum": velocity}


class Halving(schedules.Schedule):
    """Raises at a step."""

    initial_learning_rate: float
    raises_at: float = 1000.0

    def rate(self, step: float) -> float:
        if step == self.raises_at:
            raise ArithmeticError(f"no rate for step {step}")
        return float(self.initial_learning_rate * 0.5**step)


def register() -> None:
    """Do what a plugin does when it is imported; ``own_rules_plugin`` is one that does."""
    rules.register(Momentum)
    schedules.register(Halving)


# A training, and what it must give.

SHAPE = (4, 3)
DECAY = 0.01


def rule() -> Momentum:
    return Momentum(schedules.ExponentialDecay(0.1, 5, 0.9), momentum=0.8)


def declared(scope: Any) -> tuple[Any, Any]:
    """A variable of ones, and its optimizer."""
    with scope:
        w = psync.Variable(np.ones(SHAPE, np.float32), name="w")
    return w, psync.optimizers.Optimizer(rule(), weight_decay=DECAY)


def gradient_of(value: np.ndarray, number: int) -> np.ndarray:
    gradient: np.ndarray = np.sin(value * np.float32(number + 1)).astype(np.float32)
    return gradient


async def train(w: Any, optimizer: Any, number: int, global_step: Any = None) -> int:
    """One step."""
    value = await psync.pull(w)
    pairs = [(gradient_of(value, number), w)]
    step: int = (await optimizer.apply_gradients(pairs, global_step)).step
    return step


async def check_bits(w: Any, optimizer: Any, steps: int) -> None:
    """Value and slot are those of one process that makes the same steps."""
    alone = rule().with_options(RuleOptions(weight_decay=DECAY))
    value, slot = np.ones(12, np.float32), np.zeros(12, np.float32)
    for number in range(steps):
        gradient = gradient_of(value.reshape(SHAPE), number).reshape(-1)
        alone.apply(value, gradient, [slot], value, [slot], number, Scratch())
    assert np.array_equal(await w.read(), value.reshape(SHAPE))
    assert np.array_equal(await optimizer.get_slot(w, "momentum").read(), slot.reshape(SHAPE))
