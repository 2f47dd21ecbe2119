"""SyncReplicasOptimizer: what is checked, and training on a cluster in memory, in numbers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import local_training
import memory_cluster
import psync
from local_training import at_once, declare, declared, in_step, strategy_of, training
from loops import for_each
from memory_cluster import coordinating, until
from psync import Outcome, PushResult, SyncReplicasOptimizer, optimizers
from psync.errors import (
    ClosureCancelled,
    ConfigurationError,
    NotEnoughReplicas,
    UsageError,
    ValueMismatchError,
)

pytestmark = pytest.mark.timeout(20)

ACCEPTED, STALE, DUPLICATE = Outcome.ACCEPTED, Outcome.STALE, Outcome.DUPLICATE


class Model:
    """A running cluster with a variable of two zeros, and a step that pushes one gradient."""

    def __init__(
        self, strategy: psync.ParameterServerStrategy, coordinator: psync.ClusterCoordinator
    ) -> None:
        self.strategy, self.coordinator = strategy, coordinator
        with strategy.scope():
            self.v = psync.Variable(np.zeros(2, np.float32), name="v")
            self.step = psync.get_or_create_global_step()

    async def run(self, step: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Schedule a step once for each argument; return the results."""
        values = [self.coordinator.schedule(step, args=(each,)) for each in arguments]
        await self.coordinator.join()
        return await self.coordinator.fetch(values)

    def pushing(self, optimizer: SyncReplicasOptimizer, **options: Any) -> Callable[..., Any]:
        """A step that pulls, pushes its argument as the gradient, and returns the result."""
        v, global_step = self.v, self.step

        async def step(value: float) -> PushResult:
            weights = await v.read()
            gradient = np.full_like(weights, value)
            return await optimizer.apply_gradients([(gradient, v)], global_step, **options)

        return step

    async def value(self) -> float:
        """The value of both elements."""
        first, second = await self.v.read()
        assert first == second
        return float(first)

    async def global_step(self) -> int:
        return int(await self.step.read())


@contextlib.asynccontextmanager
async def model(num_workers: int, num_ps: int = 2) -> AsyncIterator[Model]:
    local_training.shared.clear()
    async with training(num_ps, num_workers) as (strategy, coordinator):
        yield Model(strategy, coordinator)
    local_training.shared.clear()


def sgd(rate: float = 1.0) -> optimizers.Optimizer:
    return optimizers.SGD(rate)


# --- training ----------------------------------------------------------------------------------


RUNS: dict[str, Any] = {
    "the last step is closed with what there is": (
        {"replicas_to_aggregate": 2}, 0, [1.0] * 5, lambda r: (r.step, r.partial, r.count),
        [(1, False, 2), (1, False, 2), (2, False, 2), (2, False, 2), (3, True, 1)], -3, 3,
    ),
    "one worker makes steps of three gradients": (
        {"replicas_to_aggregate": 3, "total_num_replicas": 1}, 0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        lambda r: (r.step, r.outcome), [(step, ACCEPTED) for step in (0, 0, 1, 1, 1, 2)],
        -(2 + 5), 2,
    ),
    "steps begin at the value of the global step": (
        {"replicas_to_aggregate": 1}, 100, [1.0, 1.0], lambda r: (r.step, r.outcome),
        [(101, ACCEPTED), (102, ACCEPTED)], -2, 102,
    ),
    "the tokens of TensorFlow waste the second step": (
        {"replicas_to_aggregate": 1, "tensorflow_compat": True}, 0, [1.0] * 4,
        lambda r: (r.outcome, r.staleness),
        [(ACCEPTED, 0), (STALE, 1), (ACCEPTED, 0), (ACCEPTED, 0)], -3, 3,
    ),
}  # fmt: skip


@pytest.mark.promise("answers.synchronous")
@pytest.mark.parametrize(
    ("options", "start", "gradients", "told", "results", "value", "global_step"),
    RUNS.values(),
    ids=RUNS,
)
async def test_each_push_is_told_its_step_and_the_mean_of_each_step_is_applied(
    options: dict[str, Any],
    start: int,
    gradients: list[float],
    told: Callable[[PushResult], Any],
    results: list[Any],
    value: float,
    global_step: int,
) -> None:
    workers = options.get("total_num_replicas", options["replicas_to_aggregate"])
    async with model(workers) as m:
        if start:
            await m.step.assign(start)
        optimizer = SyncReplicasOptimizer(sgd(), **options)
        found = [told(result) for result in await m.run(m.pushing(optimizer), *gradients)]
        assert (sorted(found) if workers > 1 else found) == results
        assert await m.value() == value
        assert await m.global_step() == global_step


