"""Write optimizers.npz: what Keras 3 makes of given gradients, with each of its optimizers.

Run by hand, in an environment that has keras 3 (the tests need only the file):

    python -m venv /tmp/keras && /tmp/keras/bin/pip install keras jax
    cd tests/helpers
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 /tmp/keras/bin/python golden_optimizers.py

(With numpy as its backend Keras computes float64 in float32.)

The file holds "cases", a JSON object of what to make (class and arguments, schedules as
{"schedule": name, ...}), and "<case>/<dtype>/<variable>": the values of a variable after the
updates ``KEPT``, one row for each. Start and gradients are drawn by ``start`` and ``gradient``, in
the tests too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 20
KEPT = (1, 2, 3, 5, 10, 20)
SHAPES = ((4, 2), (5,))
DTYPES = ("float32", "float64")

EXPONENTIAL = {
    "schedule": "ExponentialDecay",
    "initial_learning_rate": 0.1,
    "decay_steps": 7,
    "decay_rate": 0.5,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "exponential": EXPONENTIAL,
    "staircase": {**EXPONENTIAL, "staircase": True},
    "inverse_time": {**EXPONENTIAL, "schedule": "InverseTimeDecay"},
    "polynomial": {
        "schedule": "PolynomialDecay",
        "initial_learning_rate": 0.1,
        "decay_steps": 8,
        "end_learning_rate": 0.01,
        "power": 2.0,
        "cycle": True,
    },
    "piecewise": {
        "schedule": "PiecewiseConstantDecay",
        "boundaries": [3, 9],
        "values": [0.1, 0.03, 0.01],
    },
    "cosine": {
        "schedule": "CosineDecay",
        "initial_learning_rate": 0.01,
        "decay_steps": 12,
        "alpha": 0.1,
        "warmup_target": 0.1,
        "warmup_steps": 4,
    },
    "restarts": {
        "schedule": "CosineDecayRestarts",
        "initial_learning_rate": 0.1,
        "first_decay_steps": 4,
        "t_mul": 1.5,
        "m_mul": 0.8,
        "alpha": 0.05,
    },
    "restarts_alike": {
        "schedule": "CosineDecayRestarts",
        "initial_learning_rate": 0.1,
        "first_decay_steps": 6,
        "t_mul": 1.0,
    },
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "sgd_nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.8, "nesterov": True}),
    "adagrad": ("Adagrad", {}),
    "adagrad_other": (
        "Adagrad",
        {"learning_rate": 0.3, "initial_accumulator_value": 0.5, "epsilon": 1e-3},
    ),
    "adadelta": ("Adadelta", {}),
    "adadelta_other": ("Adadelta", {"learning_rate": 1.0, "rho": 0.8, "epsilon": 1e-3}),
    "rmsprop": ("RMSprop", {}),
    "rmsprop_momentum": ("RMSprop", {"learning_rate": 0.02, "rho": 0.8, "momentum": 0.5}),
    "rmsprop_centered": ("RMSprop", {"learning_rate": 0.02, "centered": True, "epsilon": 1e-3}),
    "rmsprop_both": (
        "RMSprop",
        {"learning_rate": 0.02, "momentum": 0.7, "centered": True, "epsilon": 1e-3},
    ),
    "adam": ("Adam", {}),
    "adam_other": (
        "Adam",
        {"learning_rate": 0.05, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3},
    ),
    "adam_amsgrad": ("Adam", {"learning_rate": 0.05, "beta_2": 0.5, "amsgrad": True}),
    "adamw": ("AdamW", {}),
    "adamw_other": ("AdamW", {"learning_rate": 0.05, "weight_decay": 0.3, "amsgrad": True}),
    "adamax": ("Adamax", {}),
    "adamax_other": (
        "Adamax",
        {"learning_rate": 0.05, "beta_1": 0.7, "beta_2": 0.8, "epsilon": 1e-2},
    ),
    "nadam": ("Nadam", {}),
    "nadam_other": (
        "Nadam",
        {"learning_rate": 0.05, "beta_1": 0.7, "beta_2": 0.8, "epsilon": 1e-2},
    ),
    "ftrl": ("Ftrl", {}),
    "ftrl_other": (
        "Ftrl",
        {
            "learning_rate": 0.3,
            "learning_rate_power": -0.7,
            "initial_accumulator_value": 0.2,
            "l1_regularization_strength": 0.3,
            "l2_regularization_strength": 0.1,
            "l2_shrinkage_regularization_strength": 0.05,
            "beta": 0.2,
        },
    ),
    "lion": ("Lion", {}),
    "lion_other": ("Lion", {"learning_rate": 0.05, "beta_1": 0.5, "beta_2": 0.7}),
    "lamb": ("Lamb", {}),
    "lamb_other": (
        "Lamb",
        {
            "learning_rate": 0.05,
            "beta_1": 0.8,
            "beta_2": 0.9,
            "epsilon": 1e-3,
            "weight_decay": 0.1,
        },
    ),
    "decay": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
    "clipvalue": ("Adam", {"learning_rate": 0.05, "clipvalue": 0.4}),
    "clipnorm": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "clipnorm": 1.5}),
    "global_clipnorm": ("Adagrad", {"learning_rate": 0.1, "global_clipnorm": 2.5}),
    "accumulation": (
        "Adam",
        {
            "learning_rate": EXPONENTIAL,
            "gradient_accumulation_steps": 3,
            "weight_decay": 0.1,
            "clipvalue": 0.4,
        },
    ),
    "accumulation_nadam": ("Nadam", {"learning_rate": 0.05, "gradient_accumulation_steps": 2}),
    **{
        f"schedule_{name}": ("SGD", {"learning_rate": schedule})
        for name, schedule in SCHEDULES.items()
    },
    "schedule_decays_weights": ("Adam", {"learning_rate": EXPONENTIAL, "weight_decay": 0.1}),
}


def start(variable: int, dtype: str) -> np.ndarray:
    """The value with which a variable begins."""
    rng = np.random.default_rng([variable, 1])
    return rng.standard_normal(SHAPES[variable]).astype(dtype)


def gradient(variable: int, step: int, dtype: str) -> np.ndarray:
    """The gradient of a variable in a step: some elements are 0, some steps are large."""
    rng = np.random.default_rng([variable, 2, step])
    values = rng.standard_normal(SHAPES[variable]) * (0.2, 1.0, 3.0)[step % 3]
    return (values * (rng.random(SHAPES[variable]) < 0.8)).astype(dtype)


def _values(optimizer: Any, dtype: str) -> list[np.ndarray]:
    import keras

    variables = [
        keras.Variable(start(i, dtype), dtype=dtype, name=f"v{i}") for i in range(len(SHAPES))
    ]
    kept: list[list[np.ndarray]] = [[] for _ in SHAPES]
    for step in range(STEPS):
        optimizer.apply([gradient(i, step, dtype) for i in range(len(SHAPES))], variables)
        if step + 1 in KEPT:
            for values, variable in zip(kept, variables, strict=True):
                values.append(np.array(variable.numpy(), dtype))
    return [np.stack(values) for values in kept]


def main() -> None:
    import keras

    def made(argument: Any) -> Any:
        if not isinstance(argument, dict):
            return argument
        schedule = getattr(keras.optimizers.schedules, argument["schedule"])
        return schedule(**{name: value for name, value in argument.items() if name != "schedule"})

    arrays = {}
    for dtype in DTYPES:
        keras.config.set_floatx(dtype)  # of the learning rate and of schedules
        for case, (name, arguments) in CASES.items():
            optimizer = getattr(keras.optimizers, name)(
                **{key: made(value) for key, value in arguments.items()}
            )
            for variable, values in enumerate(_values(optimizer, dtype)):
                arrays[f"{case}/{dtype}/{variable}"] = values
    path = Path(__file__).parents[1] / "numerics" / "golden" / "optimizers.npz"
    np.savez_compressed(
        path, cases=np.array(json.dumps(CASES)), keras=np.array(keras.__version__), **arrays
    )
    print(f"{path}: {len(arrays)} arrays, {path.stat().st_size} bytes, keras {keras.__version__}")


if __name__ == "__main__":
    main()
