"""Optimizers: what is checked before a push, what comes back, and that the mathematics is right."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from local_training import in_step, strategy_of, training

import psync
from psync import Outcome, PushResult, optimizers, schedules
from psync.context import ClosureContext, enter_closure
from psync.errors import GradientError, UsageError
from psync.runtime import Runtime


def halves(shape: tuple[int, ...], dtype: object) -> list[int]:
    return [2, *[1] * (len(shape) - 1)]


def gradients(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(5, 3)).astype(np.float32) for _ in range(count)]


@contextlib.contextmanager
def in_closure_of(origin: str) -> Iterator[None]:
    """As in a step on a worker in another process than the program's."""
    runtime = Runtime(None, origin)  # type: ignore[arg-type]
    with enter_closure(ClosureContext(worker_index=0, closure_id=1, runtime=runtime)):
        yield


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


# --- the mathematics, against numpy ------------------------------------------------------------


async def test_sgd_over_two_ps_tasks_equals_numpy_bit_for_bit() -> None:
    expected = START.copy()
    for gradient in gradients(6):
        expected -= np.float32(0.1) * gradient
    value, results = await trained(optimizers.SGD(0.1), gradients(6))
    assert np.array_equal(value, expected)
    assert results == [PushResult(Outcome.ACCEPTED, step, 0) for step in range(1, 7)]


@pytest.mark.parametrize("nesterov", [False, True])
async def test_momentum_equals_numpy_bit_for_bit(nesterov: bool) -> None:
    rate, momentum = np.float32(0.1), np.float32(0.9)
    expected, velocity = START.copy(), np.zeros_like(START)
    for gradient in gradients(6):
        velocity = momentum * velocity - rate * gradient
        expected += momentum * velocity - rate * gradient if nesterov else velocity
    value, _ = await trained(optimizers.SGD(0.1, 0.9, nesterov), gradients(6))
    assert np.array_equal(value, expected)


@pytest.mark.parametrize("amsgrad", [False, True])
async def test_adam_equals_the_textbook(amsgrad: bool) -> None:
    expected = START.astype(np.float64)
    m, v, highest = (np.zeros_like(expected) for _ in range(3))
    for step, gradient in enumerate(gradients(6), 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient.astype(np.float64) ** 2
        highest = np.maximum(highest, v)
        rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        expected -= rate * m / (np.sqrt(highest if amsgrad else v) + 1e-7)
    value, _ = await trained(optimizers.Adam(0.01, amsgrad=amsgrad), gradients(6))
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


async def test_a_schedule_is_evaluated_at_the_ps() -> None:
    schedule = schedules.PiecewiseConstantDecay([1, 3], [1.0, 0.5, 0.25])
    expected = START.copy()
    for step, gradient in enumerate(gradients(6)):
        expected -= np.float32(schedule(step)) * gradient
    value, _ = await trained(optimizers.SGD(schedule), gradients(6))
    assert np.array_equal(value, expected)


async def test_two_optimizers_on_one_variable_count_their_own_steps() -> None:
    slow, fast = optimizers.SGD(0.1), optimizers.SGD(1.0)
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(10))
        assert (await slow.apply_gradients([(np.float32(1), v)])).step == 1
        assert (await slow.apply_gradients([(np.float32(1), v)])).step == 2
        assert (await fast.apply_gradients([(np.float32(1), v)])).step == 1
        assert await v.read() == np.float32(10) - np.float32(0.1) - np.float32(0.1) - 1


async def test_a_shard_can_be_pushed_alone() -> None:
    async with training(partitioner=halves) as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32))
        await optimizers.SGD(1.0).apply_gradients([(np.ones(2, np.float32), v.variables[1])])
        assert (await v.read()).tolist() == [0, 0, -1, -1]


# --- what comes back ---------------------------------------------------------------------------


