"""The strategy: what cluster it takes, its scope, and what it owns."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import psync
from local_training import declare, declared, in_step, inside_a_step, strategy_of, training
from psync.errors import ConfigurationError, PartitionError, SerializationError, UsageError


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
    v = declared(2, partitioner, v=np.zeros((16, 2), np.float32))
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


# --- where variables lie -----------------------------------------------------------------------


def test_beside_a_variable_is_one_shard_on_its_ps_and_takes_nobodys_turn() -> None:
    strategy = strategy_of(3, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        a = psync.Variable(0.0)
        b = psync.Variable(0.0)
        with strategy.colocate_vars_with(b):
            beside = psync.Variable(np.zeros((4, 2), np.int8))
        c = psync.Variable(0.0)
    assert isinstance(beside, psync.Variable)
    assert [v.spec.shards[0].ps for v in (a, b, beside, c)] == [0, 1, 1, 2]
    assert beside.trainable


def test_beside_several_shards_each_shard_lies_beside_one_with_a_value_of_its_own() -> None:
    strategy = strategy_of(3, psync.FixedShardsPartitioner(3))
    with strategy.scope():
        first = psync.Variable(0.0)
        table = psync.Variable(np.zeros((7, 2), np.float32))
        with strategy.colocate_vars_with(table):
            counts = psync.Variable(np.ones((7, 2)), dtype="int32", trainable=False)
        following = psync.Variable(0.0)
    assert counts.dtype == np.int32
    assert not counts.trainable
    assert [part.shape for part in counts.variables] == [(3, 2), (2, 2), (2, 2)]
    assert counts.device == table.device
    assert first.device != table.device[0]
    assert following.spec.shards[0].ps == 1


def test_beside_one_shard_of_several_any_shape_may_lie() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        table = psync.Variable(np.zeros((4, 2)))
        with strategy.colocate_vars_with(table.variables[1]):
            v = psync.Variable(np.zeros(9))
    assert v.device == table.device[1]


def test_beside_several_shards_another_shape_is_an_error_that_leaves_nothing_behind() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        table = psync.Variable(np.zeros((4, 2)), name="table")
        with strategy.colocate_vars_with(table), pytest.raises(PartitionError) as caught:
            psync.Variable(np.zeros(4), name="v")
        v = psync.Variable(0.0, name="v")
    assert 'expected shape (4, 2), as "table" has, with whose 2 shards' in str(caught.value)
    assert "colocate_vars_with(table.variables[0])" in str(caught.value)
    assert (v.name, v.spec.shards[0].ps) == ("v", 0)


def test_the_innermost_of_several_places_counts() -> None:
    strategy = strategy_of(3)
    with strategy.scope(), strategy.pinned(2):
        pinned = psync.Variable(0.0)
        with strategy.pinned(1):
            anchor = psync.Variable(0.0)
        with strategy.colocate_vars_with(anchor):
            beside = psync.Variable(0.0)
            with strategy.pinned(0):
                inner = psync.Variable(0.0)
        again = psync.Variable(0.0)
    places = [v.spec.shards[0].ps for v in (pinned, anchor, beside, inner, again)]
    assert places == [2, 1, 1, 0, 2]


def test_a_place_of_one_strategy_is_none_of_another() -> None:
    one, other = strategy_of(3), strategy_of(3)
    with one.pinned(2), other.scope():
        assert psync.Variable(0.0).spec.shards[0].ps == 0


def test_outside_of_the_scope_or_beside_what_is_not_of_it_is_an_error() -> None:
    strategy, other = strategy_of(), strategy_of()
    v = declare(strategy, v=0.0)
    with pytest.raises(UsageError, match="the strategy's scope is not open here"):
        strategy.colocate_vars_with(v)
    with other.scope():
        with pytest.raises(UsageError, match=r'variable "v" belongs to another strategy'):
            other.colocate_vars_with(v)
        with pytest.raises(UsageError, match="expected a variable, got str"):
            other.colocate_vars_with("v")  # type: ignore[arg-type]


async def test_values_are_where_they_are_said_to_be() -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        with strategy.scope():
            table = psync.Variable(np.arange(6).reshape(3, 2))
            with strategy.colocate_vars_with(table):
                counts = psync.Variable(np.full((3, 2), 7, np.int32))
            with strategy.pinned("/job:ps/task:1"):
                v = psync.Variable(np.ones(3, np.float32))

        async def step() -> object:
            return [value.tolist() for value in await psync.pull((table, counts, v))]

        assert await in_step(coordinator, step) == [
            [[0, 1], [2, 3], [4, 5]], [[7, 7]] * 3, [1, 1, 1],
        ]  # fmt: skip
        held = [row.ps for row in strategy.placement().rows]
        assert held == [0, 1, 0, 1, 1]


def test_it_is_printed_as_a_table() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        psync.Variable(np.zeros((399, 2), np.float32), name="table")
        psync.Variable(0, name="b", dtype="int8")
    report = strategy.placement()
    assert str(report).splitlines() == [
        "variable   shard  shape     dtype    bytes  ps",
        "table          0  (200, 2)  float32  1,600   0",
        "table          1  (199, 2)  float32  1,592   1",
        "b              0  ()        int8         1   0",
        "all of it                            1,601   0",
        "all of it                            1,592   1",
    ]
    assert report.rows[1].device == "/job:ps/replica:0/task:1/device:CPU:0"


def test_without_variables_nothing_lies_anywhere() -> None:
    report = strategy_of(1).placement()
    assert (report.rows, report.totals) == ((), (0,))
    assert str(report).split()[:3] == ["variable", "shard", "shape"]
