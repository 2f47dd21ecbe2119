"""Optimizer handles: what is checked before a push, what comes back, and how they travel."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import psync
from local_training import (
    at_once,
    declare,
    declared,
    in_step,
    inside_a_step,
    strategy_of,
    training,
    training_of,
)
from loops import for_each
from psync import optimizers
from psync.errors import ConfigurationError, UsageError, ValueMismatchError

halves = psync.FixedShardsPartitioner(2)


# --- what comes back ---------------------------------------------------------------------------


async def test_pairs_may_be_gone_through_once() -> None:
    optimizer = optimizers.SGD(1.0)
    async with training_of(v=np.float32(10)) as (_, v):
        await optimizer.apply_gradients([iter((np.float32(1), v))])
        assert await v.read() == np.float32(9)


async def test_small_variables_may_be_pushed_with_a_large_one() -> None:
    names = [f"v{number}" for number in range(5)]
    values = {name: np.zeros(1000, np.float32) for name in names}
    async with training_of(big=np.zeros(1 << 20, np.float32), **values) as (_, *variables):
        gradients = [np.ones(variable.shape, np.float32) for variable in variables]
        await optimizers.SGD(1.0).apply_gradients(zip(gradients, variables, strict=True))
        for variable in variables:
            assert (await variable.read() == -1).all()


async def test_two_optimizers_on_one_variable_count_their_own_steps() -> None:
    slow, fast = optimizers.SGD(0.1), optimizers.SGD(1.0)
    async with training_of(v=np.float32(10)) as (_, v):
        assert (await slow.apply_gradients([(np.float32(1), v)])).step == 1
        assert (await slow.apply_gradients([(np.float32(1), v)])).step == 2
        assert (await fast.apply_gradients([(np.float32(1), v)])).step == 1
        assert await v.read() == np.float32(10) - np.float32(0.1) - np.float32(0.1) - 1


async def test_a_shard_can_be_pushed_alone() -> None:
    async with training_of(2, 1, halves, v=np.zeros(4, np.float32)) as (_, v):
        await optimizers.SGD(1.0).apply_gradients([(np.ones(2, np.float32), v.variables[1])])
        assert (await v.read()).tolist() == [0, 0, -1, -1]


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


async def test_variables_of_two_strategies_are_not_pushed_or_pulled_together() -> None:
    """Each is the first of its strategy, so they have the same number."""
    sgd = optimizers.SGD(1.0)
    async with training() as (strategy, _), training() as (other, _):
        v = declare(strategy, v=np.float32(0))
        foreign = declare(other, foreign=np.float32(7))
        own = (np.float32(1), v)
        for push in (
            lambda: sgd.apply_gradients([own, (np.float32(1), foreign)]),
            lambda: sgd.push_pull([own], pull=foreign),
            lambda: sgd.push_pull([own], pull=[v, foreign]),
        ):
            with pytest.raises(UsageError, match='"foreign" belongs to another program or strat'):
                await push()
        assert (await v.read(), await foreign.read()) == (0, 7)


async def test_a_global_step_that_cannot_count_lets_nothing_be_pushed() -> None:
    sgd = optimizers.SGD(1.0)
    async with training() as (strategy, _), training() as (other, _):
        with other.scope():
            foreign = psync.get_or_create_global_step()
        with strategy.scope():
            v = psync.Variable(np.float32(0))
            counter = psync.Variable(7, name="the same number as that of the other strategy")
            vector = psync.Variable(np.zeros(3, np.int64), name="vector")
        for step, expected in [
            (foreign, '"global_step" belongs to another program or strategy'),
            (vector, 'expected an integer scalar, variable "vector"'),
            (v, "expected an integer scalar"),
            (3, "global_step: expected a variable as global_step, got int"),
        ]:
            with pytest.raises(UsageError, match=expected):
                await sgd.apply_gradients([(np.float32(1), v)], step)
        assert (await v.read(), await counter.read()) == (0, 7)


# --- gradients that do not fit -----------------------------------------------------------------

NO_PAIRS = "apply_gradients: expected (gradient, variable) pairs, got "
NO_VARIABLE = "apply_gradients: expected a variable in each (gradient, variable) pair, got "
HINT = "\nhint: apply_gradients(zip(gradients, variables))"
ONE, TWO = np.float32(1), np.zeros(2, np.float32)


@for_each(
    "make, text",
    [
        (lambda v, w: [], "apply_gradients: no gradients given"),
        (lambda v, w: {v: ONE}, f"{NO_PAIRS}dict{HINT}"),
        (lambda v, w: [(None, v), (None, w)], "apply_gradients: all gradients are None (v, w)"),
        (
            lambda v, w: [(np.zeros(3, np.float32), v)],
            'gradient for "v": expected shape (2,), got (3,)',
        ),
        (
            lambda v, w: [(np.zeros(2), v)],
            'gradient for "v": expected dtype float32, got float64\n'
            "hint: convert it: np.asarray(value, 'float32')",
        ),
        (lambda v, w: [(TWO, v)] * 2, 'apply_gradients: variable "v" appears twice'),
        (lambda v, w: [(TWO, "v")], f"{NO_VARIABLE}str"),
        (lambda v, w: [(v, TWO)], f"{NO_VARIABLE}ndarray"),
        (lambda v, w: None, f"{NO_PAIRS}NoneType{HINT}"),
        (lambda v, w: [np.zeros(3, np.float32)], f"{NO_PAIRS}ndarray{HINT}"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_before_the_push(make: Any, text: str) -> None:
    v, w = declared(v=TWO, w=TWO)
    with pytest.raises(ValueMismatchError) as caught:
        at_once(optimizers.SGD(0.1).apply_gradients(make(v, w)))
    assert str(caught.value) == text


async def test_a_learning_rate_that_was_set_goes_with_its_cluster() -> None:
    optimizer = optimizers.SGD(0.25)
    for _ in range(2):
        async with training() as (strategy, _):
            v = declare(strategy, v=np.float32(10))
            await optimizer.apply_gradients([(np.float32(4), v)])
            assert (optimizer.learning_rate, await v.read()) == (0.25, 9)
            await optimizer.set_learning_rate(0.5)
            await optimizer.apply_gradients([(np.float32(4), v)])
            assert (optimizer.learning_rate, await v.read()) == (0.5, 7)


@pytest.mark.parametrize("rate", [-1, -0.1, np.float32(-1), float("nan"), float("inf")])
async def test_a_learning_rate_that_is_none_is_refused_and_changes_nothing(rate: Any) -> None:
    for make in (optimizers.SGD, optimizers.Adam, optimizers.Ftrl, optimizers.Lamb):
        with pytest.raises(ConfigurationError, match="learning rate: expected a"):
            make(rate)
    optimizer = optimizers.SGD(0.5)
    async with training_of(v=np.float32(10)) as (_, v):
        with pytest.raises(ConfigurationError, match="learning rate: expected a"):
            await optimizer.set_learning_rate(rate)
        await optimizer.apply_gradients([(np.float32(4), v)])
        await optimizer.set_learning_rate(0)
        await optimizer.apply_gradients([(np.float32(4), v)])
        assert (optimizer.learning_rate, await v.read()) == (0, 8)
        await optimizer.set_learning_rate(0.5)
        await optimizer.apply_gradients([(np.float32(-4), v)])  # ascent
        assert await v.read() == 10


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected an UpdateRule, got str"):
        optimizers.Optimizer("sgd")  # type: ignore[arg-type]


ROW = psync.IndexedSlices(np.ones((1, 2), np.float32), [0])


@pytest.mark.promise("updates.misfit-refused")
@pytest.mark.parametrize(
    ("optimizer", "gradient", "text"),
    [
        (optimizers.SGD(1.0), np.ones((2, 2), np.int32), "only floating-point variables can be"),
        (optimizers.SGD(1.0, gradient_accumulation_steps=2), ROW, "sgd accumulates gradients, and"),
        (optimizers.Lamb(1.0), ROW, "lamb scales updates by a norm over the whole variable"),
    ],
)
def test_what_one_ps_would_refuse_changes_nothing_on_the_others(
    optimizer: optimizers.Optimizer, gradient: Any, text: str
) -> None:
    dtype = getattr(gradient, "dtype", np.float32)
    with strategy_of(2).scope():
        v = psync.Variable(np.ones((2, 2), np.float32), name="v")
        w = psync.Variable(np.ones((2, 2), dtype), name="w", trainable=False)
    assert v.device != w.device
    with pytest.raises(ValueMismatchError, match=f'^gradient for "w": {text}'):
        at_once(optimizer.apply_gradients([(np.ones((2, 2), np.float32), v), (gradient, w)]))


def test_a_whole_variable_and_one_of_its_shards_are_the_same_twice() -> None:
    v = declared(2, halves, v=np.zeros(4, np.float32))
    pairs = [(np.zeros(4, np.float32), v), (np.zeros(2, np.float32), v.variables[0])]
    with pytest.raises(ValueMismatchError, match='variable "v/part_0" appears twice'):
        at_once(optimizers.SGD(0.1).apply_gradients(pairs))


def test_gradients_that_are_not_finite_are_refused_where_that_is_asked_for() -> None:
    bad = np.array([1, np.nan, -np.inf], np.float32)
    v = declared(v=np.zeros(3, np.float32))
    with pytest.raises(ValueMismatchError) as caught:
        at_once(optimizers.SGD(1.0, forbid_nonfinite=True).apply_gradients([(bad, v)]))
    assert str(caught.value) == (
        'gradient for "v": 2 of 3 elements are NaN or infinite\n'
        "hint: SGD was made with forbid_nonfinite=True"
    )


# --- slots -------------------------------------------------------------------------------------


def test_slots_have_names_and_others_are_none() -> None:
    v = declared(v=np.float32(0))
    assert optimizers.SGD(0.1).get_slot_names() == []
    assert optimizers.SGD(0.1, momentum=0.5).get_slot_names() == ["momentum"]
    assert optimizers.SGD(0.1).get_slot(v, "momentum") is None


def test_variables_that_are_not_trained_have_no_slots() -> None:
    sgd = optimizers.SGD(0.1, momentum=0.5)
    on_read = psync.VariableSynchronization.ON_READ
    with strategy_of().scope():
        trained = psync.Variable(np.float32(0))
        others = [
            psync.Variable(np.float32(0), trainable=False),
            psync.Variable(0),
            psync.Variable(0.0, synchronization=on_read, aggregation=psync.VariableAggregation.SUM),
        ]
    assert sgd.get_slot(trained, "momentum") is not None
    assert [sgd.get_slot(variable, "momentum") for variable in others] == [None] * 3


async def test_floating_variables_that_are_trained_have_slots() -> None:
    adam = optimizers.Adam(0.5)
    sgd = optimizers.SGD(0.5, momentum=0.5)
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.float32(4))
            psync.Variable(np.int32(3))  # trainable, as all are unless they say otherwise
            v = psync.Variable(np.float32(0), trainable=False)
        assert [slot.variable for slot in adam.variables()] == [w, w]
        for slot in adam.variables():  # so that a checkpoint can ask for all
            assert await slot.read() == 0
        assert sgd.get_slot(v, "momentum") is None
        await sgd.apply_gradients([(np.float32(2), v)])  # one that is trained all the same
        momentum = sgd.get_slot(v, "momentum")
        assert momentum is not None
        assert await momentum.read() == -1


# --- compute_gradients, minimize ---------------------------------------------------------------


def nested(values: Any) -> Any:
    (a,), b = values["pair"], values["w"]
    return a * b, {"pair": [b], "w": a}


@pytest.mark.parametrize(
    ("value_and_grad", "var_list", "synchronous"),
    [
        (lambda a, b: (a * b, (b, a)), lambda v, w: [v, w], False),
        (nested, lambda v, w: {"pair": (v,), "w": w}, False),
        (nested, lambda v, w: {"pair": (v,), "w": w}, True),
    ],
)
async def test_minimize_returns_the_loss_and_applies_the_gradients_in_any_nesting(
    value_and_grad: Any, var_list: Any, synchronous: bool
) -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))
            step = psync.get_or_create_global_step()
        sgd: Any = optimizers.SGD(0.5)
        optimizer = psync.SyncReplicasOptimizer(sgd, 1) if synchronous else sgd
        variables = var_list(v, w)

        async def train() -> Any:
            return await optimizer.minimize(value_and_grad, var_list=variables, global_step=step)

        assert await in_step(coordinator, train) == 12
        assert await psync.pull([v, w, step]) == [1, 2.5, 1]


async def test_without_var_list_the_trainable_variables_are_meant() -> None:
    sgd = optimizers.SGD(0.5, momentum=0.5)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3), name="v"), psync.Variable(np.float32(4), name="w")
            psync.Variable(np.float32(5), trainable=False)

        async def step() -> float:
            return float(await sgd.minimize(lambda a, b: (a * b, (b, a))))

        assert await in_step(coordinator, step) == 12
        with pytest.raises(ValueMismatchError, match="var_list: expected variables, got str"):
            await sgd.compute_gradients(lambda a: (0, [a]), [v, "w"])
        pairs = await sgd.compute_gradients(lambda a, b: (0, (a, b)))  # by the program, too
        assert [variable for _, variable in pairs] == [v, w]
        assert [(slot.variable, slot.name) for slot in sgd.variables()] == [
            (v, "momentum"), (w, "momentum"),
        ]  # fmt: skip
    assert optimizers.SGD(0.5).variables() == []


class Tagged(optimizers.SGD):
    """A class of the user's."""

    def __init__(self, tag: str) -> None:
        super().__init__(0.5)
        self.tag = tag