async def test_steps_do_not_begin_below_0_and_a_group_is_told_from_its_namesake() -> None:
    first, second = (SyncReplicasOptimizer(sgd(), 1) for _ in range(2))
    async with model(1) as m:
        await m.run(m.pushing(first), 1.0)
        await m.step.assign(-5)
        named = f"^sync_replicas/{second.number}: expected a global step of at least 0, got -5"
        with pytest.raises(ConfigurationError, match=named):
            await m.run(m.pushing(second), 1.0)


@pytest.mark.promise("steps.applied-at-join")
async def test_join_has_applied_what_was_accepted_though_nobody_waited_for_it() -> None:
    async with model(1) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 3, 1)
        results = await m.run(m.pushing(optimizer), *[1.0] * 7)
        assert all(result.outcome is ACCEPTED for result in results)
        assert results[-1].count == 0  # it went on with a token of the step that it is counted in
        assert await m.value() == -3
        assert await m.global_step() == 3


@pytest.mark.promise("steps.stale-dropped")
async def test_a_backup_worker_that_is_late_is_told_that_its_gradient_was_dropped() -> None:
    async with model(3) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 2, 3)
        v, global_step = m.v, m.step
        local_training.shared["pulled"] = pulled = asyncio.Event()
        local_training.shared["over"] = over = asyncio.Event()

        async def step(late: bool) -> PushResult:
            await v.read()
            if late:
                local_training.shared["pulled"].set()
                await local_training.shared["over"].wait()
            else:
                await local_training.shared["pulled"].wait()
            gradient = np.ones(2, np.float32)
            result = await optimizer.apply_gradients([(gradient, v)], global_step)
            local_training.shared["over"].set()
            return result

        *others, late = await m.run(step, False, False, True)
        assert pulled.is_set()
        assert over.is_set()
        assert others == [PushResult(ACCEPTED, 1, 0, False, 2)] * 2
        assert late == PushResult(STALE, 1, 1)
        assert await m.value() == -1
        (again,) = await m.run(m.pushing(optimizer), 1.0)
        assert (again.outcome, again.step, again.partial) == (ACCEPTED, 2, True)


async def test_weights_and_sums() -> None:
    async with model(2) as m:
        mean = SyncReplicasOptimizer(sgd(), 2)
        total = SyncReplicasOptimizer(sgd(), 2, reduction="sum")
        v, global_step = m.v, m.step

        async def weighted(value: float) -> None:
            gradient = np.full(2, value, np.float32)
            await mean.apply_gradients([(gradient, v)], global_step, weight=value)

        await m.run(weighted, 1.0, 3.0)
        assert await m.value() == -(1 * 1 + 3 * 3) / 4
        await m.v.assign(np.zeros(2))
        await m.run(m.pushing(total), 1.0, 3.0)
        assert await m.value() == -4


async def test_strict_steps_take_one_push_of_each_worker() -> None:
    async with model(2) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 2, strict=True)
        v, global_step = m.v, m.step

        async def step(_: int) -> tuple[int, int]:
            index = psync.get_worker_index()
            gradient = np.full(2, 1.0 + 2 * index, np.float32)
            result = await optimizer.apply_gradients([(gradient, v)], global_step)
            return result.step, index

        results = await m.run(step, *range(8))
        assert sorted(results) == [(step, index) for step in (1, 2, 3, 4) for index in (0, 1)]
        assert await m.value() == -4 * 2


async def test_deterministic_sums_are_in_the_order_of_the_workers() -> None:
    """In float32 1e8 + 1 is 1e8: one order of these three gives 1/3, the others 0."""
    async with coordinating(2, 3) as (cluster, coordinator):
        m = Model(coordinator.strategy, coordinator)
        optimizer = SyncReplicasOptimizer(sgd(), 3, deterministic=True)
        v, global_step = m.v, m.step
        memory_cluster.shared["counted"] = lambda count: counted(cluster, count)

        async def step(_: int) -> None:
            index = psync.get_worker_index()
            await memory_cluster.shared["counted"]((2, 0, 1)[index])  # 1 is first, then 2, then 0
            gradient = np.full(2, (1e8, -1e8, 1.0)[index], np.float32)
            await optimizer.apply_gradients([(gradient, v)], global_step)

        await m.run(step, 0, 1, 2)
        assert await m.value() == -float(np.float32(1) / np.float32(3))


