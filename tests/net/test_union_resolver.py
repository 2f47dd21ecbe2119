from __future__ import annotations

from typing import Any

import pytest

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError
from psync.net.resolvers import SimpleClusterResolver, TFConfigClusterResolver
from psync.net.union_resolver import UnionClusterResolver


def simple(cluster: dict[str, Any], **arguments: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **arguments)


FIRST = simple(
    {"ps": ["p0:1"], "worker": ["w0:1", "w1:1"]},
    master="m",
    task_type="ps",
    task_id=0,
    environment="cloud",
    num_accelerators={"GPU": 2},
    rpc_layer="grpc",
)
SECOND = simple({"worker": ["w2:1"], "chief": ["c:1"]}, task_type="worker", task_id=0)


def test_jobs_that_are_lists_are_put_one_after_the_other() -> None:
    assert UnionClusterResolver(FIRST, SECOND).cluster_spec() == ClusterSpec(
        {"ps": ["p0:1"], "worker": ["w0:1", "w1:1", "w2:1"], "chief": ["c:1"]}
    )


def test_with_indices_on_any_side_a_list_counts_from_0() -> None:
    third = simple({"worker": {4: "w4:1"}, "ps": {1: "p1:1"}})
    merged = UnionClusterResolver(FIRST, third).cluster_spec()
    assert merged.as_dict() == {
        "ps": ["p0:1", "p1:1"],
        "worker": {0: "w0:1", 1: "w1:1", 4: "w4:1"},
    }
    assert UnionClusterResolver(third, FIRST).cluster_spec() == merged


def test_an_index_that_is_there_twice_is_an_error_that_names_it() -> None:
    with pytest.raises(KeyError) as caught:
        UnionClusterResolver(FIRST, simple({"worker": {1: "x:1", 3: "y:1"}})).cluster_spec()
    assert str(caught.value) == (
        "UnionClusterResolver: job 'worker': several resolvers give task 1\nhint: if one resolver "
        "gives indices, lists of the others count from 0"
    )


def test_an_address_that_is_there_twice_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"^UnionClusterResolver: /job:ps/task:0 and .*"):
        UnionClusterResolver(FIRST, simple({"chief": ["p0:1"]})).cluster_spec()


def test_all_else_is_as_the_first_says() -> None:
    union = UnionClusterResolver(FIRST, SECOND)
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "grpc")
    assert (union.environment, union.num_accelerators()) == ("cloud", {"GPU": 2})
    assert union.master() == "grpc://m"


def test_what_is_given_or_assigned_wins_also_if_it_is_0() -> None:
    union = UnionClusterResolver(SECOND, FIRST, task_type="worker", task_id=1, rpc_layer="x")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, "x")
    union.task_type, union.task_id, union.rpc_layer = "ps", 0, "y"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "y")
    assert UnionClusterResolver(simple({}, task_id=3), task_id=0).task_id == 0


def test_master_of_a_task_is_looked_up_in_all_of_it() -> None:
    union = UnionClusterResolver(FIRST, SECOND)
    assert union.master("worker", 2) == "grpc://w2:1"
    assert union.master("chief", 0, rpc_layer="x") == "x://c:1"
    with pytest.raises(ConfigurationError, match="no task with index 3 in job 'worker'"):
        union.master("worker", 3)


def test_answers_follow_those_of_its_parts() -> None:
    environ: dict[str, str] = {}
    union = UnionClusterResolver(TFConfigClusterResolver(environ=environ), SECOND)
    assert union.task_type is None
    environ["TF_CONFIG"] = '{"cluster": {"ps": ["p:1"]}, "task": {"type": "ps", "index": 0}}'
    assert (union.task_type, union.task_id) == ("ps", 0)
    assert union.cluster_spec().jobs == ["ps", "worker", "chief"]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match="expected at least one resolver"):
        UnionClusterResolver()
    with pytest.raises(TypeError, match=r"expected psync.ClusterResolver objects, got 'ps'"):
        UnionClusterResolver(FIRST, "ps")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="unknown argument 'environment'"):
        UnionClusterResolver(FIRST, environment="cloud")