def test_a_class_of_ones_own_takes_its_attributes_along() -> None:
    tagged = Tagged("a")
    text = pickle.dumps(tagged)
    assert pickle.loads(text) is tagged  # it is here
    del tagged
    again = pickle.loads(text)
    assert (again.tag, again.learning_rate, again.get_config()["rule"]) == ("a", 0.5, "sgd")


async def test_with_two_strategies_a_program_says_which_variables() -> None:
    sgd = optimizers.SGD(0.5)
    async with training() as (one, coordinator), training() as (other, _):
        v = declare(one, v=np.float32(3))
        with other.scope():
            psync.Variable(np.float32(4))
        with pytest.raises(UsageError, match="compute_gradients without var_list: 2 strategies"):
            await sgd.compute_gradients(lambda a: (0, [a]))

        async def step() -> None:
            await sgd.minimize(lambda a: (0, [a]))

        await in_step(coordinator, step)
        assert await v.read() == 1.5


# --- handles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_optimizer_is_one_object_in_each_process_however_it_travels(synchronous: bool) -> None:
    made: Any = optimizers.SGD(0.5, momentum=0.9, name="mine", forbid_nonfinite=True)
    if synchronous:
        made = psync.SyncReplicasOptimizer(made, 2, 3, strict=True, min_replicas=2, name="mine")
    kind, number, config = type(made), made.number, made.get_config()
    text = pickle.dumps(made)
    assert pickle.loads(text) is copy.deepcopy(made) is copy.copy(made) is made
    del made
    again = pickle.loads(text)
    assert (type(again), again.number, again.get_name()) == (kind, number, "mine")
    assert again.get_config() == config
    assert again.get_slot_names() == ["momentum"]
    assert pickle.loads(text) is again
    assert not synchronous or again.local_step is None


