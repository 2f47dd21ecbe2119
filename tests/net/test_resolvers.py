"""Resolvers: what they answer, and that what is wrong is said in one line that names the field."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError
from psync.net.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    training_cluster,
)

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


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"task": null}'}])
def test_nothing_said_is_nothing_known(environ: dict[str, str]) -> None:
    resolver = TFConfigClusterResolver(environ=environ)
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.environment, resolver.master(), resolver.num_accelerators()) == ("", "", {})


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


def test_layer_and_environment_come_from_the_variable() -> None:
    resolver = tf_config(task("worker", 1, rpc_layer="http", environment="cloud"))
    assert (resolver.rpc_layer, resolver.environment) == ("http", "cloud")


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


@pytest.mark.parametrize("text", ["", "{", "{'cluster': {}}", "[" * 100_000, "9" * 5000])
def test_text_that_is_not_json_is_an_error_at_access(text: str) -> None:
    resolver = tf_config(text)
    with pytest.raises(ConfigurationError, match="TF_CONFIG: expected a JSON object, got text"):
        resolver.cluster_spec()
    with pytest.raises(ConfigurationError) as caught:
        training_cluster(resolver)
    assert "for example" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
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
    ],
)  # fmt: skip
def test_wrong_tf_config_names_the_field(config: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        training_cluster(tf_config(config))
    assert caught.value.message == f"TF_CONFIG: {message}"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("field", ["rpc_layer", "session_master", "environment"])
def test_optional_field_that_is_no_text_is_an_error(field: str) -> None:
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
