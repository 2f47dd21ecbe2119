"""What the optimizers compute, compared with Keras 3: see helpers/golden_optimizers.py.

Gradients take the way of an asynchronous push: clipped by norm on the worker, then applied, or
accumulated, by the store of a ps.

float64 agrees to the last bits (1e-14; Keras takes pi as a float32 in its cosines, so 1e-7 there).
In float32 Keras computes ``1 - beta ** t`` in float32, which loses up to half of the digits; psync
computes it in double precision. That is a relative error of 3e-5 in the size of a step, so
parameters that have moved by less than 1 may differ by 1e-5.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from golden_optimizers import CASES, DTYPES, KEPT, SHAPES, STEPS, VALUES, gradient, start
from loops import for_each
from psync import optimizers, schedules
from psync.numerics.rules import clipped_by_norm, rule_from_config
from psync.specs import ShardSpec
from psync.store.store import ShardStore

GOLDEN = np.load(VALUES)
NEED_ALL_ROWS = ("norm", "lamb", "accumulation")
ELEMENTWISE = [case for case in CASES if not any(word in case for word in NEED_ALL_ROWS)]

each_case = for_each("case", CASES)
each_dtype = for_each("dtype", DTYPES)


def made(argument: Any) -> Any:
    if not isinstance(argument, dict):
        return argument
    arguments = {name: value for name, value in argument.items() if name != "schedule"}
    return getattr(schedules, argument["schedule"])(**arguments)


def optimizer_of(case: str) -> optimizers.Optimizer:
    name, arguments = CASES[case]
    optimizer = getattr(optimizers, name)(**{key: made(value) for key, value in arguments.items()})
    assert isinstance(optimizer, optimizers.Optimizer)
    return optimizer


def store_of(values: list[np.ndarray]) -> ShardStore:
    store = ShardStore("/job:ps/task:0")
    for i, value in enumerate(values):
        store.create(ShardSpec(f"v{i}", i, 0, 0, value.shape, str(value.dtype), 0), value)
    return store


def value_of(store: ShardStore, i: int) -> np.ndarray:
    spec = store.spec((i, 0))
    joined = b"".join(bytes(view) for view in store.read((i, 0)))
    return np.frombuffer(joined, spec.dtype).reshape(spec.shape)


def tolerance(case: str, dtype: str) -> float:
    if dtype == "float32":
        return 1e-5
    return 1e-7 if "cosine" in case or "restarts" in case else 1e-14


@each_case
@each_dtype
def test_twenty_updates_are_those_of_keras(case: str, dtype: str) -> None:
    optimizer = optimizer_of(case)
    options = rule_from_config(optimizer.get_config()).options
    variables = range(len(SHAPES))
    store = store_of([start(i, dtype) for i in variables])
    store.define_optimizer(1, optimizer.get_config())
    kept: list[list[np.ndarray]] = [[] for _ in variables]
    for number in range(STEPS):
        gradients = [gradient(i, number, dtype) for i in variables]
        step = store.begin_push(1, 0)
        for i, clipped in enumerate(clipped_by_norm(gradients, list(variables), options)):
            assert isinstance(clipped, np.ndarray)
            grad = store.check_apply(1, (i, 0), clipped)
            for _ in store.apply_checked(1, (i, 0), grad, step):
                pass
        if number + 1 in KEPT:
            for i in variables:
                kept[i].append(value_of(store, i))
    for i in variables:
        np.testing.assert_allclose(
            np.stack(kept[i]), GOLDEN[f"{case}/{dtype}/{i}"], rtol=0, atol=tolerance(case, dtype)
        )


@each_dtype
@for_each("case", ELEMENTWISE)
def test_rows_that_are_pushed_alone_are_those_of_keras(case: str, dtype: str) -> None:
    """And the others stay as they are."""
    optimizer = optimizer_of(case)
    whole, values = GOLDEN[f"{case}/{dtype}/0"], start(0, dtype)
    rows, others = np.array([0, 2]), np.array([1, 3])
    store = store_of([values])
    store.define_optimizer(1, optimizer.get_config())
    kept = []
    for number in range(STEPS):
        step = store.begin_push(1, 0)
        grads = store.check_rows((0, 0), rows, gradient(0, number, dtype)[rows])
        for _ in store.apply_rows(1, (0, 0), rows, grads, step):
            pass
        if number + 1 in KEPT:
            kept.append(value_of(store, 0))
    np.testing.assert_allclose(
        np.stack(kept)[:, rows], whole[:, rows], rtol=0, atol=tolerance(case, dtype)
    )
    assert np.array_equal(value_of(store, 0)[others], values[others])


def test_all_classes_are_compared() -> None:
    public = {
        name
        for name, value in vars(optimizers).items()
        if isinstance(value, type) and issubclass(value, optimizers.Optimizer) and name[0] != "_"
    }
    aliases = {"Momentum", "Nesterov", "AMSGrad"}  # of SGD and Adam: see test_optimizers.py
    assert public - {"Optimizer"} - aliases == {name for name, _ in CASES.values()}