async def test_staleness_counts_the_updates_of_others() -> None:
    sgd = optimizers.SGD(0.1)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.float32(0))

        async def step() -> PushResult:
            return await sgd.apply_gradients([(np.float32(1), v)])

        assert await in_step(coordinator, step) == PushResult(Outcome.ACCEPTED, 1, 0)
        await sgd.apply_gradients([(np.float32(1), v)])  # the coordinator's: step 1 is its first
        await sgd.apply_gradients([(np.float32(1), v)])
        assert await in_step(coordinator, step) == PushResult(Outcome.ACCEPTED, 4, 2)


async def test_the_global_step_is_raised_by_each_push() -> None:
    sgd = optimizers.SGD(0.1)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.float32(0))
            global_step = psync.Variable(0, trainable=False, name="global_step")

        async def step() -> None:
            await sgd.apply_gradients([(np.float32(1), v)], global_step)

        for _ in range(5):
            coordinator.schedule(step)
        await coordinator.join()
        assert await global_step.read() == 5
        assert global_step.dtype == np.int64


# --- gradients that do not fit -----------------------------------------------------------------

Refusal = tuple[Callable[[Any, Any], Any], str]

REFUSED: dict[str, Refusal] = {
    "nothing": (lambda v, w: [], "apply_gradients: no gradients given"),
    "all None": (
        lambda v, w: [(None, v), (None, w)],
        "apply_gradients: all gradients are None (v, w)",
    ),
    "shape": (
        lambda v, w: [(np.zeros(3, np.float32), v)],
        'gradient for "v": expected shape (2,), got (3,)',
    ),
    "dtype": (
        lambda v, w: [(np.zeros(2), v)],
        'gradient for "v": expected dtype float32, got float64\n'
        "hint: convert it: np.asarray(value, 'float32')",
    ),
    "twice": (
        lambda v, w: [(np.zeros(2, np.float32), v)] * 2,
        'apply_gradients: variable "v" occurs twice',
    ),
    "not a variable": (
        lambda v, w: [(np.zeros(2, np.float32), "v")],
        "apply_gradients: expected (gradient, variable) pairs, got str for the variable",
    ),
    "swapped": (
        lambda v, w: [(v, np.zeros(2, np.float32))],
        "apply_gradients: expected (gradient, variable) pairs, got ndarray for the variable",
    ),
    "not pairs": (
        lambda v, w: [np.zeros(3, np.float32)],
        "apply_gradients: expected (gradient, variable) pairs, got ndarray\n"
        "hint: apply_gradients(zip(gradients, variables))",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_gradients_that_do_not_fit_are_refused_before_the_push(name: str) -> None:
    make, text = REFUSED[name]
    with strategy_of().scope():
        v = psync.Variable(np.zeros(2, np.float32), name="v")
        w = psync.Variable(np.zeros(2, np.float32), name="w")
    with pytest.raises(GradientError) as caught:
        await optimizers.SGD(0.1).apply_gradients(make(v, w))
    assert str(caught.value) == text


async def test_a_whole_variable_and_one_of_its_shards_are_the_same_twice() -> None:
    with strategy_of(2, halves).scope():
        v = psync.Variable(np.zeros(4, np.float32), name="v")
    pairs = [(np.zeros(4, np.float32), v), (np.zeros(2, np.float32), v.variables[0])]
    with pytest.raises(GradientError, match='variable "v/part_0" occurs twice'):
        await optimizers.SGD(0.1).apply_gradients(pairs)


async def test_none_is_passed_over_if_there_is_another_gradient() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32))
            w = psync.Variable(np.zeros(2, np.float32))
        pairs = [(None, v), (np.ones(2, np.float32), w)]
        await optimizers.SGD(1.0).apply_gradients(pairs)
        assert [value.tolist() for value in await psync.pull((v, w))] == [[0, 0], [-1, -1]]


async def test_numbers_and_lists_without_a_dtype_get_the_variables() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(1.0), psync.Variable([1.0, 2.0])
        await optimizers.SGD(1.0).apply_gradients([(0.5, v), ([1, 2], w)])
        assert [value.tolist() for value in await psync.pull((v, w))] == [0.5, [0, 0]]


