"""TensorFlow's strategy, rule by rule: which clusters it takes, where variables go, into how many
shards they are cut.

What is tested here in numbers stands in full where it belongs: ``test_cluster``,
``test_placement``, ``test_colocation``, ``test_variable_creators``, ``test_partitioners``,
``test_declarations``, ``test_variables``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of, training
from psync.wire.limits import Limits

FULL = {"chief": ["c:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1"]}


def make(
    cluster: dict[str, Any], task_type: str | None = None, task_id: int | None = None
) -> psync.ParameterServerStrategy:
    spec = psync.ClusterSpec(cluster)
    return psync.ParameterServerStrategy(
        psync.SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
    )


def places(*variables: Any) -> list[list[int]]:
    return [[shard.ps for shard in variable.spec.shards] for variable in variables]


# --- which clusters it takes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({}, None, None, "cluster is missing or empty"),
        ({**FULL, "gpu": ["g:1"]}, None, None, "cluster.gpu: expected the jobs"),
        (FULL, "foobar", 0, "task.type: expected .* got 'foobar'"),
        ({"ps": ["p:1"], "worker": ["w:1"]}, "chief", 0, "task.type is 'chief', but the cluster"),
        ({**FULL, "chief": ["c:1", "d:1"]}, None, None, "at most one chief, got 2"),
        ({**FULL, "evaluator": ["e:1", "f:1"]}, None, None, "at most one evaluator, got 2"),
        (FULL, "worker", 2, "task.index is 2, and the job 'worker' has tasks 0 to 1"),
        ({"chief": ["c:1"], "worker": ["w:1"]}, "chief", 0, "at least one ps, got none"),
        ({"chief": ["c:1"], "ps": ["p:1"]}, "chief", 0, "at least one worker, got none"),
    ],
)
def test_a_cluster_that_cannot_train_is_a_value_error(
    cluster: dict[str, Any], task_type: str | None, task_id: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^SimpleClusterResolver: .*{message}") as caught:
        make(cluster, task_type, task_id)
    assert isinstance(caught.value, psync.ConfigurationError)


@pytest.mark.parametrize(
    ("task_type", "task_id"), [(None, None), ("chief", 0), ("worker", 1), ("evaluator", 0)]
)
def test_a_complete_cluster_suits_all_its_tasks(task_type: str | None, task_id: int | None) -> None:
    strategy = make(FULL, task_type, task_id)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == task_type


def test_who_is_chief_and_how_many_compute() -> None:
    spec = psync.ClusterSpec(FULL)
    assert [psync.is_chief(spec, job, 0) for job in ("chief", "worker", "evaluator")] == [
        True, False, True,
    ]  # fmt: skip
    assert psync.is_chief(psync.ClusterSpec({"ps": ["p:1"], "worker": ["w:1"]}), "worker", 0)
    assert psync.worker_count(spec, "worker") == 3
    assert [psync.id_in_cluster(spec, *task) for task in (("chief", 0), ("worker", 1))] == [0, 2]
    with pytest.raises(ValueError, match="got 'ps'"):
        psync.id_in_cluster(spec, "ps", 0)


# --- where variables go ------------------------------------------------------------------------


def test_a_placement_of_the_users_own_decides_and_its_mistakes_name_the_variable() -> None:
    class Last:
        def place(self, nbytes: int) -> int:
            return 1 if nbytes < 100 else 2

    resolver = strategy_of(2).cluster_resolver
    strategy = psync.ParameterServerStrategy(resolver, placement=Last())
    with strategy.scope():
        assert places(psync.Variable(0.0)) == [[1]]
        with pytest.raises(ValueError, match='variable "large": expected the placement to return'):
            psync.Variable(np.zeros(100), name="large")
        assert psync.Variable(0.0, name="large").name == "large"
    with pytest.raises(ValueError, match="placement: expected 'round_robin', 'least_bytes'"):
        psync.ParameterServerStrategy(resolver, placement="best")


# --- into how many shards ----------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, [], [0, 1, 1], [2, 2, 1], [2, 1], 2, "211", [2.0, 1, 1]])
def test_an_answer_that_is_none_names_the_partitioner(answer: Any) -> None:
    with strategy_of(2, lambda shape, dtype: answer).scope():
        with pytest.raises(ValueError, match="expected variable_partitioner to return") as caught:
            psync.Variable(np.zeros((4, 4, 4)), name="v")
    assert f"got {answer!r}" in str(caught.value)
    assert f"declared at {__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [(), ([],), (None,), ([1, 2],)], ids=["nothing", "empty", "none", "others"]
)
def test_a_sharded_variable_is_made_by_declaring_one(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(psync.UsageError, match=r"created only by psync.Variable\(…\)") as caught:
        psync.ShardedVariable(*arguments)
    assert "psync.FixedShardsPartitioner(2)" in str(caught.value)


async def test_a_callable_is_asked_for_each_shard_or_once_for_all() -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        asked: list[Any] = []

        def by_shard(shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
            asked.append((shape, offset))
            return np.full(shape, offset[0])

        def whole() -> np.ndarray:
            asked.append("whole")
            return np.arange(5)

        with strategy.scope():
            v = psync.Variable(by_shard, shape=(5, 1), dtype="int64")
            w = psync.Variable(whole, shape=(5,), dtype="int64")
            inferred = psync.Variable(whole)
            assert asked == ["whole"]
        values = await psync.pull((v, w, inferred))
        assert asked == ["whole", ((3, 1), (0, 0)), ((2, 1), (3, 0)), "whole"]
        assert [value.ravel().tolist() for value in values] == [
            [0, 0, 0, 3, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4],
        ]  # fmt: skip


# --- large ones --------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_constant_table_of_gigabytes_is_declared_created_and_read_by_row_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with training(4, 1, psync.FixedShardsPartitioner(4)) as (strategy, _):
        before = resident_bytes()
        with strategy.scope(), caplog.at_level(logging.WARNING):
            table = psync.Variable(np.broadcast_to(np.float32(0.1), (8_000_000, 64)))
        assert strategy.placement().totals == (512_000_000,) * 4
        part = await table.variables[3].sparse_read([1_999_999])
        assert part.tolist() == [[np.float32(0.1)] * 64]
        assert resident_bytes() - before < 200 << 20  # of 2 GB
        assert caplog.messages == []


def test_a_shard_that_no_message_carries_says_which_partitioner_to_use() -> None:
    with strategy_of(4).scope(), pytest.raises(ValueError, match="has 2048000000 bytes") as caught:
        psync.Variable(np.broadcast_to(np.float32(0.1), (8_000_000, 64)))
    assert f"at most {Limits().segment_bytes}" in str(caught.value)
    assert "variable_partitioner=psync.MaxSizePartitioner(256 << 20)" in str(caught.value)


# --- without the coordinator -------------------------------------------------------------------
