"""Moving averages: where they lie, what they begin with, and who finds them."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import at_once, declare, declared, in_step, inside_a_step, strategy_of, training
from loops import for_each
from psync.errors import ConfigurationError, UsageError, ValueMismatchError


def variables(strategy: psync.ParameterServerStrategy) -> tuple[Any, Any]:
    w, b = declare(strategy, w=np.arange(12, dtype=np.float32).reshape(6, 2), b=np.ones(2))
    return w, b


@for_each(
    "given, error, text",
    [
        *[
            ({"decay": decay}, ConfigurationError, r"expected decay in \[0, 1\), got")
            for decay in (1.0, -0.1, float("nan"), 2, "0.9", None)
        ],
        *[
            ({"num_updates": number}, ConfigurationError, "to be True or the global step")
            for number in (3, 0.5, "step")
        ],
        ({"name": ""}, ConfigurationError, "expected a name, got ''"),
        (
            {"num_updates": declared(b=np.ones(2))}, UsageError,
            "num_updates of a moving average: expected an int",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_average_is_refused(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        psync.ExponentialMovingAverage(**{"decay": 0.9, **given})


def test_it_says_what_it_is() -> None:
    ema = psync.ExponentialMovingAverage(np.float32(0.5), name="average")  # type: ignore[arg-type]
    assert (ema.name, ema.decay, ema.num_updates) == ("average", 0.5, False)
    assert repr(ema) == "<ExponentialMovingAverage decay=0.5 of 0 variables>"


class TestPlaces:
    @pytest.mark.parametrize("shards", [1, 2, 3])
    def test_an_average_lies_beside_its_variable_and_takes_no_turn(self, shards: int) -> None:
        strategy = strategy_of(4, psync.FixedShardsPartitioner(shards))
        w, _ = variables(strategy)
        with strategy.scope():
            others = [psync.Variable(np.zeros(4, np.float32)) for _ in range(3)]
        plain = [[shard.ps for shard in v.spec.shards] for v in (w, *others)]

        strategy = strategy_of(4, psync.FixedShardsPartitioner(shards))
        w, _ = variables(strategy)
        ema = psync.ExponentialMovingAverage(0.9)
        ema.apply([w])
        with strategy.scope():
            others = [psync.Variable(np.zeros(4, np.float32)) for _ in range(3)]
        assert [[shard.ps for shard in v.spec.shards] for v in (w, *others)] == plain
        shadow = ema.average(w)
        assert shadow is not None
        assert type(shadow) is type(w)
        assert shadow.device == w.device
        for mine, its in zip(shadow.spec.shards, w.spec.shards, strict=True):
            assert (mine.offset, mine.shape, mine.ps) == (its.offset, its.shape, its.ps)
            assert mine.key == (shadow.spec.variable_id, its.index)

    def test_an_average_is_named_after_its_variable_and_not_trainable(self) -> None:
        strategy = strategy_of()
        w, b = variables(strategy)
        ema = psync.ExponentialMovingAverage(0.9)
        ema.apply([w])
        shadow = ema.average(w)
        assert shadow is not None
        assert shadow.name == "w/ExponentialMovingAverage" == ema.average_name(w)
        assert ema.average_name(b) == "b/ExponentialMovingAverage"
        assert (shadow.shape, shadow.dtype) == (w.shape, w.dtype)
        assert "test_moving_averages.py" in shadow.spec.declared_at
        assert strategy.trainable_variables == (w, b)
        assert strategy.variables == (w, b, shadow)

    def test_a_variable_is_averaged_once_by_each(self) -> None:
        strategy = strategy_of()
        w, b = variables(strategy)
        fast, slow = psync.ExponentialMovingAverage(0.9), psync.ExponentialMovingAverage(0.99)
        fast.apply([w, w])
        first = fast.average(w)
        fast.apply([w, b])
        assert fast.average(w) is first
        assert len(strategy.variables) == 4
        slow.apply([w])
        assert fast.average_name(w) == "w/ExponentialMovingAverage"
        assert slow.average_name(w) == "w/ExponentialMovingAverage_1"

    def test_what_cannot_be_averaged_is_an_error_before_anything_is_declared(self) -> None:
        strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
        w, _ = variables(strategy)
        count = declare(strategy, count=[1, 2])
        ema = psync.ExponentialMovingAverage(0.9)
        with pytest.raises(
            ValueMismatchError, match='"count": expected a float variable, got int64'
        ):
            ema.apply([w, count])
        with pytest.raises(UsageError, match='"w/part_0": it is a shard of "w"'):
            ema.apply([w, w.variables[0]])
        with pytest.raises(UsageError, match="expected a variable, got ndarray"):
            ema.apply([w, np.zeros(2)])  # type: ignore[list-item]
        with pytest.raises(UsageError, match='expected a list of variables, got variable "w"'):
            ema.apply(w)
        with pytest.raises(UsageError, match="apply without var_list outside a strategy's scope"):
            ema.apply()
        assert len(strategy.variables) == 3
        assert ema.average(w) is None
        gone, _ = variables(strategy_of())
        with pytest.raises(UsageError, match='"w": its strategy is not in this process'):
            ema.apply([gone])
        with inside_a_step(), pytest.raises(UsageError, match="declaring moving averages inside a"):
            ema.apply([w])


class TestFinding:
    def test_a_nesting_of_variables_becomes_one_of_averages(self) -> None:
        strategy = strategy_of()
        w, b = variables(strategy)
        ema = psync.ExponentialMovingAverage(0.9)
        ema.apply([w])
        with pytest.raises(UsageError, match='variable "b" has no moving average'):
            ema.averages((w, b))
        ema.apply([b])
        averages = ema.averages({"dense": (w, [b]), "rate": 0.5})
        assert averages == {"dense": (ema.average(w), [ema.average(b)]), "rate": 0.5}
        assert ema.averages(w) is ema.average(w)

    def test_what_to_restore_is_the_averages_and_all_that_have_none(self) -> None:
        strategy = strategy_of()
        w, b = variables(strategy)
        ema = psync.ExponentialMovingAverage(0.9, name="ema")
        with strategy.scope():
            step = psync.get_or_create_global_step()
            ema.apply([w])
            assert ema.variables_to_restore() == {"w/ema": w, "b/ema": b, "global_step": step}
        assert ema.variables_to_restore([w]) == {"w/ema": w, "b": b, "global_step": step}
        with pytest.raises(UsageError, match="variables_to_restore before apply outside a str"):
            psync.ExponentialMovingAverage(0.9).variables_to_restore()

    @pytest.mark.parametrize("travel", [copy.copy, lambda ema: pickle.loads(pickle.dumps(ema))])
    def test_it_travels_with_its_handles(self, travel: Any) -> None:
        strategy = strategy_of()
        w, _ = variables(strategy)
        with strategy.scope():
            step = psync.get_or_create_global_step()
        ema = psync.ExponentialMovingAverage(0.9, True, name="ema")
        ema.apply([w])
        arrived = travel(ema)
        assert arrived.average(w) is ema.average(w)
        assert (arrived.name, arrived.decay, arrived.num_updates) == ("ema", 0.9, step)


class TestTraining:
    @pytest.mark.parametrize("shards", [1, 3])
    async def test_averages_begin_with_the_values_of_their_variables(self, shards: int) -> None:
        partitioner = psync.FixedShardsPartitioner(shards)
        async with training(2, partitioner=partitioner) as (strategy, _):
            w, b = variables(strategy)
            ema = psync.ExponentialMovingAverage(0.9)
            ema.apply([w])
            weights = await psync.pull(ema.averages(w))
            assert np.array_equal(weights, np.arange(12).reshape(6, 2))

            await w.assign_add(np.ones((6, 2), np.float32))
            await b.assign([5.0, 6.0])
            ema.apply([w, b])
            weights, bias = await psync.pull(ema.averages((w, b)))
            assert np.array_equal(weights, np.arange(12).reshape(6, 2))  # its own since then
            assert bias.tolist() == [5, 6]  # those of now, not the initial ones

    async def test_a_step_reads_averages(self) -> None:
        async with training() as (strategy, coordinator):
            w, _ = variables(strategy)
            ema = psync.ExponentialMovingAverage(0.9)
            ema.apply([w])

            async def evaluate() -> Any:
                shadow = ema.average(w)
                assert shadow is not None
                return await psync.pull(ema.averages([w])), await shadow.read()

            (pulled,), read = await in_step(coordinator, evaluate)
            assert np.array_equal(pulled, read)
            assert np.array_equal(read, np.arange(12).reshape(6, 2))


class TestUpdating:
    @pytest.mark.parametrize("shards", [1, 3])
    async def test_averages_follow_their_variables(self, shards: int) -> None:
        partitioner = psync.FixedShardsPartitioner(shards)
        async with training(2, partitioner=partitioner) as (strategy, coordinator):
            w, b = variables(strategy)
            ema = psync.ExponentialMovingAverage(0.75)
            ema.apply([w, b])
            await w.assign_add(np.full((6, 2), 4, np.float32))
            await ema.update()
            await b.assign([5.0, 5.0])

            async def update() -> None:
                await ema.update()

            await in_step(coordinator, update)
            weights, bias = await psync.pull(ema.averages((w, b)))
            ahead = weights - np.arange(12).reshape(6, 2)
            assert (ahead == 4 * (1 - 0.75**2)).all()
            assert (bias == 1 + 4 * 0.25).all()

    async def test_the_decay_follows_the_global_step(self) -> None:
        async with training() as (strategy, coordinator):
            with strategy.scope():
                v = psync.Variable(np.zeros(2), name="v")
                step = psync.get_or_create_global_step()
            by_true = psync.ExponentialMovingAverage(0.9, True, name="by_true")
            by_step = psync.ExponentialMovingAverage(0.9, step, name="by_step")
            by_true.apply([v])
            by_step.apply([v])
            await v.assign([1.0, 1.0])

            async def update() -> None:
                await by_true.update()
                await by_step.update()
                await step.assign_add(8)

            expected = 0.0
            for decay in (1 / 10, 9 / 18, 17 / 26):
                await in_step(coordinator, update)
                expected = 1 - decay * (1 - expected)
                for ema in (by_true, by_step):
                    assert await psync.pull(ema.averages(v)) == pytest.approx([expected] * 2)

    def test_nothing_to_follow_or_average_or_nobody_to_ask_is_an_error(self) -> None:
        strategy = strategy_of()
        w, _ = variables(strategy)
        following = psync.ExponentialMovingAverage(0.9, True)
        following.apply([w])
        with pytest.raises(UsageError, match="num_updates=True, but there is no global step"):
            at_once(following.update())
        ema = psync.ExponentialMovingAverage(0.9)
        with pytest.raises(UsageError, match="update of moving averages: no variable is averaged"):
            at_once(ema.update())
        ema.apply([w])
        with pytest.raises(UsageError, match="update of moving averages: no connection to the ps"):
            at_once(ema.update())

    @pytest.mark.virtual_time
    async def test_an_update_in_a_closure_that_runs_twice_happens_once(self) -> None:
        async with memory_cluster.coordinating(num_ps=2) as (cluster, coordinator):
            v = declare(coordinator.strategy, v=np.zeros(2))
            ema = psync.ExponentialMovingAverage(0.5)
            ema.apply([v])
            await v.assign([1.0, 1.0])

            async def step() -> int:
                await ema.update()
                runs = memory_cluster.shared["runs"] = memory_cluster.shared.get("runs", 0) + 1
                if runs == 1:
                    memory_cluster.shared["worker"] = psync.get_worker_index()
                    await memory_cluster.note("updated")
                    await asyncio.Event().wait()  # until its worker is gone
                return runs

            value = coordinator.schedule(step)
            await memory_cluster.event_of("updated").wait()
            await cluster.stop(f"worker-{memory_cluster.shared['worker']}")
            await coordinator.join()
            assert await value == 2
            assert (await psync.pull(ema.averages(v))).tolist() == [0.5, 0.5]
