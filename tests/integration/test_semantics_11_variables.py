"""TensorFlow's synchronization and aggregation of variables, rule by rule, with numbers.

What is tested here in numbers stands in full where it belongs: ``test_on_read``,
``test_variable_copies``, and for aggregation on write ``test_semantics_11_replicas``.
"""

from __future__ import annotations

from typing import Any

import pytest

import psync
from memory_cluster import coordinating
from psync import VariableAggregation, VariableSynchronization
from psync.errors import ReplicaValueError

NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
ON_READ, ON_WRITE, AUTO = (
    VariableSynchronization.ON_READ,
    VariableSynchronization.ON_WRITE,
    VariableSynchronization.AUTO,
)


def variable(strategy: Any, value: Any, synchronization: Any, aggregation: Any) -> Any:
    with strategy.scope():
        return psync.Variable(value, synchronization=synchronization, aggregation=aggregation)


async def replica_id() -> int:
    context = psync.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


# --- declaring -----------------------------------------------------------------------------------


def test_synchronization_none_is_an_error_and_auto_is_on_write() -> None:
    resolver = psync.SimpleClusterResolver(
        psync.ClusterSpec({"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1"]}),
        task_type="chief",
        task_id=0,
    )
    strategy = psync.ParameterServerStrategy(resolver)
    with pytest.raises(ValueError, match="synchronization NONE is not supported"):
        variable(strategy, 0.0, VariableSynchronization.NONE, NONE)
    kinds = {type(variable(strategy, 0.0, kind, NONE)) for kind in (AUTO, ON_WRITE)}
    assert kinds == {psync.Variable}


# --- ON_WRITE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", VariableAggregation)
async def test_one_replica_and_the_program_write_as_they_are_told(aggregation: Any) -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        v = variable(coordinator.strategy, 0.0, ON_WRITE, aggregation)

        async def step() -> None:
            await v.assign_add(2.0)

        coordinator.schedule(step)
        await coordinator.join()
        await v.assign_add(3.0)
        with coordinator.strategy.scope():
            await v.assign_sub(1.0)
            assert await v.read() == 4.0


# --- ON_READ -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 5.0), (MEAN, 2.5), (FIRST, 2.0)])
async def test_a_read_in_cross_replica_context_aggregates(
    aggregation: Any, expected: float
) -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        v = variable(coordinator.strategy, 0.0, ON_READ, aggregation)

        async def total(strategy: Any) -> float:
            return float(await v.read())

        async def replica() -> float:
            await v.assign(await replica_id() + 2.0)
            return await psync.get_replica_context().merge_call(total)

        assert list(await coordinator.strategy.run(replica)) == [expected] * 2
        with coordinator.strategy.scope():
            assert float(await v.read()) == expected


@pytest.mark.parametrize(
    ("aggregation", "each"), [(SUM, 3.0), (MEAN, 6.0), (FIRST, 6.0), (NONE, 6.0)]
)
async def test_an_assign_in_cross_replica_context_stores_its_share_in_each(
    aggregation: Any, each: float
) -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        v = variable(coordinator.strategy, 1.0, ON_READ, aggregation)

        async def copy() -> float:
            return float(await v.read())

        with coordinator.strategy.scope():
            await v.assign(6.0)
        assert list(await coordinator.strategy.run(copy)) == [each, each]


async def test_adding_to_a_sum_in_cross_replica_context_is_an_error() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        v = variable(coordinator.strategy, 0.0, ON_READ, SUM)

        async def merge(strategy: Any) -> None:
            await v.assign_add(1.0)

        async def replica() -> None:
            await psync.get_replica_context().merge_call(merge)

        with pytest.raises(ReplicaValueError, match=r"assign_add .* in cross-replica context"):
            await coordinator.strategy.run(replica)
        with (
            coordinator.strategy.scope(),
            pytest.raises(ValueError, match=r"assign_sub .* in cross-replica context"),
        ):
            await v.assign_sub(1.0)
        assert float(await v.read()) == 0.0
