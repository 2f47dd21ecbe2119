"""StrategyExtended and replica contexts as TensorFlow's pages show them, on real tasks.

What docs/howto/tensorflow.md says of these names is run here. There are two ps tasks, and two
workers, each of which is a replica of what ``strategy.run`` is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import psync
from psync import ReduceOp, VariableAggregation, VariableSynchronization
from psync.errors import PartitionError, ReplicaValueError, UsageError
from shared_tasks import SharedTasks, shared_tasks, trains

pytestmark = [pytest.mark.processes, pytest.mark.slow]

floats = partial(np.asarray, dtype=np.float32)  # travels to workers; a function of this file cannot


@pytest.fixture(scope="module")
def tasks() -> Iterator[SharedTasks]:
    with shared_tasks(2, 2) as running:
        yield running


# --- once for each replica ---------------------------------------------------------------------


@trains()
async def test_three_plus_replica_id(distribution: Any, coordinator: Any) -> None:
    """The example of ``call_for_each_replica``, and its other two names."""

    def merge_fn(distribution: Any, three_plus_replica_id: Any) -> Any:
        return sum(distribution.experimental_local_results(three_plus_replica_id))

    async def fn(three: int) -> int:
        replica_ctx = psync.get_replica_context()
        assert replica_ctx is not None
        v = three + replica_ctx.replica_id_in_sync_group
        s = await replica_ctx.merge_call(merge_fn, args=(v,))
        return int(s + v)

    with distribution.scope():
        for run in (
            distribution.run,
            distribution.experimental_run_v2,
            distribution.extended.call_for_each_replica,
        ):
            merged_results = await run(fn, args=[3])
            assert isinstance(merged_results, psync.PerReplica)
            assert distribution.experimental_local_results(merged_results) == (10, 11)


@trains()
async def test_arguments_are_unwrapped_and_results_merged_item_by_item(
    strategy: Any, coordinator: Any
) -> None:
    with strategy.scope():
        v = psync.Variable(floats([1, 2]), name="v")

    async def fn(w: str, *, everyones: int) -> tuple[Any, ...]:
        context = psync.get_replica_context()
        assert context is not None
        assert context.num_replicas_in_sync == 2
        return v, w, psync.get_worker_index(), everyones

    w = psync.PerReplica(("w0", "w1"))
    merged, a, workers, seven = await strategy.run(fn, (w,), {"everyones": 7})
    assert isinstance(a, psync.PerReplica)
    assert a.values == ("w0", "w1")
    assert merged is v  # the same object from every replica
    assert workers.values == (0, 1)  # two real workers
    assert seven.values == (7, 7)  # equal numbers are not the same object
    mirrored = psync.Mirrored(["m", "m"])  # has no part of its own for any replica
    _, b, *_ = await strategy.run(fn, (mirrored,), {"everyones": 7})
    assert b.values == ("m", "m")


def test_replica_cross_replica_and_update_context(tasks: SharedTasks) -> None:
    async def train(strategy: Any, coordinator: Any) -> None:
        default = psync.get_replica_context()
        assert default is not None  # the default single replica context
        assert (default.replica_id_in_sync_group, default.num_replicas_in_sync) == (0, 1)
        assert not psync.has_strategy()
        with strategy.scope():
            v = psync.Variable(0.0)
            assert psync.get_replica_context() is None
            assert psync.in_cross_replica_context()
            assert psync.get_strategy() is strategy

        def state() -> tuple[bool, bool]:
            return psync.get_replica_context() is not None, psync.in_cross_replica_context()

        async def updating(var: Any, delta: float) -> Any:
            await var.assign_add(delta)
            return state()

        async def merge_fn(distribution: Any) -> Any:
            inside = await distribution.extended.update(v, updating, args=(2.0,))
            return state(), inside

        async def fn() -> Any:
            context = psync.get_replica_context()
            assert context is not None
            return state(), await context.merge_call(merge_fn)

        (replica, merged) = strategy.experimental_local_results(await strategy.run(fn))[1]
        assert replica == (True, False)
        assert merged == ((False, True), (False, False))
        assert await v.read() == 2  # once, not once for each replica
        with pytest.raises(RuntimeError, match="mixing different strategies"), strategy.scope():
            with psync.ParameterServerStrategy(tasks.resolver).scope():
                pass

        async def wrong() -> None:
            await psync.get_strategy().extended.reduce_to(ReduceOp.SUM, 1.0, v)

        with pytest.raises(RuntimeError, match="merge_call"):
            await strategy.run(wrong)

    tasks.train(train)


# --- how a variable is updated -----------------------------------------------------------------


@trains()
async def test_the_standard_pattern_in_four_steps(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        v = psync.Variable(np.zeros(3, np.float32), name="v")
        w = psync.Variable(np.zeros(2, np.float32), name="w")

    async def add(var: Any, update: Any) -> None:
        await var.assign_add(update)

    async def merge_fn(distribution: Any, updates: Any) -> Any:
        extended = distribution.extended
        of_v = await extended.reduce_to(ReduceOp.SUM, updates[0], v)
        (of_w,) = await extended.batch_reduce_to("mean", [(updates[1], w)])
        for variable, update in ((v, of_v), (w, of_w)):
            await extended.update(variable, add, args=(update,))
        return type(of_v).__name__, extended.non_slot_devices([w, v])

    async def fn() -> Any:
        context = psync.get_replica_context()
        assert context is not None
        own = 1.0 + context.replica_id_in_sync_group
        updates = [np.full(3, own, np.float32), np.full(2, own, np.float32)]
        return await context.merge_call(merge_fn, args=(updates,))

    kind, device = await strategy.run(fn)
    assert set(strategy.experimental_local_results(kind)) == {"Mirrored"}
    assert set(strategy.experimental_local_results(device)) == {v.device}  # the smallest name
    assert (await v.read()).tolist() == [3, 3, 3]
    assert (await w.read()).tolist() == [1.5, 1.5]


@trains()
async def test_apply_gradients_and_assigns_merge_by_themselves(
    strategy: Any, coordinator: Any
) -> None:
    aggregations = (
        VariableAggregation.SUM, VariableAggregation.MEAN,
        VariableAggregation.ONLY_FIRST_REPLICA,
    )  # fmt: skip
    with strategy.scope():
        w = psync.Variable(np.zeros(4, np.float32), name="w")
        none = psync.Variable(0.0)
        kinds = [psync.Variable(10.0, aggregation=kind) for kind in aggregations]
    optimizer = psync.optimizers.SGD(1.0)
    features, labels = np.array([1.0, 2, 3, 4]), np.array([0.0, 0, 0, 4])

    async def fn(rows: list[int]) -> tuple[Any, ...]:
        context = psync.get_replica_context()
        assert context is not None
        losses = features[rows] - labels[rows]
        loss = psync.compute_average_loss(losses, global_batch_size=4)
        regularization = psync.scale_regularization_loss(np.float32(6))
        gradient = np.zeros(4, np.float32)
        gradient[rows] = losses / 4
        result = await optimizer.apply_gradients([(gradient, w)])
        own = 1.0 + context.replica_id_in_sync_group
        for kind in kinds:
            await kind.assign(own)
            await kind.assign_add(own)
        try:
            await none.assign(own)
        except ReplicaValueError as exc:
            refused = "no aggregation" in str(exc)
        total = await context.all_reduce(ReduceOp.SUM, {"loss": loss, "reg": regularization})
        gathered = await context.all_gather(np.array([own]), axis=0)
        return result.step, refused, total, gathered.tolist()

    rows = psync.PerReplica(([0, 1, 2], [3]))  # the replicas' parts of a batch of 4
    step, refused, total, gathered = await strategy.run(fn, args=(rows,))
    assert step.values == (1, 1)  # one push of the sum
    assert refused.values == (True, True)
    assert total["loss"].values == (1.5, 1.5)  # the mean over the batch of 4
    assert total["reg"].values == (6, 6)
    assert [list(each) for each in gathered] == [[1, 1], [2, 2]]
    assert (await w.read()).tolist() == [-0.25, -0.5, -0.75, 0]
    assert [float(await kind.read()) for kind in kinds] == [6, 3, 2]
    assert [int(await none.read()), await optimizer.iterations.read()] == [0, 1]


@trains(psync.FixedShardsPartitioner(2))
async def test_values_have_the_locality_of_a_variable(strategy: Any, coordinator: Any) -> None:
    extended = strategy.extended
    with strategy.scope():
        var1 = psync.Variable(floats([1, 2]), name="var1")
        with extended.colocate_vars_with(var1):
            var2 = psync.Variable(floats([10, 20]), name="var2")
            var3 = psync.Variable(floats([100, 200]), name="var3")
        other = psync.Variable(0.0, name="another")
        elsewhere = psync.Variable(0.0, name="elsewhere")
        with extended.colocate_vars_with(extended.non_slot_devices([elsewhere, var1, other])):
            beta_power = psync.Variable(0.5, name="beta_power")
    assert var2.device == var3.device == var1.device
    assert beta_power.device == other.device != elsewhere.device  # the smallest name
    with pytest.raises(PartitionError, match="expected shape"), strategy.scope():
        with extended.colocate_vars_with(var1):
            psync.Variable(0.0)

    async def fn(v1: Any, v2: Any, v3: Any) -> list[float]:
        await v1.assign_add(await v2.read() + await v3.read())
        return (await v1.read()).tolist()

    with strategy.scope():
        updated = await extended.update(var1, fn, args=(var2, var3))
    assert updated == [111, 222]
    sent = await extended.broadcast_to(floats([5, 5]), destinations=var1)
    assert isinstance(sent, psync.Mirrored)
    add = type(var1).assign_add
    await extended.update(var1, add, args=(sent,))
    assert (await var1.read()).tolist() == [116, 227]
    assert await extended.update(var1, type(var1).read, group=False) is not None

    async def decay() -> float:
        await beta_power.assign(0.25)
        return float(await beta_power.read())

    devices = extended.non_slot_devices([elsewhere, var1, other])
    assert await extended.update_non_slot(devices, decay) == 0.25
    assert extended.value_container(var1.variables[0]) is var1
    assert await extended.broadcast_to(3, destinations=var1) == 3


@trains()
async def test_reductions_outside_of_replicas(strategy: Any, coordinator: Any) -> None:
    async def fn() -> Any:
        index = psync.get_worker_index()
        return np.full((2, 1), index + 1.0), floats([4, 4, 4, 4] if index == 0 else [1, 1])

    same, uneven = await strategy.run(fn)
    assert (await strategy.reduce(ReduceOp.SUM, same)).tolist() == [[3], [3]]
    assert await strategy.reduce("MEAN", same, axis=None) is not None
    assert (await strategy.reduce(ReduceOp.MEAN, uneven, axis=0)) == 3  # of all 6, not of means
    assert (await strategy.gather(uneven, axis=0)).tolist() == [4, 4, 4, 4, 1, 1]
    mean = await strategy.reduce(ReduceOp.MEAN, same)
    assert mean.tolist() == [[1.5], [1.5]]


# --- synchronized on read ----------------------------------------------------------------------


@trains()
async def test_variables_synchronized_on_read(strategy: Any, coordinator: Any) -> None:
    kind = {"synchronization": VariableSynchronization.ON_READ}
    with strategy.scope():
        seen = psync.Variable(0.0, aggregation=VariableAggregation.SUM, **kind)
        v = psync.Variable(1.0, aggregation=VariableAggregation.MEAN, **kind)

    async def fn() -> float:
        context = psync.get_replica_context()
        assert context is not None
        update = 10.0 * (1 + context.replica_id_in_sync_group)
        await seen.assign_add(update)
        await v.assign(0.9 * await v.read() + 0.1 * update)
        return float(await v.read())

    own = await strategy.run(fn)
    assert [round(value, 4) for value in own] == [1.9, 2.9]  # of the local copies
    with strategy.scope():
        assert await seen.read() == 30
        assert round(float(await v.read()), 4) == 2.4
        with pytest.raises(UsageError, match="cross-replica"):
            await seen.assign_add(1.0)
        await seen.assign(8.0)
        assert await seen.read() == 8
    with strategy.scope(), pytest.raises(UsageError, match="NONE"):
        psync.Variable(0.0, synchronization=VariableSynchronization.NONE)


# --- steps over an iterator, and who does what -------------------------------------------------


@trains()
async def test_run_steps_on_an_iterator(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        total = psync.Variable(0.0, aggregation=VariableAggregation.SUM)

    async def replica_fn(inputs: float) -> float:
        context = psync.get_replica_context()
        assert context is not None
        own = inputs + context.replica_id_in_sync_group
        await total.assign_add(own)
        return own

    async def fn(context: Any, inputs: float) -> None:
        results = await context_run(replica_fn, args=(inputs,))
        context.set_last_step_output("loss", results, reduce_op=ReduceOp.MEAN)
        context.set_non_tensor_output("ids", results)

    context_run = strategy.extended.call_for_each_replica
    rows = strategy.extended.experimental_make_numpy_dataset(floats([1, 2, 3]))
    context = await strategy.extended.experimental_run_steps_on_iterator(
        fn, iter(rows), iterations=3, initial_loop_values={"loss": 0.0}
    )
    assert context.last_step_outputs == {"loss": 3.5}
    assert context.non_tensor_outputs == {"ids": (3, 4)}
    assert await total.read() == 15  # (1 + 2) + (2 + 3) + (3 + 4)


@trains()
async def test_what_the_chief_is_for(strategy: Any, coordinator: Any) -> None:
    extended = strategy.extended
    assert isinstance(extended, psync.StrategyExtended)
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert extended.experimental_should_init
    assert extended.experimental_between_graph
    assert not extended.experimental_require_static_shapes
    assert (len(extended.worker_devices), len(extended.parameter_devices)) == (2, 2)

    async def of_any_shape() -> int:
        context = psync.get_replica_context()
        assert context is not None
        rows = np.ones((3 + context.replica_id_in_sync_group, 2))
        return int(rows.size)

    assert (await strategy.run(of_any_shape)).values == (6, 8)
