"""Write optimizers.npz: what Keras 3 makes of given gradients, with each of its optimizers.

Run by hand, in an environment that has keras 3 (the tests need only the file):

    python -m venv /tmp/keras && /tmp/keras/bin/pip install keras jax
    cd tests/helpers
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 /tmp/keras/bin/python golden_optimizers.py

(With numpy as its backend Keras computes float64 in float32.)

``optimizers.json`` beside it says what to make: class and arguments, schedules as {"schedule":
name, ...}. The file holds "<case>/<dtype>/<variable>": the values of a variable after the updates
``KEPT``, one row for each. Start and gradients are drawn by ``start`` and ``gradient``, in the
tests too.
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

GOLDEN = Path(__file__).parents[1] / "numerics" / "golden"
VALUES = GOLDEN / "optimizers.npz"
CASES: dict[str, tuple[str, dict[str, Any]]] = json.loads((GOLDEN / "optimizers.json").read_text())


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
    np.savez_compressed(VALUES, keras=np.array(keras.__version__), **arrays)
    print(f"{VALUES}: {len(arrays)} arrays, keras {keras.__version__}")


if __name__ == "__main__":
    main()
