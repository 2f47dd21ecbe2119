"""Accumulators of both kinds: handles that are declared once; gradients in whole clusters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from local_training import at_once, inside_a_step, strategy_of, training
from loops import for_each
from memory_cluster import MemoryCluster, coordinating, event_of, note, session_cluster
from psync.errors import (
    ClosureCancelled,
    ConfigurationError,
    UsageError,
    ValueMismatchError,
)

pytestmark = pytest.mark.virtual_time

ACCEPTED, STALE, DUPLICATE = (psync.Outcome(name) for name in ("accepted", "stale", "duplicate"))

ONES = np.ones((1, 3), np.float32)


@dataclass
class Scene:
    """A running coordinator, and an accumulator of two numbers."""

    cluster: MemoryCluster
    strategy: psync.ParameterServerStrategy
    coordinator: psync.ClusterCoordinator
    held: psync.ConditionalAccumulator

    def counters(self, ps: int = 0) -> dict[str, int]:
        counters: dict[str, int] = self.cluster.tasks[f"ps-{ps}"].statistics()["accumulators"]
        return counters


@contextlib.asynccontextmanager
async def scene_of(num_ps: int = 1, **options: Any) -> AsyncIterator[Scene]:
    async with coordinating(num_ps, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            held = psync.ConditionalAccumulator(np.float32, (2,), **options)
        yield Scene(cluster, coordinator.strategy, coordinator, held)


# --- steps -----------------------------------------------------------------------------------


async def test_steps_apply_and_the_program_takes_their_mean():
    async with scene_of(2) as scene:
        held = scene.held

        async def step(value: float) -> psync.GradientResult:
            return await held.apply_grad(np.full(2, value, np.float32))

        values = [scene.coordinator.schedule(step, args=(float(n),)) for n in range(4)]
        assert (await held.take_grad(4)).tolist() == [1.5, 1.5]
        await scene.coordinator.join()
        results = await scene.coordinator.fetch(values)
        assert {result.outcome for result in results} == {ACCEPTED}
        assert sorted(result.count for result in results) == [0, 1, 2, 3]
        assert await held.step() == 1


async def test_both_workers_apply_and_take_at_once_and_nothing_is_lost_or_counted_twice():
    async with scene_of(reduction_type="SUM", max_staleness=1000) as scene:
        held = scene.held

        async def gives(value: float) -> None:
            for _ in range(5):
                await held.apply_grad(np.full(2, value, np.float32))

        async def takes() -> float:
            taken = await asyncio.gather(*(held.take_grad(2) for _ in range(5)))
            return float(sum(each[0] for each in taken))

        closures = [(gives, (1.0,)), (takes, ()), (gives, (10.0,)), (takes, ())]
        values = [scene.coordinator.schedule(step, args=args) for step, args in closures]
        for value in (100.0, 1000.0):
            await asyncio.gather(*(held.apply_grad([value, value]) for _ in range(5)))
        while any(not value.done() for value in values):
            await asyncio.sleep(1)
            if scene.counters()["waiting"]:  # gradients that were there together went together
                await held.apply_grad([0.0, 0.0])
        await scene.coordinator.join()
        total = sum([await value or 0.0 for value in values])
        if await held.num_accumulated():
            total += float((await held.take_grad(1))[0])
        assert total == 5 * 1111


async def test_a_gradient_of_an_earlier_step_is_stale_within_the_bound_it_counts():
    async with scene_of() as scene, scene_of_another(scene, max_staleness=1) as tolerant:
        for held, outcomes in ((scene.held, [STALE, STALE]), (tolerant, [ACCEPTED, STALE])):
            got = []
            for _ in range(2):
                await held.apply_grad([1.0, 1.0], local_step=7)
                await held.take_grad(1)
                got.append((await held.apply_grad([2.0, 2.0], local_step=0)).outcome)
            assert got == outcomes
            assert await held.step() == 2


@contextlib.asynccontextmanager
async def scene_of_another(
    scene: Scene, **options: Any
) -> AsyncIterator[psync.ConditionalAccumulator]:
    with scene.strategy.scope():
        yield psync.ConditionalAccumulator(np.float32, (2,), **options)


async def test_steps_and_weights_are_passed_on():
    async with scene_of() as scene:
        held = scene.held
        await held.apply_grad([1.0, 2.0], weight=3)
        await held.set_global_step(5)
        assert await held.num_accumulated() == 1
        result = await held.apply_grad([1.0, 1.0], local_step=4)
        assert result == psync.GradientResult(STALE, 1, 5)
        await held.set_global_step(2)
        result = await held.apply_grad([5.0, 6.0], local_step=4)
        assert (result.outcome, result.count) == (ACCEPTED, 2)
        assert await held.step() == 2
        assert (await held.take_grad(2)).tolist() == [2.0, 3.0]


async def test_programs_that_train_in_sessions_share_what_all_of_them_declare():
    async def main(strategy: psync.ParameterServerStrategy) -> float:
        with strategy.scope():
            psync.Variable(0.0)
            held = [psync.ConditionalAccumulator(np.float32) for _ in range(2)]
        async with psync.MonitoredTrainingSession(strategy):
            worker = strategy.cluster_resolver.task_id
            await held[1].apply_grad(float(worker + 1))
            await asyncio.sleep(1)
            return float(await held[1].take_grad(2)) if worker else await held[1].step()

    async with session_cluster(2, 2) as cluster:
        assert await cluster.run_all(main) == [0, 1.5]


# --- what fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["cancelled", "timeout"])
async def test_a_take_that_is_cancelled_or_whose_timeout_passes_consumes_nothing(ends: str):
    async with scene_of() as scene:

        async def take() -> None:
            async with asyncio.timeout(3 if ends == "timeout" else None):
                await scene.held.take_grad(2)

        taking = asyncio.create_task(take())
        await asyncio.sleep(1)
        assert scene.counters()["waiting"] == 1
        if ends == "cancelled":
            taking.cancel()
        await asyncio.sleep(3)
        assert taking.cancelled() or isinstance(taking.exception(), TimeoutError)
        assert scene.counters()["waiting"] == 0
        assert (await scene.held.apply_grad([1.0, 1.0])).count == 1
        await scene.held.apply_grad([3.0, 3.0])
        assert await scene.held.num_accumulated() == 2
        assert (await scene.held.take_grad(1)).tolist() == [2.0, 2.0]


async def test_a_step_that_is_cancelled_while_it_takes_consumes_nothing():
    async with scene_of() as scene:
        held = scene.held

        async def takes() -> None:
            await note("takes")
            await held.take_grad(1)

        value = scene.coordinator.schedule(takes)
        await event_of("takes").wait()
        await asyncio.sleep(1)

        async def fails() -> None:
            raise ValueError("here")

        scene.coordinator.schedule(fails)
        with pytest.raises(ValueError, match="here"):
            await scene.coordinator.join()
        with pytest.raises(ClosureCancelled):
            await value
        assert (await held.apply_grad([1.0, 1.0])).count == 1


async def test_a_worker_that_dies_after_its_apply_has_applied_once():
    async with scene_of() as scene:
        held = scene.held

        async def step() -> psync.GradientResult:
            result = await held.apply_grad(np.ones(2, np.float32))
            runs = memory_cluster.shared.setdefault("runs", [])
            runs.append(psync.get_worker_index())
            if len(runs) == 1:
                await note("applied")
                await asyncio.sleep(3600)
            return result

        value = scene.coordinator.schedule(step)
        await event_of("applied").wait()
        (first,) = memory_cluster.shared["runs"]
        await scene.cluster.stop(f"worker-{first}")
        await scene.coordinator.join(timeout=60)
        assert await value == psync.GradientResult(DUPLICATE, 1, 0)
        assert memory_cluster.shared["runs"] == [first, 1 - first]
        assert (await held.take_grad(1)).tolist() == [1.0, 1.0]


async def test_a_worker_that_dies_while_it_takes_consumes_nothing():
    async with scene_of() as scene:
        held = scene.held

        async def step() -> float:
            await note(f"run {len(memory_cluster.shared)}")
            memory_cluster.shared["worker"] = psync.get_worker_index()
            return float((await held.take_grad(1))[0])

        value = scene.coordinator.schedule(step)
        await asyncio.sleep(1)
        await scene.cluster.stop(f"worker-{memory_cluster.shared['worker']}")
        await asyncio.sleep(5)
        assert scene.counters()["waiting"] == 1  # that of the second run
        await held.apply_grad([4.0, 4.0])
        assert await value == 4.0
        await scene.coordinator.join()


@pytest.mark.parametrize("cut", [False, True])
async def test_a_take_survives_a_lost_connection_and_a_ps_keeps_no_value_that_has_arrived(
    cut: bool,
):
    async with scene_of() as scene:
        for value in (1.0, 2.0, 3.0):
            taking = asyncio.create_task(scene.held.take_grad(1))
            await asyncio.sleep(1)
            if cut:
                scene.cluster.network.cut("ps-0:1")
                await asyncio.sleep(5)
            await scene.held.apply_grad([value, value], local_step=9)
            assert (await taking).tolist() == [value, value]
        await asyncio.sleep(1)
        assert scene.counters()["kept"] == 0


async def test_an_apply_that_was_begun_ends_though_its_caller_is_cancelled():
    async with scene_of() as scene:
        await scene.held.num_accumulated()
        applying = asyncio.create_task(scene.held.apply_grad([1.0, 1.0]))
        await asyncio.sleep(0)
        applying.cancel()
        await asyncio.sleep(1)
        assert applying.cancelled()
        assert await scene.held.num_accumulated() == 1


# --- sparse ----------------------------------------------------------------------------------


async def test_sparse_gradients_of_steps_become_the_means_of_their_rows():
    async with scene_of() as scene:
        with scene.strategy.scope():
            rows = psync.SparseConditionalAccumulator(np.float64, (9, None))

        async def step(indices: list[int], value: float) -> psync.GradientResult:
            values = np.full((len(indices), 2), value)
            slices = SimpleNamespace(
                indices=np.array(indices, np.int32), values=values, dense_shape=(9, 2)
            )
            return await rows.apply_indexed_slices_grad(slices)

        for arguments in (([7, 2], 1.0), ([2, 2], 2.0), ([], 0.0)):
            scene.coordinator.schedule(step, args=arguments)
        await scene.coordinator.join()
        taken = await rows.take_indexed_slices_grad(3)
        assert taken.indices.tolist() == [2, 7]
        assert taken.values.tolist() == [[2.5, 2.5], [1.0, 1.0]]
        assert taken.dense_shape == (9, 2)
        await rows.apply_grad([3], np.ones((1, 4)), local_step=1)
        indices, values, dense_shape = await rows.take_grad(1)
        assert (indices.tolist(), values.shape, dense_shape) == ([3], (1, 4), (9, 4))
        # A take of nothing but empty gradients has no rows.
        with scene.strategy.scope():
            rows = psync.SparseConditionalAccumulator(np.float32)
        await rows.apply_grad([], np.empty((0, 3), np.float32))
        indices, values, dense_shape = await rows.take_grad(1)
        assert (indices.shape, values.shape, dense_shape) == ((0,), (0, 3), (-1, 3))


# --- what does not fit -----------------------------------------------------------------------


@for_each(
    "call, error, text",
    [
        (lambda h: h.apply_grad([1.0] * 3), ValueMismatchError, r"expected \(2,\), got \(3,\)"),
        (lambda h: h.apply_grad(np.zeros(2)), ValueMismatchError, "of float32, got float64"),
        (lambda h: h.apply_grad([1.0] * 2, 1 << 63), ValueMismatchError, "scalar as local_step"),
        (lambda h: h.apply_grad([1.0] * 2, 0, 0.0), ValueMismatchError, "expected a weight from"),
        (lambda h: h.take_grad(0), ConfigurationError, "expected a number of gradients above 0"),
        (lambda h: h.set_global_step(1.5), ConfigurationError, r"an integer as step, got 1\.5"),
    ],
)
def test_what_does_not_fit_is_refused_at_once_and_nothing_is_sent(
    call: Any, error: type[Exception], text: str
) -> None:
    with strategy_of().scope():
        held = psync.ConditionalAccumulator(np.float32, (2,))
    with pytest.raises(error, match=text):
        at_once(call(held))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([2], ONES), "expected indices of 0 or more and below 2, got 2"),
        (([-1], ONES), "got -1"),
        (([0, 1], ONES), "expected 2 rows of values"),
        (([0], ONES[:, :2]), "expected dimension 1 of values to be 3, got 2"),
        (([0], ONES, (4, 3)), "expected dimension 0 of dense_shape to be 2, got 4"),
    ],
)
def test_rows_that_do_not_fit_are_refused_at_once(arguments: tuple[Any, ...], text: str) -> None:
    with strategy_of().scope():
        rows = psync.SparseConditionalAccumulator(np.float32, (2, 3))
    with pytest.raises(ValueMismatchError, match=text):
        at_once(rows.apply_grad(*arguments))


async def test_a_shape_that_the_first_gradient_decides_is_checked_on_the_ps():
    async with scene_of() as scene:
        with scene.strategy.scope():
            held = psync.ConditionalAccumulator(np.float32, forbid_nonfinite=True)
        await held.apply_grad([1.0, 2.0])
        with pytest.raises(
            ValueMismatchError, match=r'accumulator "conditional_accumulator_1": shape'
        ):
            await held.apply_grad([1.0])
        with pytest.raises(ValueMismatchError, match="expected finite values, got 1 of 2"):
            await held.apply_grad([1.0, np.nan])
        assert await held.num_accumulated() == 1


# --- plain steps, large gradients -------------------------------------------------------------


async def test_large_gradients_go_both_ways():
    async with training(1, 2) as (strategy, coordinator):
        with strategy.scope():
            held = psync.ConditionalAccumulator(np.float32)
            rows = psync.SparseConditionalAccumulator(np.float32)
        count = 1 << 20

        async def step(value: float) -> None:
            await held.apply_grad(np.full(count, value, np.float32))
            indices = np.arange(1000)[::-1]
            await rows.apply_grad(indices, np.full((1000, 1024), value, np.float32))

        for value in (1.0, 3.0):
            coordinator.schedule(step, args=(value,))
        mean = await held.take_grad(2)
        assert mean.shape == (count,)
        assert (mean == 2).all()
        mean += 1  # it is the caller's
        taken = await rows.take_indexed_slices_grad(2)
        assert taken.indices.tolist() == list(range(1000))
        assert (taken.values == 2).all()
        await coordinator.join()


# --- handles ---------------------------------------------------------------------------------


def test_accumulators_are_placed_one_ps_after_the_other_apart_from_variables():
    strategy = strategy_of(2)
    with strategy.scope():
        held = [psync.ConditionalAccumulator("float32") for _ in range(3)]
        variables = [psync.Variable(0.0) for _ in range(2)]
    assert [each.place.ps for each in held] == [0, 1, 0]
    assert [each.device for each in variables] == [each.device for each in held[:2]]
    assert [each.name for each in held] == [
        "conditional_accumulator", "conditional_accumulator_1", "conditional_accumulator_2",
    ]  # fmt: skip


def test_a_handle_says_what_it_stands_for():
    with strategy_of(1).scope():
        held = psync.ConditionalAccumulator(np.float16, [None, 3], name="g")
        rows = psync.SparseConditionalAccumulator("bfloat16")
    assert (held.dtype, held.shape, held.name) == (np.float16, (None, 3), "g")
    assert (rows.dtype.name, rows.shape) == ("bfloat16", None)
    assert rows.name == "sparse_conditional_accumulator"
    assert repr(held) == "<ConditionalAccumulator 'g' shape=(None, 3) dtype=float16 on ps 0>"


def test_a_shared_name_stands_for_one_accumulator_of_one_kind():
    with strategy_of(2).scope():
        held = psync.ConditionalAccumulator("float32", (2,), shared_name="g")
        assert psync.ConditionalAccumulator(np.float32, [2], shared_name="g") is held
        with pytest.raises(ConfigurationError, match=r"expected shape=\[2\], got shape=None"):
            psync.ConditionalAccumulator("float32", shared_name="g")
        with pytest.raises(
            ConfigurationError, match=r"expected kind='dense', .* got kind='sparse'"
        ):
            psync.SparseConditionalAccumulator("float32", (2,), shared_name="g")
        assert psync.ConditionalAccumulator("float32", name="g").name == "g_1"


@for_each(
    "arguments, text",
    [
        (("int32",), "as dtype, got 'int32'"),
        (("float32", (2, -1)), "expected dimensions"),
        (("float32", None, None, "g", "mean"), "'MEAN' or 'SUM', got 'mean'"),
        (("float32", None, ""), "expected a text as shared_name"),
        (("float32", None, 3), "expected a text as shared_name"),
        (("float32", None, None, ""), "expected a text as name"),
    ],
)
def test_parameters_of_no_accumulator_are_refused(arguments, text):
    with strategy_of(1).scope(), pytest.raises(ConfigurationError, match=text):
        psync.ConditionalAccumulator(*arguments)


def test_without_a_coordinator_and_in_a_step_of_another_strategy_there_is_no_way_to_the_ps():
    with strategy_of(1).scope():
        held = psync.ConditionalAccumulator("float32")
    with pytest.raises(UsageError, match=r'take_grad of accumulator "conditional_accumulator": no'):
        at_once(held.take_grad(1))
    with inside_a_step(), pytest.raises(UsageError, match="belongs to another program or strat"):
        at_once(held.apply_grad(1.0))


def test_a_handle_that_arrives_twice_is_one_object():
    with strategy_of(1).scope():
        held = psync.ConditionalAccumulator("float32", (2,))
    sent = pickle.dumps(held)
    assert pickle.loads(sent) is held
    del held
    gc.collect()
    one, two = pickle.loads(sent), pickle.loads(sent)
    assert one is two
    assert (type(one), one.shape) == (psync.ConditionalAccumulator, (2,))