async def test_gradients_that_are_not_finite_are_refused_where_that_is_asked_for() -> None:
    bad = np.array([1, np.nan, -np.inf], np.float32)
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros(3, np.float32), name="v")
        with pytest.raises(GradientError) as caught:
            await optimizers.SGD(1.0, forbid_nonfinite=True).apply_gradients([(bad, v)])
        assert str(caught.value) == (
            'gradient for "v": 2 of 3 elements are NaN or infinite\n'
            "hint: SGD was made with forbid_nonfinite=True"
        )
        assert not (await v.read()).any()
        await optimizers.SGD(1.0).apply_gradients([(bad, v)])
        assert np.isnan((await v.read())[1])


async def test_a_push_in_another_memory_layout_is_the_same_push() -> None:
    gradient = np.arange(15, dtype=np.float32).reshape(3, 5).T
    value, _ = await trained(optimizers.SGD(1.0), [gradient])
    assert np.array_equal(value, START - gradient)


# --- slots -------------------------------------------------------------------------------------


async def test_a_slot_is_read_in_the_shape_of_its_variable() -> None:
    sgd = optimizers.SGD(0.5, momentum=0.9)
    async with training(partitioner=halves) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")
        slot = sgd.get_slot(v, "momentum")
        assert slot is not None
        assert (await slot.read()).tolist() == [0, 0, 0, 0]
        await sgd.apply_gradients([(np.arange(4, dtype=np.float32), v)])
        assert (await slot.read()).tolist() == [0, -0.5, -1, -1.5]

        async def step() -> list[float]:
            momentum = sgd.get_slot(v, "momentum")
            assert momentum is not None
            return (await momentum.read()).tolist()

        assert await in_step(coordinator, step) == [0, -0.5, -1, -1.5]


def test_slots_have_names_and_others_are_none() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.float32(0))
    assert optimizers.SGD(0.1).get_slot_names() == []
    assert optimizers.SGD(0.1, momentum=0.5).get_slot_names() == ["momentum"]
    assert optimizers.SGD(0.1).get_slot(v, "momentum") is None


async def test_a_slot_cannot_be_read_without_a_coordinator() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.float32(0), name="v")
    slot = optimizers.SGD(0.1, momentum=0.5).get_slot(v, "momentum")
    assert slot is not None
    with pytest.raises(UsageError, match='read of slot "momentum" of "v": no connection'):
        await slot.read()


# --- compute_gradients, minimize ---------------------------------------------------------------


async def test_compute_gradients_pulls_and_pairs() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))
        pairs = await optimizers.SGD(0.1).compute_gradients(lambda a, b: (a * b, (b, a)), [v, w])
    assert pairs == [(4, v), (3, w)]


async def test_minimize_returns_the_loss_and_applies_the_gradients() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))
            global_step = psync.Variable(0)
        loss = await optimizers.SGD(0.5).minimize(lambda a, b: (a * b, (b, a)), [v, w], global_step)
        assert loss == 12
        assert await psync.pull([v, w, global_step]) == [1, 2.5, 1]


async def test_without_var_list_the_trainable_variables_are_meant() -> None:
    sgd = optimizers.SGD(0.5, momentum=0.5)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3), name="v"), psync.Variable(np.float32(4), name="w")
            psync.Variable(np.float32(5), trainable=False)

        async def step() -> float:
            return float(await sgd.minimize(lambda a, b: (a * b, (b, a))))

        assert await in_step(coordinator, step) == 12
        pairs = await sgd.compute_gradients(lambda a, b: (0, (a, b)))  # by the program, too
        assert [variable for _, variable in pairs] == [v, w]
        assert [(slot.variable, slot.name) for slot in sgd.variables()] == [
            (v, "momentum"), (w, "momentum"),
        ]  # fmt: skip
    assert optimizers.SGD(0.5).variables() == []


