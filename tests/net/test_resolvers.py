"""Cluster resolvers, and where a program without a resolver finds its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import psync
from psync import blocking
from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError
from psync.integrations.launchers import jobs_of
from psync.net.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionClusterResolver,
    interface_towards,
    opened,
    resolve_cluster,
    training_cluster,
)
from recorded_slurm import INTERACTIVE, ONE_NODE, SHELL, two_nodes

CLUSTER: dict[str, Any] = {"chief": ["c:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1"]}


def tf_config(config: object, **arguments: Any) -> TFConfigClusterResolver:
    """A resolver over a TF_CONFIG of its own: JSON of ``config``, or the very text."""
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(environ={"TF_CONFIG": text}, **arguments)


def task(kind: object, index: object, **more: object) -> dict[str, object]:
    return {"cluster": CLUSTER, "task": {"type": kind, "index": index}, **more}


# --- TF_CONFIG: what it answers ----------------------------------------------------------------


def test_dense_form_is_read() -> None:
    resolver = tf_config(task("worker", 1))
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert training_cluster(resolver) == (ClusterSpec(CLUSTER), "worker", 1)


def test_sparse_form_of_dynamic_workers_is_read() -> None:
    sparse = {"worker": {"3": "w3:2222"}, "ps": ["p0:2222", "p1:2222"]}
    resolver = tf_config({"cluster": sparse, "task": {"type": "worker", "index": 3}})
    assert resolver.cluster_spec().task_indices("worker") == [3]
    assert training_cluster(resolver)[1:] == ("worker", 3)
    assert resolver.master() == "w3:2222"


def test_ps_that_knows_only_itself_may_serve() -> None:
    config = {"cluster": {"ps": {"1": "p1:2222"}}, "task": {"type": "ps", "index": 1}}
    assert training_cluster(tf_config(config)) == (ClusterSpec({"ps": {1: "p1:2222"}}), "ps", 1)


def test_master_is_given_as_chief_and_other_fields_are_ignored() -> None:
    cluster = {"master": ["c:1"], "ps": ["p:1"], "worker": ["w:1"]}
    own = {"type": "master", "index": 0, "trial": "7", "cloud": {}}
    resolver = tf_config({"cluster": cluster, "task": own, "job": {"args": []}})
    assert resolver.task_type == "chief"
    assert resolver.cluster_spec().jobs == ["chief", "ps", "worker"]
    assert training_cluster(resolver) == (
        ClusterSpec({"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1"]}),
        "chief",
        0,
    )


def test_evaluator_is_left_out_of_the_training_cluster_only() -> None:
    cluster = {**CLUSTER, "evaluator": ["e:1"]}
    for kind in ("chief", "evaluator"):
        resolver = tf_config({"cluster": cluster, "task": {"type": kind, "index": 0}})
        assert "evaluator" in resolver.cluster_spec().jobs
        assert training_cluster(resolver) == (ClusterSpec(CLUSTER), kind, 0)


def test_numbers_and_text_are_cast() -> None:
    resolver = tf_config(task(123456, "1"))
    assert (resolver.task_type, resolver.task_id) == ("123456", 1)


def test_nothing_said_is_nothing_known() -> None:
    for environ in [{}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"task": null}'}]:
        resolver = TFConfigClusterResolver(environ=environ)
        assert resolver.cluster_spec() == ClusterSpec({})
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
        assert (resolver.environment, resolver.master(), resolver.num_accelerators()) == (
            "",
            "",
            {},
        )


def test_variable_is_read_again_at_every_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(task("worker", 0)))
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps(task("ps", 1)))
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    monkeypatch.delenv("TF_CONFIG")
    assert resolver.task_type is None


def test_constructor_wins_over_variable_and_assignment_over_both() -> None:
    resolver = tf_config(
        task("worker", 1, rpc_layer="http", environment="cloud"),
        task_type="ps", task_id=0, rpc_layer="grpc", environment="lab",
    )  # fmt: skip
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "lab")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "master", 7, "tcp"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 7, "tcp")


def test_an_empty_layer_wins_too() -> None:
    resolver = tf_config(task("worker", 1, rpc_layer="http"), rpc_layer="")
    assert (resolver.rpc_layer, resolver.master()) == ("", "w1:1")


def test_master_is_the_address_of_the_given_or_own_task() -> None:
    resolver = tf_config(task("worker", 1))
    assert resolver.master() == "w1:1"
    assert resolver.master("ps", 0) == "p0:1"
    assert resolver.master(task_id=0) == "w0:1"
    assert resolver.master("ps", 0, "grpc") == "grpc://p0:1"
    resolver.rpc_layer = "tcp"
    assert resolver.master() == "tcp://w1:1"


def test_session_master_is_returned_as_it_stands() -> None:
    config = task("worker", 1, rpc_layer="grpc", session_master="somewhere")
    assert tf_config(config).master("ps", 0) == "somewhere"


def test_cluster_of_a_single_task_has_no_master() -> None:
    assert tf_config({"cluster": {"worker": ["w:1"]}}).master() == ""
    sparse = {"cluster": {"worker": {"1": "w:1"}}, "task": {"type": "worker", "index": 1}}
    assert tf_config(sparse).master() == "w:1"


def test_master_of_no_task_is_an_error() -> None:
    resolver = tf_config({"cluster": CLUSTER})
    with pytest.raises(ConfigurationError) as caught:
        resolver.master()
    assert str(caught.value) == (
        "TF_CONFIG: master() needs a task type and a task index, got None and None"
    )
    with pytest.raises(ConfigurationError, match="no task with index 9 in job 'ps'"):
        resolver.master("ps", 9)


# --- TF_CONFIG: what is wrong with it ----------------------------------------------------------


def test_text_that_is_not_json_is_an_error_at_access() -> None:
    for text in ["", "{", "{'cluster': {}}", "[" * 100_000, "9" * 5000]:
        resolver = tf_config(text)
        with pytest.raises(ConfigurationError, match="TF_CONFIG: expected a JSON object, got text"):
            resolver.cluster_spec()
        with pytest.raises(ConfigurationError) as caught:
            training_cluster(resolver)
        assert "for example" in (caught.value.hint or "")


def test_wrong_tf_config_names_the_field() -> None:
    for config, message in [
        ([1], "expected a JSON object, got [1]"),
        ({"cluster": ["a:1"]}, "cluster: expected an object, got ['a:1']"),
        ({"cluster": {"ps": "p:1"}}, "cluster: job 'ps': expected a list of addresses or a mapping "
         "from index to address, got 'p:1'"),
        ({"cluster": {"ps": [7]}}, "cluster: /job:ps/task:0: an address is a str, got 7"),
        ({"cluster": {"ps": ["p"]}}, "cluster: /job:ps/task:0: address 'p': expected a port from 0 "
         "to 65535 at its end"),
        ({"cluster": {"ps": ["p:1", "p:1"]}}, "cluster: /job:ps/task:0 and /job:ps/task:1 have the "
         "same address 'p:1'"),
        ({"cluster": {"master": ["m:1"], "chief": ["c:1"]}}, "cluster: the cluster has both a "
         "'chief' and a 'master', which are the same job"),
        ({"cluster": CLUSTER, "task": 3}, "task: expected an object, got 3"),
        ({"cluster": CLUSTER}, "task.type is missing"),
        ({"cluster": CLUSTER, "task": {"index": 0}}, "task.type is missing"),
        ({"cluster": CLUSTER, "task": {"type": "ps"}}, "task.index is missing, and the job 'ps' "
         "has tasks 0 to 1"),
        (task(["ps"], 0), "task.type: expected text, got ['ps']"),
        (task(True, 0), "task.type: expected text, got True"),
        (task("foobar", 0), "task.type: expected 'chief', 'worker', 'ps' or 'evaluator', got "
         "'foobar'"),
        (task("ps", "one"), "task.index: expected a whole number, got 'one'"),
        (task("ps", 1.5), "task.index: expected a whole number, got 1.5"),
        (task("ps", False), "task.index: expected a whole number, got False"),
        (task("ps", 2), "task.index is 2, and the job 'ps' has tasks 0 to 1"),
        (task("ps", -1), "task.index is -1, and the job 'ps' has tasks 0 to 1"),
        ({"task": {"type": "ps", "index": 0}}, "cluster is missing or empty"),
        ({}, "cluster is missing or empty"),
        ({"sparseCluster": CLUSTER, "task": {"type": "ps"}},
         "sparseCluster is not supported, expected cluster"),
        ({"cluster": {**CLUSTER, "gpu": ["g:1"]}, "task": {"type": "ps", "index": 0}},
         "cluster.gpu: expected the jobs 'chief', 'worker', 'ps' or 'evaluator', got 'gpu'"),
        ({"cluster": {"chief": ["c:1"], "worker": ["w:1"]}, "task": {"type": "chief", "index": 0}},
         "cluster.ps: expected at least one ps, got none"),
        ({"cluster": {"chief": ["c:1"], "ps": ["p:1"]}, "task": {"type": "chief", "index": 0}},
         "cluster.worker: expected at least one worker, got none"),
    ]:  # fmt: skip
        with pytest.raises(ConfigurationError) as caught:
            training_cluster(tf_config(config))
        assert caught.value.message == f"TF_CONFIG: {message}"
        assert "\n" not in caught.value.message


def test_optional_field_that_is_no_text_is_an_error() -> None:
    for field in ["rpc_layer", "session_master", "environment"]:
        resolver = tf_config(task("worker", 0, **{field: [1]}))
        with pytest.raises(ConfigurationError) as caught:
            [resolver.master(), resolver.environment]
        assert str(caught.value) == f"TF_CONFIG: {field}: expected text, got [1]"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["a:1", "b:2", "[::1]:3", "unix:/x", "ps", "worker", "chief", "0", "1"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["ps", "worker", "chief", "master", "evaluator", "type", "index", "0", "1"])
        | st.text(max_size=4),
        inner,
        max_size=3,
    ),
    max_leaves=12,
)  # fmt: skip
configs = st.fixed_dictionaries(
    {},
    optional={
        "cluster": json_values, "task": json_values, "rpc_layer": json_values,
        "session_master": json_values, "environment": json_values,
    },
)  # fmt: skip


@settings(max_examples=200)
@given(st.text(max_size=40) | json_values.map(json.dumps) | configs.map(json.dumps))
def test_any_tf_config_is_answered_or_is_a_configuration_error(text: str) -> None:
    resolver = tf_config(text)
    questions = [
        resolver.cluster_spec,
        resolver.master,
        lambda: (resolver.task_type, resolver.task_id),
        lambda: (resolver.rpc_layer, resolver.environment),
        lambda: training_cluster(resolver),
    ]
    for question in questions:
        with contextlib.suppress(ConfigurationError):
            question()


# --- the others --------------------------------------------------------------------------------


def test_simple_resolver_answers_what_it_was_given() -> None:
    resolver = SimpleClusterResolver(
        ClusterSpec(CLUSTER), "m:1", "worker", 1, "lab", {"GPU": 2}, "grpc"
    )
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "lab")
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("ps") == "grpc://m:1"
    assert resolver.master("ps", 1, "tcp") == "tcp://p1:1"
    resolver.num_accelerators().clear()
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2}


def test_simple_resolver_needs_only_a_cluster() -> None:
    resolver = SimpleClusterResolver(ClusterSpec(CLUSTER), rpc_layer="grpc")
    assert (resolver.task_type, resolver.task_id, resolver.environment) == (None, None, "")
    assert (resolver.master(), resolver.num_accelerators()) == ("", {})
    assert training_cluster(resolver) == (ClusterSpec(CLUSTER), None, None)


def test_simple_resolver_takes_assignments() -> None:
    resolver = SimpleClusterResolver(ClusterSpec(CLUSTER))
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 1, "tcp"
    assert training_cluster(resolver) == (ClusterSpec(CLUSTER), "ps", 1)
    assert resolver.master("ps", 1) == "tcp://p1:1"


def test_simple_resolver_refuses_wrong_types() -> None:
    wrong: Any = CLUSTER
    with pytest.raises(
        TypeError, match=r"cluster_spec: expected a psync.ClusterSpec, got \{'chief'"
    ):
        SimpleClusterResolver(wrong)
    wrong = 1
    with pytest.raises(TypeError, match="master: expected a str, got 1"):
        SimpleClusterResolver(ClusterSpec(CLUSTER), wrong)


def test_error_in_a_cluster_of_the_program_names_its_resolver() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["w:1"]}))
    with pytest.raises(ConfigurationError) as caught:
        training_cluster(resolver)
    assert str(caught.value) == (
        "SimpleClusterResolver: cluster.ps: expected at least one ps, got none"
    )


def test_resolver_of_the_user_needs_only_cluster_spec() -> None:
    class Fixed(ClusterResolver):
        def cluster_spec(self) -> ClusterSpec:
            return ClusterSpec(CLUSTER)

    resolver = Fixed()
    assert training_cluster(resolver) == (ClusterSpec(CLUSTER), None, None)
    assert (resolver.environment, resolver.num_accelerators()) == ("", {})
    with pytest.raises(ConfigurationError, match=r"cluster resolver: master\(\) needs a task type"):
        resolver.master()
    resolver.task_type, resolver.task_id = "ps", 0
    assert resolver.master() == "p0:1"


def test_resolver_without_cluster_spec_cannot_be_made() -> None:
    abstract: Any = ClusterResolver
    with pytest.raises(TypeError, match="cluster_spec"):
        abstract()


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
    assert merged.as_dict() == {"ps": ["p0:1", "p1:1"], "worker": {0: "w0:1", 1: "w1:1", 4: "w4:1"}}
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


TF_CONFIG = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]},
            "task": {"type": "worker", "index": 0},
        }
    )
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = two_nodes(3)
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-worker-1",
    "PSYNC_SERVICE": "train",
    "PSYNC_JOBS": "ps=1,worker=2",
}


def test_the_first_surroundings_that_apply_say_who_this_is() -> None:
    for environ, source, task in [
        (TF_CONFIG, "TF_CONFIG", ("worker", 0)),
        (TORCHRUN, "torchrun", ("worker", 0)),
        (SLURM, "SlurmClusterResolver", ("worker", 1)),
        (ONE_NODE, "SlurmClusterResolver", ("ps", 0)),
        (KUBERNETES, "KubernetesClusterResolver", ("worker", 1)),
        # Inner launchers come first: each passes its own environment on.
        ({**TORCHRUN, **TF_CONFIG}, "TF_CONFIG", ("worker", 0)),
        ({**SLURM, **TORCHRUN}, "torchrun", ("worker", 0)),
        ({**KUBERNETES, **TORCHRUN}, "torchrun", ("worker", 0)),
        ({**KUBERNETES, **TF_CONFIG}, "TF_CONFIG", ("worker", 0)),
        ({**SHELL, **KUBERNETES}, "KubernetesClusterResolver", ("worker", 1)),
    ]:  # fmt: skip
        resolver = resolve_cluster(environ)
        assert (resolver.source, (resolver.task_type, resolver.task_id)) == (source, task)


def test_slurm_tasks_listen_from_the_port_that_is_given() -> None:
    environ = {**SLURM, "PSYNC_PORT": "2000", "PSYNC_JOBS": "ps=2"}
    assert resolve_cluster(environ).cluster_spec().as_dict() == {
        "chief": ["node1:2000"],
        "ps": ["node1:2001", "node2:2000"],
        "worker": ["node2:2001"],
    }


def test_pods_are_found_by_the_names_of_their_service() -> None:
    environ = {**KUBERNETES, "PSYNC_NAMESPACE": "team", "PSYNC_PORT": "2222"}
    assert resolve_cluster(environ).cluster_spec().as_dict() == {
        "chief": ["train-chief-0.train.team.svc:2222"],
        "ps": ["train-ps-0.train.team.svc:2222"],
        "worker": ["train-worker-0.train.team.svc:2222", "train-worker-1.train.team.svc:2222"],
    }


def test_without_any_it_says_what_to_do() -> None:
    for environ, hint in [
        ({}, "psync run "),
        ({"TF_CONFIG": ""}, "psync.LocalCluster(1, 2)"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "srun --ntasks=4"),
        (INTERACTIVE, "srun --ntasks=4"),
        (SHELL, "srun --ntasks=4"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "set PSYNC_SERVICE to the headless service"),
    ]:
        with pytest.raises(
            psync.ConfigurationError, match="this process belongs to no cluster"
        ) as exc:
            resolve_cluster(environ)
        assert "variables of TF_CONFIG, torchrun, SLURM, Kubernetes" in exc.value.message
        assert hint in (exc.value.hint or "")


def test_jobs_that_are_not_named_are_counted() -> None:
    for text, number, jobs in [
        ("", "4", {"chief": 1, "ps": 1, "worker": 2}),
        ("ps=2", "7", {"chief": 1, "ps": 2, "worker": 4}),
        ("chief=0, ps=1", "3", {"ps": 1, "worker": 2}),
        ("ps=2,worker=4", "7", {"chief": 1, "ps": 2, "worker": 4}),
        ("ps=2,worker=4", "", {"chief": 1, "ps": 2, "worker": 4}),
    ]:
        assert jobs_of({"PSYNC_JOBS": text}, number, "SLURM") == jobs


def test_jobs_that_do_not_fit_are_told() -> None:
    for text, number, told in [
        ("ps", "4", "as in chief=1,ps=2,worker=4, got 'ps'"),
        ("ps=-1", "4", "as in chief=1,ps=2,worker=4"),
        ("ps=1,ps=2", "4", "as in chief=1,ps=2,worker=4"),
        ("server=1", "4", "as in chief=1,ps=2,worker=4"),
        ("ps=2", "", "expected a number of workers, which SLURM does not provide"),
        (
            "ps=3",
            "4",
            "expected 1 chief, 3 ps and at least 1 worker, but SLURM has started 4 tasks",
        ),
        ("ps=1,worker=3", "4", "expected 5 tasks, but SLURM has started 4 tasks"),
    ]:
        with pytest.raises(psync.ConfigurationError, match=told):
            jobs_of({"PSYNC_JOBS": text}, number, "SLURM")


def test_a_port_that_is_none_is_told() -> None:
    for port in ["0", "65536", "http", "-1"]:
        with pytest.raises(psync.ConfigurationError, match="PSYNC_PORT: expected a port"):
            resolve_cluster({**SLURM, "PSYNC_PORT": port})


def test_a_malformed_variable_of_slurm_is_the_resolvers_to_tell() -> None:
    for number in ["x", "-4"]:
        with pytest.raises(psync.ConfigurationError):
            resolve_cluster({**SLURM, "SLURM_STEP_NUM_TASKS": number})


# Clusters that a program has opened.


def solo(name: str) -> psync.SimpleClusterResolver:
    jobs = {"chief": [f"{name}:1"], "ps": [f"{name}:2"], "worker": [f"{name}:3"]}
    return psync.SimpleClusterResolver(psync.ClusterSpec(jobs))


async def test_a_local_cluster_is_the_default_while_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG["TF_CONFIG"])
    async with psync.LocalCluster(1, 2, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy()
        assert strategy.cluster_resolver is cluster.resolver
        async with psync.LocalCluster(2, 1, processes=False) as inner:
            assert psync.resolve_cluster() is inner.resolver
        assert psync.resolve_cluster() is cluster.resolver
    assert psync.resolve_cluster().source == "TF_CONFIG"


async def test_clusters_of_two_asyncio_tasks_are_not_mixed_up() -> None:
    both = asyncio.Barrier(2)

    async def program(num_workers: int) -> int:
        async with psync.LocalCluster(1, num_workers, processes=False):
            await both.wait()
            strategy = psync.ParameterServerStrategy()
            await both.wait()
            return strategy.cluster.num_tasks("worker")

    assert await asyncio.gather(program(1), program(2)) == [1, 2]


def test_cells_of_a_notebook_share_the_one_cluster_of_their_process() -> None:
    """Each cell runs in a context of its own."""

    def in_a_cell(function: Callable[[], Any]) -> Any:
        return contextvars.Context().run(function)

    one, other = opened(solo("a")), opened(solo("b"))
    in_a_cell(one.__enter__)
    assert in_a_cell(resolve_cluster).master("ps", 0) == "a:2"
    in_a_cell(other.__enter__)
    with pytest.raises(psync.ConfigurationError, match="several clusters are open"):
        in_a_cell(resolve_cluster)
    in_a_cell(lambda: other.__exit__(None, None, None))
    assert in_a_cell(resolve_cluster).master("ps", 0) == "a:2"
    in_a_cell(lambda: one.__exit__(None, None, None))


def test_plain_calls_find_their_cluster_too() -> None:
    with blocking.LocalCluster(1, 1, processes=False) as cluster:
        assert psync.ParameterServerStrategy().cluster_resolver is cluster.resolver


def test_towards_this_machine_it_is_the_loopback_interface() -> None:
    assert interface_towards("127.0.0.1", 22)[0] == "127.0.0.1"
    assert interface_towards("localhost", 22)[0] in ("127.0.0.1", "::1")
