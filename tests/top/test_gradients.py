"""Gradients from torch and jax: the right numbers, shared memory, nothing changed, sparse rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import ml_dtypes
import numpy as np
import pytest

import psync
from local_training import in_step, training
from psync import gradients, optimizers
from psync.errors import ConfigurationError, ValueMismatchError


def linear(w: Any, b: Any, x: Any, y: Any) -> Any:
    """The same in both libraries, and in numpy."""
    difference = x @ w + b - y
    return (difference * difference).mean()


def expected(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    difference = x @ w + b - y
    scale = 2 / difference.size
    return float((difference**2).mean()), [
        scale * x.T @ difference,
        scale * difference.sum(0, keepdims=False),
    ]


def drawn(dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = ((3, 2), (2,), (5, 3), (5, 2))
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    for array in arrays:
        array.setflags(write=False)  # as what is pulled
    return arrays


@pytest.fixture(params=["torch", "jax"])
def library(request: pytest.FixtureRequest) -> Any:
    """``from_torch`` or ``from_jax``, where the library is installed."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return getattr(gradients, f"from_{request.param}")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="jax is not installed")


# --- both --------------------------------------------------------------------------------------


def test_loss_and_gradients_are_right_and_the_values_stay_as_they_are(library: Any) -> None:
    w, b, x, y = drawn()
    before = [array.tobytes() for array in (w, b, x, y)]
    loss, grads = library(linear).on(x, y)(w, b)
    true_loss, true_grads = expected(w, b, x, y)
    assert type(loss) is float
    assert loss == pytest.approx(true_loss, rel=1e-5)
    for grad, true in zip(grads, true_grads, strict=True):
        assert isinstance(grad, np.ndarray)
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, true, rtol=1e-5, atol=1e-6)
    assert [array.tobytes() for array in (w, b, x, y)] == before


def test_integers_have_no_gradient(library: Any) -> None:
    def picked(table: Any, rows: Any) -> Any:
        return table[rows].sum()

    _, (of_table, of_rows) = library(picked)(np.ones((3, 2), np.float32), np.array([0, 2]))
    assert of_table.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert of_rows is None


def test_it_survives_the_way_to_a_worker(library: Any) -> None:
    w, b, x, y = drawn()
    function = library(linear)
    function.on(x, y)(w, b)  # what is compiled stays behind
    for arrived in (
        cloudpickle.loads(cloudpickle.dumps(function)),
        pickle.loads(pickle.dumps(function)),
    ):
        assert arrived.on(x, y)(w, b)[0] == pytest.approx(expected(w, b, x, y)[0], rel=1e-5)


class Differences(gradients.GradientFunction):
    """A library that has nothing but numpy, and takes differences; exact for squares."""

    def _differentiate(self, arrays: Any, structure: Any, data: Any) -> Any:
        def loss_with(changed: int, element: int, step: float) -> float:
            given = [array.astype(np.float64) for array in arrays]
            given[changed].flat[element] += step
            return float(self._loss_of(given, structure, data)[0])

        grads = [
            np.array(
                [loss_with(i, j, 0.5) - loss_with(i, j, -0.5) for j in range(array.size)],
                array.dtype,
            ).reshape(array.shape)
            for i, array in enumerate(arrays)
        ]
        loss, predictions = self._loss_of(arrays, structure, data)
        return float(loss), grads, predictions


@pytest.fixture(params=["torch", "jax", "differences"])
def function_of(request: pytest.FixtureRequest) -> Any:
    """``from_torch`` or ``from_jax``, where the library is installed; or ``Differences``."""
    if request.param == "differences":
        return Differences
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return getattr(gradients, f"from_{request.param}")


def of_nesting(params: Any, x: Any, y: Any) -> Any:
    """As ``linear``, of {"layers": [(w,)], "b": b}, with predictions."""
    predictions = x @ params["layers"][0][0] + params["b"]
    return ((predictions - y) ** 2).mean(), predictions


def of_list(w: Any, b: Any, x: Any, y: Any) -> Any:
    return linear(w, b, x, y), x @ w + b


def test_of_a_nesting_of_values_the_gradients_are_nested_alike(function_of: Any) -> None:
    w, b, x, y = drawn()
    params = {"layers": [(w,)], "b": b, "activation": "none"}
    loss, grads, predictions = function_of(of_nesting).on(x, y)(params)
    true_loss, (of_w, of_b) = expected(w, b, x, y)
    assert loss == pytest.approx(true_loss, rel=1e-4)
    np.testing.assert_allclose(grads["layers"][0][0], of_w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads["b"], of_b, rtol=1e-4, atol=1e-5)
    assert isinstance(predictions, np.ndarray)
    np.testing.assert_allclose(predictions, x @ w + b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tree_of", "loss"),
    [(lambda w, b: (w, b), of_list), (lambda w, b: {"layers": [(w,)], "b": b}, of_nesting)],
    ids=["list", "nesting"],
)
async def test_a_trainer_and_minimize_take_the_same_function(
    function_of: Any, tree_of: Any, loss: Any
) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 3)).astype(np.float32)
    y = (x @ np.array([[1], [-2], [3]], np.float32)) + np.float32(0.5)

    def batches(context: psync.InputContext) -> Any:
        while True:
            yield x, y

    value_and_grad, sgd = function_of(loss), optimizers.SGD(0.2)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros((3, 1), np.float32), name="w")
            b = psync.Variable(np.zeros(1, np.float32), name="b")
            mae = psync.metrics.MeanAbsoluteError("mae")
        variables = tree_of(w, b)

        async def step() -> float:
            return float(await sgd.minimize(value_and_grad.on(x, y), variables))

        first = await in_step(coordinator, step)
        trainer = psync.Trainer(strategy, variables, value_and_grad, sgd, [mae])
        history = await trainer.fit(
            batches, epochs=1, steps_per_epoch=100, validation_data=(x, y), verbose=False
        )
        assert first > history.history["loss"][0]
        assert history.history["val_mae"][0] < 0.02
        np.testing.assert_allclose((await w.read()).ravel(), [1, -2, 3], atol=0.02)


