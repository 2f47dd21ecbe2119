"""The strategy: what cluster it takes, its scope, and what it owns."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import psync
from local_training import inside_a_step, strategy_of, training
from psync.errors import ConfigurationError, SerializationError, UsageError


def resolver_of(*jobs: str) -> psync.SimpleClusterResolver:
    cluster = {job: [f"localhost:{port}"] for port, job in enumerate(jobs, 1)}
    return psync.SimpleClusterResolver(psync.ClusterSpec(cluster), task_type="chief", task_id=0)


@pytest.mark.parametrize("jobs", [("chief", "worker"), ("chief", "ps")])
def test_a_cluster_that_cannot_train_is_an_error(jobs: tuple[str, ...]) -> None:
    missing = "ps" if "worker" in jobs else "worker"
    with pytest.raises(ConfigurationError, match=f"at least one {missing}"):
        psync.ParameterServerStrategy(resolver_of(*jobs))


def test_an_evaluator_is_no_part_of_the_training_cluster() -> None:
    strategy = psync.ParameterServerStrategy(resolver_of("chief", "ps", "worker", "evaluator"))
    assert strategy.cluster.jobs == ["chief", "ps", "worker"]
    assert strategy.cluster_resolver.cluster_spec().num_tasks("evaluator") == 1


@pytest.mark.parametrize(("jobs", "missing"), [((), "ps"), (("ps",), "worker")])
def test_an_evaluator_needs_the_training_cluster_to_declare_variables(
    jobs: tuple[str, ...], missing: str
) -> None:
    resolver = resolver_of("evaluator", *jobs)
    resolver.task_type = "evaluator"
    with pytest.raises(ConfigurationError, match=rf"cluster\.{missing}: expected at least one"):
        psync.ParameterServerStrategy(resolver)


def test_a_scope_gives_the_strategy_and_may_be_nested_in_itself() -> None:
    strategy = strategy_of()
    with strategy.scope() as given, strategy.scope():
        assert given is strategy
        v = psync.Variable(0.0)
    assert strategy.variables == (v,)
    assert strategy.num_replicas_in_sync == 1


def test_a_scope_ends_with_its_error() -> None:
    with pytest.raises(ZeroDivisionError), strategy_of().scope():
        _ = 1 / 0
    with pytest.raises(UsageError, match="outside a strategy's scope"):
        psync.Variable(0.0)


def test_a_variable_that_could_not_be_declared_takes_neither_name_nor_place() -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        with pytest.raises(psync.PartitionError):
            psync.Variable("text", name="v")
        v = psync.Variable(0.0, name="v")
    assert (v.name, v.device) == ("v", "/job:ps/replica:0/task:0/device:CPU:0")


def test_its_partitioner_sees_shape_and_dtype() -> None:
    seen: list[object] = []

    def partitioner(shape: tuple[int, ...], dtype: object) -> list[int]:
        seen.append((shape, dtype))
        return [1, 1]

    with strategy_of(2, partitioner).scope():
        psync.Variable(np.zeros((4, 2), np.int8))
    assert seen == [((4, 2), np.dtype(np.int8))]


@pytest.mark.parametrize(
    ("partitioner", "shards"),
    [
        (psync.FixedShardsPartitioner(3), 3),
        (psync.MinSizePartitioner(min_shard_bytes=64, max_shards=8), 2),
        (psync.MaxSizePartitioner(max_shard_bytes=32), 4),
    ],
)
def test_partitioners_of_psync_decide_the_number_of_shards(
    partitioner: psync.Partitioner, shards: int
) -> None:
    with strategy_of(2, partitioner).scope():
        v = psync.Variable(np.zeros((16, 2), np.float32))
    assert len(v.variables) == shards


def test_a_strategy_is_not_copied() -> None:
    strategy = strategy_of()
    with pytest.raises(RuntimeError, match="a strategy cannot be copied"):
        copy.copy(strategy)
    assert copy.deepcopy([strategy])[0] is strategy


async def test_a_step_neither_captures_nor_makes_nor_opens_a_strategy() -> None:
    with pytest.raises(SerializationError, match="the strategy lives on the coordinator"):
        async with training() as (strategy, coordinator):
            coordinator.schedule(lambda: strategy.variables)
    with inside_a_step(), pytest.raises(UsageError, match="making a strategy inside a step"):
        strategy_of()


def test_it_says_how_many_variables_it_has() -> None:
    strategy = strategy_of()
    with strategy.scope():
        psync.Variable(0.0)
    assert repr(strategy).endswith(", 1 variables>")