async def test_an_optimizer_takes_the_trainable_variables_along_to_other_processes() -> None:
    sgd = optimizers.SGD(0.5)
    number = sgd.number
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(3), name="v")
        few = pickle.dumps(sgd)
        with strategy.scope():
            w = psync.Variable(np.float32(3), name="w")
        text = pickle.dumps(sgd)
        origin = strategy.origin
    del sgd, strategy
    again = pickle.loads(few)
    assert again.number == number
    with in_closure_of(origin):
        assert again._trainable_variables("minimize") == [v]
        assert pickle.loads(text) is again
        assert again._trainable_variables("minimize") == [v, w]
        assert pickle.loads(few) is again
        assert pickle.loads(pickle.dumps(again))._trainable_variables("minimize") == [v, w]
    with in_closure_of("another strategy"), pytest.raises(UsageError) as caught:
        again._trainable_variables("minimize")
    assert str(caught.value) == (
        "minimize: no trainable variable is known here\n"
        "hint: declare variables before the step that captures this optimizer is first scheduled, "
        "or say which variables"
    )


async def test_with_two_strategies_a_program_says_which_variables() -> None:
    sgd = optimizers.SGD(0.5)
    async with training() as (one, coordinator), training() as (other, _):
        with one.scope():
            v = psync.Variable(np.float32(3))
        with other.scope():
            psync.Variable(np.float32(4))
        with pytest.raises(UsageError, match="compute_gradients without var_list: 2 strategies"):
            await sgd.compute_gradients(lambda a: (0, [a]))

        async def step() -> None:
            await sgd.minimize(lambda a: (0, [a]))

        await in_step(coordinator, step)
        assert await v.read() == 1.5


async def test_only_variables_can_be_optimized() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.float32(3))
    with pytest.raises(GradientError, match="var_list: expected variables, got str"):
        await optimizers.SGD(0.1).compute_gradients(lambda a: (0, [a]), [v, "w"])  # type: ignore[list-item]


async def test_another_number_of_gradients_than_variables_is_an_error() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(3))
        with pytest.raises(GradientError, match="value_and_grad: expected 1 gradients, got 2"):
            await optimizers.SGD(0.1).minimize(lambda a: (a, [a, a]), [v])


# --- handles -----------------------------------------------------------------------------------


def test_an_optimizer_is_one_object_however_it_is_copied() -> None:
    adam = optimizers.Adam(schedules.ExponentialDecay(0.1, 10, 0.5), name="mine")
    assert pickle.loads(pickle.dumps(adam)) is adam
    assert copy.deepcopy(adam) is copy.copy(adam) is adam


def test_a_process_that_does_not_have_it_makes_it_again() -> None:
    made = optimizers.SGD(0.5, momentum=0.9, name="mine", forbid_nonfinite=True)
    text, number, config = pickle.dumps(made), made.number, made.get_config()
    del made
    again = pickle.loads(text)
    assert (type(again), again.number, again.get_name()) == (optimizers.SGD, number, "mine")
    assert again.get_config() == config
    assert again.get_slot_names() == ["momentum"]
    assert pickle.loads(text) is again


def test_an_optimizer_says_its_name_and_configuration() -> None:
    assert optimizers.Adam(0.5).get_name() == "Adam"
    named = optimizers.SGD(0.5, name="mine")
    assert named.get_name() == "mine"
    assert named.get_config()["learning_rate"] == {"kind": "Constant", "value": 0.5}
    assert repr(named).startswith("<SGD 'mine' {")


async def test_an_optimizer_made_in_a_step_is_an_error() -> None:
    async def step() -> None:
        optimizers.SGD(0.1)

    async with training() as (_, coordinator):
        with pytest.raises(UsageError, match=re.escape("making an optimizer (SGD) inside a step")):
            await in_step(coordinator, step)


async def test_an_optimizer_that_another_process_made_is_refused() -> None:
    elsewhere = optimizers.SGD(0.1, name="mine")
    elsewhere.origin = "another process"
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(0))
        with pytest.raises(UsageError) as caught:
            await elsewhere.apply_gradients([(np.float32(1), v)])
    assert str(caught.value) == (
        "optimizer 'mine' was made on this worker, where nobody shares its slots\n"
        "hint: make it in main(), on the coordinator, and let the step capture it"
    )