@pytest.mark.parametrize(
    ("decay", "by_step", "average_of_two"),
    [
        # 0 → -1: the average becomes -0.5; → -2: -0.5 - 0.5 * (-0.5 + 2).
        (0.5, False, -1.25),
        # With num_updates the decay follows the global step: 2 / 11, then 3 / 12.
        (0.99, True, -(9 / 11) + 0.75 * (9 / 11 - 2)),
    ],
)
async def test_moving_averages_follow_each_step(
    decay: float, by_step: bool, average_of_two: float
) -> None:
    async with model(1) as m:
        with m.strategy.scope():  # all trainable variables by default
            average = psync.ExponentialMovingAverage(decay, num_updates=m.step if by_step else None)
            which = {} if by_step else {"variables_to_average": [m.v]}
            optimizer = SyncReplicasOptimizer(sgd(), 1, variable_averages=average, **which)
        await m.run(m.pushing(optimizer), 1.0, 1.0)
        shadow = average.average(m.v)
        assert shadow is not None
        np.testing.assert_allclose(await shadow.read(), average_of_two, rtol=1e-6)


async def test_the_rule_is_applied_once_to_the_mean_and_its_slots_are_the_optimizers() -> None:
    async with model(2) as m:
        optimizer = SyncReplicasOptimizer(optimizers.SGD(1.0, momentum=0.5), 2)
        slot = optimizer.get_slot(m.v, "momentum")
        assert slot is not None
        assert (await slot.read()).tolist() == [0, 0]
        await m.run(m.pushing(optimizer), 1.0, 3.0)
        await m.run(m.pushing(optimizer), 1.0, 3.0)
        assert await m.value() == -2 - (0.5 * 2 + 2)
        assert (await slot.read()).tolist() == [-3, -3]
        assert optimizer.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(m.v, "other") is None
        assert [(slot.variable, slot.name) for slot in optimizer.variables()] == [(m.v, "momentum")]


async def test_the_optimizer_that_is_wrapped_shows_and_sets_what_its_wrapper_has() -> None:
    async with model(1) as m:
        inner = optimizers.SGD(1.0, momentum=0.5)
        optimizer = SyncReplicasOptimizer(inner, 1)
        await m.run(m.pushing(optimizer), 3.0)
        slot = inner.get_slot(m.v, "momentum")
        assert slot is not None
        assert (await slot.read()).tolist() == [-3, -3]
        assert await inner.iterations.read() == 1
        await inner.set_learning_rate(0.0)
        assert (inner.learning_rate, optimizer.learning_rate) == (0.0, 0.0)
        before = await m.value()
        await slot.assign(np.zeros(2, np.float32))
        await m.run(m.pushing(optimizer), 3.0)
        assert await m.value() == before
        await inner.apply_gradients([(np.ones(2, np.float32), m.v)])  # then it is one of its own
        assert (await inner.iterations.read(), await optimizer.iterations.read()) == (1, 2)
        assert (inner.learning_rate, optimizer.learning_rate) == (1.0, 0.0)
        assert await m.value() == before - 1


halves = psync.FixedShardsPartitioner(2)


@pytest.mark.parametrize("partitioner", [None, halves])
@pytest.mark.parametrize("plain", [False, True])
async def test_plain_and_coroutine_steps_wait_for_their_push_of_all_shards(
    plain: bool, partitioner: Any
) -> None:
    async with training(2, 2, partitioner) as (strategy, coordinator):
        m = Model(strategy, coordinator)
        assert {shard.ps for shard in m.v.spec.shards} == ({0, 1} if partitioner else {0})
        optimizer = SyncReplicasOptimizer(sgd(), 2)
        v, global_step = m.v, m.step

        def step(value: float) -> PushResult:
            weights = psync.wait(psync.pull(v))
            gradient = np.full_like(weights, value)
            return psync.wait(optimizer.apply_gradients([(gradient, v)], global_step))

        results = await m.run(step if plain else m.pushing(optimizer), 1.0, 3.0)
        assert results == [PushResult(ACCEPTED, 1, 0, False, 2)] * 2
        assert await m.value() == -2


def test_gradients_that_are_not_finite_are_refused_where_the_wrapped_one_does() -> None:
    with strategy_of().scope():
        v, step = psync.Variable(np.zeros(2, np.float32)), psync.get_or_create_global_step()
    optimizer = SyncReplicasOptimizer(optimizers.SGD(1.0, forbid_nonfinite=True), 1)
    bad = np.full(2, np.nan, np.float32)
    with pytest.raises(ValueMismatchError, match="2 of 2 elements are NaN or infinite"):
        at_once(optimizer.apply_gradients([(bad, v)], step))


# --- which step a push is of -------------------------------------------------------------------


