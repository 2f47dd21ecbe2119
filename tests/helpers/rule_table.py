"""Every update rule, in the forms that differ in what they compute, and work on them."""

from __future__ import annotations

import numpy as np

from psync.numerics.memory import Scratch
from psync.numerics.rules import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Ftrl,
    Lamb,
    Lion,
    Nadam,
    RMSprop,
    RuleOptions,
    UpdateRule,
    slot_dtype,
)
from psync.schedules import ExponentialDecay

Slots = list[np.ndarray]

RULES: dict[str, UpdateRule] = {
    "sgd": SGD(0.1),
    "momentum": SGD(0.1, momentum=0.9),
    "nesterov": SGD(0.1, momentum=0.9, nesterov=True),
    "schedule": SGD(ExponentialDecay(0.1, 5, 0.5)),
    "decay": SGD(0.1).with_options(RuleOptions(weight_decay=0.3)),
    "clipvalue": SGD(0.1, 0.9).with_options(RuleOptions(clipvalue=0.5)),
    "adam": Adam(0.01),
    "amsgrad": Adam(0.01, amsgrad=True),
    "adamw": Adam(0.01).with_options(RuleOptions(weight_decay=0.3, clipvalue=0.5)),
    "adamax": Adamax(0.01),
    "nadam": Nadam(0.01),
    "lion": Lion(0.01),
    "adagrad": Adagrad(0.1),
    "adadelta": Adadelta(1.0),
    "rmsprop": RMSprop(0.01),
    "rmsprop, momentum": RMSprop(0.01, momentum=0.5),
    "rmsprop, centered": RMSprop(0.01, centered=True),
    "rmsprop, both": RMSprop(0.01, momentum=0.5, centered=True),
    "ftrl": Ftrl(0.1, l1_regularization_strength=0.1),
    "ftrl, power": Ftrl(0.1, -0.7, beta=0.1, l2_shrinkage_regularization_strength=0.1),
    "lamb": Lamb(0.01).with_options(RuleOptions(weight_decay=0.1)),
}


def gradients(size: int, dtype: np.dtype, steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [(rng.standard_normal(size) * (step + 1) / 8).astype(dtype) for step in range(steps)]


def start(rule: UpdateRule, size: int, dtype: np.dtype) -> tuple[np.ndarray, Slots]:
    param = np.linspace(-2, 2, size).astype(dtype)
    slots = [np.full(size, rule.initial_slot(name), slot_dtype(dtype)) for name in rule.own_slots()]
    return param, slots


def run(
    rule: UpdateRule, dtype: np.dtype, *, chunk: int, in_place: bool = True, size: int = 1000
) -> tuple[np.ndarray, Slots]:
    """Twenty updates."""
    param, slots = start(rule, size, dtype)
    scratch = Scratch(chunk)
    for step, grad in enumerate(gradients(size, dtype, 20)):
        if in_place:
            rule.apply([(param, grad, slots, param, slots)], step, scratch)
        else:
            new, new_slots = np.empty_like(param), [np.empty_like(slot) for slot in slots]
            before = (param.tobytes(), grad.tobytes(), [slot.tobytes() for slot in slots])
            rule.apply([(param, grad, slots, new, new_slots)], step, scratch)
            assert before == (param.tobytes(), grad.tobytes(), [slot.tobytes() for slot in slots])
            param, slots = new, new_slots
    return param, slots