def test_an_optimizer_says_its_name_and_configuration_and_is_not_made_in_a_step() -> None:
    assert optimizers.Adam(0.5).get_name() == "Adam"
    named = optimizers.SGD(0.5, name="mine")
    assert named.get_name() == "mine"
    assert named.get_config()["learning_rate"] == {"kind": "Constant", "value": 0.5}
    assert repr(named).startswith("<SGD 'mine' {")
    for make in (lambda: optimizers.SGD(0.1), lambda: psync.SyncReplicasOptimizer(named, 1)):
        with inside_a_step(), pytest.raises(UsageError, match=r"making an optimizer \(.*\) inside"):
            make()


async def test_a_shard_that_does_not_decay_stands_for_its_variable() -> None:
    sgd = optimizers.SGD(0.5, weight_decay=0.5)
    async with training_of(2, 1, halves, v=np.ones(4, np.float32)) as (_, v):
        sgd.exclude_from_weight_decay(v.variables[:1])
        await sgd.apply_gradients([(np.zeros(4, np.float32), v)])
        assert (await v.read()).tolist() == [1, 1, 1, 1]


async def test_an_optimizer_that_another_process_made_is_refused() -> None:
    elsewhere = optimizers.SGD(0.1, name="mine")
    elsewhere.origin = "another process"
    async with training_of(v=np.float32(0)) as (_, v):
        with pytest.raises(UsageError) as caught:
            await elsewhere.apply_gradients([(np.float32(1), v)])
    assert str(caught.value) == (
        "optimizer 'mine' was created on this worker, so its slots would not be shared\nhint: "
        "create it in main(), on the coordinator, and let the step capture it"
    )