@pytest.mark.parametrize(("reads", "outcome"), [("value", STALE), ("slot", ACCEPTED)])
async def test_the_oldest_pull_decides_and_reading_a_slot_is_none(
    reads: str, outcome: Outcome
) -> None:
    async with model(2) as m:
        optimizer = SyncReplicasOptimizer(optimizers.SGD(1.0, momentum=0.5), 1, 2)
        v, global_step = m.v, m.step
        local_training.shared["read"] = asyncio.Event()
        local_training.shared["over"] = asyncio.Event()

        async def step(slow: bool) -> tuple[PushResult, float]:
            slot = optimizer.get_slot(v, "momentum")
            assert slot is not None
            if slow:
                await (slot if reads == "slot" else v).read()
                local_training.shared["read"].set()
                await local_training.shared["over"].wait()
            else:
                await local_training.shared["read"].wait()
            weights = await psync.pull(v)  # newer, but the gradient may be of both
            gradient = np.ones(2, np.float32)
            result = await optimizer.apply_gradients([(gradient, v)], global_step)
            local_training.shared["over"].set()
            return result, float(weights[0])

        slow, fast = await m.run(step, True, False)
        assert (fast[0].outcome, slow[0].outcome, slow[1]) == (ACCEPTED, outcome, -1)


async def test_a_step_may_pull_and_push_several_times() -> None:
    async with model(1) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 1)
        v, global_step = m.v, m.step

        async def step(pulls: bool) -> list[Outcome]:
            gradient = np.ones(2, np.float32)
            outcomes = []
            for _ in range(3):
                if pulls:
                    await v.read()
                result = await optimizer.apply_gradients([(gradient, v)], global_step)
                outcomes.append(result.outcome)
            return outcomes

        # Without a pull the last token says how old the gradients are.
        assert await m.run(step, True, False, True) == [[ACCEPTED] * 3] * 3


async def test_the_last_token_can_be_read() -> None:
    async with model(1) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 1)
        v, global_step = m.v, m.step

        async def step() -> list[int | None]:
            before = optimizer.local_step
            await optimizer.apply_gradients([(np.ones(2, np.float32), v)], global_step)
            return [before, optimizer.local_step]

        assert await in_step(m.coordinator, step) == [None, 1]
        assert await in_step(m.coordinator, step) == [1, 2]
        assert optimizer.local_step is None  # the program is no replica