async def test_a_trainer_of_one_variable_takes_it_as_well(function_of: Any) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.float32(3), name="w")
        value_and_grad = function_of(lambda w, x: (w - x) ** 2)
        trainer = psync.Trainer(strategy, w, value_and_grad, optimizers.SGD(0.5))
        await trainer.fit(lambda: iter([np.float32(1)]), steps_per_epoch=1, verbose=False)
        assert await w.read() == 1


# --- torch -------------------------------------------------------------------------------------


def test_torch_sees_the_memory_that_was_pulled(torch: Any) -> None:
    (w, *_) = drawn()
    seen = []

    def loss(tensor: Any) -> Any:
        seen.append((tensor.data_ptr(), tensor.requires_grad, tensor.is_leaf))
        return tensor.sum()

    gradients.from_torch(loss)(w)
    assert seen == [(w.__array_interface__["data"][0], True, True)]


def test_torch_refuses_to_change_what_was_pulled(torch: Any) -> None:
    (w, *_) = drawn()
    before = w.tobytes()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        gradients.from_torch(lambda tensor: tensor.mul_(2).sum())(w)
    assert w.tobytes() == before


def test_torch_gradients_of_what_the_loss_ignores_are_none(torch: Any) -> None:
    w, b, *_ = drawn()
    _, grads = gradients.from_torch(lambda w, b: w.sum())(w, b)
    assert grads[1] is None


def test_sparse_torch_gradients_are_rows(torch: Any) -> None:
    table = np.arange(12, dtype=np.float32).reshape(6, 2)

    def loss(table: Any, ids: Any) -> Any:
        return torch.nn.functional.embedding(ids, table, sparse=True).sum()

    _, (rows,) = gradients.from_torch(loss).on(np.array([4, 1, 4]))(table)
    assert isinstance(rows, psync.IndexedSlices)
    indices, values = rows.merged()
    assert indices.tolist() == [1, 4]
    assert values.tolist() == [[1, 1], [2, 2]]
    assert rows.dense_shape == (6, 2)


def test_torch_takes_any_floating_dtype_and_memory_layout(torch: Any) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        value = np.arange(6, dtype=dtype).reshape(2, 3)  # type: ignore[call-overload]
        value.setflags(write=False)
        for given in (value, value.T, value[::-1], value[:, ::2]):
            _, (grad,) = gradients.from_torch(lambda w: (w * w).sum())(given)
            assert grad.dtype == value.dtype
            assert grad.tolist() == (2 * given).tolist()


@pytest.mark.parametrize(
    ("loss", "got"), [(lambda w: w, r"shape \(2,\)"), (lambda w: 3.0, "float")]
)
def test_a_torch_loss_is_a_scalar_tensor(torch: Any, loss: Any, got: str) -> None:
    with pytest.raises(ValueMismatchError, match=f"expected a scalar tensor as loss, got {got}"):
        gradients.from_torch(loss)(np.ones(2, np.float32))


# --- jax ---------------------------------------------------------------------------------------


def test_jax_compiles_a_loss_once(jax: Any) -> None:
    traced = []

    def loss(w: Any, x: Any) -> Any:
        traced.append(1)
        return (w * x).sum()

    function = gradients.from_jax(loss)
    for scale in range(3):
        _, (grad,) = function.on(np.full(2, scale, np.float32))(np.ones(2, np.float32))
        assert grad.tolist() == [scale, scale]
    assert len(traced) == 1
    gradients.from_jax(loss, jit=False).on(np.ones(2))(np.ones(2, np.float32))
    assert len(traced) == 2


def test_jax_gradients_have_the_dtype_of_the_variable(jax: Any) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        value = np.ones(2, dtype)  # type: ignore[call-overload]
        _, (grad,) = gradients.from_jax(lambda w: (w * w).sum())(value)
        assert grad.dtype == value.dtype
        assert grad.tolist() == [2, 2]


# --- what is missing ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    function = getattr(gradients, f"from_{name}")(linear)
    with pytest.raises(ConfigurationError) as caught:
        function(np.ones(2))
    assert str(caught.value) == (
        f"psync.gradients.from_{name} needs the package {name}, which cannot be imported here\n"
        f"hint: pip install {name}, on every worker"
    )


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a loss function, got float"):
        gradients.from_torch(0.5)  # type: ignore[arg-type]


def test_to_import_it_costs_no_library() -> None:
    code = "import sys, psync; psync.gradients; print({'torch', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
