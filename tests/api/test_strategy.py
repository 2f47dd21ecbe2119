"""The strategy: what cluster it takes, its scope, and what it owns."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import psync
from local_training import inside_a_step, strategy_of
from psync.errors import ConfigurationError, SerializationError, UsageError
from psync.partitioners import Pinned
from psync.serialization.functions import FunctionTable
from psync.specs import VariableSpec


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


def test_a_step_neither_captures_nor_makes_nor_opens_a_strategy() -> None:
    strategy = strategy_of()
    with pytest.raises(SerializationError, match="the strategy lives on the coordinator"):
        FunctionTable().register(lambda: strategy.variables)
    with inside_a_step(), pytest.raises(UsageError, match="making a strategy inside a step"):
        strategy_of()


def test_it_says_how_many_variables_it_has() -> None:
    strategy = strategy_of()
    with strategy.scope():
        psync.Variable(0.0)
    assert repr(strategy).endswith(", 1 variables>")


@pytest.mark.parametrize(
    ("declared", "places"),
    [
        # What is declared, in order: its name, and how. Where its shards then lie.
        ([("a", None), ("p", 0), ("b", None)], {"a": [0, 1], "p": [0], "b": [2, 0]}),
        ([("p", 2), ("q", 2), ("a", None)], {"p": [2], "q": [2], "a": [0, 1]}),
        ([("a", None), ("x", "a"), ("b", None)], {"a": [0, 1], "x": [0, 1], "b": [2, 0]}),
        ([("a", None), ("x", "a"), ("y", "x")], {"a": [0, 1], "x": [0, 1], "y": [0, 1]}),
        ([("p", 1), ("x", "p"), ("a", None)], {"p": [1], "x": [1], "a": [0, 1]}),
    ],
)
def test_what_is_pinned_or_beside_another_takes_nobodys_turn(
    declared: list[tuple[str, int | str | None]], places: dict[str, list[int]]
) -> None:
    strategy = strategy_of(3, psync.FixedShardsPartitioner(2))
    specs: dict[str, VariableSpec] = {}
    for name, how in declared:
        if isinstance(how, str):
            specs[name] = strategy._declare_copy(specs[how], name, "train.py:1")
        else:
            placement = None if how is None else Pinned(how)
            specs[name] = strategy._declare(
                np.zeros((5, 2)), name, None, None, True, "train.py:1", placement=placement
            )
    found = {name: [shard.ps for shard in spec.shards] for name, spec in specs.items()}
    assert found == places
    assert [spec.variable_id for spec in specs.values()] == list(range(len(declared)))


def test_a_variable_beside_another_is_cut_as_that_one_whatever_the_partitioner() -> None:
    strategy = strategy_of(3, lambda shape, dtype: [cuts.pop(0), 1])
    cuts = [3]
    original = strategy._declare(np.zeros((7, 2)), "w", None, None, True, "train.py:1")
    beside = strategy._declare_copy(original, "w", "train.py:2")
    assert (beside.name, beside.trainable, beside.declared_at) == ("w_1", False, "train.py:2")
    assert (beside.shape, beside.dtype) == (original.shape, original.dtype)
    for mine, its in zip(beside.shards, original.shards, strict=True):
        assert (mine.variable, mine.key) == ("w_1", (1, its.index))
        assert (mine.offset, mine.shape, mine.ps) == (its.offset, its.shape, its.ps)
    assert not cuts