# --- losses and ends ---------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_too_few_replicas_are_reported_after_a_time() -> None:
    async with coordinating(1, 2) as (cluster, coordinator):
        m = Model(coordinator.strategy, coordinator)
        optimizer = SyncReplicasOptimizer(sgd(), 2, min_replicas=2, patience_s=20)
        await cluster.stop("worker-1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(NotEnoughReplicas, match="at least 2 living replicas") as caught:
            await m.run(m.pushing(optimizer), 1.0)
        assert "/job:worker/task:1" in str(caught.value)
        assert 19 < loop.time() - began < 25


async def test_a_cancelled_step_leaves_the_token_channel() -> None:
    async with coordinating(1, 2) as (cluster, coordinator):
        m = Model(coordinator.strategy, coordinator)
        optimizer = SyncReplicasOptimizer(sgd(), 2)

        async def fails() -> None:
            await memory_cluster.shared["counted"](1)
            raise LookupError("a step of the user's")

        memory_cluster.shared["counted"] = lambda count: counted(cluster, count)
        waiting = coordinator.schedule(m.pushing(optimizer), args=(1.0,))
        coordinator.schedule(fails)
        with pytest.raises(LookupError, match="a step of the user's"):
            await coordinator.join()
        with pytest.raises(ClosureCancelled):
            await waiting
        results = await m.run(m.pushing(optimizer), 3.0, 3.0)
        assert [result.outcome for result in results] == [ACCEPTED, ACCEPTED]


# --- what it takes -----------------------------------------------------------------------------

SGD = optimizers.SGD(0.5)
ONES = [np.ones(2, np.float32)]
AVERAGE = psync.ExponentialMovingAverage(0.9)


@for_each(
    "changes, text",
    [
        ({"opt": "sgd"}, "sync: expected one of psync.optimizers as opt, got str"),
        (
            {"opt": SyncReplicasOptimizer(SGD, 2, name="inner")},
            "sync: opt 'inner' is already synchronous",
        ),
        (
            {"opt": optimizers.SGD(0.1, name="b", staleness_bound=psync.StalenessBound(1))},
            "sync: opt 'b' has a staleness bound",
        ),
        ({"variable_averages": 0.9}, "sync: expected an ExponentialMovingAverage as variable_a"),
        ({"variables_to_average": []}, "sync: variables_to_average without variable_averages"),
        ({"name": ""}, "a synchronous optimizer: expected a name, got ''"),
        ({"name": None}, "a synchronous optimizer: expected a name, got None"),
        ({"replicas_to_aggregate": "2"}, "sync: expected a whole number as replicas_to_aggregate"),
        ({"replicas_to_aggregate": 2.0}, "sync: expected a whole number as replicas_to_aggregate"),
        ({"total_num_replicas": True}, "sync: expected a whole number as total_num_replicas, got"),
        (
            {"replicas_to_aggregate": 0},
            "sync: expected replicas_to_aggregate and total_num_replicas of at least 1, got 0 and",
        ),
        ({"min_replicas": 4}, "sync: expected min_replicas from 1 to total_num_replicas (3), got"),
        ({"min_replicas": None}, "sync: expected a whole number as min_replicas, got None"),
        ({"patience_s": 0}, "sync: expected patience_s above 0 s and finite, got 0"),
        ({"patience_s": "1"}, "sync: patience_s: expected a number, got '1'"),
        ({"patience_s": float("inf")}, "sync: patience_s: expected a finite number, got inf"),
        ({"strict": 1}, "sync: expected strict to be True or False, got 1"),
        ({"deterministic": None}, "sync: expected deterministic to be True or False, got None"),
        ({"tensorflow_compat": 0}, "sync: expected tensorflow_compat to be True or False, got 0"),
        ({"pull_ahead": 1}, "sync: expected pull_ahead to be True or False, got 1"),
        ({"reduction": "MEAN"}, 'sync: expected reduction "mean" or "sum", got \'MEAN\''),
        ({"reduction": []}, 'sync: expected reduction "mean" or "sum", got []'),
        (
            {"strict": True, "tensorflow_compat": True},
            "sync: tensorflow_compat=True uses unbound tokens, as TensorFlow does",
        ),
        (
            {"deterministic": True},
            "sync: deterministic=True needs every replica in every step, got "
            "replicas_to_aggregate=2 of total_num_replicas=3\n"
            "hint: set both to the same value, without backup workers",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], text: str) -> None:
    given = {"opt": SGD, "replicas_to_aggregate": 2, "total_num_replicas": 3, "name": "sync"}
    with pytest.raises(ConfigurationError, match="^" + re.escape(text)) as caught:
        SyncReplicasOptimizer(**given | changes)
    assert isinstance(caught.value, ValueError)


def test_numbers_of_numpy_become_plain_ones_and_deterministic_is_strict() -> None:
    optimizer = SyncReplicasOptimizer(
        SGD, np.int64(2), deterministic=True, patience_s=np.float32(0.5)
    )
    config = optimizer.get_config()
    names = "replicas_to_aggregate", "total_num_replicas", "patience_s", "strict"
    assert [repr(config[name]) for name in names] == ["2", "2", "0.5", "True"]


@for_each(
    "weight, text",
    [
        *[
            (weight, f"apply_gradients: expected a weight from 1e-30 to 1e+30, got {weight}")
            for weight in (0, -1.5, 1e31, 1e-31)
        ],
        *[
            (weight, "apply_gradients: weight: expected a ")
            for weight in ("2", None, float("inf"), float("nan"), True)
        ],
    ],
)
def test_a_weight_is_a_number_within_what_can_be_summed(weight: Any, text: str) -> None:
    with strategy_of().scope():
        v, step = psync.Variable(np.float32(0)), psync.get_or_create_global_step()
    pairs = [(np.float32(1), v)]
    with pytest.raises(ValueError, match=re.escape(text)):
        at_once(SyncReplicasOptimizer(SGD, 2).apply_gradients(pairs, step, weight=weight))


async def test_the_global_step_stays_the_same_and_is_that_of_its_averages() -> None:
    async with model(1) as m:
        with m.strategy.scope():
            other = psync.Variable(0, name="other", trainable=False)
        average = psync.ExponentialMovingAverage(0.75, num_updates=other)
        one = SyncReplicasOptimizer(SGD, 1, name="sync")
        two = SyncReplicasOptimizer(SGD, 1, None, average, [m.v], name="sync")
        assert await one.init_tokens(m.step) == 0
        text = 'sync: expected the same global step "global_step" as before, got "other"'
        with pytest.raises(ConfigurationError, match=text):
            await one.init_tokens(other)
        with pytest.raises(ConfigurationError, match='averages depends on "other", not on the gl'):
            await two.init_tokens(m.step)
        assert await two.init_tokens(other) == 0
    async with model(1) as m:  # one optimizer may be used with one strategy after the other
        assert await one.init_tokens(m.step) == 0
        text = 'averages of "v" and variable "global_step" belong to different programs or'
        with pytest.raises(ConfigurationError, match=text):
            await two.init_tokens(m.step)


def test_averages_are_of_one_strategy() -> None:
    one, other = strategy_of(), strategy_of()
    variables = [declare(one, v=ONES[0]), declare(other, w=ONES[0])]
    with pytest.raises(ConfigurationError, match='averages of "v" and variable "w"'):
        SyncReplicasOptimizer(SGD, 2, None, psync.ExponentialMovingAverage(0.75), variables)
    with pytest.raises(UsageError, match='expected a list of variables, got variable "v"'):
        SyncReplicasOptimizer(SGD, 2, None, AVERAGE, variables[0])  # type: ignore[arg-type]


def test_before_the_first_push_there_is_nothing_to_run_on_the_chief() -> None:
    optimizer = SyncReplicasOptimizer(SGD, 3, 1, name="sync")
    for ask in (optimizer.get_init_tokens_op, optimizer.get_chief_queue_runner):
        with pytest.raises(ValueError, match="before apply_gradients of sync was called"):
            ask()


def fours_in_halves(shape: tuple[int, ...], dtype: object) -> list[int]:
    return [2] if shape == (4,) else [1] * len(shape)


async def test_norms_of_the_mean_are_of_whole_variables_wherever_they_lie() -> None:
    async with training(2, 1, fours_in_halves) as (strategy, coordinator):
        with strategy.scope():
            whole = psync.Variable(np.full(3, 2, np.float32), name="whole")
            cut = psync.Variable(np.ones(4, np.float32), name="cut")
            global_step = psync.get_or_create_global_step()
        lamb = SyncReplicasOptimizer(optimizers.Lamb(0.5), 1, name="lamb")
        clipping = SyncReplicasOptimizer(optimizers.SGD(1.0, clipnorm=1.0), 1, name="clipping")

        async def step(optimizer: SyncReplicasOptimizer, variable: Any) -> PushResult:
            gradient = np.ones(variable.shape, np.float32)
            return await optimizer.apply_gradients([(gradient, variable)], global_step)

        await in_step(coordinator, lambda: step(lamb, whole))
        np.testing.assert_allclose(await whole.read(), [2 - 0.5 * 2] * 3, atol=1e-5)
        await in_step(coordinator, lambda: step(lamb, cut))
        np.testing.assert_allclose(await cut.read(), [1 - 0.5] * 4, atol=1e-5)
        await in_step(coordinator, lambda: step(clipping, cut))
        np.testing.assert_allclose(await cut.read(), [0.5 - 1 / 2] * 4, atol=1e-5)


@pytest.mark.parametrize("norm", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}])
async def test_the_norm_of_the_mean_is_limited_and_not_that_of_each_gradient(
    norm: dict[str, float],
) -> None:
    async with model(2) as m:
        optimizer = SyncReplicasOptimizer(optimizers.SGD(1.0, **norm), 2)  # type: ignore[arg-type]
        await m.run(m.pushing(optimizer), 10.0, -9.5)
        assert await m.value() == -0.25  # the mean's norm is 0.35
        await m.run(m.pushing(optimizer), 10.0, 9.0)
        assert await m.value() == pytest.approx(-0.25 - 1 / np.sqrt(2))


