"""Optimizers: that the mathematics on the ps tasks is right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import psync
from local_training import training
from psync import Outcome, PushResult, optimizers, schedules
from psync.errors import ConfigurationError, UsageError, ValueMismatchError


def halves(shape: tuple[int, ...], dtype: object) -> list[int]:
    return [2, *[1] * (len(shape) - 1)]


def gradients(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(5, 3)).astype(np.float32) for _ in range(count)]


START = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)


async def trained(
    optimizer: optimizers.Optimizer, pushes: Sequence[np.ndarray], num_ps: int = 2
) -> tuple[np.ndarray, list[PushResult]]:
    """The value of a variable on two ps tasks after these pushes, each of them by a step."""
    async with training(num_ps, partitioner=halves) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(START)

        async def step(gradient: np.ndarray) -> PushResult:
            return await optimizer.apply_gradients([(gradient, v)])

        results = [coordinator.schedule(step, args=(gradient,)) for gradient in pushes]
        await coordinator.join()
        return await v.read(), await coordinator.fetch(results)


def by_sgd(value: np.ndarray, pushes: Sequence[np.ndarray]) -> None:
    for gradient in pushes:
        value -= np.float32(0.1) * gradient


def by_momentum(value: np.ndarray, pushes: Sequence[np.ndarray], *, nesterov: bool) -> None:
    rate, momentum = np.float32(0.1), np.float32(0.9)
    velocity = np.zeros_like(value)
    for gradient in pushes:
        velocity = momentum * velocity - rate * gradient
        value += momentum * velocity - rate * gradient if nesterov else velocity


def by_adam(value: np.ndarray, pushes: Sequence[np.ndarray], *, amsgrad: bool) -> None:
    exact = value.astype(np.float64)
    m, v, highest = (np.zeros_like(exact) for _ in range(3))
    for step, gradient in enumerate(pushes, 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient.astype(np.float64) ** 2
        highest = np.maximum(highest, v)
        rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        exact -= rate * m / (np.sqrt(highest if amsgrad else v) + 1e-7)
    value[:] = exact


SCHEDULE = schedules.PiecewiseConstantDecay([1, 3], [1.0, 0.5, 0.25])


def by_schedule(value: np.ndarray, pushes: Sequence[np.ndarray]) -> None:
    for step, gradient in enumerate(pushes):
        value -= np.float32(SCHEDULE(step)) * gradient


def by_clipped_norm(value: np.ndarray, pushes: Sequence[np.ndarray]) -> None:
    for gradient in pushes:
        value -= 0.5 * gradient / float(np.linalg.norm(gradient))  # of both shards


def by_clipped_values(value: np.ndarray, pushes: Sequence[np.ndarray]) -> None:
    for gradient in pushes:
        value *= 0.75
        value -= 0.5 * np.clip(gradient, -0.25, 0.25)


@pytest.mark.parametrize(
    ("optimizer", "by_hand", "rtol", "atol"),
    [
        pytest.param(optimizers.SGD(0.1), by_sgd, 0, 0, id="sgd"),
        *(
            pytest.param(
                optimizers.SGD(0.1, 0.9, nesterov),
                functools.partial(by_momentum, nesterov=nesterov), 0, 0,
                id="nesterov" if nesterov else "momentum",
            )
            for nesterov in (False, True)
        ),
        *(
            pytest.param(
                optimizers.Adam(0.01, amsgrad=amsgrad),
                functools.partial(by_adam, amsgrad=amsgrad), 1e-5, 1e-6,
                id="amsgrad" if amsgrad else "adam",
            )
            for amsgrad in (False, True)
        ),
        pytest.param(optimizers.SGD(SCHEDULE), by_schedule, 0, 0, id="schedule"),
        pytest.param(optimizers.SGD(0.5, clipnorm=1.0), by_clipped_norm, 1e-5, 1e-6, id="clipnorm"),
        pytest.param(
            optimizers.SGD(0.5, global_clipnorm=1.0), by_clipped_norm, 1e-5, 1e-6,
            id="global_clipnorm",
        ),
        pytest.param(
            optimizers.SGD(0.5, clipvalue=0.25, weight_decay=0.5), by_clipped_values, 1e-5, 1e-6,
            id="clipvalue and weight_decay",
        ),
    ],
)  # fmt: skip
async def test_updates_on_two_ps_tasks_equal_numpy_and_gradients_stay_as_they_are(
    optimizer: optimizers.Optimizer,
    by_hand: Callable[[np.ndarray, Sequence[np.ndarray]], None],
    rtol: float,
    atol: float,
) -> None:
    """Bit for bit, where no tolerance is given."""
    expected, pushes = START.copy(), gradients(6)
    by_hand(expected, gradients(6))
    value, results = await trained(optimizer, pushes)
    np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol)
    assert results == [PushResult(Outcome.ACCEPTED, step, 0) for step in range(1, 7)]
    assert [each.tobytes() for each in pushes] == [each.tobytes() for each in gradients(6)]


# --- norms of whole variables, options -----------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
async def test_layerwise_rules_take_norms_of_whole_variables_wherever_shards_are(
    synchronous: bool,
) -> None:
    """Large ones, too: their norms are measured with the loop running in between."""
    chance = np.random.default_rng(5)
    pushes = [chance.normal(size=(400_000, 3)).astype(np.float32) for _ in range(2)]
    values = []
    for num_ps in (1, 2):
        async with training(num_ps, partitioner=psync.FixedShardsPartitioner(num_ps)) as (
            strategy, coordinator,
        ):  # fmt: skip
            with strategy.scope():
                v = psync.Variable(np.ones((400_000, 3), np.float32), name="v")
                global_step = psync.get_or_create_global_step()
            inner = optimizers.Lamb(0.1)
            optimizer = psync.SyncReplicasOptimizer(inner, 1) if synchronous else inner

            async def step(
                gradient: np.ndarray, optimizer=optimizer, v=v, global_step=global_step
            ) -> None:
                await optimizer.apply_gradients([(gradient, v)], global_step)

            for gradient in pushes:
                coordinator.schedule(step, (gradient,))
                await coordinator.join()
            values.append(await v.read())
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(values[0], 1)


async def test_lamb_refuses_gradients_of_some_rows() -> None:
    rows = psync.IndexedSlices(np.ones((1, 3), np.float32), [1])
    with pytest.raises(ValueMismatchError, match="lamb scales updates by a norm over the whole"):
        await trained(optimizers.Lamb(0.1), [rows])  # type: ignore[list-item]


async def test_a_norm_of_rows_is_clipped_as_that_of_their_sums() -> None:
    rows = psync.IndexedSlices(np.array([[3, 0], [0, 2], [0, 2]], np.float32), [4, 1, 1])
    async with training(2, partitioner=halves) as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros((5, 2), np.float32))
        await optimizers.SGD(1.0, clipnorm=1.0).apply_gradients([(rows, v)])
        expected = np.zeros((5, 2), np.float32)
        expected[4], expected[1] = (-0.6, 0), (0, -0.8)
        np.testing.assert_allclose(await v.read(), expected, rtol=1e-6)
    assert rows.values.tolist() == [[3, 0], [0, 2], [0, 2]]


async def test_gradients_are_accumulated_and_iterations_count_the_updates() -> None:
    sgd = optimizers.SGD(0.5, gradient_accumulation_steps=3)
    pushes = gradients(4)
    async with training(2, partitioner=halves) as (strategy, _):
        with strategy.scope():
            v = psync.Variable(START)
        for i, gradient in enumerate(pushes):
            await sgd.apply_gradients([(gradient, v)])
            assert await sgd.iterations.read() == (i + 1) // 3
        expected = START - 0.5 * (pushes[0] + pushes[1] + pushes[2]) / 3
        np.testing.assert_allclose(await v.read(), expected, rtol=1e-5, atol=1e-6)
        slot = sgd.get_slot(v, "gradient_accumulator")
        assert slot is not None
        assert np.array_equal(await slot.read(), pushes[3])
        await sgd.iterations.assign(5)
        assert await sgd.iterations.read() == 5


async def test_excluded_variables_do_not_decay() -> None:
    sgd = optimizers.SGD(0.5, weight_decay=0.5)
    async with training() as (strategy, _):
        with strategy.scope():
            names = ("w", "w2", "dense/bias")
            variables = [psync.Variable(np.ones(2, np.float32), name=name) for name in names]
        with pytest.raises(ConfigurationError, match="expected at most 10000 words, got bias"):
            sgd.exclude_from_weight_decay(var_names="bias")  # which is b, i, a and s
        with pytest.raises(ValueMismatchError, match="var_list: expected variables, got str"):
            sgd.exclude_from_weight_decay(var_list=["w"])  # type: ignore[list-item]
        sgd.exclude_from_weight_decay(var_list=variables[0], var_names=(n for n in ["bias"]))
        await sgd.apply_gradients([(np.zeros(2, np.float32), v) for v in variables])
        assert [(await v.read())[0] for v in variables] == [1, 0.75, 1]
        with pytest.raises(UsageError, match="exclude_from_weight_decay: SGD is already in use"):
            sgd.exclude_from_weight_decay(var_names=["w"])


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (optimizers.Momentum(0.1), optimizers.SGD(0.1, 0.9)),
        (optimizers.Nesterov(0.1, 0.8), optimizers.SGD(0.1, 0.8, True)),
        (optimizers.AMSGrad(0.1), optimizers.Adam(0.1, amsgrad=True)),
        (optimizers.AdamW(0.1), optimizers.Adam(0.1, weight_decay=0.004)),
    ],
)
def test_other_names_for_the_same(made: optimizers.Optimizer, same: optimizers.Optimizer) -> None:
    assert made.get_config() == same.get_config()


def test_arguments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at most one of clipnorm, global_clipnorm, clip"):
        optimizers.Adam(clipnorm=1.0, clipvalue=1.0)
    with pytest.raises(TypeError, match=r"^SGD\(\) got .* 'momentom'; did you mean 'momentum'"):
        optimizers.SGD(momentom=0.9)  # type: ignore[call-arg]


def test_a_subclass_takes_the_arguments_that_it_wants() -> None:
    class Usual(optimizers.SGD):
        def __init__(self) -> None:
            super().__init__(0.5, momentum=0.9)

    class Misspelt(optimizers.SGD):
        def __init__(self, rate: float) -> None:
            super().__init__(rate, clipnrom=rate)  # type: ignore[call-arg]

    assert Usual().get_config()["momentum"] == 0.9
    with pytest.raises(TypeError, match="'clipnrom'; did you mean 'clipnorm'"):
        Misspelt(0.5)
