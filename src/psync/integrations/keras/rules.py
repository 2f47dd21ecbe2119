"""Keras optimizers as update rules on the ps: the same formulas, with the same numbers."""

from __future__ import annotations

from typing import Any

import keras

from psync import optimizers, schedules
from psync.api.optimizers import Optimizer
from psync.errors import ConfigurationError

RULES: dict[str, type[Optimizer]] = {
    name: getattr(optimizers, name)
    for name in (
        "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl",
        "Lion", "Lamb",
    )
}  # fmt: skip
"""By the names that Keras has for them, too; arguments are called alike on both sides."""

SCHEDULES: dict[str, type[schedules.Schedule]] = {
    name: getattr(schedules, name)
    for name in (
        "ExponentialDecay", "InverseTimeDecay", "PolynomialDecay", "CosineDecay",
        "CosineDecayRestarts", "PiecewiseConstantDecay",
    )
}  # fmt: skip

_ELSEWHERE = {
    "use_ema": "psync.ExponentialMovingAverage keeps averages of variables",
    "loss_scale_factor": "use the dtype policy mixed_bfloat16, which needs no scaling of the loss",
}
"""Options of Keras optimizers that no rule has, and what there is instead."""

_WITHOUT_RULE = frozenset({*_ELSEWHERE, "name", "ema_momentum", "ema_overwrite_frequency"})


def optimizer_of(optimizer: Any) -> Optimizer:
    """Return the psync optimizer that does what a Keras optimizer does.

    A learning rate is the number that the Keras optimizer holds, in its precision. Weight decay is
    of all variables; see ``undecayed``.

    Args:
        optimizer: A ``keras.optimizers.Optimizer`` that has not trained anything yet.

    Raises:
        ConfigurationError: It, its schedule or one of its options has no rule here.
    """
    name = _public_name(optimizer)
    if name not in RULES:
        scaled = name == "LossScaleOptimizer"
        raise ConfigurationError(
            f"PSModel: no rule on the ps for the Keras optimizer {name}",
            hint="of mixed_float16; use the policy mixed_bfloat16, or compile(auto_scale_loss="
            "False)" if scaled else f"those with one: {', '.join(RULES)}",
        )  # fmt: skip
    config = optimizer.get_config()
    for option, instead in _ELSEWHERE.items():
        if config.get(option):
            raise ConfigurationError(
                f"PSModel: no rule on the ps has {option}, an option of the Keras optimizer {name} "
                f"({option}={config[option]})",
                hint=instead,
            )
    arguments = {key: value for key, value in config.items() if key not in _WITHOUT_RULE}
    arguments["learning_rate"] = _rate_of(name, config["learning_rate"])
    arguments["name"] = name
    return RULES[name](**arguments)


def undecayed(optimizer: Any, variables: dict[str, Any]) -> list[str]:
    """Return the names of those variables that a Keras optimizer's weight decay passes over.

    Args:
        optimizer: The Keras optimizer.
        variables: Keras variables by name.
    """
    if not optimizer.weight_decay:
        return []
    return [name for name, each in variables.items() if not optimizer._use_weight_decay(each)]


def _rate_of(name: str, rate: Any) -> float | schedules.Schedule:
    """Return a learning rate as psync has it, of what ``get_config`` of an optimizer says."""
    if not isinstance(rate, dict):
        return float(rate)
    kind, own = rate.get("class_name"), rate.get("registered_name") is None
    if kind not in SCHEDULES or not own:
        raise ConfigurationError(
            f"PSModel: no rule on the ps for the learning rate {kind} of the Keras optimizer "
            f"{name}",
            hint=f"use a number, or one of {', '.join(SCHEDULES)} of keras.optimizers.schedules",
        )
    arguments = {key: value for key, value in rate["config"].items() if key != "name"}
    return SCHEDULES[kind](**arguments)


def _public_name(optimizer: Any) -> str:
    """Return the name that a class has in ``keras.optimizers``, or its own if it is not Keras's.

    Some backends make objects of classes of their own, derived from the public ones.
    """
    own = type(optimizer)
    if own.__module__.partition(".")[0] == "keras":
        for cls in own.__mro__:
            if getattr(keras.optimizers, cls.__name__, None) is cls:
                return str(cls.__name__)
    return str(own.__qualname__)