def test_what_a_wrapped_optimizer_excludes_is_settled() -> None:
    inner = optimizers.SGD(0.1, weight_decay=0.1)
    wrapped = SyncReplicasOptimizer(inner, 2)
    for optimizer in (inner, wrapped):
        with pytest.raises(UsageError, match="is already in use"):
            optimizer.exclude_from_weight_decay(var_names=["bias"])


@for_each(
    "gradients, step, error, text",
    [
        ([], "step", ValueMismatchError, "no gradients given"),
        ([None], "step", ValueMismatchError, "all gradients are None (v)"),
        ([{"a": 1}], "step", ValueMismatchError, 'gradient for "v": expected shape (2,), got ()'),
        (ONES, None, ConfigurationError, "global_step is None, and stale gradients are detected"),
        (ONES, 3, ConfigurationError, "expected a variable as global_step, got int"),
        (
            ONES, "v", ConfigurationError,
            'expected an int64 scalar, variable "v" declared at ',
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_pushed_is_a_value_error(
    gradients: list[Any], step: Any, error: type[Exception], text: str
) -> None:
    variables = dict(zip(("v", "step"), declared(v=np.zeros(2, np.float32), step=0), strict=True))
    pairs = [(gradient, variables["v"]) for gradient in gradients]
    given = variables.get(step, step)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        at_once(SyncReplicasOptimizer(sgd(), 2).apply_gradients(pairs, given))
    assert type(caught.value) is error


async def test_the_program_is_no_replica() -> None:
    async with model(1) as m:
        with pytest.raises(UsageError) as caught:
            await SyncReplicasOptimizer(sgd(), 1).apply_gradients([([1.0, 1.0], m.v)], m.step)
        assert str(caught.value) == (
            "apply_gradients of a synchronous optimizer outside a step: the program is not a "
            "replica and would wait forever\nhint: call it in a scheduled step function, or in a "
            "training session"
        )


# --- the other methods -------------------------------------------------------------------------


async def test_minimize_returns_the_loss_of_the_trainable_variables_or_of_some() -> None:
    async with model(1) as m:
        w = declare(m.strategy, w=np.float32(4))
        optimizer, v, global_step = SyncReplicasOptimizer(sgd(), 1), m.v, m.step

        def loss(v: np.ndarray, w: np.ndarray) -> tuple[float, list[np.ndarray]]:
            return float(w * v.sum()), [np.full(2, w), np.float32(1)]

        async def step() -> Any:
            return await optimizer.minimize(loss, global_step)

        async def step_of_some() -> Any:  # with TensorFlow's arguments
            return await optimizer.minimize(
                lambda v: (7.0, [np.ones(2, np.float32)]), global_step, [v],
                SyncReplicasOptimizer.GATE_GRAPH, None, True, "train", None,
            )  # fmt: skip

        assert await in_step(m.coordinator, step) == 0
        assert (await m.value(), await w.read(), await m.global_step()) == (-4, 3, 1)
        assert await in_step(m.coordinator, step_of_some) == 7
        assert (await m.value(), await w.read()) == (-5, 3)


@for_each(
    "arguments, text",
    [
        ({}, "minimize: global_step is None"),
        ({"gate_gradients": 3}, "expected gate_gradients GATE_NONE, GATE_OP or"),
        ({"global_step": []}, "expected a variable as global_step, got list"),
    ],
)
def test_minimize_checks_before_it_computes(arguments: dict[str, Any], text: str) -> None:
    optimizer = SyncReplicasOptimizer(sgd(), 1, name="sync")

    def never(*values: Any) -> Any:
        raise AssertionError

    with pytest.raises(ConfigurationError, match=text):
        at_once(optimizer.minimize(never, **arguments))


async def test_gradients_are_computed_by_the_wrapped_optimizer() -> None:
    class Clipping(optimizers.SGD):
        async def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
            pairs = await super().compute_gradients(*args, **kwargs)
            return [(np.clip(gradient, -1, 1), variable) for gradient, variable in pairs]

    async with model(1) as m:
        optimizer = SyncReplicasOptimizer(Clipping(1.0), 1)
        v = m.v
        pairs = await optimizer.compute_gradients(lambda v: (0.0, [v + 5]), var_list=[v])
        assert [(gradient.tolist(), variable) for gradient, variable in pairs] == [([1, 1], v)]


def test_it_says_its_name_and_configuration() -> None:
    optimizer = SyncReplicasOptimizer(optimizers.SGD(0.5, name="inner"), 2, 3, name="mine")
    assert optimizer.get_name() == "mine"
    assert SyncReplicasOptimizer(sgd(), 1).get_name() == "sync_replicas"
    config = optimizer.get_config()
    assert config["replicas_to_aggregate"] == 2
    assert config["total_num_replicas"] == 3
    assert config["optimizer"]["learning_rate"] == {"kind": "Constant", "value": 0.5}
    assert repr(optimizer).startswith("<SyncReplicasOptimizer 'mine' 2 of 3, <SGD 'inner' ")


# --- tokens, and what programs for TensorFlow call ---------------------------------------------


async def test_initial_tokens_can_be_put_before_and_once() -> None:
    async with model(1) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 3, 1)
        assert await optimizer.get_init_tokens_op() == 0  # of the strategy that runs
        assert await optimizer.init_tokens(m.step) == 0
        results = await m.run(m.pushing(optimizer), 1.0, 2.0, 3.0)
        assert [result.step for result in results] == [0, 0, 1]
        assert await optimizer.get_init_tokens_op() == 1
        assert await optimizer.get_init_tokens_op(num_tokens=2) == 1
        for count, text in WRONG_COUNTS:
            with pytest.raises(ValueError, match=text):
                optimizer.get_init_tokens_op(count)  # type: ignore[arg-type]
        results = await m.run(m.pushing(optimizer), 1.0, 2.0, 3.0)
        assert [result.step for result in results] == [1, 1, 2]


WRONG_COUNTS = [
    (1, "too few tokens to finish the first step: got 1, needed 2"),
    (-2, "too few tokens"),
    (1.5, "expected a whole number as num_tokens, got 1.5"),
    (True, "expected a whole number as num_tokens, got True"),
]


@for_each("count, text", WRONG_COUNTS)
def test_a_wrong_number_of_tokens_is_a_value_error(count: Any, text: str) -> None:
    optimizer = SyncReplicasOptimizer(sgd(), 3, 1)
    with strategy_of().scope():
        step = psync.get_or_create_global_step()
    with pytest.raises(ValueError, match=text):
        optimizer.make_session_run_hook(True, count)
    with pytest.raises(ValueError, match=text):
        at_once(optimizer.init_tokens(step, count))


@pytest.mark.parametrize("by", ["call", "hook"])
async def test_where_no_initial_tokens_are_needed_none_may_be_put(by: str) -> None:
    async with model(1) as m:
        optimizer = SyncReplicasOptimizer(sgd(), 1, tensorflow_compat=True)
        if by == "call":
            assert await optimizer.init_tokens(m.step, 0) == 0
        else:  # which puts them on the chief
            await optimizer.make_session_run_hook(False, 7).after_create_session(None)
            await optimizer.make_session_run_hook(True).after_create_session(None)  # ps 0 knows
            await optimizer.make_session_run_hook(True, 0).after_create_session(None)
        results = await m.run(m.pushing(optimizer), 1.0, 1.0)  # so no step is wasted
        assert [result.outcome for result in results] == [ACCEPTED, ACCEPTED]


def test_the_hook_needs_a_global_step_to_put_other_numbers_of_tokens() -> None:
    hook = SyncReplicasOptimizer(sgd(), 1, name="sync").make_session_run_hook(True, 3)
    with pytest.raises(UsageError, match="sync: 3 initial tokens for an unknown global step"):
        at_once(hook.after_create_session(None))


@pytest.mark.promise("schedule.open-step-named")
@pytest.mark.virtual_time
@pytest.mark.parametrize(("away", "what"), [
    (("worker-1", "ps-1"), "the part of /job:worker/task:1 at /job:ps/task:1 (push 2)"),
    (("worker-1", "ps-0"), "the part of /job:worker/task:1 at /job:ps/task:0 (push 2)"),
    (("ps-0", "ps-1"), "/job:ps/task:1, which applies step 0"),
    ((), "/job:worker/task:1"),
])  # fmt: skip
async def test_a_step_that_does_not_close_says_why(away, what, caplog) -> None:
    async with coordinating(num_ps=2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = [psync.Variable(np.float32(0)), psync.Variable(np.float32(0))]  # on ps 0 and ps 1
            step = psync.get_or_create_global_step()
        optimizer = SyncReplicasOptimizer(sgd(), 2)

        async def train(worker: int) -> None:
            for turn in range(2):
                await psync.pull(v)
                if turn and worker:
                    await memory_cluster.note("second")
                    await memory_cluster.event_of("go on").wait()
                await optimizer.apply_gradients([(np.float32(1), each) for each in v], step)

        coordinator.schedule(train, args=(0,))
        coordinator.schedule(train, args=(1,))
        await memory_cluster.event_of("second").wait()
        if away:
            cluster.network.partition(*away)
            memory_cluster.event_of("go on").set()
        expected = f"gradients and waits for {what}"
        with pytest.raises(psync.DeadlineExceeded, match=re.escape(expected)):
            await coordinator.join(timeout=14.5)
        assert any(expected in line for line in caplog.messages if "join waits: " in line)
        assert what in str([group.lacks + group.waits_for
                            for group in (await coordinator.status()).steps.groups])  # fmt: skip
        assert any(f"waits for {what}" in line for line in caplog.messages) or not away
        if away:
            cluster.network.heal(*away)
        memory_cluster.event_of("go on").set()
        await coordinator.join()
        assert await psync.pull(v) == [-2, -2]


# --- what the tests share ----------------------------------------------------------------------


async def counted(cluster: memory_cluster.MemoryCluster, count: int) -> None:
    """Wait until so many pushes count in the present step."""
    groups = lambda: cluster.tasks["ps-0"].statistics()["sync"].values()  # noqa: E731
    await until(lambda: max((group["counted"] for group in groups()), default=0) >= count)
